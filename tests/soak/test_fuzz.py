"""Ten thousand made-up experiment files, as many expressions, and a thousand damaged runs: no traceback, nothing that
runs, nothing that hangs.

make soak
"""

from __future__ import annotations

import random
import time

import pytest

from benchmarks.report_page import make_run
from tests import fuzzing

COUNT = 10_000


@pytest.mark.parametrize("kind", ["expressions", "files"])
def test_ten_thousand(tmp_path, kind):
    file = tmp_path / "e.toml"
    fuzzing.read_file(fuzzing.a_file_that_is_right(), file)  # imports what is imported on first use
    fuzzing.read_expression("FedAvg()")
    began, taken, slowest = time.monotonic(), 0, 0.0
    for seed in range(COUNT):
        chance, start = random.Random(seed), time.monotonic()
        made = fuzzing.an_expression(chance) if kind == "expressions" else fuzzing.a_file(chance)
        try:
            with fuzzing.nothing_executed():
                taken += fuzzing.read_expression(made) if kind == "expressions" else fuzzing.read_file(made, file)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {made!r:.500}") from error
        slowest = max(slowest, time.monotonic() - start)
    seconds = time.monotonic() - began
    print(f"{COUNT:,} {kind} in {seconds:.0f} s, the slowest {slowest:.2f} s; {taken:,} were valid")
    assert COUNT // 100 < taken < COUNT, "some of each kind, or they test nothing"


def test_a_thousand_damaged_runs(tmp_path):
    folder = tmp_path / "run"
    make_run(folder, 0.1, 0, 3)
    whole = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    shown = 0
    for seed in range(1000):
        try:
            shown += fuzzing.read_run(random.Random(seed), folder, whole)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    print(f"1,000 damaged runs, of which {shown} could still be shown")
    assert 0 < shown < 1000
