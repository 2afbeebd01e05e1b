"""FLamby's published table of heart disease at four hospitals, which nobody here produced (benchmarks/flamby.py).

The data lie in the folder that UNDRIFT_DATA names, or in `../shared/data`; without them these tests are skipped.
"""

from __future__ import annotations

import json
import os
import statistics
from functools import cache
from pathlib import Path

import pytest

from benchmarks import flamby
from tests.pages import DOCS
from tests.problems import distance

FOLDER = Path(os.environ.get("UNDRIFT_DATA") or Path(__file__).parents[2] / "shared" / "data") / "flamby"
at_hand = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"FLamby's table is not checked: its data are not at hand ({FOLDER})"
)

MEAN, SEED = 0.012, 0.01
"""How far our accuracy may be from the published one: the mean over the seeds, and FedAvg's of each seed."""


@cache
def trained(name, seed):
    return flamby.train(FOLDER, name, seed)


def accuracies(name):
    return {seed: flamby.accuracy(FOLDER, trained(name, seed)) for seed in flamby.SEEDS}


def off(name):
    """By how much the mean accuracy over the seeds differs from the published one."""
    published = flamby.published(FOLDER, name).values()
    return abs(statistics.fmean(accuracies(name).values()) - statistics.fmean(published))


@at_hand
@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "SCAFFOLD", "FedAdam", "FedYogi", "FedAdagrad"])
def test_the_mean_is_the_published_one(name):
    assert off(name) <= MEAN


@at_hand
def test_fedavg_is_the_published_one_in_every_seed():
    ours, published = accuracies("FedAvg"), flamby.published(FOLDER, "FedAvg")
    assert all(abs(ours[seed] - published[seed]) <= SEED for seed in flamby.SEEDS)


@at_hand
@pytest.mark.parametrize("name", ["FedProx", "SCAFFOLD"])
def test_equal_accuracies_are_not_of_equal_weights(name):
    """Published FedProx and SCAFFOLD have FedAvg's accuracy in every seed, which FedAvg under their name would, too."""
    for seed in flamby.SEEDS:
        assert distance(trained(name, seed).params, trained("FedAvg", seed).params) > 1e-5


@at_hand
@pytest.mark.parametrize("name", ['Scaffold(variates="uniform")', "ServerAdam"])
def test_two_weightings_and_a_bias_correction_miss_the_table(name):
    assert off(name) > 2 * MEAN


@at_hand
def test_published_cyclic_training_is_the_first_hospital_alone():
    """FLamby's code hands no weights from one centre to the next, so its row is what Cleveland reaches in its turns."""
    ours, published = accuracies("Cleveland's turns"), flamby.published(FOLDER, "Cleveland's turns")
    assert all(abs(ours[seed] - published[seed]) <= SEED for seed in flamby.SEEDS)


def test_the_page_has_the_stored_table():
    found, page = json.loads(flamby.RESULTS.read_text(encoding="utf-8")), DOCS / "correctness.md"
    assert page.read_text(encoding="utf-8") == flamby.with_table(page.read_text(encoding="utf-8"), found)
    assert "| FedAvg | **0.7472** |" in flamby.table(found)
