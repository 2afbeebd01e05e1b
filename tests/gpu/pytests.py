"""(t) The tests that need a GPU, in several processes of pytest; a line for each test.

As a plugin of pytest (`-p gpu.pytests`) it keeps every n-th test, so that no list of tests can be out of date.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.gpu.checks import Check, Finding
from tests.gpu.runner import ROOT

FILES = ["tests/test_gpu.py", "tests/test_kernels.py", "tests/test_convolution.py", "tests/test_random.py"]
SHARDS = 6


def pytest_collection_modifyitems(items: list[Any]) -> None:
    number, count = map(int, os.environ["GPU_SHARD"].split("/"))
    items[:] = items[number::count]


def tests(number: int, device: str) -> list[Finding]:
    """They choose their device themselves, and are skipped where there is no GPU, which is not to pass."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu.pytests", f"--junitxml={report}", *FILES]
        env = {**os.environ, "GPU_SHARD": f"{number}/{SHARDS}"}
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        if not report.exists():
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            return [Finding("FAIL", f"pytest ended with status {done.returncode}: {''.join(last)}")]
        cases = list(ElementTree.parse(report).iter("testcase"))
    found = [_finding(case) for case in cases]
    if done.returncode and all(f.status == "ok" for f in found):
        found.append(Finding("FAIL", f"pytest ended with status {done.returncode}"))
    return found


def _finding(case: ElementTree.Element) -> Finding:
    name = f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name')}"
    seconds = float(case.get("time", 0))
    for kind, status in (("failure", "FAIL"), ("error", "FAIL"), ("skipped", "absent")):
        if (child := case.find(kind)) is not None:
            return Finding(
                status, (child.get("message") or kind).strip().splitlines()[0][:200], name, seconds, child.text or ""
            )
    return Finding("ok", "passed", name, seconds)


def checks() -> Iterator[Check]:
    for number in range(SHARDS):
        yield Check("t", f"tests, part {number + 1} of {SHARDS}", partial(tests, number), seconds=120.0)
