"""The code of users' functions and classes as a digest of its syntax tree, in which comments and layout do not count.

The digest also covers whatever code of the user's own a function or class uses: its base classes, functions and classes
that it refers to by name, and those behind a decorator. Code of installed packages counts by the package's version.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib.metadata
import inspect
import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

LIBRARIES = {"undrift", "torch", "numpy", *sys.stdlib_module_names}
"""Packages whose versions a run records, so that a name from them identifies its code."""
INSTALLED = ("site-packages", "dist-packages")
DATA = (bool, int, float, complex, str, bytes, tuple, list, dict, np.ndarray, np.generic, Tensor, type(None))
"""The types of module variables whose values count in functions that use them."""

NAMED = (types.ModuleType, types.BuiltinFunctionType, np.ufunc)
"""What counts by its name wherever it is used."""

Definition = types.FunctionType | type


def from_library(x: Definition) -> bool:
    """Return whether a function or class is identified by its name and the versions that a run records."""
    return str(x.__module__).partition(".")[0] in LIBRARIES


def code_of(x: Definition) -> tuple[str, dict[str, Any]]:
    """Return the code of a function or class, and the data that this code takes from around it.

    Returns:
        A digest of the syntax trees of `x` and of the user's code that it uses, or of compiled code where there is no
        source; and, by name, the values that they use of closures, default arguments and module variables.
    """
    parts: list[Any] = []
    values: dict[str, Any] = {}
    waiting: list[Definition] = [x]
    seen = {id(x)}
    while waiting:
        owner = waiting.pop(0)
        package, names = _package(owner), []
        for name, value in _uses(owner) if package is None else _wrapped(owner):
            if isinstance(value, NAMED) or (isinstance(value, Definition) and from_library(value)):
                names.append(f"{name} is {value.__name__}")
            elif not isinstance(value, Definition):
                values[_new_label(name if owner is x else f"{owner.__qualname__}: {name}", value, values)] = value
            elif id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)
        parts.append((owner.__qualname__, _tree_or_code(owner) if package is None else package, sorted(names)))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16], values


def _new_label(label: str, value: Any, taken: dict[str, Any]) -> str:
    """Return a label of this value's own: two functions of one name may use different values of one name."""
    while label in taken and taken[label] is not value:
        label += "'"
    return label


def _package(x: Definition | types.ModuleType) -> str | None:
    """Return the package that this code is from, with its version if it is installed; None for the user's own code.

    For a function it is where its code stands, which for a wrapper is not what `functools.wraps` says.
    """
    if isinstance(x, types.FunctionType):
        name = str(x.__globals__.get("__name__"))
    else:
        name = x.__name__ if isinstance(x, types.ModuleType) else str(x.__module__)
    top = name.partition(".")[0]
    return top if top in LIBRARIES else _installed(top)


@functools.cache
def _installed(top: str) -> str | None:
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    if not any(place in file for place in INSTALLED):
        return None
    try:
        return f"{top} {importlib.metadata.version(top)}"
    except importlib.metadata.PackageNotFoundError:  # its distribution has another name
        return f"{top} {getattr(module, '__version__', '')}"


# ---- what code uses ----------------------------------------------------------------------------------------------


def _uses(x: Definition) -> Iterator[tuple[str, Any]]:
    """Yield the definitions, modules and data that a function or class of the user's takes from around it, by name."""
    if isinstance(x, type):
        yield from ((base.__name__, base) for base in x.__bases__ if base is not object)
        for name, function in _functions(x):
            if _inside(function, x):
                yield from _uses(function)
            else:  # a wrapper, or a function that was assigned to the class
                yield name, function
        return
    yield from _around(x)
    names = sorted(_names(x.__code__))
    for name in names:
        if name not in x.__globals__:
            continue
        value = x.__globals__[name]
        if isinstance(value, types.ModuleType) and _package(value) is None:
            own = {inner: vars(value)[inner] for inner in names if inner in vars(value)}
            yield from ((f"{name}.{inner}", used) for inner, used in own.items() if _counts(used))
        elif _counts(value):
            yield name, value


def _counts(value: Any) -> bool:
    return isinstance(value, (*DATA, *NAMED, types.FunctionType, type))


def _wrapped(x: Definition) -> Iterator[tuple[str, Any]]:
    """Yield what a library's wrapper wraps: a function that claims to be from another module than its code."""
    if isinstance(x, types.FunctionType) and x.__module__ != x.__globals__.get("__name__"):
        yield from _around(x)


def _around(x: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values of a function's closure and default arguments."""
    for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # still empty, in a function that refers to itself
            continue
    defaults = x.__defaults__ or ()
    arguments = x.__code__.co_varnames[: x.__code__.co_argcount]
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from sorted((x.__kwdefaults__ or {}).items())


def _names(code: types.CodeType) -> set[str]:
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inside))


def _functions(x: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions in a class, including properties and static methods, without those of `dataclass`."""
    for name, value in sorted(vars(x).items()):
        inner = [value]
        if isinstance(value, staticmethod | classmethod):
            inner = [value.__func__]
        elif isinstance(value, property):
            inner = [value.fget, value.fset, value.fdel]
        elif isinstance(value, functools.cached_property):
            inner = [value.func]
        for function in inner:
            if isinstance(function, types.FunctionType) and not _generated(function, x):
                yield name, function


def _generated(function: types.FunctionType, owner: type) -> bool:
    """Return whether `dataclass` has generated the function."""
    code: Any = inspect.unwrap(function).__code__
    special = code.co_name.startswith("__") and code.co_filename == "<string>"
    return special and "__dataclass_fields__" in vars(owner)


def _inside(function: types.FunctionType, owner: type) -> bool:
    """Return whether the function's definition stands in that of the class."""
    return _package(function) is None and function.__code__.co_qualname.startswith(f"{owner.__qualname__}.")


# ---- the code itself ---------------------------------------------------------------------------------------------


def _tree_or_code(x: Definition) -> str:
    """Return the syntax tree of a function or class, or its compiled code if the source is missing or outdated."""
    if isinstance(x, types.FunctionType):
        node = _function_node(x)
        return compiled(x.__code__) if node is None else _dump(node)
    own = [function for _, function in _functions(x) if _inside(function, x)]
    node = _class_node(x, own)
    if node is not None:
        return _dump(node)
    plain = {name: value for name, value in vars(x).items() if isinstance(value, bool | int | float | str | tuple)}
    attributes = [f"{name} = {value!r}" for name, value in sorted(plain.items()) if not name.startswith("__")]
    return repr([attributes, [(function.__name__, compiled(function.__code__)) for function in own]])


Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


@functools.lru_cache(maxsize=64)
def _definitions(text: str) -> dict[str, list[Node]]:
    """Return the functions and classes of a source file, by their qualified names."""
    definitions: dict[str, list[Node]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        if isinstance(node, Node):
            name = prefix + ("<lambda>" if isinstance(node, ast.Lambda) else node.name)
            definitions.setdefault(name, []).append(node)
            prefix = f"{name}." if isinstance(node, ast.ClassDef) else f"{name}.<locals>."
        for child in ast.iter_child_nodes(node):
            visit(child, prefix)

    try:
        visit(ast.parse(text), "")
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return definitions


def _read(file: str) -> dict[str, list[Node]]:
    """Return the definitions in a source file as it is now; a notebook's cells are files too."""
    linecache.checkcache(file)
    return _definitions("".join(linecache.getlines(file)))


def _function_node(x: types.FunctionType) -> Node | None:
    nodes = _read(x.__code__.co_filename).get(x.__code__.co_qualname, [])
    fitting = [node for node in nodes if not isinstance(node, ast.ClassDef) and _fits(node, x.__code__)]
    return _nearest(fitting, x.__code__.co_firstlineno)


def _class_node(x: type, own: list[types.FunctionType]) -> Node | None:
    """Return the definition of a class, which must have all of its functions."""
    file = own[0].__code__.co_filename if own else getattr(sys.modules.get(x.__module__), "__file__", None)
    nodes = [node for node in _read(file or "").get(x.__qualname__, []) if isinstance(node, ast.ClassDef)]
    functions = [_function_node(function) for function in own]
    around = [node for node in nodes if all(f is not None and f in ast.walk(node) for f in functions)]
    return _nearest(around, own[0].__code__.co_firstlineno if own else 0)


def _nearest(nodes: list[Any], line: int) -> Node | None:
    """Return the definition that is next to this line; None if there is none, or nothing says which."""
    nodes = sorted(nodes, key=lambda node: abs(node.lineno - line))
    alike = len(nodes) > 1 and abs(nodes[0].lineno - line) == abs(nodes[1].lineno - line)
    return None if not nodes or alike else nodes[0]


def _fits(node: Any, code: types.CodeType) -> bool:
    """Return whether a definition has the names and numbers of the code that runs, since files may be edited."""
    inside = [n for part in (node.body if isinstance(node.body, list) else [node.body]) for n in _evaluated(part)]
    names = {n.id for n in inside if isinstance(n, ast.Name)} | {n.attr for n in inside if isinstance(n, ast.Attribute)}
    numbers = {n.value for n in inside if isinstance(n, ast.Constant) and type(n.value) in (int, float)}
    codes, constants = [code], list(code.co_consts)
    for constant in constants:  # which grows: those of inner functions, and those in tuples
        if isinstance(constant, types.CodeType):
            codes.append(constant)
            constants += constant.co_consts
        elif isinstance(constant, tuple | frozenset):
            constants += constant
    running = {n for one in codes for n in (*one.co_names, *one.co_varnames, *one.co_freevars, *one.co_cellvars)}
    return names <= running and numbers <= {abs(c) for c in constants if type(c) in (int, float)}


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a syntax tree, without annotations."""
    yield node
    for field, child in ast.iter_fields(node):
        for inner in child if isinstance(child, list) else [child]:
            if isinstance(inner, ast.AST) and field not in ("annotation", "returns"):
                yield from _evaluated(inner)


def _dump(node: ast.AST) -> str:
    """Return a syntax tree as text, without positions, docstrings and other strings that nothing uses."""
    return ast.dump(_WithoutDocstrings().visit(copy.deepcopy(node)))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        unused = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if unused else self.generic_visit(node)


def compiled(code: types.CodeType) -> str:
    """Return compiled code, without its location."""
    consts = [
        compiled(c) if isinstance(c, types.CodeType) else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    shape = (code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_names, code.co_varnames, code.co_freevars)
    return repr([code.co_code, shape, consts])
