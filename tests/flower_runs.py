"""For tests that start Flower's own processes: apps, the folders they write, and what is still running.

What such a run should give is computed by nodes in the tests' process (`federated.py`), which `test_flower_near.py`
holds against local runs. Nothing here depends on how fast the machine is: waits end with what they wait for, and their
limits are for a run that hangs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("flwr") is None and os.environ.get("UNDRIFT_FLOWER") != "required":  # there it is a failure
    pytest.skip('needs Flower: make flower, or pip install "undrift[flower]"', allow_module_level=True)

from safetensors.torch import load_file
from torch import Tensor

from tests.federated import BASE
from tests.registries import as_before
from undrift.files import write_text
from undrift.flower.new import as_toml, write_app

NODES = 2
QUICK = {"evaluate_every": 10}
LONG = 900
"""Seconds after which a run hangs."""
PROBLEM = Path(__file__).with_name("flower_problem.py")


@pytest.fixture(scope="module", autouse=True)
def problem():
    """The modules that apps bring with them, in this process too."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(PROBLEM.parent))
    patch.setenv("OMP_NUM_THREADS", "1")
    with as_before():
        # Here, not by the experiments' imports: Python imports a module once, and what a test registers is forgotten.
        importlib.import_module(PROBLEM.stem).register()
        yield
    patch.undo()


def app(folder: Path, changes: dict[str, Any], **terms: Any) -> Path:
    """An experiment as a Flower app, as `undrift flower new` writes it."""
    folder.mkdir(parents=True)
    shutil.copy(PROBLEM, folder)
    write_text(folder / "experiment.toml", as_toml(BASE | changes | {"imports": ["flower_problem"]}))
    write_app(folder / "app", folder / "experiment.toml", nodes=NODES, **terms)
    return folder / "app"


def rows(out: Path) -> list[dict[str, Any]]:
    """The history of the run in a server's folder."""
    file = out / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "run" / "model.safetensors")


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must happen."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def assert_all_ended(folder: Path) -> None:
    """That no process of a federation in this folder, which is in their environment, is left once killed ones died."""

    def running() -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(folder) in (process / "environ").read_text(errors="replace"):
                    found.append((process / "cmdline").read_text(errors="replace").replace("\0", " "))
        return found

    end = time.monotonic() + 30
    while (left := running()) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
