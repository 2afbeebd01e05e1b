"""Finished runs that go on with more rounds, code that has changed when a run is resumed, and what `run.json` has."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import undrift as ud
from tests import experiments, killing
from tests.experiments import StopError, stop_after
from tests.killing import Dead, DiesAtWrite, contents
from tests.problems import make_clients, net, same_bits, split
from undrift import files
from undrift.files import seal, unseal
from undrift.training import checkpoint, code_digest, provenance, track
from undrift.training.identity import describe

LOCAL = ud.Local(steps=2, batch_size=4, lr=0.1)


@dataclass(frozen=True)
class Doubled(ud.Part):
    """Twice the weights at the end: a `finish` that shows in every figure."""

    measures = "finish"

    def measure(self, params, batch, client):
        return batch.mask.sum()

    def finish(self, params, state, server):
        server.model.track(ud.tree_map(lambda b: b + 1 if b.is_floating_point() else b, server.model.tracked))
        return ud.tree_map(lambda w: 2 * w, params)


def train(out=None, method=None, model=None, on=None, **options):
    options = {"rounds": 3, "local": LOCAL, "engine": "plain", "participation": 2, **options}
    options |= {} if out else {"checkpoint_every": None}
    return ud.train(model or net(), on or make_clients([10, 20, 8, 12]), method or Doubled(), out=out, **options)


def rows(history) -> list[dict]:
    return json.loads(json.dumps([{k: v for k, v in row.items() if k != "seconds"} for row in history]))


def on_disk(folder: Path) -> list[dict]:
    return rows(json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())


def recorded(folder: Path) -> dict:
    return unseal(folder / "run.json")


def assert_same(result: ud.Result, whole: ud.Result) -> None:
    """Weights, buffers and history, but for seconds; the order of columns too."""
    assert same_bits(result.params, whole.params)
    assert same_bits(result.model.state_dict(), whole.model.state_dict())
    assert rows(result.history) == rows(whole.history)
    assert [set(row) for row in result.history] == [set(row) for row in whole.history]


# ---- more rounds -------------------------------------------------------------------------------------------------


def with_norm() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4)]
    return torch.nn.Sequential(*layers).double()


CASES = {
    "ccvr": {"method": ud.CCVR(samples_per_class=10, epochs=1)},
    "a finish, clients' states, buffers": {"method": Doubled() + ud.Scaffold(), "model": with_norm()},
    "no finish": {"method": ud.ServerAdam(0.01)},
    "rarely evaluated": {"method": Doubled(), "evaluate_every": 4},
    "rarely evaluated, no finish": {"method": ud.FedAvg(), "evaluate_every": 4, "checkpoint_every": 1},
    "clients' own data": {"method": ud.FedDyn(0.1), "on": split(), "personalize_every": 2},
    "lanes": {"method": Doubled() + ud.FedNLR(), "engine": "lanes", "checkpoint_every": 2},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_finished_run_continues_as_if_it_had_been_longer(tmp_path, case):
    whole = train(tmp_path / "whole", **case, rounds=6)
    short = train(tmp_path / "r", **case, rounds=3)
    assert_same(short, train(**case, rounds=3))
    trained: list[int] = []
    for rounds in (5, 6):
        longer = train(
            tmp_path / "r", **case, rounds=rounds, resume=True, on_round=lambda row: trained.append(row["round"])
        )
        assert len(longer.history) == rounds and not longer.stopped
    assert trained == [4, 5, 6], "no round is trained twice"
    assert_same(longer, whole)
    assert on_disk(tmp_path / "r") == on_disk(tmp_path / "whole")
    for name in ("model.safetensors", "config.toml"):
        assert (tmp_path / "r" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    before = contents(tmp_path / "r")
    assert_same(train(tmp_path / "r", **case, rounds=6, resume=True), whole)
    assert contents(tmp_path / "r") == before, "a finished run is given back as it is"


def test_a_finished_run_can_be_repaired_and_its_finish_is_not_applied_twice(tmp_path):
    whole = train(tmp_path / "r")
    for name in ("model.safetensors", "metrics.jsonl"):
        (tmp_path / "r" / name).write_bytes(b"damaged \xff")
        assert_same(train(tmp_path / "r", resume=True), whole)
        assert on_disk(tmp_path / "r") == rows(whole.history)


def test_fewer_rounds_than_are_done_are_refused(tmp_path):
    train(tmp_path / "finished", rounds=4)
    with pytest.raises(StopError):
        train(tmp_path / "stopped", rounds=6, on_round=stop_after(4))
    for kind in ("finished", "stopped"):
        before = contents(tmp_path / kind)
        with pytest.raises(ud.UndriftError, match=r"already trained 4 rounds, but rounds is 3; ask for at least 4"):
            train(tmp_path / kind, rounds=3, resume=True)
        assert contents(tmp_path / kind) == before


@pytest.mark.parametrize("rounds", [4, 5, 8])
def test_a_run_that_was_stopped_may_be_given_another_length(tmp_path, rounds):
    with pytest.raises(StopError):
        train(tmp_path / "r", rounds=6, on_round=stop_after(4))
    assert_same(train(tmp_path / "r", rounds=rounds, resume=True), train(rounds=rounds))
    assert len(on_disk(tmp_path / "r")) == rounds


def test_a_checkpoint_that_cannot_be_used_takes_no_other_one_s_place(tmp_path):
    """Of the last two, which are kept."""
    with pytest.raises(StopError):
        train(tmp_path / "r", rounds=8, checkpoint_every=3, on_round=stop_after(5))
    folder = tmp_path / "r" / "checkpoint"
    (folder / "round-5.safetensors").write_bytes(b"")
    with pytest.raises(StopError):
        train(tmp_path / "r", rounds=8, resume=True, on_round=stop_after(4))
    assert sorted(file.name for file in folder.glob("*.json")) == ["round-3.json", "round-4.json"]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_death_at_any_moment_of_finishing_and_continuing(tmp_path, monkeypatch, before):
    """Die at the k-th file that is written, just before its rename or just after, for every k; then go on."""
    options = {"method": Doubled() + ud.Scaffold(), "local": ud.Local(steps=1, lr=0.1), "checkpoint_every": 1}
    wholes = {rounds: train(**options, rounds=rounds) for rounds in (1, 2)}
    train(tmp_path / "base", **options, rounds=1)
    dying, moments = DiesAtWrite(monkeypatch, before), 0
    for k in range(1, 100):
        folder, dying.left = tmp_path / str(k), k
        shutil.copytree(tmp_path / "base", folder)
        try:
            found = train(folder, **options, rounds=2, resume=True)
        except Dead:
            moments, dying.left = moments + 1, 0
            if k % 2 and len(on_disk(folder)) <= 1 and not (folder / "checkpoint" / "round-2.json").exists():
                assert_same(train(folder, **options, rounds=1, resume=True), wholes[1])  # a change of mind
            found = train(folder, **options, rounds=2, resume=True)
        assert_same(found, wholes[2])
        assert on_disk(folder) == rows(wholes[2].history) and not list(folder.glob("*.partial"))
        if dying.left > 0:  # it lived
            break
    assert moments >= 8


def test_a_run_killed_while_it_continues_is_resumed(tmp_path, monkeypatch):
    """By the commands, with SIGKILL."""
    monkeypatch.chdir(tmp_path)
    for name, rounds in (("whole", 25), ("r", 3)):
        Path("e.toml").write_text(killing.EXPERIMENT.format(method="CCVR(10, epochs=1)", rounds=rounds))
        experiments.undrift("run", "e.toml", "--out", name)
    assert (
        experiments.undrift("resume", "r") == "r is finished; to train it further, ask for more rounds with --rounds.\n"
    )
    process = killing.undrift("resume", "r", "--rounds", 25, cwd=tmp_path)
    while process.poll() is None and killing.count(tmp_path / "r") < 5:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and 5 <= killing.count(tmp_path / "r") < 25
    assert "after 25 rounds" in experiments.undrift("resume", "r")
    assert killing.what_it_left(Path("r")) == killing.what_it_left(Path("whole"))
    assert Path("r/config.toml").read_bytes() == Path("whole/config.toml").read_bytes()
    assert [session["rounds"] for session in recorded(Path("r"))["resumed"]] == [25, 25]


def test_a_run_that_dies_when_it_begins_to_continue_still_does(tmp_path, monkeypatch):
    """`undrift resume` without `--rounds` goes by `config.toml`, whichever files were written before the death."""
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(experiments.toml(experiments.GOOD))
    experiments.undrift("run", "e.toml", "--out", "base")
    atomic_replace = files.atomic_replace

    def dying(partial, file):
        atomic_replace(partial, file)
        if file.name == name:
            raise Dead

    for name in ("config.toml", "run.json", "metrics.jsonl"):
        shutil.copytree("base", name)
        with monkeypatch.context() as patch:
            patch.setattr(files, "atomic_replace", dying)
            with pytest.raises(Dead):
                experiments.undrift("resume", name, "--rounds", "4")
        assert "after 4 rounds" in experiments.undrift("resume", name), name


def test_the_commands_continue_a_run_by_its_file_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rule = "EarlyStopping('accuracy', patience=2, min_delta=0.9)"  # round 1 stays the best
    Path("e.toml").write_text(experiments.toml(experiments.GOOD | {"rounds": 6, "stop_when": rule}))
    assert "after 3 rounds" in experiments.undrift("run", "e.toml", "--out", "r")
    assert (
        experiments.undrift("resume", "r") == "r is finished; to train it further, ask for more rounds with --rounds.\n"
    )
    assert "after 3 rounds" in experiments.undrift("resume", "r", "--rounds", "5"), "the rule ends it there again"
    file = Path("r/config.toml")
    kept = [line for line in file.read_text().splitlines() if not line.startswith("stop_when")]
    file.write_text("\n".join(kept).replace("rounds = 6", "rounds = 5"))
    assert "after 5 rounds" in experiments.undrift("resume", "r")
    experiments.undrift("run", "e.toml", "--set", "rounds=5", "--set", "stop_when=EarlyStopping('loss')", "--out", "w")
    assert killing.what_it_left(Path("r")) == killing.what_it_left(Path("w"))
    with pytest.raises(ud.UndriftError, match="already trained 5 rounds"):
        experiments.undrift("resume", "r", "--rounds", "2")


def test_trackers_show_the_row_of_the_longer_run(tmp_path, monkeypatch):
    shown: dict[int, float] = {}

    class Fake:
        hint, files = "", ()

        def __init__(self, folder):
            pass

        def begin(self, config, rounds):
            for number in [n for n in shown if n > len(rounds)]:
                del shown[number]

        def add(self, rounds):
            shown.update({int(row["round"]): row["loss"] for row in rounds})

        def end(self, status):
            pass

    monkeypatch.setattr(track, "find", lambda names: {"fake": Fake})
    train(tmp_path / "r", rounds=2, track="fake")
    longer = train(tmp_path / "r", rounds=4, track="fake", resume=True)
    assert shown == {row["round"]: row["loss"] for row in longer.history}


def test_a_disk_without_room_for_the_last_checkpoint_still_gets_the_model(tmp_path, monkeypatch, caplog):
    whole = train(rounds=4)

    def full(file, *_):
        raise OSError(28, "No space left on device", str(file))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full)
        assert_same(train(tmp_path / "r", rounds=4), whole)
    assert "No space left" in caplog.text and not list((tmp_path / "r" / "checkpoint").iterdir())
    assert_same(train(tmp_path / "r", rounds=4, resume=True), whole)
    before = contents(tmp_path / "r")
    with pytest.raises(ud.UndriftError, match="is finished and has no checkpoint to continue from"):
        train(tmp_path / "r", rounds=5, resume=True)
    assert contents(tmp_path / "r") == before


@dataclass(frozen=True)
class Spoiled(Doubled):
    """A `finish` that goes wrong."""

    def finish(self, params, state, server):
        return ud.tree_map(lambda w: w * torch.nan, params)


@pytest.mark.parametrize("rule", [None, lambda history: len(history) == 3], ids=["last", "early"])
def test_a_finish_that_is_not_finite_leaves_what_was_before_it(tmp_path, rule):
    rounds = 9 if rule else 3
    found = train(tmp_path / "r", Spoiled(), rounds=rounds, stop_when=rule)
    plain = train(None, ud.FedAvg(), rounds=4)
    assert (
        found.stopped == "Round 3: after the method's finish, the weights are not finite. The result is from before it."
    )
    assert found.stopped_early is None and rows(found.history) == rows(plain.history[:3]) == on_disk(tmp_path / "r")
    assert (tmp_path / "r" / "stopped.json").exists() and not (tmp_path / "r" / "model.safetensors").exists()
    again = train(tmp_path / "r", Spoiled(), rounds=rounds, stop_when=rule, resume=True)
    assert again.stopped == found.stopped and same_bits(again.params, found.params)


# ---- runs that a rule ended --------------------------------------------------------------------------------------


def early(patience: int) -> ud.EarlyStopping:
    return ud.EarlyStopping("loss", patience=patience, min_delta=10.0)  # round 1 stays the best


def test_a_run_that_a_rule_ended_continues_without_it_or_with_another(tmp_path, caplog):
    first = train(tmp_path / "r", rounds=9, stop_when=early(2))
    assert len(first.history) == 3 and first.stopped_early
    before = contents(tmp_path / "r")
    for rounds in (9, 12):
        caplog.clear()
        again = train(tmp_path / "r", rounds=rounds, stop_when=early(2), resume=True)
        assert_same(again, first)
        assert ("stop_when would end it there again" in caplog.text) == (rounds == 12)
        assert again.stopped_early == first.stopped_early and contents(tmp_path / "r") == before
    later = train(tmp_path / "r", rounds=9, stop_when=early(4), resume=True)
    assert_same(later, train(rounds=9, stop_when=early(4)))
    assert len(later.history) == 5 and later.stopped_early and "stopped_early" not in later.history[2]
    assert_same(train(tmp_path / "r", rounds=7, resume=True), train(rounds=7))


def test_a_run_that_a_rule_ended_may_be_made_just_as_long(tmp_path):
    train(tmp_path / "r", rounds=9, stop_when=early(2))
    found = train(tmp_path / "r", rounds=3, stop_when=early(2), resume=True)
    assert_same(found, train(rounds=3))
    assert found.stopped_early is None


def test_a_run_killed_while_a_rule_ends_it_ends_there(tmp_path, monkeypatch):
    whole = train(rounds=9, stop_when=early(2))
    with monkeypatch.context() as patch:
        patch.setattr(ud.Result, "__init__", lambda *_: pytest.fail("not here"))
        patch.setattr("undrift.training.run_folder.Folder.model", lambda *_: (_ for _ in ()).throw(Dead))
        with pytest.raises(Dead):
            train(tmp_path / "r", rounds=9, stop_when=early(2))
    assert_same(train(tmp_path / "r", rounds=9, stop_when=early(2), resume=True), whole)
    assert on_disk(tmp_path / "r") == rows(whole.history)


# ---- schedules that depend on the number of rounds ---------------------------------------------------------------


@dataclass(frozen=True)
class Cosine:
    initial: float
    total_rounds: int

    def __call__(self, t):
        return self.initial * 0.5 * (1 + math.cos(math.pi * min(1.0, t / self.total_rounds)))


def closed_over(rounds):
    return lambda t: 0.1 / (1 + t / rounds)


@dataclass(frozen=True)
class Warm(ud.Part):
    rounds: int = 3

    def update(self, delta, client):
        return ud.tree_map(lambda d: d * torch.where(client.round < self.rounds, 0.5, 1.0), delta)


def with_lr(lr):
    return {"local": ud.Local(steps=1, batch_size=4, lr=lr), "method": ud.FedAvg()}


RELATIVE = {
    "an object": (lambda n: with_lr(Cosine(0.1, n)), "Local(lr)"),
    "a closure": (lambda n: with_lr(closed_over(n)), "Local(lr)"),
    "a part's number": (lambda n: {"method": ud.FedProx(Cosine(0.1, n))}, "FedProx(mu)"),
    "a part's field": (lambda n: {"method": Warm(n)}, "Warm(rounds)"),
}


@pytest.mark.parametrize(("made", "name"), RELATIVE.values(), ids=RELATIVE)
def test_schedules_that_depend_on_the_number_of_rounds_are_named(tmp_path, made, name, caplog):
    train(tmp_path / "r", **made(3), rounds=3)
    shutil.copytree(tmp_path / "r", tmp_path / "fixed")
    assert "number of rounds decides" not in caplog.text
    assert len(train(tmp_path / "r", **made(5), rounds=5, resume=True).history) == 5
    assert f"was started with 3 rounds and now has 5. The number of rounds decides {name}, so" in caplog.text
    caplog.clear()
    fixed = train(tmp_path / "fixed", **made(3), rounds=5, resume=True)  # still that of 3 rounds
    assert f"The number of rounds decides {name}, so" in caplog.text
    assert_same(fixed, train(**made(3), rounds=5))
    caplog.clear()
    train(tmp_path / "fixed", **made(3), rounds=5, resume=True)
    assert "number of rounds decides" not in caplog.text, "nothing is longer"
    with pytest.raises(ud.UndriftError, match="was started with"):
        train(tmp_path / "fixed", **made(4), rounds=5, resume=True)


@pytest.mark.parametrize("lr", [ud.decay(0.1, 0.9), ud.inverse(0.1, 3), lambda t: 0.1 / (3 + t)])
def test_functions_of_the_round_alone_are_not_named(tmp_path, lr, caplog):
    train(tmp_path / "r", **with_lr(lr))
    train(tmp_path / "r", **with_lr(lr), rounds=5, resume=True)
    assert "number of rounds decides" not in caplog.text


def test_what_is_compiled_in_a_longer_run_alone_is_named(tmp_path, caplog):
    """By itself a GPU compiles only if the run is long enough."""
    train(tmp_path / "r")
    known = recorded(tmp_path / "r")
    seal(tmp_path / "r" / "run.json", known | {"config": known["config"].replace("compile = false", "compile = true")})
    train(tmp_path / "r", rounds=4, resume=True)
    assert "The number of rounds decides compile, which is now False, so" in caplog.text


# ---- code that has changed ---------------------------------------------------------------------------------------

HELPERS = """
def halved(d):
    return d / 2


def weighted(d):
    return d * 1.5
"""
CODE = """
from dataclasses import dataclass
import torch
import undrift as ud
import users_helpers
from torch import abs as size
from users_helpers import halved

FACTOR = 3.0


def scaled(d):
    return d * 0.5


class Base(ud.Part):
    def update(self, delta, client):
        return ud.tree_map(lambda d: scaled(halved(d)), delta)


@dataclass(frozen=True)
class Mine(Base):
    by: ud.Number = 2.0

    def transform(self, update, state, server):
        return ud.tree_map(lambda u: u / self.by * FACTOR, update), state


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 4)


@torch.autocast("cpu", enabled=False)
def forward(self, x):
    return self.layer(x) * 1.0


Net.forward = forward


def loss(output, target):
    return size(users_helpers.weighted(torch.nn.functional.cross_entropy(output, target, reduction="none")))
"""


def load(folder: Path, name: str, text: str):
    """A module of this source, imported as if for the first time."""
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(text, str(file), "exec", dont_inherit=True), vars(module))  # no bytecode of an earlier text
    return module


@pytest.fixture
def code(tmp_path):
    """What a user's script trains, from these sources, and a run of it that was stopped."""

    def settings(helpers: str = HELPERS, text: str = CODE) -> dict:
        load(tmp_path, "users_helpers", helpers)
        own = load(tmp_path, "users_code", text)
        return {"method": own.Mine(), "model": own.Net().double(), "loss": own.loss}

    with pytest.raises(StopError):
        train(tmp_path / "r", **settings(), on_round=stop_after(2))
    yield settings
    for name in ("users_code", "users_helpers"):
        del sys.modules[name]


def changed(a: str, b: str, text: str = CODE) -> str:
    assert text.count(a) == 1, a
    return text.replace(a, b)


LIKE = {
    "comments": changed("FACTOR = 3.0\n", "# Why three?\n\n\nFACTOR = 3.0  # So.\n"),
    "docstrings": changed(
        "    def transform(self, update, state, server):\n",
        '    """A part."""\n\n    def transform(self, update, state, server):\n        """A hook."""\n',
    ),
    "layout": changed("ud.tree_map(lambda u: u / self.by * FACTOR, update), state", "(\n            ud.tree_map(\n"
    "                lambda u: (u / self.by) * FACTOR, update), state)"),
    "another order": changed("FACTOR = 3.0\n", "").replace("class Net(", "FACTOR = 3.0\n\n\nclass Net("),
}  # fmt: skip


@pytest.mark.parametrize("text", LIKE.values(), ids=LIKE)
def test_comments_docstrings_and_layout_do_not_count(tmp_path, code, text):
    whole = train(**code())
    assert_same(train(tmp_path / "r", **code(text=text), resume=True), whole)
    assert recorded(tmp_path / "r")["resumed"][0]["allowed"] == []


OTHER = {
    "a hook": ({"text": changed("self.by * FACTOR", "self.by + FACTOR")}, "Mine (method)"),
    "a constant in it": ({"text": changed("d * 0.5", "d * 0.25")}, "Mine (method)"),
    "a base class": ({"text": changed("scaled(halved(d))", "scaled(d)")}, "Mine (method)"),
    "a function from another module": ({"helpers": changed("d / 2", "d / 4", HELPERS)}, "Mine (method)"),
    "a function in another module": ({"helpers": changed("d * 1.5", "d * 2.5", HELPERS)}, "loss (loss)"),
    "several": ({"text": changed("self.by * FACTOR", "self.by + FACTOR").replace("abs as", "square as")},
        "Mine (method) and loss (loss)"),
    "a library's function": ({"text": changed("torch import abs as", "torch import square as")}, "loss (loss)"),
    "a decorated function, assigned to a class": ({"text": changed("* 1.0", "* 2.0")}, "Net (model)"),
    "a loss": ({"text": changed('reduction="none")', 'reduction="none") * 2')}, "loss (loss)"),
}  # fmt: skip


@pytest.mark.parametrize(("sources", "name"), OTHER.values(), ids=OTHER)
def test_changed_code_is_refused_and_the_flag_allows_it(tmp_path, code, sources, name):
    before = contents(tmp_path / "r")
    with pytest.raises(ud.UndriftError) as caught:
        train(tmp_path / "r", **code(**sources), resume=True)
    said = str(caught.value)
    assert said.startswith(f"The code of {name}, or code that it uses, has changed since")
    assert "allow_version_change=True" in said and "--allow-version-change" in said
    assert contents(tmp_path / "r") == before
    assert len(train(tmp_path / "r", **code(**sources), resume=True, allow_version_change=True).history) == 3
    (session,) = recorded(tmp_path / "r")["resumed"]
    assert session["allowed"] == [f"the code of {one}" for one in name.split(" and ")]
    assert session["after_round"] == 2 and session["at"]
    train(tmp_path / "r", **code(**sources), rounds=4, resume=True)  # from now on it is the run's code


def test_a_value_that_code_uses_is_a_setting_which_no_flag_changes(tmp_path, code):
    text = changed("FACTOR = 3.0", "FACTOR = 4.0")
    with pytest.raises(ud.UndriftError, match=r"was started with method .*FACTOR': 3.0.* not .*FACTOR': 4.0"):
        train(tmp_path / "r", **code(text=text), resume=True, allow_version_change=True)


def test_code_without_source_is_known_by_what_it_compiles_to():
    def described(text: str) -> str:
        space = {"__name__": "nowhere"}
        exec(text, space)
        return describe(space["Mine"])

    one = "class Mine:\n    size = 3\n    def hook(self, x):\n        return x + 1\n"
    assert described(one) == described(one.replace("x + 1", "x + 1  # more")) != described(one.replace("+ 1", "+ 2"))
    assert described(one) != described(one.replace("size = 3", "size = 4"))


def test_code_is_what_was_imported_not_what_its_file_has_become(tmp_path, code):
    own = code()
    before = describe(own["loss"])
    file = tmp_path / "users_code.py"
    file.write_text(changed("def loss", "# A comment above it\n\n\ndef loss"))
    assert describe(own["loss"]) == before, "the same code at another line"
    file.write_text(changed("def loss(output, target):\n", "def loss(output, target):\n    target = target * 0\n"))
    stale = describe(own["loss"])
    assert stale != describe(code(text=file.read_text())["loss"]), "the file is not what runs"
    file.unlink()
    assert describe(own["loss"]) == stale


def test_installed_code_is_known_by_its_version(monkeypatch):
    before = describe(pytest.approx)
    code_digest._installed.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.1")
    try:
        assert describe(pytest.approx) != before
    finally:
        code_digest._installed.cache_clear()
    assert describe(torch.relu) == describe(torch.relu) and describe(dataclass) == "dataclass"


def test_functions_that_use_each_other_are_described_once():
    """Thirty functions, each of which uses all of them: a walk along every path would not end."""
    names = [f"f{i}" for i in range(30)]
    text = "\n".join(f"def {name}():\n    return [{', '.join(names)}]" for name in names)
    space: dict = {"__name__": "nowhere"}
    exec(text, space)
    began = time.monotonic()
    assert describe(space["f0"]) != describe(space["f1"]) and time.monotonic() - began < 2


# ---- run.json and config.toml ------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *settings, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def test_run_json_has_dates_versions_and_the_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train("none")
    assert recorded(Path("none"))["started"]["commit"] is None
    git("init")
    train("empty")
    assert recorded(Path("empty"))["started"]["commit"] is None, "there is no commit yet"
    Path("mine.py").write_text("one")
    git("add", "mine.py")
    git("commit", "-m", "one")
    with pytest.raises(StopError):
        train("r", on_round=stop_after(1))
    Path("mine.py").write_text("two")
    train("r", resume=True)
    train("r", rounds=5, resume=True)
    known = recorded(Path("r"))
    first, *again = [known["started"], *known["resumed"]]
    assert first["commit"] == git("rev-parse", "HEAD") and first["dirty"] is False, "untracked files do not count"
    assert [session["dirty"] for session in again] == [True, True]
    assert [(session["after_round"], session["rounds"]) for session in again] == [(1, 3), (3, 5)]
    for session in (first, *again):
        assert session["versions"]["torch"] == torch.__version__
        assert session["at"].startswith("20") and session["at"].endswith("+00:00")
    assert known["choices"]["why"] == "asked for" and known["versions"] == first["versions"]


def test_a_repository_does_not_run_commands_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git("init")
    Path(".gitattributes").write_text("*.py filter=mine")
    Path("mine.py").write_text("one")
    git("add", "-A")
    git("commit", "-m", "one")
    Path("mine.py").write_text("two")
    assert provenance.session({}, {})["dirty"] is True
    command = f"{sys.executable} -c \"open('ran', 'w'); print('two')\""
    for key in ("filter.mine.clean", "core.fsmonitor"):
        git("config", key, command)
        assert provenance.session({}, {})["dirty"] is (None if "filter" in key else True) and not Path("ran").exists()
        git("status")
        assert Path("ran").exists(), "git itself would"
        Path("ran").unlink()
        git("config", "--unset", key)
        Path("ran").unlink(missing_ok=True)


def test_git_is_neither_needed_nor_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.session({}, {})["commit"] is None
    slow = tmp_path / "git"
    slow.write_text(
        f"#!{sys.executable}\nimport sys, time\nprint('f00d') if 'rev-parse' in sys.argv else time.sleep(60)"
    )
    slow.chmod(0o755)
    monkeypatch.setattr(provenance, "PATIENCE", 1.0)
    began = time.monotonic()
    found = provenance.session({}, {})
    assert found["commit"] == "f00d" and found["dirty"] is None and time.monotonic() - began < 10


def test_the_config_of_the_same_settings_is_the_same_file(tmp_path, monkeypatch):
    texts = []
    for name, version in (("a", torch.__version__), ("b", "9.9.9")):
        monkeypatch.setattr(torch, "__version__", version)
        train(tmp_path / name, engine="auto")
        texts.append((tmp_path / name / "config.toml").read_bytes())
    assert texts[0] == texts[1]


def test_the_error_says_what_a_description_without_a_field_stands_for(tmp_path):
    """A method's description leaves out `variates="uniform"`."""
    train(tmp_path / "r", ud.Scaffold(variates="uniform"))
    with pytest.raises(ud.UndriftError, match=r"method Scaffold\(\).*stands for Scaffold\(variates='uniform'\)"):
        train(tmp_path / "r", ud.Scaffold(), rounds=5, resume=True)
    with pytest.raises(ud.UndriftError) as caught:
        train(tmp_path / "r", ud.FedAvg(), rounds=5, resume=True)
    assert "variates" not in str(caught.value)
