"""Carries out cases in worker processes: one that hangs or crashes costs itself alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.compat import extras
from tests.compat.case import Case
from tests.compat.trial import Finding, carry_out

ROOT = Path(__file__).parent.parent.parent
LONGEST, STARTING = 120.0, 120.0
"""Seconds after which a case, or a process that starts, counts as hung."""
QUIET = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


class Worker:
    """A process that carries out cases by name; started when it is needed, and again after it has ended."""

    def __init__(self, source: str) -> None:
        self.command = [sys.executable, "-m", "tests.compat", "--worker", source]
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, **QUIET, "PYTHONPATH": path}
        self.process: subprocess.Popen[str] | None = None

    def ask(self, name: str, limit: float) -> Finding:
        began = time.perf_counter()
        if not (self.process or self.start()):
            return self.lost("no process could be started")
        reply = self.exchange(name, limit)
        if reply:
            return Finding(**json.loads(reply))
        late = time.perf_counter() - began >= limit
        return self.lost(f"did not end within {limit:.0f} s" if late else "the process ended")

    def start(self) -> bool:
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=self.environment, text=True, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip
        return bool(self.exchange("", STARTING))

    def exchange(self, name: str, limit: float) -> str:
        """The process's answer; empty if it ends, or is not there in time."""
        assert self.process and self.process.stdin and self.process.stdout
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        try:
            if name:
                self.process.stdin.write(name + "\n")
                self.process.stdin.flush()
            return self.process.stdout.readline()
        except BrokenPipeError:
            return ""
        finally:
            timer.cancel()

    def lost(self, why: str) -> Finding:
        self.errors.seek(0)
        said = self.errors.read()
        self.stop()
        return Finding("traceback", problems=[why], detail=said)

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()  # waits, and closes the pipes
            self.errors.close()
            self.process = None


def run(cases: Sequence[Case], source: str, jobs: int, report: Callable[[Case, Finding], None]) -> None:
    """Carry out all cases, in order, with so many processes; `report` is called with each finding."""
    waiting, reporting = deque(cases), threading.Lock()

    def serve_cases() -> None:
        worker = Worker(source)
        try:
            while waiting:
                try:
                    case = waiting.popleft()
                except IndexError:
                    break
                found = worker.ask(case.name, LONGEST)
                with reporting:
                    report(case, found)
        finally:
            worker.stop()

    threads = [threading.Thread(target=serve_cases) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve(cases: dict[str, Case]) -> None:
    """The worker's side: names come in, findings go out, a line each."""
    # Whatever libraries print goes to stderr, or it would get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")

    def say(line: Any) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    extras.prepare()
    say("ready")
    for line in sys.stdin:
        say(asdict(carry_out(cases[line.rstrip("\n")])))
