"""Tests in a process of their own, forked from one that has imported torch but nothing of undrift: quick and clean."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# Before torch is imported: a process that has run OpenMP's threads cannot be forked.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import numpy as np
import pytest
import torch
import torch._dynamo
import torch.func
import torch.fx.experimental.proxy_tensor
import torch.utils.flop_counter

PRELOADED = hypothesis, np, torch

MEMORY = 12 * 2**30
"""A mutant that asks for more address space than that gets a MemoryError."""
TEST_SECONDS = 30
"""CPU time that any test may take; more where it takes more than a tenth of that by itself."""


class Selection:
    """A pytest plugin: runs the named tests in this order, times them, and stops those that do not end."""

    def __init__(self, tests: dict[str, float] | None) -> None:
        self.tests = tests
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.skipped: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.tests is not None:
            found = {item.nodeid: item for item in items}
            items[:] = [found[name] for name in self.tests]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        usual = self.tests[item.nodeid] if self.tests is not None else 60.0
        signal.setitimer(signal.ITIMER_PROF, max(TEST_SECONDS, 10 * usual))  # its signal ends the process
        begin = time.perf_counter()
        done = yield
        self.seconds[item.nodeid] = time.perf_counter() - begin
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped.append(report.nodeid)


def run(root: Path, files: list[str], tests: dict[str, float] | None = None, *, extra: Any = None) -> dict[str, Any]:
    """Run tests of these files in the checkout at `root`: all of them, or those named, until the first fails.

    `tests` gives the seconds that each usually takes. `extra` is called in the child with a function that runs pytest.
    """

    def child() -> dict[str, Any]:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(root)
        sys.path[:0] = [str(root / "src"), str(root)]
        os.environ["PYTHONPATH"] = f"{root / 'src'}{os.pathsep}{root}"
        selection = Selection(tests)
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is there before pytest starts
        options += ["-x"] if tests is not None else []

        def main(*plugins: Any) -> int:
            signal.setitimer(signal.ITIMER_PROF, 10 * TEST_SECONDS)
            return int(pytest.main([*options, *files], plugins=[selection, *plugins]))

        found = extra(main) if extra else {"code": main()}
        return {"seconds": selection.seconds, "failed": selection.failed, "skipped": selection.skipped} | found

    usual = sum(tests.values()) if tests is not None else 600.0
    return _forked(child, log=root.parent / "pytest.log", limit=max(120.0, 6 * usual))


def _forked(function: Callable[[], dict[str, Any]], log: Path, limit: float) -> dict[str, Any]:
    """What the function returns in a process of its own, or which signal ended that; `limit` seconds at most."""
    answer = log.with_suffix(".json")
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        try:
            answer.write_text(json.dumps(function()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    status, end = None, time.monotonic() + limit
    while status is None and time.monotonic() < end:
        done, found = os.waitpid(pid, os.WNOHANG)
        status = found if done else None
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and whatever it started
    if status is None:
        os.waitpid(pid, 0)
        return {"signal": "time limit"}
    if os.WIFSIGNALED(status):
        return {"signal": signal.Signals(os.WTERMSIG(status)).name}
    return json.loads(answer.read_text()) if answer.exists() else {"signal": "no answer"}
