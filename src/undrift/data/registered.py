"""What a function returns that was registered with `ud.register_data`: arrays, tables, or data split into clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from undrift.data import held, own, sources
from undrift.data.dataset import FederatedDataset
from undrift.data.partition import ByKey
from undrift.data.source import Source
from undrift.errors import UndriftError

DEFAULTS = (None, False, 0, "label")
"""The values of arguments of `ud.load` that were not given."""
KEPT = ("name", "partition", "seed", "augment", "data_dir")
"""Arguments of `ud.load` that do not change a `FederatedDataset`, or have no influence on one."""


@contextmanager
def called_once(name: str) -> Iterator[bool]:
    """Say whether the function of this name, if any, returns data that are split into clients.

    Loading the data inside the context does not call it again.
    """
    function = sources.FUNCTIONS.get(name)
    if function is None:
        yield False
        return
    made = function()
    sources.FUNCTIONS[name] = lambda: made
    try:
        yield isinstance(made, FederatedDataset)
    finally:
        sources.FUNCTIONS[name] = function


def keep(asked: dict[str, Any], partition: Any) -> None:
    """Raise if an argument of `ud.load` would change a `FederatedDataset` that a function returned."""
    name = asked["name"]
    if partition not in (None, ByKey()):
        raise UndriftError(
            f"The function of {name} returns a FederatedDataset, which has its own clients: the partition must be "
            f"ByKey() or left out, not {partition!r}."
        )
    for argument, value in asked.items():
        if argument not in KEPT and not any(value is default or value == default for default in DEFAULTS):
            raise UndriftError(
                f"{argument} does not suit {name}, as its function returns a FederatedDataset, which is used as it is; "
                "leave it out."
            )


def source(name: str, made: Any, wanted: own.Wanted) -> Source:
    """Return the source of what the function of `name` made: a table, or a pair (train, test) of tables or arrays."""
    if isinstance(made, Source):
        if wanted.client is not None:
            raise UndriftError(f"client names a column of your own table, and {name} has none; leave it out.")
        wanted.refuse(name, "columns", "drop", "missing", "resize")
        if wanted.lazy:
            raise UndriftError(own.NOT_LAZY.format(name))
        return made
    if _is_table(made):
        return own.given(made, None, wanted)
    if not isinstance(made, tuple | list) or len(made) != 2 or (hasattr(made[0], "shape") and not _is_table(made[0])):
        pair = isinstance(made, tuple | list) and len(made) == 2
        raise UndriftError(
            f"The function of {name} must return a DataFrame, a FederatedDataset, or a pair (train, test), where train "
            "is a pair (x, y), a Dataset or a DataFrame, and test the same or None, not "
            f"{'two arrays; write ((x, y), None)' if pair else type(made).__name__}."
        )
    train, test = made
    if not _is_table(train):
        for argument in ("client", "columns", "drop", "missing"):
            if getattr(wanted, argument) is not None:
                raise UndriftError(
                    f"{argument} is for tables, but the function of {name} returns arrays or a torch Dataset; leave it "
                    "out, or return a DataFrame with a column of clients, or a FederatedDataset."
                )
    return own.given(train, test, wanted)


def _is_table(data: Any) -> bool:
    return held.is_frame(data) or held.is_table(data)
