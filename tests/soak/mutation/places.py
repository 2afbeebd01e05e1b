"""Which mutants there are, and a random sample of them.

Cosmic Ray's operators make the mutants. A place in the source (an operator, a number, a condition, …) often has many,
an arithmetic operator for one has eleven, so places are sampled, and for each place one of its mutants.
"""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

FILES = [
    "engine/*.py", "methods/*.py", "method/*.py", "random.py", "schedule.py", "tree.py",
    "training/nonfinite.py",
]  # fmt: skip
STANDS_IN = "engine/graph.py"
"""The tests run it without a GPU (tests/cuda_graphs.py)."""

KINDS = [
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitOr", "BitAnd", "BitXor", "LShift", "RShift"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
]
"""A float has no `<<`, and whether numbers are the same object means nothing: such mutants would show little."""

Position = tuple[int, int]
Span = tuple[Position, Position]


@dataclass(frozen=True)
class Mutant:
    file: str
    """Relative to the package."""
    line: int
    column: int
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.operator} {self.occurrence}"

    def source(self, package: Path) -> str:
        """The mutated file."""
        code = mutate_code(
            (package / self.file).read_text(encoding="utf-8"), _operators()[self.operator], self.occurrence
        )
        assert code is not None
        return code


def sample(package: Path, count: int, seed: int) -> list[Mutant]:
    """One mutant each of `count` places, in random order; a longer sample begins with the shorter one."""
    chance = random.Random(seed)
    places = list(_places(package).values())
    chance.shuffle(places)
    found: list[Mutant] = []
    for mutants in places:
        chance.shuffle(mutants)
        found += next(([mutant] for mutant in mutants if _compiles(mutant.source(package))), [])
        if len(found) == count:
            break
    return found


def _places(package: Path) -> dict[tuple[str, Span], list[Mutant]]:
    places: dict[tuple[str, Span], list[Mutant]] = {}
    for path in sorted(path for pattern in FILES for path in package.glob(pattern)):
        file, code = path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")
        left_out = [*_for_type_checkers(ast.parse(code)), *(_for_gpus(ast.parse(code)) if file != STANDS_IN else ())]
        nodes = list(ast_nodes(get_ast(code)))
        for name, operator in _operators().items():
            spans = [span for node in nodes for span in operator.mutation_positions(node)]
            for occurrence, span in enumerate(spans):
                if not any(begin <= span[0] < end for begin, end in left_out):
                    places.setdefault((file, span), []).append(Mutant(file, *span[0], name, occurrence))
    return places


def _operators() -> dict[str, Operator]:
    """Cosmic Ray's that replace an operator by one of its kind, and all others but two that must be given names."""
    provider = OperatorProvider()
    found = {}
    for name in provider:
        family, *words = name.split("_")
        alike = not family.startswith("ReplaceBinary") and not family.startswith("ReplaceComparison")
        if not name.startswith("Variable") and (alike or any(set(words) <= kind for kind in KINDS)):
            found[name] = provider[name]()
    return found


def _compiles(code: str) -> bool:
    """Whether it is Python, and none that warns of itself (`x is 1`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            compile(code, "mutant", "exec")
        except (SyntaxError, SyntaxWarning):
            return False
    return True


def _for_type_checkers(tree: ast.Module) -> Iterator[Span]:
    """Annotations, which nothing evaluates, and conditions on TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
            yield _span(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns:
            yield _span(node.returns)
        elif isinstance(node, ast.If) and _mentions(node.test, "TYPE_CHECKING"):
            yield _span(node.test)


def _for_gpus(tree: ast.Module) -> Iterator[Span]:
    """What runs on a GPU alone. That is, by rule and not by looking at survivors:

    - statements that use `torch.cuda`, or the branch that does so of a conditional expression, and what a conditional
      expression on `is_cuda` chooses;
    - what follows `if ….type == "cpu": return`;
    - constants of the module that are read nowhere else than there.
    """
    found: list[Span] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            branches = [node.body, *([] if _mentions(node.test, "is_cuda") else [node.orelse])]
            found += [_span(b) for b in branches if _mentions(node.test, "is_cuda") or _uses_cuda(b)]
        elif isinstance(node, ast.Assign | ast.Return | ast.Expr) and _uses_cuda(node):
            choices = [n for n in ast.walk(node) if isinstance(n, ast.IfExp) and _uses_cuda(n)]
            found += [] if choices else [_span(node)]
        elif isinstance(node, ast.FunctionDef):
            for i, statement in enumerate(node.body):
                if (
                    isinstance(statement, ast.If)
                    and _on_cpu(statement.test)
                    and isinstance(statement.body[0], ast.Return)
                ):
                    found += [_span(after) for after in node.body[i + 1 :]]
    yield from found
    for node in tree.body:
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name | ast.Tuple) for target in node.targets):
            yield from (_span(value) for name, value in _constants(node) if _read_within(tree, name, found))


def _constants(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    target = node.targets[0]
    if isinstance(target, ast.Name):
        yield target.id, node.value
    elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        for name, value in zip(target.elts, node.value.elts, strict=True):
            if isinstance(name, ast.Name):
                yield name.id, value


def _read_within(tree: ast.Module, name: str, spans: list[Span]) -> bool:
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    return bool(reads) and all(any(begin <= _span(n)[0] < end for begin, end in spans) for n in reads)


def _on_cpu(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and _mentions(test, "cpu")


def _uses_cuda(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Attribute) and inner.attr == "cuda" for inner in ast.walk(node))


def _mentions(node: ast.AST, word: str) -> bool:
    """Whether a name, an attribute or a string in it is this word."""
    for inner in ast.walk(node):
        if word in (getattr(inner, "id", None), getattr(inner, "attr", None), getattr(inner, "value", None)):
            return True
    return False


def _span(node: ast.expr | ast.stmt | ast.arg) -> Span:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
