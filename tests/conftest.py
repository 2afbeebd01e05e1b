from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal

import pytest
import torch

import undrift as ud
from tests.flower_problem import register
from tests.problems import make_clients
from tests.registries import as_before
from undrift.data import warn_once

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
torch.set_num_threads(1)  # tests run two at a time on two cores
with contextlib.suppress(ValueError):  # not in the main thread
    # A suite that a shell started in the background ignores Ctrl-C, and so would the processes that tests send one to.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session) -> None:
    """Look for garbage less often: tracing makes many objects, few of them garbage, and torch itself is a million."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """Do not wait for the disk at every file of every run: no test cuts the power. That files are synced is tested."""

    def fsync(handle) -> None:
        os.fstat(handle if isinstance(handle, int) else handle.fileno())  # a closed one is an error, as it is for fsync

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(autouse=True)
def warnings_again() -> None:
    """Every test gets the warnings about its data, which a process gives once."""
    warn_once.warned.clear()


@pytest.fixture(autouse=True)
def registries_as_before():
    """What a test registers, as the examples of docstrings do, is gone after it."""
    with as_before():
        yield


@pytest.fixture
def one_core(monkeypatch) -> None:
    """Sweeps and comparisons run one run at a time, on one thread, in this process: no worker imports torch."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


@pytest.fixture
def flower_problem() -> None:
    """The model and the data of the tests of federations, by name."""
    register()


@pytest.fixture
def uneven() -> ud.FederatedDataset:
    """Seven clients, one of them empty, no two with the same number of samples."""
    return make_clients([23, 5, 0, 41, 10, 17, 1])


@pytest.fixture(scope="session")
def browser():
    """A real browser, for the report and the documentation."""
    if not CHROMIUM:
        pytest.skip("no Chromium here: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()
