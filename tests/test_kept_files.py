"""What clients keep, in files: the bits of a run in memory, and nothing is read that no checkpoint names."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import undrift as ud
from tests.experiments import StopError, stop_after
from tests.field import Ditto, FedPer
from tests.killing import left_by, sigkilled
from tests.problems import make_clients, net, same_bits
from undrift.engine import slots
from undrift.engine.slots import Layout, SlotFiles
from undrift.engine.table import Table
from undrift.files import unseal
from undrift.training import build
from undrift.training.checkpoint import Checkpoints
from undrift.tree import tree_leaves, tree_structure

SIZES = [10, 7, 1, 12, 9, 3, 16]
LOCAL = ud.Local(epochs=1, batch_size=4, lr=0.1)
SLOT = Layout.of(dict(net().named_parameters())).size
"""What a client of Scaffold keeps takes."""


@pytest.fixture
def in_files(monkeypatch):
    """States go to files, of three slots each."""
    monkeypatch.setattr(build, "HOST_SHARE", 0.0)
    monkeypatch.setattr(slots, "FILE_BYTES", 3 * SLOT)


def train(out=None, method="Scaffold()", **options):
    options = {"rounds": 7, "local": LOCAL, "participation": 3, "engine": "plain", "device": "cpu", **options}
    return ud.train(net(), make_clients(SIZES), method, out=out, **options)


def in_memory(**options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "HOST_SHARE", 1.0)
        return train(**options)


def stop(out, after=5, **options):
    with pytest.raises(StopError):
        train(out, on_round=stop_after(after), **{"checkpoint_every": 2, **options})


def equal(one, other):
    assert same_bits(one.params, other.params) and left_by(one) == left_by(other)


# ---- the table and the slots -------------------------------------------------------------------------------------


def test_a_table_is_a_value():
    chance, tables, wanted = random.Random(1), [Table()], [dict[int, int]()]
    for step in range(60):
        new = {
            chance.choice([chance.randrange(600), chance.randrange(2**40)]): step for _ in range(chance.randrange(9))
        }
        tables.append(tables[-1].updated(new))
        wanted.append(wanted[-1] | new)
    for table, known in zip(tables, wanted, strict=True):
        assert dict(table) == known and len(table) == len(known) and list(table) == sorted(known)
        assert table.get(10**9) is None and all(client in table for client in known)


def test_states_come_back_as_they_were(tmp_path):
    state = {
        "w": torch.randn(5, 3), "none": torch.empty(0, 4), "one": torch.tensor(7), "yes": torch.tensor([True, False]),
        "half": [torch.randn(9).bfloat16(), (torch.randn(2, dtype=torch.float64), torch.ones(2, dtype=torch.int8))],
    }  # fmt: skip
    files = SlotFiles(tmp_path / "checkpoint")
    for kept in (state, (), {"x": torch.empty(0)}, torch.randn(4, 4).t()):
        slot = files.write(0, kept)
        found = slot.read()
        assert tree_structure(found) == tree_structure(kept) and slot.finite
        for a, b in zip(tree_leaves(found), tree_leaves(kept), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b) and a.is_contiguous()
    assert not files.write(0, torch.tensor([1.0, float("nan")])).finite


def test_slots_are_used_again_once_nothing_refers_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "FILE_BYTES", 3 * 64)
    for files in (SlotFiles(tmp_path / "checkpoint"), SlotFiles(None)):
        held = {i: files.write(0, torch.full((4,), float(i))) for i in range(7)}
        assert [file.count for file in files.files.values()] == [3, 3, 3]
        places = {i: (slot.file, slot.number) for i, slot in held.items()}
        assert len(set(places.values())) == 7
        del held[2], held[5]
        later = [files.write(0, torch.full((4,), 10.0 + i)) for i in range(2)]
        assert {(slot.file, slot.number) for slot in later} == {places[2], places[5]} and len(files.files) == 3
        assert all((slot.read() == i).all() for i, slot in held.items())
        assert files.write(1, torch.zeros(100)).file not in [slot.file for slot in held.values()]
    assert sorted(file.name for file in (tmp_path / "checkpoint").iterdir()) == [f"kept-{i}.bin" for i in range(4)]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    files = SlotFiles(tmp_path / "checkpoint")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"kept-0\.bin"):
        files.write(0, torch.zeros(3))


# ---- runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spoils(ud.Part):
    """Keeps a count, which is NaN for one client in one round."""

    def keep(self, start):
        return {"times": torch.zeros(())}

    def upload(self, delta, client):
        bad = (client.id == 3) & (client.round == 4)
        return client.kept["times"], {"times": client.kept["times"] + torch.where(bad, torch.nan, 1.0)}


CASES = {
    "Scaffold, plain": {},
    "Scaffold, lanes": {"engine": "lanes", "lanes": 2},
    "FedDyn and Adam's state": {
        "method": "FedDyn(0.1)",
        "local": ud.Local(steps=2, batch_size=4, lr=0.01, optimizer=ud.Adam(), optimizer_state="keep"),
        "engine": "lanes",
    },
    "personal layers": {"method": FedPer(("3.*",)), "engine": "lanes", "lanes": 3},
    "Ditto": {"method": Ditto(1.0), "engine": "lanes", "lanes": 2},
    "faults": {"faults": ud.Faults(dropout=0.4), "min_clients": 2},
    "skipped clients": {"method": Spoils(), "on_nonfinite": "skip", "engine": "lanes"},
    "a round undone": {"method": Spoils() + ud.Scaffold()},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("folder", [True, False])
def test_the_bits_are_those_of_a_run_in_memory(tmp_path, in_files, case, folder):
    options = CASES[case]
    whole, found = in_memory(**options), train(tmp_path / "r" if folder else None, **options)
    equal(found, whole)
    assert found.choices["kept"].startswith("in ") and "kept" not in whole.choices
    assert found.stopped == whole.stopped and bool(whole.stopped) == (case == "a round undone")
    for client in range(len(SIZES)) if whole.find_own else ():
        assert same_bits(found.own_params(client), whole.own_params(client))
    names = [file.name for file in tmp_path.rglob("kept-*.bin")]
    assert bool(names) == folder


def test_threads_write_side_by_side(in_files, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    options = {"engine": "lanes", "lanes": 1, "participation": 6}
    equal(train(**options), in_memory(**options))


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path, in_files, engine):
    whole = in_memory(engine=engine)
    for after in (1, 4):
        folder = tmp_path / str(after)
        stop(folder, after, engine=engine)
        equal(train(folder, resume=True, engine=engine), whole)
    longer = train(tmp_path / "4", resume=True, engine=engine, rounds=9)
    equal(longer, in_memory(engine=engine, rounds=9))


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_resumed_run_may_keep_states_elsewhere(tmp_path, in_files, monkeypatch, first):
    """From files to memory and back, or the other way round, as the machine's memory has it."""
    whole, folder = in_memory(rounds=9), tmp_path / "r"
    for life, share in enumerate((first, 1.0 - first, first)):
        monkeypatch.setattr(build, "HOST_SHARE", share)
        stop(folder, after=2 * life + 2, rounds=9, resume=life > 0, checkpoint_every=1)
    monkeypatch.setattr(build, "HOST_SHARE", 1.0 - first)
    equal(train(folder, resume=True, rounds=9, checkpoint_every=1), whole)
    names = {file.name.split("-")[0] for file in (folder / "checkpoint").iterdir()}
    assert names == ({"round", "rows", "clients"} if first == 0.0 else {"round", "rows", "slots", "kept"})


def named(folder: Path, number: int) -> set[tuple[str, int]]:
    """The files and slots that the checkpoint of this round names."""
    table = folder / "checkpoint" / unseal(folder / "checkpoint" / f"round-{number}.json")["slots"]
    with safe_open(table, framework="pt") as opened:
        files, rows = json.loads(opened.metadata()["files"]), opened.get_tensor("0 slots").tolist()
    return {(files[place], slot) for _, place, slot in rows}


def overwrite(folder: Path, name: str, slot: int) -> None:
    with (folder / "checkpoint" / name).open("r+b") as opened:
        opened.seek(slot * SLOT)
        opened.write(b"\x7f" * 16)


def test_what_no_checkpoint_names_is_never_read(tmp_path, in_files, monkeypatch):
    """Every other slot is written over, as states since the last checkpoint might have been half."""
    folder, save = tmp_path / "r", Checkpoints.save
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", lambda self, now: save(self, now) if now.round < 5 else None)
        stop(folder, after=5)
    taken = named(folder, 4) | named(folder, 2)
    free = {(f.name, s) for f in (folder / "checkpoint").glob("kept-*.bin") for s in range(3)} - taken
    assert free
    for name, slot in free:
        overwrite(folder, name, slot)
    older = tmp_path / "older"
    shutil.copytree(folder, older)
    (older / "checkpoint" / "round-4.json").unlink()
    whole = in_memory()
    equal(train(folder, resume=True, checkpoint_every=2), whole)
    equal(train(older, resume=True, checkpoint_every=2), whole)


def test_a_resumed_run_leaves_both_checkpoints_whole(tmp_path, in_files, monkeypatch):
    """It goes on from the newer, dies before it saves anything, and the newer is damaged."""
    folder = tmp_path / "r"
    stop(folder, after=4, rounds=9, checkpoint_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", lambda self, now: None)
        stop(folder, after=8, rounds=9, resume=True, checkpoint_every=None)
    (folder / "checkpoint" / "round-4.json").write_text("{")
    equal(train(folder, rounds=9, resume=True), in_memory(rounds=9))


def rounds_after(folder: Path, **options) -> list[int]:
    """The rounds that a resumed run trains, which must end like one that was not stopped."""
    starts: list[int] = []
    equal(train(folder, resume=True, on_round=lambda row: starts.append(row["round"]), **options), in_memory())
    return starts


def test_damage_costs_at_most_one_checkpoint(tmp_path, in_files, caplog):
    """Every slot of either checkpoint is overwritten, also where a client's state is the same in both."""
    folder = tmp_path / "r"
    stop(folder, after=6, checkpoint_every=1)
    new, old = named(folder, 6), named(folder, 5)
    assert not {name for name, _ in new} & {name for name, _ in old}
    for (name, slot), number in [*((one, 6) for one in sorted(new)), *((one, 7) for one in sorted(old))]:
        copy = tmp_path / f"{name}-{slot}"
        shutil.copytree(folder, copy)
        overwrite(copy, name, slot)
        caplog.clear()
        assert rounds_after(copy)[0] == number
        assert (f"{name} is damaged: a client's state" in caplog.text) == (number == 6)


def test_a_damaged_state_is_not_copied_into_the_next_checkpoint(tmp_path, in_files, caplog):
    """The run ends instead, and both of its checkpoints stay; the older one is whole."""
    folder = tmp_path / "r"

    def spoil(row):
        for place in named(folder, 3) if row["round"] == 4 else ():
            overwrite(folder, *place)

    with pytest.raises(ud.UndriftError, match=r"kept-\d\.bin is damaged: .* Resume the run"):
        train(folder, checkpoint_every=1, on_round=spoil, participation=1)
    assert {file.name for file in (folder / "checkpoint").glob("*.json")} == {"round-2.json", "round-3.json"}
    starts: list[int] = []
    again = train(folder, resume=True, participation=1, on_round=lambda row: starts.append(row["round"]))
    equal(again, in_memory(participation=1))
    assert starts[0] == 3 and "is damaged: a client's state" in caplog.text


def test_checkpoints_that_share_files_do_not_for_long(tmp_path, in_files, monkeypatch):
    """Those of a run whose files share slots."""
    folder = tmp_path / "r"
    with monkeypatch.context() as patch:
        patch.setattr(SlotFiles, "beside", lambda self, slots: slots)
        stop(folder, after=4, checkpoint_every=1)
    assert named(folder, 4) & named(folder, 3)
    stop(folder, after=6, checkpoint_every=1, resume=True)
    assert not {name for name, _ in named(folder, 5)} & {name for name, _ in named(folder, 6)}
    assert rounds_after(folder) == [7]


@pytest.mark.parametrize("how", ["missing", "short", "link", "table"])
def test_files_that_are_no_longer_there(tmp_path, in_files, how, caplog):
    folder = tmp_path / "r"
    stop(folder, after=6, checkpoint_every=1)
    own = [sorted({name for name, _ in named(folder, number)})[0] for number in (6, 5)]
    for number, name in enumerate(["slots-6.safetensors", "slots-5.safetensors"] if how == "table" else own, 6):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        file = copy / "checkpoint" / name
        if how in ("missing", "link"):
            file.rename(tmp_path / "elsewhere")
        if how == "link":
            file.symlink_to(tmp_path / "elsewhere")
        if how in ("short", "table"):
            os.truncate(file, 100)
        caplog.clear()
        assert rounds_after(copy)[0] == number
        assert (name in caplog.text) == (number == 6)
        assert how != "link" or file.is_symlink()


def test_damage_to_both_checkpoints_is_an_error(tmp_path, in_files, caplog):
    folder = tmp_path / "r"
    stop(folder, after=6, checkpoint_every=1)
    damaged = [sorted(named(folder, number))[0] for number in (6, 5)]
    for name, slot in damaged:
        overwrite(folder, name, slot)
    with pytest.raises(ud.UndriftError, match="None of the checkpoints"):
        train(folder, resume=True)
    assert all(f"{name} is damaged" in caplog.text for name, _ in damaged)


def test_files_are_not_left_behind_or_taken_over(tmp_path, in_files):
    """A file of that name that no checkpoint knows is not written to; ours are removed when nothing needs them."""
    folder = tmp_path / "r"
    stop(folder, after=1, checkpoint_every=None)  # which saves what it has
    (folder / "checkpoint" / "kept-7.bin").write_bytes(b"left by a crash")
    (folder / "checkpoint" / "kept-x.bin").write_bytes(b"somebody's")
    train(folder, resume=True)
    assert not (folder / "checkpoint" / "kept-7.bin").exists()
    assert (folder / "checkpoint" / "kept-x.bin").read_bytes() == b"somebody's"


def dies(folder: str) -> None:
    """A run that kills its own process in the middle of a round's writes."""
    build.HOST_SHARE, slots.FILE_BYTES = 0.0, 3 * SLOT
    write, count = SlotFiles.write, [0]

    def deadly(self, part, state):
        count[0] += 1
        slot = write(self, part, state)
        if count[0] == 3 * 4 + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return slot

    SlotFiles.write = deadly
    train(folder, checkpoint_every=2)


def test_a_killed_process_leaves_what_its_checkpoint_names(tmp_path, in_files):
    sigkilled("tests.test_kept_files", "dies", tmp_path / "r")
    starts: list[int] = []
    equal(train(tmp_path / "r", resume=True, on_round=lambda row: starts.append(row["round"])), in_memory())
    assert starts[0] == 5
