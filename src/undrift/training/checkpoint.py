"""Checkpoints: what a run needs to continue as if it had never stopped.

The folder `checkpoint/` has, for each of the last two checkpoints, `round-N.json`, which is written last and makes it
valid, and the files that it names with their checksums:

- `round-N.safetensors`: parameters, running statistics, the server's state;
- `clients-M.safetensors`: what clients keep between rounds, each with the states that changed since the one before;
- `slots-N.safetensors`: where these states are in the files `kept-K.bin`, if they are not in memory;
- `rows-M.jsonl`: the history so far, likewise in pieces.

The two checkpoints share no file: each belongs to its own series, so that a damaged file affects one checkpoint only.
Draws come from keys, so there is no generator state to save.

A checkpoint does not depend on the number of rounds: that of the last round, which a finished run leaves, is from
before the method's `finish`, with the row that this round has in a longer run. So a finished run can be continued.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from undrift.engine.client_states import ClientStates
from undrift.engine.ranks import LostError, Ranks
from undrift.engine.slots import Layout, Slot, SlotFiles, damaged
from undrift.engine.table import Table
from undrift.errors import UndriftError, first_line
from undrift.files import DamagedError, digest, regular, remove_partial, replacing, seal, sync, unseal, verify
from undrift.training.barrier import companions
from undrift.training.run import Run
from undrift.training.run_folder import CHECKPOINT, CHECKPOINT_FILES, as_json, as_record
from undrift.training.safetensors_io import own_memory, pack, unpack, write_tensors
from undrift.training.state import State
from undrift.tree import Tree, tree_to, tree_unflatten

log = logging.getLogger("undrift")
LAST = 2
"""The number of checkpoints to keep, each in its own series."""
PIECES = 16
"""The number of files of clients' states, or of the history, from which they are merged into one."""


@dataclass
class Series:
    """Every other checkpoint: the files of the newest one of the series."""

    clients: dict[str, list[int]] = field(default_factory=dict)
    """By file: the clients whose states are in it."""
    rows: list[str] = field(default_factory=list)
    """The files of the history, in order."""
    rounds: int = 0
    """The number of rounds in these files."""
    sums: dict[str, str] = field(default_factory=dict)
    """The checksums of all these files."""

    def files(self) -> dict[str, str]:
        return {name: self.sums[name] for name in (*self.clients, *self.rows)}


class Checkpoints:
    """The checkpoints of one run; without a folder there are none."""

    def __init__(self, folder: Path | None, run: Run, every: int | str | None) -> None:
        self.folder = folder / CHECKPOINT if folder else None
        self.run = run
        self.rounds, self.seconds = parse_interval(every)
        self.saved_round, self.saved_at = 0, time.monotonic()
        self.series = [Series() for _ in range(LAST)]
        """The series, in the order in which they are written next."""
        self.record: dict[str, Any] = {}
        """Identifies the run in every checkpoint."""
        self.stale: list[int] = []
        """Rounds whose checkpoints cannot be used, so that they are replaced."""
        self.protected: dict[int, list[Slot]] = {}
        """By round: the slots that its checkpoint names, which must not be written to."""
        self.closed = False
        """Whether the run's last checkpoint has been written."""
        if every is not None and folder is None:
            raise UndriftError("checkpoint_every needs a folder to write to; pass out=….")

    def due(self, t: int) -> bool:
        late = self.seconds is not None and time.monotonic() - self.saved_at >= self.seconds
        return late or (self.rounds is not None and t % self.rounds == 0)

    def save(self, now: State) -> None:
        """Save a checkpoint between two rounds. Of several processes, the first writes it."""
        if self.folder is None or self.closed or now.round == self.saved_round:
            return
        ranks, series = self.run.ranks, self.series[0]
        ranks.same((now.params, now.tracked, now.parts))
        whole = replace(now, clients=gather_clients(ranks, now.clients, self._since(series))) if ranks.several else now
        ranks.first(lambda: self._write(whole))
        self.saved_round, self.saved_at = now.round, time.monotonic()

    def _write(self, now: State) -> None:
        assert self.folder
        if not self.folder.is_dir():
            self.folder.mkdir()
            sync(self.folder.parent)
        while self.stale:  # files are written under the same names, so no JSON may remain that names the old ones
            (self.folder / f"round-{self.stale.pop()}.json").unlink(missing_ok=True)
        series = self.series[0]
        slots = now.clients.slots()
        self._save_clients(series, now, slots)
        self._save_rows(series, now)
        tensors: dict[str, Tensor] = {}
        trees = {
            "params": pack(now.params, "params", tensors),
            "tracked": pack(now.tracked, "tracked", tensors),
            "states": pack(now.parts, "states", tensors),
        }
        state = f"round-{now.round}.safetensors"
        whole = {
            **self.record,
            "round": now.round,
            "total_steps": now.total_steps,
            "constant_steps": now.constant_steps,
            "total_bytes": now.total_bytes,
            "trees": trees,
            "state": state,
            "clients": series.clients,
            "rows": series.rows,
            "beside": companions(self.run, now.round),
            "files": {state: write_tensors(self.folder / state, tensors), **series.files()},
        }
        if slots:
            table, files = f"slots-{now.round}.safetensors", now.clients.files
            assert files
            slots = {i: dict(zip(own, files.beside([*own.values()]), strict=True)) for i, own in slots.items()}
            whole |= {"slots": table, "kept": sorted(files.files)}
            whole["files"][table] = write_slots(self.folder / table, files, slots)
        seal(self.folder / f"round-{now.round}.json", whole)
        self.protected[now.round] = [slot for own in slots.values() for slot in own.values()]
        self.series = [*self.series[1:], series]
        if self.run.files:
            self.run.files.side = 1 - self.run.files.side
        self._tidy()

    def close(self, now: State) -> None:
        """Save the checkpoint of the last round, before the method's `finish`, and none after it.

        If the disk is full, this only warns: there may still be space for the model.
        """
        try:
            self.save(now)
        except LostError:
            raise
        except (OSError, SafetensorError) as error:
            log.warning(
                "the last checkpoint could not be written, so the finished run cannot be continued: %s",
                first_line(error),
            )
            if self.folder and self.folder.is_dir() and self.run.ranks.leads:
                self._tidy()
        self.closed = True

    def _save_clients(self, series: Series, now: State, slots: dict[int, dict[int, Slot]]) -> None:
        """Save the states in memory that changed since the series' last checkpoint; all of them if files are many."""
        changed = now.clients.changed_since(self._since(series))
        in_files = {client for own in slots.values() for client in own}
        changed -= in_files
        gone = changed | in_files
        left = {file: [c for c in own if c not in gone] for file, own in series.clients.items()}
        series.clients = {file: own for file, own in left.items() if own}
        if not changed:
            return
        assert self.folder
        tensors: dict[str, Tensor] = {}
        trees = {
            f"{i}/{client}": pack(states[client], f"{i}/{client}", tensors)
            for i, states in now.clients.parts.items()
            for client in sorted(changed & states.keys())
        }
        name = f"clients-{now.round}.safetensors"
        series.sums[name] = write_tensors(self.folder / name, tensors, {"trees": json.dumps(trees)})
        series.clients |= {name: sorted(changed)}

    def _since(self, series: Series) -> int:
        """Return the round since which a client's states must have changed to be in the series' next checkpoint."""
        return -1 if len(series.clients) >= PIECES else series.rounds

    def _save_rows(self, series: Series, now: State) -> None:
        """Save the history since the series' last checkpoint; all of it if files are many."""
        if len(series.rows) >= PIECES:
            series.rows, series.rounds = [], 0
        assert self.folder
        name = f"rows-{now.round}.jsonl"
        with replacing(self.folder / name) as partial:
            with partial.open("w", encoding="utf-8") as opened:
                opened.writelines(as_json(row) + "\n" for row in now.history[series.rounds :])
            series.sums[name] = digest(partial)
        series.rows, series.rounds = [*series.rows, name], now.round

    def _tidy(self) -> None:
        """Remove our files that neither of the last two checkpoints needs."""
        assert self.folder
        needed = set(self.run.files.files) if self.run.files else set()
        last = rounds_in(self.folder)[:LAST]
        for number in last:
            with contextlib.suppress(DamagedError):
                needed |= set(files_of(self.folder, number))
        ours = [file for file in self.folder.iterdir() if CHECKPOINT_FILES.fullmatch(file.name) and regular(file)]
        for file in sorted(ours, key=lambda f: f.suffix != ".json"):  # files that name others are removed first
            if file.name not in needed:
                file.unlink()
        remove_partial(self.folder, CHECKPOINT_FILES)
        self.protected = {number: slots for number, slots in self.protected.items() if number in last}

    def recorded(self) -> dict[str, Any] | None:
        """Return the record of the run in the newest checkpoint that can be read."""
        for number in self._rounds():
            assert self.folder
            try:
                file = self.folder / f"round-{number}.json"
                return as_record(unseal(file), file)
            except DamagedError as error:
                log.warning("%s", error)
        return None

    @property
    def newest(self) -> int:
        """The latest round that has a checkpoint, readable or not; 0 if there is none."""
        return max(self._rounds(), default=0)

    def _rounds(self) -> list[int]:
        return rounds_in(self.folder) if self.folder else []

    def restore(self, last: int | None = None) -> State | None:
        """Return the state of the newest complete checkpoint, or None if there is no checkpoint at all.

        With `last`, checkpoints of later rounds are not used, and will be replaced.
        """
        present = self._rounds()
        usable = [number for number in present if last is None or number <= last]
        self.stale = [number for number in present if number not in usable]
        for number in usable:
            assert self.folder
            try:
                now, series = self.read(number)
            except Exception as error:  # damage may raise anything; the previous checkpoint is used
                log.warning("the checkpoint of round %d cannot be used: %s", number, error)
                continue
            self.stale = [later for later in present if later > number]
            # The other series may be damaged, or have later rounds that are trained again, so it starts over.
            self.series = [*(Series() for _ in range(LAST - 1)), series]
            self.saved_round = number
            self._hold(present, now)
            return now
        if usable:
            raise UndriftError(
                f"None of the checkpoints in {self.folder} can be read; start the run again in another folder."
            )
        return None

    def read(self, number: int) -> tuple[State, Series]:
        """Return a checkpoint, with every file checked. Raises if anything is wrong with it."""
        assert self.folder
        whole = read_verified(self.folder, number)
        tensors = own_memory(load_file(self.folder / whole["state"]))
        trees = {name: tree_to(unpack(tree, tensors), self.run.device) for name, tree in whole["trees"].items()}
        clients = self._clients(whole, number)
        lines = [line for name in whole["rows"] for line in (self.folder / name).read_text("utf-8").splitlines()]
        counts = (whole["total_steps"], whole["constant_steps"], whole["total_bytes"])
        history = [json.loads(line) for line in lines]
        now = State(trees["params"], trees["states"], trees["tracked"], clients, number, *counts, history)
        if whole["round"] != number or len(now.history) != number:
            raise DamagedError(f"round-{number}.json belongs to another round.")
        return now, Series(whole["clients"], whole["rows"], number, whole["files"])

    def _clients(self, whole: dict[str, Any], number: int) -> ClientStates:
        """Return what clients keep, in memory or in files as this run has it, wherever the checkpoint has it."""
        assert self.folder
        clients, files = self.run.no_states(), self.run.files
        for name, own in whole["clients"].items():
            read = _read_clients(self.folder / name, [client for client in own if self.run.ranks.owns(client)])
            if files:
                read = {i: {c: files.write(i, state) for c, state in states.items()} for i, states in read.items()}
            clients = clients.updated(read, number)
        if "slots" not in whole:
            return clients
        slots = self._slots(whole, files or SlotFiles(self.folder))
        if bad := damaged([slot for own in slots.values() for slot in own.values()]):
            raise DamagedError(f"{bad.file.path} is damaged: a client's state is not what was written.")
        if files:
            return clients.updated(slots, number)
        owns = self.run.ranks.owns
        trees = {i: {c: slot.read() for c, slot in own.items() if owns(c)} for i, own in slots.items()}
        return clients.updated(trees, number + 1)  # so that the next checkpoint has them

    def _hold(self, present: list[int], now: State) -> None:
        """Protect what checkpoints on disk name from being overwritten, after one of them has been restored."""
        files = self.run.files
        if files is None:
            return
        for number in present:
            with contextlib.suppress(Exception):  # damage may raise anything; that checkpoint cannot be used
                assert self.folder
                slots = self._slots(unseal(self.folder / f"round-{number}.json"), files)
                self.protected[number] = [slot for own in slots.values() for slot in own.values()]
        files.settle(slot for own in now.clients.slots().values() for slot in own.values())

    def _slots(self, whole: dict[str, Any], files: SlotFiles) -> dict[int, dict[int, Slot]]:
        """Return the slots that a checkpoint names, if any. Raises if its table of them is damaged."""
        assert self.folder
        if "slots" not in whole:
            return {}
        name = whole["slots"]
        if not CHECKPOINT_FILES.fullmatch(name):
            raise DamagedError(f"it names the file {name!r}, which no checkpoint writes.")
        verify(self.folder / name, whole["files"][name])
        return read_slots(self.folder / name, files)


def read_verified(folder: Path, number: int) -> dict[str, Any]:
    """Return what `round-N.json` says. Raises `DamagedError` if a file that it names is not what was written."""
    whole: dict[str, Any] = unseal(folder / f"round-{number}.json")
    for name, sha256 in whole["files"].items():
        if not CHECKPOINT_FILES.fullmatch(name):
            raise DamagedError(f"it names the file {name!r}, which no checkpoint writes.")
        verify(folder / name, sha256)
    return whole


def companions_in(folder: Path) -> dict[int, list[Path] | None]:
    """Return the folders of those that trained side by side with the run in a folder, by the checkpoints' rounds.

    A checkpoint that is damaged is not among them; None stands for one that does not say.
    """
    companions: dict[int, list[Path] | None] = {}
    place = folder / CHECKPOINT
    for number in rounds_in(place):
        with contextlib.suppress(Exception):  # damage may raise anything
            others = read_verified(place, number).get("beside")
            companions[number] = (
                None if others is None else [Path(os.path.normpath(folder / other)) for other in others]
            )
    return companions


def files_of(folder: Path, number: int) -> list[str]:
    """Return the names of a checkpoint's files. Raises `DamagedError` if it cannot be read."""
    whole = unseal(folder / f"round-{number}.json")
    return [f"round-{number}.json", *whole["files"], *whole.get("kept", ())]


def rounds_in(folder: Path) -> list[int]:
    """Return the rounds that have a checkpoint in a folder, newest first."""
    if not folder.is_dir():
        return []
    matches = [(CHECKPOINT_FILES.fullmatch(file.name), file) for file in folder.iterdir() if file.suffix == ".json"]
    return sorted((int(match[1]) for match, file in matches if match and regular(file)), reverse=True)


def _read_clients(file: Path, wanted: list[int]) -> dict[int, dict[int, Tree]]:
    """Return the states of these clients in a file, by part and client; a KeyError if one of them is not in it."""
    with safe_open(file, framework="pt") as opened:
        tensors = own_memory({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - not a dict
        trees = json.loads(opened.metadata()["trees"])
    states_by_part: dict[int, dict[int, Tree]] = {}
    for name, tree in trees.items():
        part, client = map(int, name.split("/"))
        states_by_part.setdefault(part, {})[client] = unpack(tree, tensors)
    return {part: {client: states[client] for client in wanted} for part, states in states_by_part.items()}


def parse_interval(every: int | str | None) -> tuple[int | None, float | None]:
    """Parse an interval: `5` is every five rounds, `"30s"` every thirty seconds."""
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


# ---- states in files -----------------------------------------------------------------------------------------------

Slots = dict[int, dict[int, Slot]]
"""By part and client."""


def write_slots(file: Path, files: SlotFiles, slots: Slots) -> str:
    """Write these slots' states to the disk, and then the table; returns its checksum."""
    files.seal(slot for own in slots.values() for slot in own.values())
    names = list(files.files)
    places = {id(files.files[name]): i for i, name in enumerate(names)}
    tensors, layouts = {}, {}
    for part, own in slots.items():
        every = list(own.values())
        layouts[part] = _describe_layout(every[0].layout)
        sums = b"".join(slot.sha256 or b"" for slot in every)
        rows = [[client, places[id(slot.file)], slot.number] for client, slot in own.items()]
        tensors[f"{part} slots"] = torch.tensor(rows, dtype=torch.int64)
        tensors[f"{part} sha256"] = torch.from_numpy(np.frombuffer(sums, np.uint8).copy()).reshape(len(every), 32)
    return write_tensors(file, tensors, {"files": json.dumps(names), "layouts": json.dumps(layouts)})


def read_slots(file: Path, files: SlotFiles) -> Slots:
    """Return the slots that a table names. Raises if `files` cannot have them."""
    slots: Slots = {}
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
        names = json.loads(about["files"])
        for part, described in json.loads(about["layouts"]).items():
            layout = _layout_of(described)
            rows, sums = (opened.get_tensor(f"{part} {what}") for what in ("slots", "sha256"))
            slots[int(part)] = {
                client: files.known(names[place], number, layout, sha256.tobytes())
                for (client, place, number), sha256 in zip(rows.tolist(), sums.numpy(), strict=True)
            }
    return slots


def _describe_layout(layout: Layout) -> dict[str, Any]:
    """Return the layout as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    blank = [torch.empty(shape, dtype=dtype) for dtype, shape in layout.kinds]
    tree = pack(tree_unflatten(blank, layout.structure), "", tensors)
    kinds = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    return {"tree": tree, "kinds": kinds}


def _layout_of(described: dict[str, Any]) -> Layout:
    kinds = described["kinds"].items()
    blank = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in kinds}
    return Layout.of(unpack(described["tree"], blank))


# ---- several processes ---------------------------------------------------------------------------------------------


def gather_clients(ranks: Ranks, clients: ClientStates, since: int) -> ClientStates:
    """Return, in the first process, all states of clients that changed after `since` rounds, for a checkpoint.

    The first process determines `since`.
    """
    since = ranks.said(lambda: since)
    host = torch.device("cpu")
    changed = clients.changed_since(since)
    own = {i: {c: tree_to(states[c], host) for c in changed & states.keys()} for i, states in clients.parts.items()}
    handed_in = ranks.handed_in((own, {c: clients.changed[c] for c in changed}))
    parts: dict[int, dict[int, Any]] = {i: {} for i in clients.parts}
    when: dict[int, int] = {}
    for states, rounds in handed_in:
        for i, of_part in states.items():
            parts[i] |= of_part
        when |= rounds
    tables = {i: Table().updated(states) for i, states in parts.items()}
    return replace(clients, parts=tables, changed=Table().updated(when), device=host)
