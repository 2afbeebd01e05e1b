"""The examples: the quadratic's facts, and a run beside what is expected of it."""

from __future__ import annotations

import numpy as np
import pytest

import undrift as ud
from examples import quadratic

FACTS = {  # after 500 and 3000 rounds
    "K = 1": (0.4760, 0.5230),
    "K = 10": (0.5549, 0.5570),
    "K = 50": (0.5760, 0.5772),
    "K = 10, γ decays by 0.995": (0.5220, 0.5227),
    "K decays by 0.99": (0.5089, 0.5233),
    "K decays by 0.995": (0.5245, 0.5234),
    "K decays by 0.9995": (0.5514, 0.5335),
}


@pytest.mark.parametrize("name", FACTS)
def test_the_expected_path_of_each_scheme(name):
    path = quadratic.expected(quadratic.SCHEMES[name], 3000)
    assert [round(path[t], 4) for t in (499, 2999)] == pytest.approx(FACTS[name], abs=1.01e-4)


def test_where_constant_k_heads_for():
    assert pytest.approx(0.5234, abs=5e-5) == quadratic.OPTIMUM
    assert [quadratic.surrogate(k) for k in (1, 10, 50)] == pytest.approx([0.5234, 0.5570, 0.5772], abs=5e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("K = 10", marks=pytest.mark.long),
        "K decays by 0.99",
        pytest.param("K = 10, γ decays by 0.995", marks=pytest.mark.long),
    ],
)
def test_a_run_follows_what_is_expected(name):
    local = quadratic.SCHEMES[name]
    runs = [quadratic.curve(quadratic.population(), local, 300, seed)[0] for seed in range(2)]
    assert np.abs(np.mean(runs, axis=0) - quadratic.expected(local, 300)).max() < 0.006


def test_the_steps_that_decay_saves():
    steps = sum(
        ud.Local(steps=ud.decay(10, 0.995), lr=1).step_counts(t, np.array([0]), np.array([1]))[0] for t in range(3000)
    )
    assert 0.84 < 1 - steps / 30_000 < 0.85
