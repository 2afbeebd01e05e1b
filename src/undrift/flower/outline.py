"""The data of a federation without a sample: what nodes report about theirs, and what the server makes of it.

A node reports for each of its clients how many samples it has, of each class where targets are classes, the shapes and
types of a sample, and what classes and columns mean (`agreement.py`). The server makes a data set of that many made-up
samples, so that plans, weights, checks and trial passes work as they do where the data are. Nothing is ever trained on
it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows, Task
from undrift.data.samples import to_store
from undrift.errors import UndriftError
from undrift.flower.agreement import (
    Report,
    agreed_columns,
    agreed_names,
    agreed_scale,
    check_meaning,
    meaning,
    places,
)
from undrift.flower.messages import RefusedError
from undrift.losses import IGNORED

DTYPES = {str(t).removeprefix("torch."): t for t in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip
MOST = 1 << 40
"""More samples than any client has."""


def report(data: FederatedDataset) -> Report:
    """Return a node's report on its data for the server."""
    counted = data.labels is not None and data.classes > 0
    return {
        "sizes": data.sizes.tolist(),
        "counts": data.label_counts().tolist() if counted else None,
        **forms(data),
        "classes": data.classes,
        "outputs": data.outputs,
        "vocabulary": data.task.vocabulary,
        "loss": data.task.loss if isinstance(data.task.loss, str) else None,
        "metrics": data.task.metrics if _names(data.task.metrics) else None,
        "tested": data.client_test.sizes.tolist() if data.client_test is not None else None,
        **meaning(data),
    }


def forms(data: FederatedDataset) -> Report:
    """Return the shapes and types of a sample and of its target."""
    x, y = data.take(data.store, data.index[:1])
    return {"x": {name: _form(t) for name, t in to_store(x).items()}, "y": _form(y)}


def _form(t: Tensor) -> list[Any]:
    return [list(t.shape[1:]), str(t.dtype).removeprefix("torch.")]


def _names(metrics: Any) -> bool:
    return isinstance(metrics, dict) and all(isinstance(metric, str) for metric in metrics.values())


def check_report(found: Report) -> None:
    """Raise `RefusedError` unless a node's report is one that `report` could have made."""
    try:
        sizes, counts = found["sizes"], found["counts"]
        fine = bool(sizes) and all(type(n) is int and 0 <= n < MOST for n in sizes)
        fine &= found["tested"] is None or len(found["tested"]) == len(sizes)
        classes = found["classes"]
        fine &= all(type(found[name]) is int and found[name] >= 0 for name in ("classes", "outputs"))
        if counts is not None:
            fine &= len(counts) == len(sizes) and all(len(row) == classes for row in counts)
            fine &= all(type(n) is int and n >= 0 for row in counts for n in row)
            fine &= all(sum(row) <= n for row, n in zip(counts, sizes, strict=True))
        for shape, dtype in [*found["x"].values(), found["y"]]:
            fine &= dtype in DTYPES and all(type(n) is int and 0 <= n < MOST for n in shape)
        fine &= all(name in found for name in ("vocabulary", "loss", "metrics"))
        fine &= check_meaning(found)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RefusedError(f"its report about its data is incomplete ({type(error).__name__}: {error})") from error
    if not fine:
        raise RefusedError("its report about its data does not fit together")


def agreed(reports: dict[str, Report]) -> Report:
    """Return what all nodes' samples have in common. Raises `UndriftError` where they differ; names by node."""
    names, columns = agreed_names(reports), agreed_columns(reports)
    first_name, first = next(iter(reports.items()))
    same = {what: first[what] for what in ("x", "y", "loss", "metrics")}
    for name, other in reports.items():
        for what, form in same.items():
            if other[what] != form:
                raise UndriftError(
                    f"The samples of the nodes {first_name} and {name} differ in {what}: {form} and {other[what]}. "
                    "Give all nodes data of one form."
                )
    own = [places(r["names"], names, r["classes"])[: r["classes"]] for r in reports.values()]
    classes = max((place + 1 for each in own for place in each), default=0)
    vocabularies = [r["vocabulary"] for r in reports.values() if r["vocabulary"] is not None]
    return same | {
        "classes": classes,
        "outputs": max(classes, *(r["outputs"] for r in reports.values())),
        "vocabulary": max(vocabularies, default=None),
        "names": names,
        "columns": columns,
        "codes": first["codes"],
        "scale": agreed_scale(reports, columns),
    }


def outline(sizes: np.ndarray, counts: np.ndarray | None, common: Report, **rest: Any) -> FederatedDataset:
    """Return a data set of made-up samples: clients of these sizes, with these numbers of samples of each class."""
    shape, dtype = common["y"]
    if counts is None:
        y, held = torch.zeros(1, *shape, dtype=DTYPES[dtype]), sizes[:, None]
    else:  # one sample of each class, and one without a label, each as often as a client has it
        y = torch.tensor([*range(counts.shape[1]), IGNORED], dtype=DTYPES[dtype])
        held = np.concatenate([counts, sizes[:, None] - counts.sum(1, keepdims=True)], 1)
        if not held[:, -1].any():
            y, held = y[:-1], held[:, :-1]
    rows = [np.repeat(np.arange(len(y)), row) for row in held]
    store = {name: _made_up(form, len(y)) for name, form in common["x"].items()} | {"y": y}
    return FederatedDataset(
        store,
        torch.from_numpy(np.concatenate(rows)),
        np.concatenate([[0], np.cumsum(sizes)]),
        task=Task(common["loss"], common["metrics"], common["outputs"], common["vocabulary"]),
        names=common["names"],
        **rest,
    )


def _made_up(form: list[Any], count: int) -> Tensor:
    """Return noise, and ones for integers, which are tokens or masks that every model accepts."""
    shape, dtype = form
    if not DTYPES[dtype].is_floating_point:
        return torch.ones(count, *shape, dtype=DTYPES[dtype])
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])


def placed(data: FederatedDataset, own: list[int], ids: list[int], total: int, common: Report) -> FederatedDataset:
    """Return the data of the clients `own` as those of clients `ids` of `total`; all others have none."""
    order = np.argsort(ids)
    spans = [slice(*data.offsets[own[i] : own[i] + 2]) for i in order]
    sizes = np.zeros(total, np.int64)
    sizes[ids] = data.sizes[own]
    index = torch.cat([data.index[span] for span in spans])
    known = {"classes": common["outputs"] or None, "vocabulary": common["vocabulary"]}
    return replace(
        data,
        index=index,
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        task=replace(data.task, **known),
        client_names=None,
        client_test=data.client_test and placed(data.client_test, own, ids, total, common),
    )


def share(rows: Rows | None, part: int, parts: int) -> Rows | None:
    """Return one of several equal parts of held-out samples, so that nodes which hold the same ones count each once."""
    found = rows and replace(rows, index=rows.index[part::parts])
    return found if found and len(found) else None
