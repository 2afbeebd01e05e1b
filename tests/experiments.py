"""Experiment files, and commands and runs that tests start from them."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from undrift.files import digest, seal, unseal
from undrift.tools.cli import app
from undrift.training.run_folder import RESULTS, RUN

GOOD = {
    "model": "mlp",
    "method": "FedAvg()",
    "rounds": 2,
    "participation": 0.5,
    "data": {"name": "digits", "partition": "IID()", "clients": 4},
    "local": {"epochs": 1, "batch_size": 32, "lr": 0.1},
}


def toml(settings: dict) -> str:
    from undrift.training.config_writer import toml_literal

    lines = [f"{name} = {toml_literal(value)}" for name, value in settings.items() if not isinstance(value, dict)]
    for name, section in settings.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {toml_literal(value)}" for key, value in section.items())]
    return "\n".join(lines)


def changed(key: str, value: object) -> dict:
    settings = copy.deepcopy(GOOD)
    section, _, name = key.rpartition(".")
    into = settings.setdefault(section, {}) if section else settings
    if value is None:
        del into[name]
    else:
        into[name] = value
    return settings


def undrift(*arguments: object, exit_code: int = 0) -> str:
    """What a command prints. It must end with this status."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == exit_code, done.output
    return done.output


def reseal(folder: Path) -> None:
    """Record the files of a finished run as they are now, as somebody does who has changed them on purpose."""
    sums = {name: digest(folder / name) for name in RESULTS}
    seal(folder / RUN, unseal(folder / RUN) | {"config": (folder / "config.toml").read_text(), "results": sums})


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Fails what takes longer, as a test that blocks would otherwise hang."""

    def late(*_: object) -> None:
        pytest.fail(f"this took longer than {seconds} s")  # which nothing catches

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class StopError(Exception):
    pass


def stop_after(rounds: int):
    def on_round(row):
        if row["round"] == rounds:
            raise StopError

    return on_round
