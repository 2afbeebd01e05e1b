"""Checkpoints: what a run needs to go on as if it had never stopped.

In `checkpoint/` of the run's folder lie, for each of the last few, `round-N.safetensors` (parameters, running
statistics, the server's state) and `round-N.json`, which is written last and makes it one. What clients keep between
rounds lies in `clients-N.safetensors`, each with those that changed since the one before; a checkpoint's JSON says
which file has whose. Every file is written under another name, synced and renamed. Draws come from keys, so there is no
generator's state to keep.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from undrift.errors import UndriftError
from undrift.files import PARTIAL, settle, sync, write_text
from undrift.models.functional import Params
from undrift.setup import Setup
from undrift.tree import Tree, tree_to

log = logging.getLogger("undrift")

LAST = 2
"""How many checkpoints are kept."""
PIECES = 16
"""How many files clients' states may be spread over before they are gathered into one."""


@dataclass
class Progress:
    """A run between two rounds."""

    params: Params
    states: list[Tree]
    round: int = 0
    """How many rounds are done."""
    total_steps: int = 0
    constant_steps: int = 0
    """What `total_steps` would be had every round taken as many as the first."""
    total_bytes: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run; without a folder there are none."""

    def __init__(self, folder: Path | None, run: Setup, every: int | str | None) -> None:
        self.folder = folder / "checkpoint" if folder else None
        self.run = run
        self.rounds, self.seconds = parse_interval(every)
        self.saved_round, self.saved_at = 0, time.monotonic()
        self.homes: dict[str, list[int]] = {}
        """By file: whose states are in it."""
        if every is not None and folder is None:
            raise UndriftError("checkpoint_every needs a folder to write to; name one: out=….")

    def due(self, now: Progress) -> bool:
        late = self.seconds is not None and time.monotonic() - self.saved_at >= self.seconds
        return late or (self.rounds is not None and now.round % self.rounds == 0)

    def save(self, now: Progress) -> None:
        """Make a checkpoint of a run that stands between two rounds."""
        if self.folder is None or now.round == self.saved_round:
            return
        if not self.folder.is_dir():
            self.folder.mkdir()
            sync(self.folder.parent)
        self._save_clients(now.round)
        tensors: dict[str, Tensor] = {}
        trees = {
            "params": pack(now.params, "params", tensors),
            "tracked": pack(self.run.model.tracked, "tracked", tensors),
            "states": pack(now.states, "states", tensors),
        }
        whole = {
            "round": now.round,
            "total_steps": now.total_steps,
            "constant_steps": now.constant_steps,
            "total_bytes": now.total_bytes,
            "identity": self.run.identity,
            "trees": trees,
            "clients": self.homes,
        }
        write_tensors(self.folder / f"round-{now.round}.safetensors", tensors)
        write_text(self.folder / f"round-{now.round}.json", json.dumps(whole))
        self.saved_round, self.saved_at = now.round, time.monotonic()
        self._tidy()

    def _save_clients(self, number: int) -> None:
        """The states that changed since the last checkpoint; all of them when they lie in too many files."""
        kept = self.run.kept
        changed = kept.take_changed()
        if len(self.homes) >= PIECES:
            changed = {client for states in kept.states.values() for client in states}
        if not changed:
            return
        assert self.folder
        tensors: dict[str, Tensor] = {}
        trees = {
            f"{i}/{client}": pack(states[client], f"{i}/{client}", tensors)
            for i, states in kept.states.items()
            for client in sorted(changed & states.keys())
        }
        name = f"clients-{number}.safetensors"
        write_tensors(self.folder / name, tensors, {"trees": json.dumps(trees)})
        self.homes = {file: [c for c in own if c not in changed] for file, own in self.homes.items()}
        self.homes = {file: own for file, own in self.homes.items() if own} | {name: sorted(changed)}

    def _tidy(self) -> None:
        """Remove what none of the last few checkpoints needs."""
        assert self.folder
        found = _listed(self.folder)
        needed: set[str] = set()
        for number in found[:LAST]:
            text = (self.folder / f"round-{number}.json").read_text(encoding="utf-8")
            needed |= {f"round-{number}.json", f"round-{number}.safetensors", *json.loads(text)["clients"]}
        for file in sorted(self.folder.iterdir(), key=lambda f: f.suffix != ".json"):  # what names others goes first
            if file.name not in needed:
                file.unlink()

    def restore(self, now: Progress, rows: list[dict[str, Any]]) -> Progress:
        """Where the newest checkpoint stands, and `now` if there is none. `rows` is the history so far."""
        found = _listed(self.folder) if self.folder and self.folder.is_dir() else []
        for number in found:
            assert self.folder
            try:
                whole = json.loads((self.folder / f"round-{number}.json").read_text(encoding="utf-8"))
                tensors = load_file(self.folder / f"round-{number}.safetensors")
                clients = {name: _read_clients(self.folder / name, own) for name, own in whole["clients"].items()}
            except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
                log.warning("the checkpoint of round %d in %s cannot be read (%s)", number, self.folder, error)
                continue  # a disk may have lost one; the one before it serves
            self._check_same(whole["identity"])
            if len(rows) < number:
                raise UndriftError(
                    f"{self.folder.parent}/metrics.jsonl has {len(rows)} rounds, but the checkpoint has {number}; "
                    "it was changed, so start the run again in another folder."
                )
            device = self.run.resident.device
            trees = {name: tree_to(unpack(tree, tensors), device) for name, tree in whole["trees"].items()}
            for name, value in trees["tracked"].items():
                self.run.model.tracked[name].copy_(value)
            for name, own in whole["clients"].items():
                self.run.kept.restore(clients[name], set(own))
            # What comes later is written anew, under the same names: no JSON may be left that names the old files.
            for later in found:
                if later > number:
                    (self.folder / f"round-{later}.json").unlink()
            self.homes, self.saved_round = whole["clients"], number
            return Progress(
                trees["params"],
                trees["states"],
                number,
                whole["total_steps"],
                whole["constant_steps"],
                whole["total_bytes"],
                rows[:number],
            )
        if found:
            raise UndriftError(f"None of the checkpoints in {self.folder} can be read; start the run again elsewhere.")
        return now

    def _check_same(self, before: dict[str, str]) -> None:
        for what, value in self.run.identity.items():
            if before.get(what) != value:
                raise UndriftError(
                    f"The checkpoint in {self.folder} is of a run with {what} {before.get(what)}, not {value}; resume "
                    "it with what it was started with, or choose another folder."
                )


def _listed(folder: Path) -> list[int]:
    """The rounds that have a checkpoint, newest first."""
    return sorted((int(file.stem.removeprefix("round-")) for file in folder.glob("round-*.json")), reverse=True)


def _read_clients(file: Path, wanted: list[int]) -> dict[int, dict[int, Tree]]:
    """The states in a file, by part and client; a KeyError if one of those wanted is not in it."""
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        trees = json.loads(opened.metadata()["trees"])
    found: dict[int, dict[int, Tree]] = {}
    for name, tree in trees.items():
        part, client = map(int, name.split("/"))
        found.setdefault(part, {})[client] = unpack(tree, tensors)
    for states in found.values():
        for client in wanted:
            _ = states[client]
    return found


def parse_interval(every: int | str | None) -> tuple[int | None, float | None]:
    """`5` is every five rounds, `"30s"` every thirty seconds."""
    if every is None:
        return None, None
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return every, None
    if isinstance(every, str) and every.endswith("s"):
        try:
            seconds = float(every[:-1])
        except ValueError:
            seconds = -1.0
        if seconds >= 0:
            return None, seconds
    raise UndriftError(
        f'checkpoint_every must be a number of rounds such as 10, or of seconds such as "30s", not {every!r}.'
    )


def pack(tree: Tree, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON, its tensors put aside by name."""
    if isinstance(tree, dict):
        return {"dict": [[key, pack(branch, f"{name}.{key}", tensors)] for key, branch in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [pack(branch, f"{name}.{i}", tensors) for i, branch in enumerate(tree)]}
    leaf = torch.as_tensor(tree, dtype=torch.float64 if isinstance(tree, float) else None)
    name = f"{name} #{len(tensors)}"  # two branches may spell their way alike
    tensors[name] = leaf.detach().cpu().contiguous().clone()  # a clone, for two names may share one tensor
    return {"tensor": name}


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Tree:
    ((kind, inside),) = packed.items()
    if kind == "dict":
        return {key: unpack(branch, tensors) for key, branch in inside}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(unpack(branch, tensors) for branch in inside)
    return tensors[inside]


def write_tensors(file: Path, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
    partial = file.with_name(file.name + PARTIAL)
    save_file(tensors, partial, notes)
    settle(partial, file)
