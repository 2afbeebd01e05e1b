"""Paired differences over the end of training, against numbers by hand."""

from __future__ import annotations

import math
import statistics

import pytest

from papers.catalogue import Figure
from papers.paired import Estimate, block_error, by_seed, over_columns, over_seeds

ACCURACY = Figure("accuracy", "accuracy", "last", percent=True)


def run(values: list[float], every: int = 1, column: str = "accuracy") -> dict:
    return {"curve": {"round": [every * (t + 1) for t in range(len(values))], column: values}}


def test_the_difference_is_that_of_the_last_fifths_means():
    steps = [0.01 * (t % 3) for t in range(100)]
    one, other = run([0.5] * 80 + [0.7] * 20), run([0.9] * 80 + [0.6 + steps[t] for t in range(80, 100)])
    found = by_seed(ACCURACY, one, other)
    late = [10 - 100 * steps[t] for t in range(80, 100)]
    blocks = [statistics.fmean(late[i : i + 4]) for i in range(0, 20, 4)]
    assert found.value == pytest.approx(statistics.fmean(late))
    assert found.error == pytest.approx(statistics.stdev(blocks) / math.sqrt(5))


def test_what_both_runs_share_does_not_count_as_error():
    noise = [0.05 * math.sin(t) for t in range(100)]
    found = by_seed(ACCURACY, run([0.5 + e for e in noise]), run([0.4 + e for e in noise]))
    assert found == (pytest.approx(10.0), pytest.approx(0.0, abs=1e-12))


def test_runs_of_other_lengths_have_errors_of_their_own():
    one, other = run([0.01 * (t % 7) for t in range(100)]), run([0.01 * (t % 11) for t in range(200)])
    errors = [block_error([(t % n) for t in range(a, b)]) for n, a, b in ((7, 80, 100), (11, 160, 200))]
    assert by_seed(ACCURACY, one, other).error == pytest.approx(math.hypot(*errors))


def test_less_is_better_turns_the_sign():
    loss = Figure("loss", "loss", "last", lower=True)
    assert by_seed(loss, run([1.0] * 50, column="loss"), run([2.0] * 50, column="loss")).value == pytest.approx(1.0)


def test_what_has_no_difference():
    reach = Figure("rounds", "accuracy", "reach", target=0.5, lower=True)
    assert by_seed(reach, run([0.5] * 50), run([0.6] * 50)) is None
    assert by_seed(ACCURACY, {"curve": {"round": [1]}}, run([0.6] * 50)) is None
    few = by_seed(ACCURACY, run([0.5] * 40), run([0.4] * 40))
    assert few.value == pytest.approx(10.0) and few.error is None, "eight rounds do not make five blocks of two"


def test_means_over_seeds_and_columns():
    each = [Estimate(1.0, 0.5), Estimate(3.0, 0.5)]
    assert over_seeds(each) == (2.0, pytest.approx(math.sqrt(2) / math.sqrt(2)))
    assert over_seeds(each[:1]) == each[0] and over_seeds([]) is None
    assert over_columns([Estimate(1.0, 3.0), Estimate(2.0, 4.0)]) == (1.5, 2.5)
    assert over_columns([Estimate(1.0, 3.0), Estimate(2.0)]).error is None and over_columns([]) is None
