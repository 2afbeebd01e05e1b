"""Runs that end before their last round: `stop_when` and `ud.EarlyStopping`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch

import undrift as ud
from tests.experiments import StopError, stop_after
from tests.problems import make_clients, net, same_bits
from undrift.tools import config, experiment
from undrift.training.build import prepare
from undrift.training.early_stopping import as_rule, check_possible
from undrift.training.run_folder import recorded
from undrift.training.settings import Settings

LOCAL = ud.Local(epochs=1, batch_size=8, lr=0.1)
SIZES = [12, 9, 20, 8]


def rows(*values: float | None, column: str = "validation_loss") -> list[dict]:
    return [{"round": i + 1, **({} if v is None else {column: v})} for i, v in enumerate(values)]


@pytest.mark.parametrize(
    ("rule", "history", "stops"),
    [
        (ud.EarlyStopping(patience=2), rows(3, 2, 1), False),
        (ud.EarlyStopping(patience=2), rows(1, 2), False),
        (ud.EarlyStopping(patience=2), rows(1, 2, 3), True),
        (ud.EarlyStopping(patience=2), rows(1, 1, 1), True),
        (ud.EarlyStopping(patience=2), rows(2, None, 1, None), False),  # rounds without evaluation
        (ud.EarlyStopping(patience=2), rows(1, None, None), True),
        (ud.EarlyStopping(patience=2, min_delta=0.5), rows(3, 2.7, 2.4), False),  # 0.6 better than the best
        (ud.EarlyStopping(patience=2, min_delta=0.5), rows(3, 2.7, 2.6), True),
        (ud.EarlyStopping("accuracy", patience=1), rows(0.1, 0.2, column="accuracy"), False),
        (ud.EarlyStopping("accuracy", patience=1), rows(0.2, 0.1, column="accuracy"), True),
        (ud.EarlyStopping("accuracy", patience=1, better="lower"), rows(0.2, 0.1, column="accuracy"), False),
        (ud.EarlyStopping("drift", patience=1), rows(None, None), False),
    ],
)
def test_when_it_stops(rule, history, stops):
    assert bool(rule(history)) == stops


def test_why_it_stops():
    why = ud.EarlyStopping(patience=2)(rows(4, 1.25, 2, 3))
    assert why == "validation_loss has not improved for 2 rounds; it was 1.25 in round 2"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"column": 3}, "column"),
        ({"patience": 0}, "patience"),
        ({"patience": 2.5}, "patience"),
        ({"min_delta": -1.0}, "min_delta"),
        ({"better": "up"}, "better"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ud.UndriftError, match=rf"EarlyStopping\({message}\) must"):
        ud.EarlyStopping(**wrong)


@pytest.mark.parametrize("rule", [5, "EarlyStoping(patience=2)", "EarlyStopping(patiens=2)"])
def test_a_rule_that_is_none_is_refused(rule):
    with pytest.raises(ud.UndriftError):
        ud.train(net(), make_clients(SIZES), rounds=2, local=LOCAL, stop_when=rule)


def test_a_column_that_is_never_there_is_refused():
    with pytest.raises(ud.UndriftError, match=r"no column 'validation_loss' to stop by. Hold data out for it"):
        ud.train(net(), make_clients(SIZES), rounds=5, local=LOCAL, stop_when=ud.EarlyStopping())


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_the_run_ends_with_the_round_and_is_that_of_so_many_rounds(engine):
    seen = []

    def rule(history):
        seen.append([row["round"] for row in history])
        assert "seconds" in history[-1] and "loss" in history[-1]
        return "enough" if len(history) == 3 else None

    settings = {"local": LOCAL, "engine": engine, "method": ud.Scaffold()}
    run = ud.train(net(), make_clients(SIZES), rounds=9, stop_when=rule, **settings)
    short = ud.train(net(), make_clients(SIZES), rounds=3, **settings)
    assert len(run.history) == 3 and seen == [[1], [1, 2], [1, 2, 3]] and same_bits(run.params, short.params)
    assert run.stopped is None and run.stopped_early == run.history[-1]["stopped_early"] == "enough"
    assert "stopped early: enough" in repr(run) and short.stopped_early is None


@dataclass(frozen=True)
class Doubled(ud.Part):
    """Twice the weights, at the end: a `finish` that shows."""

    measures = "finish"

    def measure(self, params, batch, client):
        return batch.mask.sum()

    def finish(self, params, state, server):
        return ud.tree_map(lambda w: 2 * w, params)


def test_what_follows_the_last_round_follows_here_too():
    settings = {"local": LOCAL, "method": Doubled()}
    run = ud.train(net(), make_clients(SIZES), rounds=9, stop_when=lambda history: len(history) == 2, **settings)
    short = ud.train(net(), make_clients(SIZES), rounds=2, **settings)
    assert same_bits(run.params, short.params) and run.stopped_early == "stop_when returned True"
    ours, theirs = (
        {k: v for k, v in r.history[-1].items() if k not in ("seconds", "stopped_early")} for r in (run, short)
    )
    assert ours == theirs


def test_a_rule_in_the_last_round_changes_nothing():
    run = ud.train(net(), make_clients(SIZES), rounds=2, local=LOCAL, stop_when=lambda history: len(history) == 2)
    assert run.stopped_early is None and "stopped_early" not in run.history[-1]


@pytest.mark.parametrize("killed", [1, 3, 4])
def test_a_resumed_run_ends_where_it_would_have(tmp_path, killed):
    data = make_clients(SIZES)
    settings = {"rounds": 20, "local": LOCAL, "method": Doubled() + ud.Scaffold(), "checkpoint_every": 2}
    rule = ud.EarlyStopping("loss", patience=3, min_delta=10.0)  # round 1 stays the best
    whole = ud.train(net(), data, **settings, stop_when=rule, out=tmp_path / "whole")
    assert len(whole.history) == 4
    with pytest.raises(StopError):
        ud.train(net(), data, **settings, stop_when=rule, out=tmp_path / "r", on_round=stop_after(killed))
    again = ud.train(net(), data, **settings, stop_when=rule, out=tmp_path / "r", resume=True)
    assert len(again.history) == 4 and again.stopped_early == whole.stopped_early
    assert same_bits(again.params, whole.params)
    finished = ud.train(net(), data, **settings, stop_when=rule, out=tmp_path / "r", resume=True)
    assert finished.stopped_early == whole.stopped_early and same_bits(finished.params, whole.params)


def test_how_often_a_rule_sees_figures_must_not_change(tmp_path):
    """With fewer evaluations, EarlyStopping would end the resumed run in another round."""
    data, rule = make_clients(SIZES), ud.EarlyStopping("loss", patience=3)
    settings = {"rounds": 6, "local": LOCAL, "checkpoint_every": 1, "out": tmp_path / "r"}
    with pytest.raises(StopError):
        ud.train(net(), data, **settings, stop_when=rule, on_round=stop_after(2))
    for changed in ({"evaluate_every": 5}, {"personalize_every": 2}):
        before = {file: file.read_bytes() for file in (tmp_path / "r").rglob("*.*")}
        with pytest.raises(ud.UndriftError, match=rf"had {next(iter(changed))} .*With stop_when, .*must keep them"):
            ud.train(net(), data, **settings, stop_when=rule, resume=True, **changed)
        assert {file: file.read_bytes() for file in (tmp_path / "r").rglob("*.*")} == before
    shutil.copytree(tmp_path / "r", tmp_path / "without")
    free = ud.train(net(), data, **settings | {"out": tmp_path / "without"}, resume=True, evaluate_every=5)
    assert [row["round"] for row in free.history if "loss" in row] == [1, 2, 5, 6]
    ud.train(net(), data, **settings, stop_when=rule, resume=True, evaluate_every=5, allow_version_change=True)
    assert recorded(tmp_path / "r")["resumed"][-1]["allowed"] == ["evaluate_every 1, now 5"]


@dataclass(frozen=True)
class Speaking(ud.Part):
    """Adds a column to the history."""

    def history(self, state):
        return {"volume": 0.5}


@pytest.mark.parametrize(
    ("column", "settings", "possible"),
    [
        ("nosuch", {}, False),
        ("validation_loss", {}, False),
        ("client_loss", {}, False),
        ("accuracy", {}, True),
        ("seconds", {}, True),
        ("volume", {}, False),
        ("volume", {"method": Speaking()}, True),
        ("validation_volume", {"method": Speaking()}, False),
        ("update_norm", {"drift": True}, True),
    ],
)
def test_a_column_that_cannot_be_there_is_refused_before_training(column, settings, possible):
    given = Settings(
        model=net(), data=make_clients(SIZES), rounds=5, local=LOCAL, stop_when=ud.EarlyStopping(column), **settings
    )
    run = prepare(given)
    rule = as_rule(given.stop_when, run.metrics)
    if possible:
        check_possible(rule, run)
        return
    with pytest.raises(ud.UndriftError, match=rf"no column '{column}' to stop by.* It has loss, accuracy"):
        check_possible(rule, run)


def test_an_experiment_file_has_it_and_its_run_repeats(tmp_path):
    text = "EarlyStopping('validation_accuracy', patience=2, min_delta=0.5)"
    settings = {
        "model": "mlp(hidden=8)", "rounds": 30, "stop_when": text, "data": {"name": "digits", "clients": 5,
        "validation_fraction": 0.2}, "local": {"epochs": 1, "batch_size": 32, "lr": 0.2},
    }  # fmt: skip
    runs = [experiment.run(config.checked(settings, "e"), tmp_path / "a")]
    runs.append(experiment.run(config.checked(config.read(tmp_path / "a"), "config"), tmp_path / "b"))
    assert len(runs[0].history) == len(runs[1].history) < 30 and same_bits(runs[0].params, runs[1].params)
    assert runs[0].stopped_early.startswith("validation_accuracy has not improved for 2 rounds")
    with pytest.raises(ud.UndriftError, match=r"stop_when: .*EarlyStopping"):
        experiment.run(config.checked({**settings, "stop_when": "EarlyStoping()"}, "e"), tmp_path / "c")


@dataclass(frozen=True)
class Poison(ud.Part):
    """NaN from the second round on."""

    def gradient(self, g, params, client):
        return ud.tree_map(lambda g: torch.where(client.round > 0, torch.nan, g), g)


def test_the_rule_does_not_see_rounds_that_are_undone():
    seen = []
    run = ud.train(net(), make_clients(SIZES), Poison(), rounds=4, local=LOCAL, stop_when=lambda h: seen.append(len(h)))
    assert run.stopped and len(run.history) == 1 and seen == [1] and run.stopped_early is None
