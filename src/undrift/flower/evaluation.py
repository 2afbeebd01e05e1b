"""Evaluation on the nodes' held-out data: nodes send sums, from which the server computes the history's columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from undrift.engine.base import RoundInputs
from undrift.flower.check import check_form
from undrift.flower.messages import RefusedError
from undrift.training.evaluation import (
    TEST,
    VALIDATION,
    Personal,
    columns_of_sums,
    has_own_models,
    own_models_of,
    split_sums,
    summarize,
    values_by_client,
)
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import Tree, tree_add, tree_map

Sums = dict[str, Tree]
BY_CLASS = "class_accuracy"


def evaluated(run: Run, state: State, inputs: Callable[[], RoundInputs]) -> Sums:
    """Numerators and denominators: of the splits that this node has, and by client of its own test data.

    `inputs` are those of all of the node's clients, whose own models are evaluated if they have any.
    """
    found: Sums = {"splits": {}, "clients": {}}
    for split, rows in ((TEST, run.test), (VALIDATION, run.validation)):
        if rows is not None:
            found["splits"][split] = split_sums(run, state, split)
    personal = Personal(run)
    if len(personal.clients):
        clients = run.data.nonempty.tolist()
        models = {clients[place]: own for place, own in own_models_of(run, inputs())} if has_own_models(run) else {}
        found["clients"] = personal.sums(state, models)
        found["ids"] = torch.from_numpy(personal.clients)
    return found


def check_sums(found: Sums, ids: list[int], forms: dict[str, torch.Tensor]) -> None:
    """Raise `RefusedError` unless these are sums of such forms that a node with these clients could have found."""
    if not isinstance(found, dict) or not {"splits", "clients"} <= set(found):
        raise RefusedError("it has no sums")
    splits, clients = found["splits"], found["clients"]
    if not isinstance(splits, dict) or not set(splits) <= {TEST, VALIDATION}:
        raise RefusedError("it has sums of data that are not held out")
    for split, sums in splits.items():
        plain: dict[str, Any] = {"sums": forms}
        by_class = sums.get("by_class") if isinstance(sums, dict) else None
        if isinstance(by_class, torch.Tensor) and by_class.dim() == 2 and len(by_class) == 2:
            plain["by_class"] = torch.zeros(by_class.shape)
        check_form(sums, plain, split)
    if clients:
        who: Any = found.get("ids")
        known = isinstance(who, torch.Tensor) and who.dtype == torch.int64 and set(who.tolist()) <= set(ids)
        if not known or not isinstance(clients, dict):
            raise RefusedError("it has sums of clients that are not its own")
        by_client = {name: form[:, None].expand(-1, len(who)) for name, form in forms.items()}
        check_form(clients, by_client, "clients")


def added(one: Sums, other: Sums) -> Sums:
    """Return the sums of two nodes as those of one."""
    splits = dict(one["splits"])
    for name, sums in other["splits"].items():
        splits[name] = tree_add(splits[name], sums) if name in splits else sums
    if not other["clients"] or not one["clients"]:
        rest = one if one["clients"] else other
        return {**rest, "splits": splits}
    joined = tree_map(lambda a, b: torch.cat([a, b], -1), one["clients"], other["clients"])
    return {"splits": splits, "clients": joined, "ids": torch.cat([one["ids"], other["ids"]])}


def columns(run: Run, found: Sums, last: bool) -> dict[str, Any]:
    """Return the history's columns, as `evaluate` and `Personal` name them."""
    row: dict[str, Any] = {}
    for split, sums in found["splits"].items():
        prefix = "" if split == "test" else f"{split}_"
        row |= {
            f"{prefix}{name}": value
            for name, value in columns_of_sums(run, sums).items()
            if not prefix or name != BY_CLASS
        }
    if found["clients"]:
        order = found["ids"].argsort()
        each = values_by_client(run.measures, {name: sums[:, order] for name, sums in found["clients"].items()})
        row |= summarize("client", each, run.measures)
        if last:
            values = {name: by_client.tolist() for name, by_client in each.items()}
            row["by_client"] = {"client": found["ids"][order].tolist(), **values}
    return row
