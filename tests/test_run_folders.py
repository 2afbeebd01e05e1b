"""What a run does to files that are not its own, to folders of other runs, and to files that are damaged."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import undrift as ud
from tests.experiments import StopError, stop_after
from tests.killing import contents
from tests.problems import make_clients, net, same_bits
from undrift.files import PARTIAL, replacing, seal, unseal, write_text
from undrift.tools import config, experiment

LOCAL = ud.Local(steps=1, batch_size=4, lr=0.1)


def data(**rest):
    return make_clients([10, 20, 8, 12], **rest)


def train(out=None, method=None, model=None, on=None, **options):
    options = {"rounds": 3, "local": LOCAL, "engine": "plain", **options}
    return ud.train(model or net(), on or data(), method or ud.FedAvg(), out=out, **options)


def stop(out, after=2, **options):
    """A run that stops after some rounds, with a checkpoint."""
    with pytest.raises(StopError):
        train(out, on_round=stop_after(after), **options)


# ---- only our own files ------------------------------------------------------------------------------------------


def test_a_folder_with_files_of_its_own_is_refused_and_left_alone(tmp_path, monkeypatch):
    """A1: `checkpoint/` and `model.safetensors` are what every project of Hugging Face has."""
    (tmp_path / "p" / "checkpoint").mkdir(parents=True)
    (tmp_path / "p" / "checkpoint" / "best.pt").write_text("weights")
    (tmp_path / "p" / "model.safetensors").write_text("mine")
    before = contents(tmp_path / "p")
    with pytest.raises(ud.UndriftError, match=r"contains 'checkpoint'. Choose a new or an empty folder"):
        train(tmp_path / "p", checkpoint_every=1)
    monkeypatch.chdir(tmp_path / "p")
    for here in (".", Path(".")):
        with pytest.raises(ud.UndriftError, match="Choose a new or an empty folder"):
            train(here, checkpoint_every=1)
    with pytest.raises(ud.UndriftError, match="out must be the path of a folder, not ''"):
        train("", checkpoint_every=1)
    with pytest.raises(ud.UndriftError, match="out must be the path of a folder, not 5"):
        train(5)
    assert contents(tmp_path / "p") == before


def test_an_empty_folder_will_do(tmp_path):
    (tmp_path / "r").mkdir()
    assert len(train(tmp_path / "r").history) == 3


def test_foreign_files_in_a_run_s_folder_are_left_alone_and_break_nothing(tmp_path):
    """A4."""
    stop(tmp_path / "r")
    foreign = [
        "mine.txt", "metrics.jsonl.partial", ".notes.0123456789abcdef.partial", "checkpoint/notes.txt",
        "checkpoint/round-1.pt", "checkpoint/round-x.json", "checkpoint/backup/round-1.json",
    ]  # fmt: skip
    (tmp_path / "r" / "checkpoint" / "backup").mkdir()
    (tmp_path / "r" / "checkpoint" / "round-7.json").mkdir()
    for name in foreign:
        (tmp_path / "r" / name).write_text("mine")
    whole = train()
    assert same_bits(train(tmp_path / "r", resume=True, checkpoint_every=1).params, whole.params)
    assert all((tmp_path / "r" / name).read_text() == "mine" for name in foreign)


def test_a_crash_s_temporary_files_are_removed(tmp_path):
    stop(tmp_path / "r")
    left = [tmp_path / "r" / ".metrics.jsonl.0123456789abcdef.partial"]
    left += [tmp_path / "r" / "checkpoint" / ".round-3.safetensors.0123456789abcdef.partial"]
    for file in left:
        file.write_text("half")
    train(tmp_path / "r", resume=True, checkpoint_every=1)
    assert not any(file.exists() for file in left)


@pytest.mark.parametrize("name", ["checkpoint", "metrics.jsonl", "model.safetensors", "run.json"])
def test_links_in_a_run_s_folder_are_refused(tmp_path, name):
    """A3."""
    stop(tmp_path / "r")
    victim = tmp_path / "victim"
    place = tmp_path / "r" / name
    if name == "checkpoint":
        place.rename(tmp_path / "elsewhere")
        victim.mkdir()
        (victim / "thesis.tex").write_text("mine")
    else:
        place.unlink(missing_ok=True)
        victim.write_text("mine")
    place.symlink_to(victim)
    before = contents(tmp_path)
    with pytest.raises(ud.UndriftError, match=f"{name} is .*link"):
        train(tmp_path / "r", resume=True)
    assert contents(tmp_path) == before


def test_writing_follows_no_link(tmp_path):
    """A3: temporary names cannot be guessed, and what replaces a link does not write through it."""
    (tmp_path / "bashrc").write_text("mine")
    for name in ("page.html", "page.html.partial"):
        (tmp_path / name).symlink_to(tmp_path / "bashrc")
    write_text(tmp_path / "page.html", "ours")
    assert (tmp_path / "bashrc").read_text() == "mine" and (tmp_path / "page.html").read_text() == "ours"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_a_file_is_synced_before_its_rename_and_its_folder_after(tmp_path, monkeypatch):
    did = []
    replace = Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: did.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
    )
    monkeypatch.setattr(Path, "replace", lambda file, to: (did.append("rename"), replace(file, to)))
    write_text(tmp_path / "a.txt", "a")
    partial, *rest = did
    assert PARTIAL.fullmatch(partial)[1] == "a.txt" and rest == ["rename", tmp_path.name]


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    """A full disk is noticed when the file is open, and Python then no longer says which it was."""
    with pytest.raises(OSError, match="full") as caught, replacing(tmp_path / "page.html"):
        raise OSError(28, "the disk is full")
    assert caught.value.filename == str(tmp_path / "page.html") and not list(tmp_path.iterdir())


def test_modes_follow_the_umask(tmp_path):
    """A25: safetensors would make its files private."""
    before = os.umask(0o027)
    try:
        train(tmp_path / "r", ud.Scaffold(), checkpoint_every=1)
    finally:
        os.umask(before)
    modes = {f.name: stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "r").rglob("*") if f.is_file()}
    assert len(modes) > 8 and set(modes.values()) == {0o640}


# ---- resume compares before it touches ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Divided(ud.Part):
    by: ud.Number = 2.0

    def update(self, delta, client):
        return ud.tree_map(lambda d: d / self.by, delta)


def divided_by_three():
    @dataclass(frozen=True)
    class Divided(ud.Part):
        by: ud.Number = 2.0

        def update(self, delta, client):
            return ud.tree_map(lambda d: d / self.by / 1.5, delta)

    return Divided()


def other_rows(split: str):
    """The same data but for one number in one row, in the middle."""
    changed = splits()
    store = getattr(changed, f"{split}_rows").store if split != "training" else changed.store
    store["x"] = store["x"].clone()
    store["x"][len(store["x"]) // 2, 0] += 1
    return changed


def splits():
    """Enough rows that looking at some of them is not looking at all."""
    generator = torch.Generator().manual_seed(5)

    def some(n):
        return torch.randn(n, 6, generator=generator).double(), torch.randint(0, 4, (n,), generator=generator)

    return ud.FederatedDataset.from_clients(
        [some(500), some(400)], test=some(300), server=some(300), validation=some(300)
    )


def scaled(by):
    def loss(output, target):
        return by * torch.nn.functional.cross_entropy(output, target, reduction="none")

    return loss


class Frozen(torch.nn.Module):
    """An adapter on a base that is not trained."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(6, 8).requires_grad_(False)
        torch.manual_seed(0)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.base(x)))


many = np.arange(2, 2002) % 3 + 1
other_many = np.where(np.arange(2000) == 1000, 2, many)
OTHERS = {
    "method": ({}, {"method": ud.Scaffold()}, "method"),
    "seed": ({}, {"seed": 9}, "seed"),
    "rate": ({}, {"local": ud.Local(steps=1, batch_size=4, lr=0.2)}, "local"),
    "a last digit": (
        {"method": ud.FedProx(0.1)},
        {"method": ud.FedProx(0.1 + 1e-16)},
        r"method FedProx\(mu=0.1, .* not FedProx\(mu=0.1000000000000001",
    ),
    "participation": ({}, {"participation": 2}, "clients a round"),
    "metrics": ({}, {"metrics": {"mine": lambda o, y: o.sum(1)}}, "metrics"),
    "schedule": (
        {"local": ud.Local(steps=1, lr=lambda t: 0.1)},
        {"local": ud.Local(steps=1, lr=lambda t: 0.2)},
        "local",
    ),
    "loss": ({"loss": scaled(1.0)}, {"loss": scaled(2.0)}, "loss"),
    "part's code": ({"method": Divided()}, {"method": divided_by_three()}, "method"),
    "steps": (
        {"on": make_clients([4] * 2000), "local": ud.Local(steps=many, batch_size=4, lr=0.1), "participation": 2},
        {"on": make_clients([4] * 2000), "local": ud.Local(steps=other_many, batch_size=4, lr=0.1), "participation": 2},
        "local",
    ),
    "frozen weights": ({"model": Frozen(0).double()}, {"model": Frozen(1).double()}, "model"),
    **{
        f"{split} data": ({"on": splits()}, {"on": other_rows(split)}, f"{split} data")
        for split in ("training", "test", "validation", "server")
    },
}


@pytest.mark.parametrize("kind", ["finished", "stopped"])
@pytest.mark.parametrize(("first", "then", "what"), OTHERS.values(), ids=OTHERS)
def test_another_run_is_refused_before_anything_is_touched(tmp_path, first, then, what, kind):
    """A2 and A6 (finished runs, with and without checkpoints), A7 (frozen weights), A11 (all that decides a result)."""
    if kind == "finished":
        train(tmp_path / "r", **first)
    else:
        stop(tmp_path / "r", **first)
    before = contents(tmp_path / "r")
    with pytest.raises(ud.UndriftError, match=rf"was started with {what}|^The code of \S+ \({what}\), .* has changed"):
        train(tmp_path / "r", resume=True, **{**first, **then})
    assert contents(tmp_path / "r") == before


def test_the_same_run_built_anew_is_the_same_run(tmp_path):
    """What is the same in meaning is described alike: new functions, arrays, classes and modules of the same code."""

    def settings():
        steps = np.array([1, 2, 1, 3])
        local = ud.Local(steps=steps, batch_size=4, lr=lambda t: 0.1 / (1 + t))
        return {"method": divided_by_three(), "local": local, "loss": scaled(1.0), "model": Frozen(3).double()}

    stop(tmp_path / "r", **settings())
    assert same_bits(train(tmp_path / "r", resume=True, **settings()).params, train(**settings()).params)


def test_a_finished_run_without_checkpoints_is_given_back(tmp_path):
    first = train(tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "checkpoint")
    before = contents(tmp_path / "r")
    again = train(tmp_path / "r", resume=True)
    assert same_bits(first.params, again.params) and contents(tmp_path / "r") == before


def test_a_run_without_a_checkpoint_says_that_it_starts_again(tmp_path, caplog):
    """A2."""
    stop(tmp_path / "r")
    for file in (tmp_path / "r" / "checkpoint").iterdir():
        file.unlink()
    with caplog.at_level(logging.WARNING, "undrift"):
        again = train(tmp_path / "r", resume=True)
    assert "has no checkpoint, so training starts over from round 1 (2 rounds were done)" in caplog.text
    assert same_bits(again.params, train().params)


def test_other_versions_need_a_flag(tmp_path):
    """A11: they are written down, a difference is shown, and a flag goes on all the same."""
    stop(tmp_path / "r")
    known = unseal(tmp_path / "r" / "run.json")
    assert known["versions"]["torch"] == str(torch.__version__)
    known["versions"]["torch"] = "2.0.0"
    seal(tmp_path / "r" / "run.json", known)
    before = contents(tmp_path / "r")
    with pytest.raises(ud.UndriftError, match=r"started with torch 2.0.0, now .*allow_version_change=True"):
        train(tmp_path / "r", resume=True)
    assert contents(tmp_path / "r") == before
    assert len(train(tmp_path / "r", resume=True, allow_version_change=True).history) == 3
    assert unseal(tmp_path / "r" / "run.json")["versions"]["torch"] == str(torch.__version__)


# ---- checksums ---------------------------------------------------------------------------------------------------


def flip(file: Path, place: float) -> None:
    """Change one bit."""
    bits = bytearray(file.read_bytes())
    at = min(int(place * len(bits)), len(bits) - 1)
    bits[at] ^= 1 << (at % 8)
    file.write_bytes(bits)


def damage(file: Path, how: str) -> None:
    if how == "flip":
        flip(file, 0.7)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """A run of a method that keeps state by client, stopped with several pieces of it on disk; and the whole run."""
    folder = tmp_path_factory.mktemp("run") / "r"
    options = {"method": ud.Scaffold(), "rounds": 7, "participation": 2}
    stop(folder, after=5, checkpoint_every=1, **options)
    return folder, options, train(**options)


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "missing"])
def test_any_one_damaged_file_costs_at_most_one_checkpoint(tmp_path, broken_off, how, caplog):
    """A5 and A8: every file of the folder in turn; what comes out has the same bits, and the file is named."""
    folder, options, whole = broken_off
    names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    assert len(names) >= 10
    for name in names:
        if name in ("config.toml", "partition.json"):  # `ud.train` reads neither
            continue
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(folder, copy)
        damage(copy / name, how)
        caplog.clear()
        starts: list[int] = []
        found = train(copy, resume=True, on_round=lambda row, s=starts: s.append(row["round"]), **options)
        assert same_bits(found.params, whole.params), name
        assert min(starts) >= 5, f"{name}: more than one checkpoint was lost"
        newest = unseal(folder / "checkpoint" / "round-5.json")["files"]
        named = {"run.json", "round-5.json", *newest} - ({"round-5.json"} if how == "missing" else set())
        if Path(name).name in named:  # without round-5.json nothing says that there was one
            assert Path(name).name in caplog.text, "the damaged file is named"
        plain = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.history] for r in (found, whole)]
        assert json.loads(json.dumps(plain[0])) == json.loads(json.dumps(plain[1]))


@pytest.mark.parametrize("name", ["model.safetensors", "metrics.jsonl"])
def test_damaged_results_are_made_again_or_refused(tmp_path, name):
    """A8, of a finished run: from its last checkpoint, and without one it is said."""
    whole = train(tmp_path / "with", checkpoint_every=2)
    train(tmp_path / "without")
    shutil.rmtree(tmp_path / "without" / "checkpoint")
    for folder in ("with", "without"):
        flip(tmp_path / folder / name, 0.7)
    assert same_bits(train(tmp_path / "with", resume=True).params, whole.params)
    before = contents(tmp_path / "without")
    with pytest.raises(ud.UndriftError, match=r"The results in .* are damaged"):
        train(tmp_path / "without", resume=True)
    assert contents(tmp_path / "without") == before


@pytest.mark.parametrize("text", ["null", "[1, 2]", "{}", "[" * 5000, "1e999", "\xff", '{"body": {}, "sha256": "x"}'])
def test_nonsense_in_place_of_json_is_damage(tmp_path, broken_off, text):
    folder, options, whole = broken_off
    shutil.copytree(folder, tmp_path / "r")
    for name in ("run.json", "checkpoint/round-5.json"):
        (tmp_path / "r" / name).write_bytes(text.encode("latin-1"))
    assert same_bits(train(tmp_path / "r", resume=True, **options).params, whole.params)


def test_a_checkpoint_cannot_name_files_elsewhere(tmp_path, caplog):
    stop(tmp_path / "r", checkpoint_every=1)
    file = tmp_path / "r" / "checkpoint" / "round-2.json"
    whole = unseal(file)
    seal(file, {**whole, "files": {**whole["files"], "../../secret": "0"}})
    train(tmp_path / "r", resume=True)
    assert "names the file '../../secret'" in caplog.text


def test_syncing_a_closed_file_fails_here_too(tmp_path):
    """The suite does not wait for the disk, but must not hide that a file was closed too early."""
    with (tmp_path / "f").open("w") as file:
        os.fsync(file.fileno())
        handle = file.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fsync(handle)


# ---- undrift resume ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_file(tmp_path_factory):
    """A run of an experiment file that was stopped, and the same run whole."""
    where = tmp_path_factory.mktemp("by-file")
    asked = {
        "model": "logistic", "rounds": 4, "checkpoint_every": 1, "engine": "lanes",
        "data": {"name": "digits", "clients": 4}, "local": {"steps": 1, "batch_size": 8, "lr": 0.1},
    }  # fmt: skip
    made = config.checked(asked, "here")
    whole = experiment.run(made, where / "whole")
    with pytest.raises(StopError):
        experiment.run(made, where / "r", on_round=stop_after(2))
    return where / "r", whole


def resume(folder: Path) -> ud.Result:
    """What `undrift resume` does."""
    settings, _ = experiment.settings_to_resume(folder)
    return experiment.run(config.checked(settings, "here"), folder, resume=True)


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "missing"])
def test_a_damaged_config_is_replaced_by_its_copy(tmp_path, by_file, how, caplog):
    folder, whole = by_file
    shutil.copytree(folder, tmp_path / "r")
    text = (folder / "config.toml").read_text()
    damage(tmp_path / "r" / "config.toml", how)
    if how == "flip":
        (tmp_path / "r" / "config.toml").write_bytes(text.encode().replace(b"lr = 0.1", b"lr = \xff.1"))
    assert same_bits(resume(tmp_path / "r").params, whole.params)
    assert "config.toml" in caplog.text and (tmp_path / "r" / "config.toml").read_text() == text


@pytest.mark.parametrize(("key", "now"), [("local.lr", "lr = 0.3"), ("seed", "seed = 4"), ("lanes", "lanes = 3")])
def test_a_changed_config_is_refused(tmp_path, by_file, key, now):
    folder, _ = by_file
    shutil.copytree(folder, tmp_path / "r")
    file, name = tmp_path / "r" / "config.toml", now.partition(" ")[0]
    lines = [now if line.startswith(f"{name} =") else line for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines))
    before = contents(tmp_path / "r")
    with pytest.raises(ud.UndriftError, match=rf"config.toml: {key} was .* when the run started, and is"):
        resume(tmp_path / "r")
    assert contents(tmp_path / "r") == before


def test_what_decides_no_result_may_be_changed(tmp_path, by_file):
    folder, whole = by_file
    shutil.copytree(folder, tmp_path / "r")
    file = tmp_path / "r" / "config.toml"
    file.write_text(file.read_text().replace("checkpoint_every = 1", 'checkpoint_every = "10s"'))
    assert same_bits(resume(tmp_path / "r").params, whole.params)
    assert 'checkpoint_every = "10s"' in file.read_text()
