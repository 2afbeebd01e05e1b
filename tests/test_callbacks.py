"""Callbacks: what they are told, in which order, and how they end a run."""

from __future__ import annotations

import pytest
import torch

import undrift as ud
from tests.problems import make_clients, net, same_bits

DATA = make_clients([10, 7, 12])
OPTIONS = {"rounds": 6, "local": ud.Local(steps=2, batch_size=4, lr=0.1)}


class Diary(ud.Callback):
    def __init__(self, late: bool = False, until: int | None = None, why: object = True) -> None:
        self.late, self.until, self.why = late, until, why
        self.began, self.rows, self.weights, self.results = [], [], [], []

    def begin(self, history):
        self.began.append(history)

    def round(self, record):
        assert record.round == record.row["round"] and record.rounds == 6
        self.rows.append(record.row)
        self.weights += [] if self.late else [record.params]
        return self.why if record.round == self.until else None

    def end(self, result):
        self.results.append(result)


def timeless(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", [ud.FedAvg(), ud.CCVR()])
def test_callbacks_are_told_of_every_round_once(method, late):
    diary = Diary(late)
    result = ud.train(net(), DATA, method, callbacks=[diary], **OPTIONS)
    assert diary.began == [[]] and diary.rows == result.history and diary.results == [result]
    assert len(diary.weights) == (0 if late else 6)
    plain = ud.train(net(), DATA, method, **OPTIONS)
    assert same_bits(plain.params, result.params) and timeless(plain.history) == timeless(result.history)


def test_a_callback_sees_the_weights_after_its_round_and_cannot_change_them():
    diary = Diary()

    class Spoil(ud.Callback):
        def begin(self, history):
            self.rows = history

        def round(self, record):
            for weights in record.params.values():
                weights.zero_()
            record.row["loss"] = -1.0
            record.row["clients"].append(99)
            self.rows.append(record.row)

    result = ud.train(net(), DATA, callbacks=[Spoil(), diary], **OPTIONS)
    assert len(result.history) == 6 and all(len(row["clients"]) == 3 for row in result.history)
    for t in (1, 3, 6):
        assert same_bits(diary.weights[t - 1], ud.train(net(), DATA, **OPTIONS | {"rounds": t}).params)
    assert all(row["loss"] > 0 for row in result.history)


@pytest.mark.parametrize("why", [True, "enough"])
def test_a_callback_ends_the_run_as_a_rule_does(tmp_path, why):
    first, second = Diary(until=4, why=why), Diary()
    result = ud.train(net(), DATA, callbacks=[first, second], out=tmp_path / "r", **OPTIONS)
    reason = "enough" if why == "enough" else "Diary asked to stop"
    assert result.stopped_early == reason and len(result.history) == len(first.rows) == len(second.rows) == 4
    rule = ud.train(net(), DATA, stop_when=lambda rows: len(rows) == 4 and reason, out=tmp_path / "rule", **OPTIONS)
    assert same_bits(rule.params, result.params) and timeless(rule.history) == timeless(result.history)
    assert result.history[-1]["stopped_early"] == reason and "stopped_early" not in first.rows[-1]
    assert (tmp_path / "r" / "metrics.jsonl").read_text().count(reason) == 1
    longer = Diary()
    again = ud.train(net(), DATA, callbacks=[longer], out=tmp_path / "r", resume=True, **OPTIONS)
    assert same_bits(again.params, ud.train(net(), DATA, **OPTIONS).params) and len(again.history) == 6
    assert [row["round"] for row in longer.rows] == [5, 6] and len(longer.began[0]) == 4


def test_a_late_callback_does_not_end_the_run_and_has_no_weights():
    with pytest.raises(ud.UndriftError, match="Diary is late, so it cannot end the run; leave `late` out"):
        ud.train(net(), DATA, callbacks=[Diary(late=True, until=2)], **OPTIONS)

    class Curious(ud.Callback):
        late = True

        def round(self, record):
            record.params  # noqa: B018

    with pytest.raises(ud.UndriftError, match="Only callbacks that are not `late` see the weights"):
        ud.train(net(), DATA, callbacks=[Curious()], **OPTIONS)


def test_a_run_that_a_callback_breaks_is_resumed_to_the_bit(tmp_path):
    def fail(record):
        if record.round == 3:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ud.train(net(), DATA, ud.Scaffold(), callbacks=fail, out=tmp_path / "r", **OPTIONS)
    rest = Diary()
    again = ud.train(net(), DATA, ud.Scaffold(), callbacks=rest, out=tmp_path / "r", resume=True, **OPTIONS)
    whole = ud.train(net(), DATA, ud.Scaffold(), **OPTIONS)
    assert same_bits(again.params, whole.params) and timeless(again.history) == timeless(whole.history)
    assert [row["round"] for row in rest.rows] == [4, 5, 6]


def test_runs_side_by_side_have_callbacks_of_their_own():
    diaries = [Diary(until=3), Diary()]
    results = ud.side_by_side(
        [lambda d=d, s=s: ud.train(net(), DATA, seed=s, callbacks=[d], **OPTIONS) for s, d in enumerate(diaries)]
    )
    assert [len(result.history) for result in results] == [3, 6] == [len(diary.rows) for diary in diaries]


@pytest.mark.parametrize("given", [Diary, 5, [print, "no"], {"a": 1}])
def test_what_is_no_callback_is_refused(given):
    with pytest.raises(
        ud.UndriftError, match=r"callbacks must be a list of objects of classes that inherit from ud\.Callback"
    ):
        ud.train(net(), DATA, callbacks=given, **OPTIONS)


def test_a_callback_is_told_that_a_run_has_stopped_at_nan():
    diary = Diary()
    result = ud.train(net(), DATA, callbacks=[diary], faults=ud.Faults(nan=0.2), **OPTIONS)
    assert result.stopped and diary.results == [result] and len(diary.rows) == len(result.history) < 6
    assert torch.isfinite(torch.cat([w.flatten() for w in result.params.values()])).all()


@pytest.mark.parametrize("answer", [3, {"reason": 1}, torch.tensor([True, False]), 0])
def test_any_other_answer_is_refused(answer):
    def look(record):
        return answer

    with pytest.raises(ud.UndriftError, match=r"The callback look returned .* It must return True, or a string"):
        ud.train(net(), DATA, callbacks=look, **OPTIONS)


def test_a_round_that_only_its_checkpoint_has_is_told_when_the_run_is_resumed(tmp_path):
    def fail(record):
        if record.round == 6:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ud.train(net(), DATA, callbacks=fail, out=tmp_path / "r", **OPTIONS)
    diaries = [Diary(), Diary(late=True)]
    ud.train(net(), DATA, callbacks=diaries, out=tmp_path / "r", resume=True, **OPTIONS)
    assert [[row["round"] for row in diary.rows] for diary in diaries] == [[6], [6]]
    assert [len(diary.began[0]) for diary in diaries] == [5, 5]


def test_what_fails_before_the_first_round_leaves_a_finished_run_as_it_was(tmp_path):
    class Late(ud.Callback):
        def begin(self, history):
            raise KeyError("begin")

    whole = ud.train(net(), DATA, out=tmp_path / "r", **OPTIONS)
    before = {file.name: file.read_bytes() for file in (tmp_path / "r").iterdir() if file.is_file()}
    with pytest.raises(KeyError, match="begin"):
        ud.train(net(), DATA, callbacks=[Late()], out=tmp_path / "r", resume=True, **OPTIONS | {"rounds": 8})
    assert {file.name: file.read_bytes() for file in (tmp_path / "r").iterdir() if file.is_file()} == before
    assert same_bits(whole.params, ud.train(net(), DATA, out=tmp_path / "r", resume=True, **OPTIONS).params)


def test_all_callbacks_are_told_of_the_end_even_if_one_fails():
    class Fails(ud.Callback):
        def end(self, result):
            raise KeyError("end")

    diary = Diary()
    with pytest.raises(KeyError, match="end"):
        ud.train(net(), DATA, callbacks=[Fails(), diary], **OPTIONS)
    assert len(diary.results) == 1
    assert ud.train(net(), DATA, callbacks=None, **OPTIONS).history
