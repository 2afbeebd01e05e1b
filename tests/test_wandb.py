"""Weights & Biases, in its offline mode: what its files say, read record by record."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import undrift as ud
from tests.problems import make_clients, net, same_bits
from tests.test_track import METHOD, OPTIONS, StopError, curves, forget_checkpoint, needs, stop_after

BLOCK = 32768
DATA = make_clients([23, 5, 0, 41, 10])
needs_wandb = needs("wandb")


def records(file: Path) -> Iterator[Any]:
    """What `wandb sync` would read: protobuf records in the log format of LevelDB, after a header of seven bytes.

    A fragment has a checksum (4 bytes), a length (2), and says whether it is whole, the first, a middle or the last.
    """
    from wandb.proto import wandb_internal_pb2

    content, at, pieces = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        pieces += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            pieces = b""
            yield record


def name_of(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


class Seen:
    """The sessions of a run in its folder, in their order.

    W&B's own process may still be writing for a moment after the run has ended; a session's last record is its exit.
    """

    def __init__(self, folder: Path, sessions: int) -> None:
        end = time.monotonic() + 60
        self.read(folder)
        while len(self.exits) < sessions:
            assert time.monotonic() < end
            time.sleep(0.05)
            self.read(folder)

    def read(self, folder: Path) -> None:
        self.ids, self.exits, self.config, self.summary = [], [], {}, {}
        self.points: dict[str, list[tuple[int, float]]] = {}
        for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns):
            for record in records(file):
                kind = record.WhichOneof("record_type")
                if kind == "run":
                    self.ids.append((record.run.run_id, record.run.project, record.run.display_name))
                    self.config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
                elif kind == "history":
                    row = {name_of(i): json.loads(i.value_json) for i in record.history.item}
                    step = record.history.step.num
                    for name in row.keys() - {"_step", "_timestamp", "_runtime"}:
                        self.points.setdefault(name, []).append((step, row[name]))
                elif kind == "summary":
                    self.summary |= {name_of(i): json.loads(i.value_json) for i in record.summary.update}
                elif kind == "exit":
                    self.exits.append(record.exit.exit_code)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)


@needs_wandb
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_run_that_is_resumed_is_one_run_with_every_round_once(tmp_path, offline):
    folder, options = tmp_path / "mine", {**OPTIONS, "checkpoint_every": 2, "track": "wandb"}
    with pytest.raises(StopError):
        ud.train(net(), DATA, METHOD, out=folder, on_round=stop_after(5), **options)
    first = Seen(folder, 1)
    assert [step for step, _ in first.points["loss"]] == [1, 2, 3, 4, 5] and first.exits == [1]
    assert first.summary["status"] == "FAILED"
    forget_checkpoint(folder, 5)
    result = ud.train(net(), DATA, METHOD, out=folder, resume=True, **options)
    seen = Seen(folder, 2)
    assert len(set(seen.ids)) == 1 and len(seen.ids) == 2 and seen.exits == [1, 0]
    identifier, project, name = seen.ids[0]
    assert (project, name) == ("undrift", "mine")
    assert json.loads((folder / "wandb.json").read_text()) == {"id": identifier, "round": 6}
    assert [step for step, _ in seen.points.pop("seconds")] == [1, 2, 3, 4, 5, 6]
    assert seen.points == curves(result.history)
    assert {"class_accuracy/3", "loss"} <= seen.points.keys() and not {"round", "clients/0"} & seen.points.keys()
    assert seen.config["local"]["lr"] == 0.1 and seen.config["method"].endswith("ServerSGD(lr=1.0, momentum=0.5)")
    assert seen.summary["loss"] == result.history[-1]["loss"] and seen.summary["status"] == "FINISHED"
    whole = ud.train(net(), DATA, METHOD, **OPTIONS)
    assert same_bits(whole.params, result.params)


@needs_wandb
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_it_gets_what_it_missed_and_a_run_without_a_folder_has_wandbs_own(tmp_path, offline, monkeypatch):
    folder = tmp_path / "r"
    with pytest.raises(StopError):
        ud.train(net(), DATA, out=folder, on_round=stop_after(3), **OPTIONS)
    ud.train(net(), DATA, out=folder, resume=True, track=["wandb"], **OPTIONS)
    assert [step for step, _ in Seen(folder, 1).points["loss"]] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setenv("WANDB_PROJECT", "other")
    ud.train(net(), DATA, track="wandb", **OPTIONS)
    seen = Seen(tmp_path, 1)
    assert seen.ids[0][1] == "other" and len(seen.points["accuracy"]) == 6


def test_what_is_missing_or_not_logged_in_is_said_before_anything_runs(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        for module in [m for m in sys.modules if m == "wandb" or m.startswith("wandb.")]:
            patch.delitem(sys.modules, module)
        patch.delitem(sys.modules, "undrift.training.track.wandb", raising=False)
        patch.setitem(sys.modules, "wandb", None)  # importing it raises
        with pytest.raises(ud.UndriftError, match=r"track='wandb' needs .*pip install 'undrift\[track\]'"):
            ud.train(net(), DATA, out=tmp_path / "r", track="wandb", **OPTIONS)
    pytest.importorskip("wandb")
    from undrift.training.track import wandb as ours

    def refuses(**_):
        raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setattr(ours.wandb, "init", refuses)
    with pytest.raises(ud.UndriftError, match=r"cannot start \(api_key not configured.*WANDB_MODE=offline"):
        ud.train(net(), DATA, out=tmp_path / "r", track="wandb", **OPTIONS)
    assert not (tmp_path / "r" / "config.toml").exists()
