"""A warning of last batches that are much shorter than the others."""

from __future__ import annotations

import logging

import pytest
import torch

import undrift as ud
from tests.problems import make_clients, net

WORDS = "end their epochs with a batch of less than an eighth"


def warned(caplog, sizes: list[int], **local) -> str:
    caplog.clear()
    caplog.set_level(logging.WARNING, logger="undrift")
    given = {"epochs": 1, "batch_size": 16, "lr": 0.1, **local}
    ud.train(net(), make_clients(sizes, torch.float32), rounds=3, local=ud.Local(**given))
    found = [record.getMessage() for record in caplog.records if WORDS in record.getMessage()]
    assert len(found) < 2, "once per run"
    return found[0] if found else ""


def test_it_counts_the_clients_and_names_the_worst(caplog):
    said = warned(caplog, [33, 48, 49, 34, 20])
    assert said.startswith("2 of 5 clients ") and "(client 0: 1 of 16 samples)" in said and "drop_last=True" in said


@pytest.mark.parametrize(
    ("sizes", "local"),
    [
        ([32, 34, 18], {}),  # an eighth is not less than an eighth
        ([1, 5, 16], {}),  # their only batch
        ([33, 49], {"drop_last": True}),
        ([33, 49], {"epochs": None, "steps": 2}),  # which leaves the last batch out
        ([33, 49], {"batch_size": None}),
        ([33, 49], {"batch_size": 4}),
    ],
)
def test_others_are_left_alone(sizes, local, caplog):
    assert not warned(caplog, sizes, **local)


def test_a_schedule_that_grows_gets_there(caplog):
    assert warned(caplog, [33, 48], epochs=None, steps=lambda t: 2 + t)
    assert warned(caplog, [33, 48], epochs=None, steps=[3, 3])
