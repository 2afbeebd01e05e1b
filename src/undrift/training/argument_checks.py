"""Checks of a run's arguments. Each error says what to change."""

from __future__ import annotations

import logging
from typing import Any

import torch

from undrift.data.dataset import FederatedDataset
from undrift.engine.ranks import local_rank
from undrift.errors import UndriftError, first_line, quoted, require, whole
from undrift.method.local import Local
from undrift.training.callbacks import as_callbacks
from undrift.training.settings import Settings

log = logging.getLogger("undrift")


def cohort_size_of(participation: Any, population: int) -> int:
    number = whole(participation) or isinstance(participation, float)
    require(number, f"participation must be a count (an int) or a fraction (a float), not {participation!r}.")
    if whole(participation):
        require(participation >= 1, f"participation must be at least 1 client, not {participation}.")
        require(
            participation <= population,
            f"participation asks for {participation} clients per round, but only {population} have data.",
        )
        return int(participation)
    require(0 < participation <= 1, f"participation as a fraction must be in (0, 1], not {participation}.")
    return max(1, int(participation * population + 0.5))


def warn_of_one_client(participation: int | float, population: int) -> None:
    """Warn of `participation=1`, which looks like all of the clients."""
    if whole(participation) and participation == 1 and population > 1:
        log.warning(
            "participation=1 is one client per round, not all %d: an int is a number of clients, a float a fraction of "
            "them. Write participation=1.0 for all.", population,
        )  # fmt: skip


def find_device(device: Any) -> torch.device:
    automatic, gpu = device is None or device == "auto", torch.cuda.is_available()
    if gpu and (automatic or str(device) == "cuda") and (number := local_rank()) is not None:
        return torch.device("cuda", number % torch.cuda.device_count())  # each process its own, as far as there are
    if automatic:
        return torch.device("cuda" if gpu else "cpu")
    try:
        chosen = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UndriftError(
            f"device {quoted(device)} is not available ({first_line(error)}); leave it out to choose one automatically."
        ) from error
    require(chosen.type != "meta", "device 'meta' holds no values, so nothing can be trained on it; choose another.")
    return chosen


def check_types(given: Settings) -> None:
    data, local, rounds, lanes = given.data, given.local, given.rounds, given.lanes
    engine, precision, compile = given.engine, given.precision, given.compile
    kind = type(data).__name__
    require(isinstance(data, FederatedDataset), f"data must be a ud.FederatedDataset, as ud.load returns, not {kind}.")
    require(isinstance(local, Local), f"local must be a ud.Local, not {type(local).__name__}.")
    require(whole(rounds) and rounds >= 1, f"rounds must be a whole number from 1, not {rounds!r}.")
    require(engine in ("auto", "lanes", "plain"), f'engine must be "auto", "lanes" or "plain", not {engine!r}.')
    precisions = ("auto", "tf32", "bfloat16")
    require(precision in precisions, f'precision must be "auto", "tf32" or "bfloat16", not {precision!r}.')
    places = ("auto", "device", "host")
    require(given.data_on in places, f'data_on must be "auto", "device" or "host", not {given.data_on!r}.')
    fine = lanes is None or (whole(lanes) and lanes >= 1)
    require(fine, f"lanes must be a whole number from 1, or None, not {lanes!r}.")
    require(compile in (None, True, False), f"compile must be True, False or None, not {compile!r}.")
    fine = given.threads is None or (whole(given.threads) and given.threads >= 1)
    require(fine, f"threads must be a whole number from 1, or None, not {given.threads!r}.")


def check_listening(given: Settings) -> None:
    evaluate_every, personalize_every, on_round = given.evaluate_every, given.personalize_every, given.on_round
    fine = whole(evaluate_every) and evaluate_every >= 1
    require(fine, f"evaluate_every must be 1 or more, not {evaluate_every!r}.")
    fine = personalize_every is None or (whole(personalize_every) and personalize_every >= 1)
    require(fine, f"personalize_every must be a whole number from 1, or None, not {personalize_every!r}.")
    require(given.progress in (True, False), f"progress must be True or False, not {given.progress!r}.")
    require(
        on_round is None or callable(on_round),
        f"on_round must be a function that takes a row of the history, not {on_round!r}.",
    )
    as_callbacks(given.callbacks)
