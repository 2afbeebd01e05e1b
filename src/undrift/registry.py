"""Things that experiment files and the command line know by name: undrift's own, and those that users register."""

from __future__ import annotations

from collections.abc import Mapping
from keyword import iskeyword
from typing import TypeVar

from undrift.errors import UndriftError, quoted, unknown

T = TypeVar("T")


class Registry(dict[str, T]):
    """Things of one kind by name.

    Args:
        kind: What they are, for messages: "metric".
        own: Those of undrift.
        replaceable: Whether users may register another thing under one of these names.
        called: Whether they are functions, which expressions call by their names: "Dirichlet(0.1)".
    """

    def __init__(self, kind: str, own: Mapping[str, T], replaceable: bool = False, called: bool = False) -> None:
        super().__init__(own)
        self.called = called
        self.kind, self.own = kind, frozenset() if replaceable else frozenset(own)

    def register(self, name: str, thing: T) -> None:
        """Add a user's thing. Raises `UndriftError` if undrift has one of this name that cannot be replaced, or if the
        name cannot be one.
        """
        if not isinstance(name, str) or not name:
            raise UndriftError(f"The name of a {self.kind} must be a string, not {quoted(name)}.")
        if self.called and (not name.isidentifier() or iskeyword(name)):
            raise UndriftError(f"A {self.kind} cannot be called {name!r}, which is no name in Python; rename it.")
        if self.called and not callable(thing):
            raise UndriftError(f"The {self.kind} {name!r} must be a function, not {quoted(thing)}.")
        if name in self.own:
            raise UndriftError(
                f"A {self.kind} of your own cannot be called {name!r}, which is one of undrift's; rename it."
            )
        self[name] = thing

    def find(self, name: str) -> T:
        """Return the thing of this name. Raises `UndriftError` with similar names if there is none."""
        if name not in self:
            raise self.unknown(name)
        return self[name]

    def unknown(self, name: str) -> UndriftError:
        """Return the error for a name that is not here, which suggests similar ones."""
        return unknown(self.kind, name, self)
