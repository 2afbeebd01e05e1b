from __future__ import annotations

import doctest

import pytest

import undrift as ud
from undrift import schedule
from undrift.schedule import check_number, inside, whole_steps


def test_examples_in_the_docstrings():
    assert doctest.testmod(schedule).failed == 0


def test_step_counts_round_up_but_not_for_noise():
    assert [whole_steps(x) for x in (0.2, 1.0, 1.001, 50 * 0.8**2)] == [1, 1, 2, 32]


def test_fractions_of_steps_that_decaying_k_uses():
    """The K-decay paper: over 4000 rounds a decay of 0.9996 leaves 0.65 / 0.55 / 0.51 / 0.50 of the steps."""
    for k0, rate, share in [
        (3, 0.9996, 0.65),
        (10, 0.9996, 0.55),
        (33, 0.9996, 0.51),
        (100, 0.9996, 0.50),
        (33, 0.999, 0.26),
    ]:
        steps = sum(whole_steps(ud.decay(k0, rate)(t)) for t in range(4000))
        assert round(steps / (4000 * k0), 2) == share


@pytest.mark.parametrize(
    ("interval", "x", "yes"),
    [("[0, 1)", 0, True), ("[0, 1)", 1, False), ("(0, inf]", float("inf"), True), ("[0, inf)", float("nan"), False)],
)
def test_intervals(interval, x, yes):
    assert inside(interval, x) == yes


def test_a_schedule_that_leaves_its_range_is_refused_with_its_round():
    with pytest.raises(ud.UndriftError, match=r"FedProx\(mu\) is -1 in round 3"):
        check_number(lambda t: 2 - t, 5, "FedProx(mu)")
    with pytest.raises(ud.UndriftError, match="must be a number or a function of the round"):
        check_number("a lot", 5, "FedProx(mu)")
