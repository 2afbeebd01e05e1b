"""Expressions in strings, `"FedProx(mu=0.1) + ServerSGD(momentum=0.9)"`: parsed by known names, never evaluated."""

from __future__ import annotations

import ast
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import undrift
from undrift import models
from undrift.data.augment import CropFlip
from undrift.errors import UndriftError, unknown
from undrift.method import Method, Part, as_method
from undrift.methods.temporal import TemporalEnsemble
from undrift.schedule import decay, inverse

INNER: dict[str, Callable[..., Any]] = {"decay": decay, "inverse": inverse, "TemporalEnsemble": TemporalEnsemble}
"""What may stand in a part's arguments."""


def known_parts() -> dict[str, Callable[..., Any]]:
    """Every part: the package's own, and those that imported modules of the user's define."""
    found: dict[str, Callable[..., Any]] = {}
    waiting = list(Part.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if not cls.__module__.startswith("undrift."):  # of ours, METHODS says which are for users
            found[cls.__name__] = cls
    return found | {name: getattr(undrift, name) for name in undrift.METHODS}


def import_plugins(modules: Iterable[str] = ()) -> None:
    """Import a user's own methods, models and data: these modules, and those of installed packages that ask for it.

    A package asks with an entry point in the group "undrift".
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # a module beside the experiment file needs no installing
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a user's module may raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UndriftError(f"imports: the module {module!r} cannot be imported ({reason}).") from error
    for point in entry_points(group="undrift"):
        point.load()


def register_model(name: str, function: Callable[..., Any]) -> None:
    """Give a model a name that experiment files know: `function(classes, shape, **options)` makes it."""
    models.MODELS[name] = function


def register_data(name: str, function: Callable[[], Any]) -> None:
    """Give data a name that experiment files know: `function()` makes a pair (train, test).

    Each is a pair (x, y) or a torch `Dataset`; `test` may be None.
    """
    from undrift.data import sources

    sources.FUNCTIONS[name] = function


def parse_method(text: str) -> Method:
    return as_method(parse(text, "method", known_parts(), INNER))


def parse_partition(text: str) -> Any:
    return parse(text, "partition", {name: getattr(undrift, name) for name in undrift.PARTITIONS})


def parse_model(text: str) -> tuple[str, dict[str, Any]]:
    """`vgg9` or `vgg9(dropout=False)`: a model's name and its options."""
    if "(" not in text:
        return text, {}
    names = {name: partial(_named, name) for name in models.MODELS}
    return parse(text, "model", names)


def _named(name: str, **options: Any) -> tuple[str, dict[str, Any]]:
    return name, options


def parse_number(text: str) -> Any:
    """A schedule in a string, `decay(0.1, 0.99)`."""
    return parse(text, "schedule", {"decay": decay, "inverse": inverse})


def parse_augmentation(text: str) -> Any:
    return parse(text, "augmentation", {"CropFlip": CropFlip})


def parse(
    text: str, kind: str, names: Mapping[str, Callable[..., Any]], inner: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Build what `text` writes: a call of a known name with plain values, of methods also a sum of such calls.

    `inner` may stand in arguments.
    """
    adds_up = kind == "method"

    def refuse(node: ast.AST) -> UndriftError:
        return UndriftError(
            f"Cannot read {ast.unparse(node)!r} in the {kind} {text!r}; write a {kind} such as {_example(names)}."
        )

    def call(node: ast.Call, allowed: Mapping[str, Callable[..., Any]]) -> Any:
        if not isinstance(node.func, ast.Name) or any(k.arg is None for k in node.keywords):
            raise refuse(node)
        if node.func.id not in allowed:
            raise unknown(kind, node.func.id, allowed)
        args = [argument(a) for a in node.args]
        keywords = {str(k.arg): argument(k.value) for k in node.keywords}
        try:
            return allowed[node.func.id](*args, **keywords)
        except TypeError as error:
            raise UndriftError(f"{ast.unparse(node)}: {str(error).split('() ')[-1].split('__ ')[-1]}.") from error

    def argument(node: ast.expr) -> Any:
        if isinstance(node, ast.Call):
            return call(node, {**names, **(inner or {})})
        if isinstance(node, ast.Name) and node.id == "inf":
            return math.inf
        if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
            return {argument(key): argument(value) for key, value in zip(node.keys, node.values, strict=True)}  # type: ignore[arg-type]
        if isinstance(node, ast.List | ast.Tuple):
            return [argument(item) for item in node.elts]
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise refuse(node) from None

    def build(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and adds_up:
            return build(node.left) + build(node.right)
        if isinstance(node, ast.Call):
            return call(node, names)
        if isinstance(node, ast.Name) and node.id not in names:
            raise unknown(kind, node.id, names)
        raise refuse(node)

    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        raise UndriftError(f"Cannot read the {kind} {text!r}; write a {kind} such as {_example(names)}.") from None
    return build(tree.body)


def _example(names: Mapping[str, Any]) -> str:
    examples = (
        "Dirichlet(0.1)",
        "CropFlip(padding=4)",
        "vgg9(dropout=False)",
        "decay(0.1, 0.99)",
        "FedProx(mu=0.1) + ServerSGD(momentum=0.9)",
    )
    return next(example for example in examples if example.partition("(")[0] in names)
