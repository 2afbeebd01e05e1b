"""What the nodes of a federation agree on before the first round: their classes, their columns, and one scale.

Each node reports what its data have. The server checks that all of them mean the same, and tells every node the result,
with every request. A node brings its data into that form by name, or refuses to answer.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows, Scales
from undrift.data.images import channel_moments, channel_scales, standardised
from undrift.data.normalize import pooled_scales, store_entries
from undrift.data.samples import Store
from undrift.errors import UndriftError, listed, quoted, require

Report = dict[str, Any]
STEP = 256
"""How many images are read at a time."""
WHERE = "or name the features that all nodes have in the experiment, as columns = [...] under [data]"


# ---- what a node reports -------------------------------------------------------------------------------------
def meaning(data: FederatedDataset) -> Report:
    """Return what a node reports about its classes, its columns and their scale."""
    known, scale = data.scales, scale_of(data)
    return {
        "names": None if data.names is None else list(map(str, data.names)),
        "columns": known.columns if known else None,
        "codes": known.codes if known else {},
        "scale": scale.lists() if scale else None,
    }


def scale_of(data: FederatedDataset) -> Scales | None:
    """Return the scales by which data are normalized, in float64; None for data that are not."""
    if data.take is not standardised:
        return None
    if data.scales is not None:
        return data.scales
    x = data.store["x"]
    return channel_scales(sum(channel_moments(x[begin : begin + STEP].numpy()) for begin in range(0, len(x), STEP)))


def check_meaning(found: Report) -> bool:
    """Return whether this part of a report is one that `meaning` could have made."""
    names, columns, codes, scale = (found[name] for name in ("names", "columns", "codes", "scale"))
    fine = names is None or _texts(names)
    fine &= columns is None or (_texts(columns) and len(set(columns)) == len(columns))
    fine &= isinstance(codes, dict) and all(_texts(each) for each in codes.values())
    if columns is not None or scale is not None:
        width = found["x"]["x"][0][0]  # of columns or channels
        fine &= columns is None or len(columns) == width
        fine &= scale is None or _scale(scale, width)
    return bool(fine)


def _texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)


def _scale(scale: Any, width: int) -> bool:
    fine = type(scale["count"]) is int and scale["count"] > 0
    for name in ("mean", "std"):
        fine &= len(scale[name]) == width
        fine &= all(type(n) is float and math.isfinite(n) and abs(n) < 1e38 for n in scale[name])
    return bool(fine) and min(scale["std"]) >= 0


# ---- what the server makes of it -----------------------------------------------------------------------------
def agreed_names(reports: dict[str, Report]) -> list[str] | None:
    """Return the names of all nodes' classes: in the order that all nodes have them in, or else sorted.

    Raises `UndriftError` if only some nodes have names, or if two nodes spell one name differently.
    """
    given = {node: report["names"] for node, report in reports.items()}
    first = next(iter(given))
    for node, names in given.items():
        if (names is None) != (given[first] is None) or targets(reports[node]) != targets(reports[first]):
            raise UndriftError(
                f"The labels of the nodes {first} and {node} do not mean the same: those of {first} are "
                f"{targets(reports[first])}, those of {node} {targets(reports[node])}. Write them in the same way at "
                "all nodes (in a CSV file, labels of digits alone are read as numbers)."
            )
    other = next((node for node, names in given.items() if names != given[first]), None)
    if other is None:
        return given[first]
    if not all(_by_name(report) for report in reports.values()):
        raise UndriftError(
            f"The classes of the nodes {first} and {other} cannot be matched by name: {listed(given[first])} and "
            f"{listed(given[other])}. Give all nodes the same classes in the same order."
        )
    every = sorted(set().union(*given.values()))
    _refuse_spellings(every, given)
    return every


def targets(report: Report) -> str:
    """Return in words what a node's targets are."""
    shape, dtype = report["y"]
    if report["names"] is not None:
        return "names of classes"
    if shape:
        return f"{dtype} of shape {tuple(shape)}"
    return "numbers to predict" if "float" in dtype else "whole numbers"


def _by_name(report: Report) -> bool:
    """Return whether each of a node's classes has a name, which no other class has."""
    names = report["names"]
    return report["counts"] is not None and report["classes"] <= len(names) == len(set(names))


def _refuse_spellings(every: list[str], given: dict[str, list[str]]) -> None:
    """Raise if names of different nodes differ in case or spaces alone. If one node has both, they are two classes."""
    spellings: dict[str, list[str]] = {}
    for name in every:
        spellings.setdefault("".join(name.casefold().split()), []).append(name)
    for same in spellings.values():
        if len(same) > 1 and not any(set(same) <= set(names) for names in given.values()):
            who = [next(node for node, names in given.items() if name in names) for name in same[:2]]
            raise UndriftError(
                f"The node {who[0]} has a class {quoted(same[0])}, and {who[1]} has {quoted(same[1])}. If they are one "
                "class, write it the same way at all nodes; if they are two, give them names that differ in more."
            )


def agreed_columns(reports: dict[str, Report]) -> list[str] | None:
    """Return the names of the features, which are the same at all nodes, in the order of the first node."""
    given = {node: report["columns"] for node, report in reports.items()}
    first = next(iter(given))
    for node, columns in given.items():
        if (columns is None) != (given[first] is None):
            without, having = (node, first) if columns is None else (first, node)
            raise UndriftError(
                f"The node {having} has a table with named columns, and {without} has none; give all nodes tables with "
                "the same columns."
            )
    if given[first] is None:
        return None
    usual = Counter(frozenset(columns) for columns in given.values()).most_common(1)[0][0]
    model = next(node for node, columns in given.items() if set(columns) == usual)
    for node, columns in given.items():
        if differs := _difference(columns, given[model]):
            raise UndriftError(
                f"The columns of the node {node} are not those of {model}: {differs}. Rename the columns at {node}, "
                f"{WHERE}."
            )
        codes, others = reports[node]["codes"], reports[model]["codes"]
        for column in columns:
            if codes.get(column) != others.get(column):
                raise UndriftError(
                    f"The column {quoted(column)} holds {_coded(codes.get(column))} at the node {node}, and "
                    f"{_coded(others.get(column))} at {model}. Write it in the same way at all nodes."
                )
    return list(given[first])


def _difference(columns: list[str], others: list[str]) -> str:
    """Return in words how one set of columns differs from another; nothing if it does not."""
    own, wanted = set(columns), set(others)
    missing = [quoted(name) for name in others if name not in own]
    more = [quoted(name) for name in columns if name not in wanted]
    parts = [f"{listed(missing, 5)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
    parts += [f"{listed(more, 5)} {'is' if len(more) == 1 else 'are'} there in addition"] if more else []
    return ", and ".join(parts)


def _coded(names: list[str] | None) -> str:
    return "numbers" if names is None else f"numbers of the classes {listed(names, 5)}"


def agreed_scale(reports: dict[str, Report], columns: list[str] | None) -> Report | None:
    """Return the scale of all nodes' data taken together, column by column, if they are to be normalized.

    Nodes that share the experiment's data have all of them, and so know this scale already.
    """
    given = {node: _in_order(report, columns) for node, report in reports.items()}
    first = next(iter(given))
    for node, scale in given.items():
        if (scale is None) != (given[first] is None):
            which = first if scale is None else node
            raise UndriftError(f"Only {which} normalizes its data; give all nodes the same experiment.")
    known = [scale for scale in given.values() if scale is not None]
    if not known:
        return None
    if any(report.get("ids") is not None for report in reports.values()):
        for node, scale in given.items():
            require(
                scale == given[first],
                f"The nodes {first} and {node} share the experiment's data, but theirs have different means or "
                "standard deviations; give them the same data.",
            )
        return known[0]
    return pooled_scales(map(_as_scales, known)).lists()


def _in_order(report: Report, columns: list[str] | None) -> Report | None:
    """Return a node's scale with its columns in this order."""
    scale: Report | None = report["scale"]
    if scale is None or columns is None:
        return scale
    order = _order(report["columns"], columns)
    return scale | {name: [scale[name][i] for i in order] for name in ("mean", "std")}


def _as_scales(scale: Report) -> Scales:
    return Scales(np.array(scale["mean"]), np.array(scale["std"]), scale["count"])


def places(names: list[str] | None, agreed: list[str] | None, classes: int) -> list[int]:
    """Return the place of each of a node's classes among all."""
    return list(range(classes)) if names == agreed else _order(agreed or [], names or [])


def _order(names: list[str], wanted: list[str]) -> list[int]:
    """Return the place of each wanted name among the names."""
    place = {name: i for i, name in enumerate(names)}
    return [place[name] for name in wanted]


# ---- what a node makes of that -------------------------------------------------------------------------------
def fitted(data: FederatedDataset, common: Report) -> FederatedDataset:
    """Return data in the form agreed on: with its classes, its columns in its order, and its scale.

    Raises `UndriftError` if that cannot be done by name.
    """
    names, columns, codes, scale = (common[name] for name in ("names", "columns", "codes", "scale"))
    own = _places_of(data, names, common["classes"])
    order = _order_of(data, columns, codes)
    normalized = data.take is standardised
    if normalized != (scale is not None):
        raise UndriftError(
            f"Its data are {'' if normalized else 'not '}normalized, unlike those of the federation; normalize is the "
            "experiment's to say, so give it to all nodes."
        )
    moved: dict[int, Tensor] = {}  # so that splits with one x have one afterwards

    def changed(store: Store) -> Store:
        found = dict(store)
        if own is not None:
            found["y"] = torch.where(store["y"] < 0, store["y"], own[store["y"].clamp(min=0)])
        if order is not None:
            x = store["x"]
            found["x"] = moved[id(x)] = moved[id(x)] if id(x) in moved else x[:, order]
        if scale is not None:
            found |= store_entries(_as_scales(scale), store["x"])
        return found

    def rows(held: Rows | None) -> Rows | None:
        return held and replace(held, store=changed(held.store))

    if own is None and order is None and scale is None:
        return data
    return replace(
        data,
        store=changed(data.store),
        test_rows=rows(data.test_rows),
        validation_rows=rows(data.validation_rows),
        server_rows=rows(data.server_rows),
        client_test=data.client_test and replace(data.client_test, store=changed(data.client_test.store), names=names),
        names=names,
        scales=None,
    )


def _places_of(data: FederatedDataset, names: list[str] | None, classes: int) -> Tensor | None:
    """Return the place of each of the data's classes among the federation's, if it is another one."""
    if (data.names is None) != (names is None):
        its, theirs = ("no ", "") if data.names is None else ("", "no ")
        raise UndriftError(f"Its classes have {its}names, and those of the federation {theirs}names; write them alike.")
    if data.names == names:
        require(
            data.classes <= classes,
            f"Its labels go up to {data.classes - 1}, and those of the federation to {classes - 1}; correct them, or "
            "start a new run.",
        )
        return None
    assert data.names is not None
    if strange := sorted(set(data.names) - set(names or ())):
        raise UndriftError(
            f"Its class {quoted(strange[0])} is none of those that the federation agreed on, {listed(names or ())}. "
            "Correct the labels, or start a new run."
        )
    require(data.labels is not None, "Its classes are in another order than those of the federation.")
    return torch.tensor(places(data.names, names, 0))


def _order_of(data: FederatedDataset, columns: list[str] | None, codes: dict[str, list[str]]) -> list[int] | None:
    """Return which of the data's columns comes first, second, and so on, if that is another order."""
    own = data.scales.columns if data.scales else None
    if (own is None) != (columns is None):
        raise UndriftError(f"Its data have {'no ' if own is None else ''}named columns, unlike those of the others.")
    if own is None or columns is None:
        return None
    if differs := _difference(own, columns):
        raise UndriftError(f"Its columns are not those that the federation agreed on: {differs}. Rename them.")
    assert data.scales is not None
    for column in columns:
        known, wanted = (found.get(column) for found in (data.scales.codes, codes))
        if known != wanted:
            raise UndriftError(
                f"Its column {quoted(column)} holds {_coded(known)}, and that of the others {_coded(wanted)}; write it "
                "alike."
            )
    return None if own == columns else _order(own, columns)
