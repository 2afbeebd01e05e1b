"""Expressions in strings, such as `"FedProx(mu=0.1) + ServerSGD(momentum=0.9)"`: parsed, never evaluated.

The caller decides which names are known: `parse_method` (method/parse.py), `parse_partition`
(data/partition.py), ….
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from undrift.errors import UndriftError, first_line, nearest, quoted, unknown
from undrift.schedule import decay, inverse


def parse_number(text: str) -> Any:
    """Return the schedule that a string such as `decay(0.1, 0.99)` describes."""
    try:
        float(text)
    except ValueError:
        return parse(text, "schedule", {"decay": decay, "inverse": inverse}, "decay(0.1, 0.99)")
    raise UndriftError(f"{quoted(text)} is a string; write the number without quotes.")


COMBINED: dict[tuple[str, type[ast.operator]], Callable[[Any, Any], Any]] = {
    ("method", ast.Add): operator.add,
    ("step schedule", ast.Mult): operator.mul,
}
"""Which kinds of expressions may consist of several calls, and how these are combined."""


def parse(
    text: str,
    kind: str,
    names: Mapping[str, Callable[..., Any]],
    example: str,
    inner: Mapping[str, Callable[..., Any]] | None = None,
    instead: Mapping[str, str] | None = None,
) -> Any:
    """Build the object that `text` describes: a call of a known name with literals.

    A method may also be a sum of calls, and a step schedule a product. The names in `inner` are known only inside
    arguments. Errors show the `example`, and for unknown names what to write `instead`.
    """

    def refuse(node: ast.AST) -> UndriftError:
        return UndriftError(f"Cannot read {_source(node)} in the {kind} {quoted(text)}; write it like {example}.")

    def call(node: ast.Call, allowed: Mapping[str, Callable[..., Any]]) -> Any:
        if not isinstance(node.func, ast.Name) or any(k.arg is None for k in node.keywords):
            raise refuse(node)
        name = node.func.id
        if name not in allowed:
            raise unknown(kind, name, allowed, instead)
        args = [argument(a) for a in node.args]
        keywords = [(str(k.arg), argument(k.value)) for k in node.keywords]
        _check_arguments(name, allowed[name], len(args), [key for key, _ in keywords])
        try:
            return allowed[name](*args, **dict(keywords))
        except UndriftError:
            raise
        except Exception as error:  # a user's own class may raise anything
            raise UndriftError(f"{name}(…): {first_line(error)}.") from error

    def argument(node: ast.expr) -> Any:
        if isinstance(node, ast.Call):
            return call(node, {**names, **(inner or {})})
        if isinstance(node, ast.Name) and node.id == "inf":
            return math.inf
        try:
            if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
                return {argument(key): argument(value) for key, value in zip(node.keys, node.values, strict=True)}  # type: ignore[arg-type]
            if isinstance(node, ast.List | ast.Tuple):
                items = [argument(item) for item in node.elts]
                return items if isinstance(node, ast.List) else tuple(items)
            return ast.literal_eval(node)
        except UndriftError:
            raise
        except (ValueError, TypeError):  # not a literal, or an unhashable key
            raise refuse(node) from None

    def build(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and (kind, type(node.op)) in COMBINED:
            return COMBINED[kind, type(node.op)](build(node.left), build(node.right))
        if isinstance(node, ast.Call):
            return call(node, names)
        if isinstance(node, ast.Name) and node.id not in names:
            raise unknown(kind, node.id, names, instead)
        raise refuse(node)

    return build(_tree(text, kind, example))


LONGEST = 10_000
"""The most characters in an expression."""
DEEPEST = 100
"""The most levels of nesting; each `+` or `*` is one."""


def _tree(text: str, kind: str, example: str) -> ast.expr:
    """Return the expression's syntax tree. Raises if the expression is too large."""
    if len(text) > LONGEST:
        raise UndriftError(f"The {kind} has {len(text):,} characters; the limit is {LONGEST:,}.")
    try:
        # Inside parentheses, an expression may span several lines and have comments.
        tree = ast.parse(f"_(\n{text}\n)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two if it is nested too deeply
        tree = None
    one = isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and len(tree.args) == 1 and not tree.keywords
    if not one:
        raise UndriftError(f"Cannot read the {kind} {quoted(text)}; write it like {example}.")
    assert isinstance(tree, ast.Call)
    level: list[ast.AST] = [tree]
    for _ in range(DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if any(isinstance(n, ast.Constant) and isinstance(n.value, int) and n.value.bit_length() > 64 for n in level):
            raise UndriftError(f"The {kind} {quoted(text)} has a number of more than 64 bits.")
    if level:
        raise UndriftError(f"The {kind} {quoted(text)} nests deeper than {DEEPEST} levels; simplify it.")
    return tree.args[0]


def _source(node: ast.AST) -> str:
    try:
        return quoted(ast.unparse(node))
    except Exception:  # f-strings, which Python cannot always unparse
        return "an expression"


def _check_arguments(name: str, function: Callable[..., Any], given: int, keywords: list[str]) -> None:
    """Raise for unknown, missing or repeated arguments; the message lists those that there are."""
    known = inspect.signature(function).parameters
    free = {p.kind for p in known.values()} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if free:
        return
    listed = f"its arguments are {', '.join(known)}" if known else "it has none"
    for key in keywords:
        if key not in known:
            close = nearest(key, known)
            raise UndriftError(
                f"{name} has no argument {quoted(key)}{f' (did you mean {close!r}?)' if close else ''}; {listed}."
            )
    by_position = [n for n, p in known.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    if given > len(by_position):
        raise UndriftError(f"{name} is given {given} arguments; {listed}.")
    filled = by_position[:given] + keywords
    twice = next((key for key in filled if filled.count(key) > 1), None)
    if twice:
        raise UndriftError(f"{name} is given {twice!r} twice; keep one.")
    missing = [n for n, p in known.items() if p.default is inspect.Parameter.empty and n not in filled]
    if missing:
        raise UndriftError(f"{name} needs the argument {missing[0]!r}; {listed}.")
