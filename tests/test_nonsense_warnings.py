"""Warnings of runs that go through and mean little or nothing, each given once; silence for ordinary ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import undrift as ud
from tests.experiments import StopError, stop_after
from undrift.training import nonfinite

RNG = np.random.default_rng(0)
LABELS = np.arange(400) % 10
PIXELS = np.round(255 * np.clip(RNG.random((10, 12, 12))[LABELS] + 0.1 * RNG.normal(size=(400, 12, 12)), 0, 1))
PIXELS = PIXELS.astype(np.float32)
UNIT = PIXELS / 255
LOCAL = ud.Local(steps=2, batch_size=16, lr=0.1)
TRAIN, TEST = slice(0, 300), slice(300, 400)


def given(x=UNIT, y=LABELS, test_x=None, test_y=None, **options) -> ud.FederatedDataset:
    test = (x if test_x is None else test_x)[TEST], (y if test_y is None else test_y)[TEST]
    return ud.load((x[TRAIN], y[TRAIN]), ud.IID(), 5, test=test, **options)


def said(caplog, data, model="mlp(hidden=16)", method="FedAvg()", **options) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        ud.train(model, data, method, **{"rounds": 2, "local": LOCAL, "engine": "plain", "device": "cpu", **options})
    return caplog.messages


def once(messages: list[str], *parts: str) -> bool:
    """Whether there is one warning, which has these parts."""
    assert len(messages) == 1, messages
    return all(part in messages[0] for part in parts)


def test_an_ordinary_run_is_silent(caplog):
    assert not said(caplog, given())
    assert not said(caplog, given(), engine="lanes", evaluate_every=2, metrics=["f1"])


# ---- pixels ------------------------------------------------------------------------------------------------------


class Scales(nn.Module):
    """Scales pixels itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.layers(x / 255)


NORMS = {
    "batch": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 10)),
    "group": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 10)),
    "layer": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 10)),
}
SMALL = ud.Local(steps=1, batch_size=16, lr=1e-4)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("cnn", (1, 12, 12)),
        *((name, shape) for name in ("mlp", "logistic") for shape in ((12, 12), (1, 12, 12), (144,))),
    ],
)
def test_pixels_that_nobody_scales(shape, model, caplog):
    x = PIXELS.reshape(400, *shape)
    assert once(said(caplog, given(x), model, local=SMALL), "look like pixels from 0 to 255", "Divide them by 255")
    assert not said(caplog, given(x / 255), model, local=SMALL)
    if len(shape) > 1:
        assert not said(caplog, given(x.astype(np.uint8)), model, local=SMALL)


@pytest.mark.parametrize("model", [Scales, *NORMS.values()], ids=["scales", *NORMS])
@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_pixels_that_the_model_scales(model, engine, caplog):
    assert not said(caplog, given(PIXELS[:, None]), model(), local=SMALL, engine=engine)


NOT_PIXELS = {
    "counts": RNG.poisson(3, (400, 100)),
    "large counts": RNG.poisson(100, (400, 100)) * 3,
    "columns": RNG.integers(0, 256, (400, 50)),
    "signed": RNG.integers(-128, 128, (400, 12, 12)),
    "fractions": 255 * RNG.random((400, 12, 12)),
}


@pytest.mark.parametrize("x", NOT_PIXELS.values(), ids=list(NOT_PIXELS))
def test_numbers_that_are_no_pixels(x, caplog):
    assert not said(caplog, given(x.astype(np.float32)), local=SMALL)


# ---- labels ------------------------------------------------------------------------------------------------------


def test_test_labels_that_are_off_by_one(caplog):
    found = said(caplog, given(y=LABELS + 1, test_y=LABELS))
    assert once(found, "No client has samples of class 0, of which 10% of the test samples are", "begin at 1", "at 0:")
    assert once(said(caplog, given(test_y=LABELS + 1)), "of class 10,", "begin at 0", "at 1: count both from 0")


def test_classes_that_no_client_has(caplog):
    mine = np.where(LABELS == 4, 5, LABELS)
    found = said(caplog, given(y=mine, test_y=LABELS))
    assert once(found, "No client has samples of class 4, of which 10%", "The model cannot learn")
    assert not said(caplog, given(y=LABELS, test_y=mine))
    rare = np.where(np.arange(400) == 399, 10, LABELS)  # one sample of a hundred is at the limit
    assert len(said(caplog, given(test_y=rare))) == 1
    x, y = np.tile(UNIT, (2, 1, 1)), np.tile(LABELS, 2)
    data = ud.load((x[:300] + 1e-3, y[:300]), ud.IID(), 5, test=(x[300:], np.where(np.arange(500) == 0, 10, y[300:])))
    assert not said(caplog, data)
    assert not said(caplog, given(y=np.where(LABELS == 4, -100, LABELS), test_y=np.where(LABELS == 4, -100, LABELS)))


def test_numbers_that_are_taken_for_classes(caplog):
    x = RNG.normal(size=(400, 6)).astype(np.float32)
    y = np.round(150 + 50 * x[:, 0]).clip(0).astype(np.int64)
    assert once(
        said(caplog, given(x, y)),
        "different values up to",
        "are taken for classes",
        "give them as floats, and loss='mse'",
    )
    assert not any("taken for" in each for each in said(caplog, given(x, y), loss="cross_entropy"))
    assert not said(caplog, given(x, (y / 100).astype(np.float32)), nn.Linear(6, 1), loss="mse")
    many = np.arange(400) % 100  # a hundred classes with three or four samples each
    assert not said(caplog, given(x, many))
    assert not said(caplog, given(x, (LABELS * 30)))


# ---- the test set ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensor", "tuple", "uint8"])
def test_a_test_set_that_clients_train_on(kind, caplog):
    x = {"tensor": UNIT, "tuple": (UNIT.reshape(400, -1), UNIT[:, 0]), "uint8": PIXELS.astype(np.uint8)}[kind]
    model = Two() if kind == "tuple" else "mlp(hidden=16)"
    data = ud.load((x, LABELS), ud.Dirichlet(0.5), 5, test=(x, LABELS))
    assert once(said(caplog, data, model), "The test samples are also the clients'", "Hold samples out")
    pieces = x if isinstance(x, tuple) else (x,)
    half = tuple(piece[::-2].copy() for piece in pieces)
    data = ud.load((x, LABELS), ud.IID(), 5, test=(half if kind == "tuple" else half[0], LABELS[::-2].copy()))
    assert once(said(caplog, data, model), "The test samples are also the clients'")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(144, 10), nn.Linear(12, 10)

    def forward(self, x, y):
        return self.one(x) + self.two(y)


def test_test_sets_that_are_others(caplog):
    assert not said(caplog, ud.load((UNIT, LABELS), ud.IID(), 5, test_fraction=0.3))
    some = np.concatenate([UNIT[:50], UNIT[300:]])  # a third of them is also trained on
    assert not said(caplog, ud.load((UNIT[:300], LABELS[:300]), ud.IID(), 5, test=(some, np.arange(150) % 10)))
    close = UNIT + np.float32(1e-4) * (np.arange(144).reshape(12, 12) == 77)  # samples differ in one number
    assert not said(caplog, ud.load((UNIT, LABELS), ud.IID(), 5, test=(close, LABELS)))
    few = RNG.integers(0, 2, (400, 6)).astype(np.float32)  # samples that repeat by themselves
    assert not said(caplog, given(few))


# ---- nothing trained ---------------------------------------------------------------------------------------------

ZERO = {
    "lr": {"local": ud.Local(steps=2, lr=0.0)},
    "the server's": {"method": ud.ServerSGD(lr=0.0)},
    "groups": {"local": ud.Local(steps=2, lr=0.1, groups={"*": ud.Group(rate=0.0)})},
    "the loss": {"loss": lambda output, target: 0 * output.sum(-1)},
}


@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_nothing_is_trained(name, engine, caplog, tmp_path):
    found = said(caplog, given(), **{"engine": engine, "metrics": ["accuracy"], **ZERO[name]})
    assert once(found, "Nothing has been trained: after round 1, the weights are what they were before")
    caplog.clear()
    options = {"rounds": 50, "metrics": ["accuracy"], "engine": engine, **ZERO[name]}
    with pytest.raises(StopError):
        said(caplog, given(), **options, on_round=stop_after(3))
    assert once(caplog.messages, "after round 1")  # while the run goes on


@dataclass(frozen=True)
class Waits(ud.Part):
    """Changes the weights in every third round."""

    def transform(self, update, state, server):
        return {name: u * (server.round % 3 == 2) for name, u in update.items()}, state


def test_what_waits_is_not_accused(caplog):
    late = ud.Local(steps=1, batch_size=16, lr=lambda t: 0.1 * (t > 1))
    assert not said(caplog, given(), rounds=3, local=late)
    assert not said(caplog, given(), method=Waits(), rounds=3)
    found = said(caplog, given(), method=Waits(), rounds=2)
    assert once(found, "Nothing has been trained: after 2 rounds, the weights are what they were before")
    assert once(said(caplog, given(), rounds=1, local=late), "after round 1")
    for nobody in ({"faults": ud.Faults(dropout=1.0)}, {"local": ud.Local(steps=2, lr=1e38), "on_nonfinite": "skip"}):
        assert not any("Nothing" in each for each in said(caplog, given(), **nobody))
    frozen = ud.Local(steps=2, lr=0.1, groups={"1.*": ud.Group(rate=0.0)})
    assert not said(caplog, given(), local=frozen)


# ---- metrics, early stopping, participation ----------------------------------------------------------------------


def test_a_metric_that_is_always_nan(caplog):
    metrics = {"odd": lambda output, target: torch.full(target.shape, torch.nan), "accuracy": "accuracy"}
    nonfinite.log.setLevel(logging.ERROR)  # as commands do, which report stops and divergence themselves
    try:
        found = said(caplog, given(), metrics=metrics, rounds=3)
    finally:
        nonfinite.log.setLevel(logging.NOTSET)
    assert once(found, "The metric 'odd' is NaN in all 3 evaluations")
    assert once(said(caplog, given(), metrics=metrics, rounds=3, evaluate_every=3), "NaN in the only evaluation")
    calls = []

    def at_first(output, target):
        calls.append(len(target))
        return torch.full(target.shape, torch.nan if len(calls) < 5 else 1.0)

    assert not said(caplog, given(), metrics={"odd": at_first}, rounds=9)


@pytest.mark.parametrize(
    ("options", "every"),
    [({"evaluate_every": 4}, "evaluate_every, which is now 4"), ({"evaluate_every": 9}, "which is now 9"), ({}, None),
     ({"evaluate_every": 3}, None), ({"evaluate_every": 4, "rounds": 1}, None)],
)  # fmt: skip
@pytest.mark.parametrize("column", ["validation_loss", "accuracy"])
def test_early_stopping_that_comes_too_late(options, every, column, caplog):
    data = ud.load((UNIT, LABELS), ud.IID(), 5, test_fraction=0.2, validation_fraction=0.2)
    found = said(caplog, data, stop_when=ud.EarlyStopping(column, patience=1), **{"rounds": 4, **options})
    if every:
        assert once(found, f"cannot end the run early: only its last round, 4, has {column}", every)
    else:
        assert not found


def test_early_stopping_by_clients_tuned_models(caplog):
    data = ud.load((UNIT, LABELS), ud.IID(), 5, client_test_fraction=0.2)
    rule = ud.EarlyStopping("tuned_accuracy", patience=1)
    found = said(caplog, data, rounds=3, stop_when=rule)
    assert once(found, "only its last round, 3, has tuned_accuracy. Choose a smaller personalize_every, which is now")
    assert not said(caplog, data, rounds=3, stop_when=rule, personalize_every=1)


def test_one_client_is_not_all(caplog):
    found = said(caplog, given(), participation=1)
    assert once(found, "participation=1 is one client per round, not all 5", "Write participation=1.0 for all")
    assert not said(caplog, given(), participation=1.0) and not said(caplog, given(), participation=2)
    one = ud.FederatedDataset.from_clients([(UNIT[TRAIN], LABELS[TRAIN])], test=(UNIT[TEST], LABELS[TEST]))
    assert not said(caplog, one, participation=1)
