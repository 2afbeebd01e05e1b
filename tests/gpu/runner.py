"""Deals checks to worker processes and prints a line for each finding.

A check may crash its process, or leave the GPU unusable for it: that costs this one check, and the process is replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.gpu.checks import Check, Finding

ROOT = Path(__file__).parent.parent.parent
STARTING, LONGEST = 120.0, 300.0
"""Seconds after which a process that starts, or a check, counts as hung."""


class Worker:
    """A process, started when it is first needed and again after it has ended."""

    def __init__(self, source: str, device: str) -> None:
        self.command = [sys.executable, "-m", "tests.gpu", "--worker", "--checks", source, "--device", device]
        # A worker has a core to itself; the compiler would otherwise start a pool of processes for each.
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self.process: subprocess.Popen[str] | None = None
        self.errors: Any = None

    def ask(self, check: Check, limit: float) -> list[tuple[Finding, float]]:
        """A check's findings, with how long each took."""
        began = time.perf_counter()
        if not self._start():
            return self._lost(f"no process could be started: {self._last_words()}", began)
        began = time.perf_counter()
        reply = self._line(limit, check.key)
        if not reply:
            late = time.perf_counter() - began >= limit
            return self._lost(f"did not end within {limit:.0f} s" if late else self._last_words(), began)
        answer = json.loads(reply)
        if not answer["usable"]:
            self.stop()
        found = [Finding(**each) for each in answer["findings"]]
        return [(each, answer["seconds"] if each.seconds is None else each.seconds) for each in found]

    def _line(self, limit: float, say: str | None = None) -> str:
        """The next line from the process, after telling it something; nothing if it ends, or has not by then."""
        process = self.process
        assert process and process.stdin and process.stdout
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            if say:
                process.stdin.write(say + "\n")
                process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return ""
        finally:
            timer.cancel()

    def _lost(self, why: str, began: float) -> list[tuple[Finding, float]]:
        errors = self._errors()
        self.stop()
        return [(Finding("FAIL", why, detail=errors), time.perf_counter() - began)]

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()  # waits, and closes the pipes
            self.errors.close()
            self.process = None

    def _start(self) -> bool:
        """Whether there is a process that waits for a check."""
        if self.process and self.process.poll() is None:
            return True
        self.stop()
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=self.env, text=True, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip
        return bool(self._line(STARTING))

    def _last_words(self) -> str:
        assert self.process
        lines = self._errors().strip().splitlines()
        return f"the process ended with status {self.process.wait()}" + (f": {lines[-1].strip()}" if lines else "")

    def _errors(self) -> str:
        """What it has written to stderr."""
        self.errors.seek(0)
        return self.errors.read()


def run(checks: Iterable[Check], source: str, device: str, workers: int, limit: float, log: Path | None = None) -> bool:
    """Carry out all checks within `limit` seconds, the longest first. Returns whether all of them passed.

    `log` is a file for the lines and, after each, what is behind a failure.
    """
    checks = sorted(checks, key=lambda check: -check.seconds)
    waiting, reported = deque(checks), set()
    began, counts, printing = time.perf_counter(), Counter[str](), threading.Lock()

    def report(check: Check, finding: Finding, seconds: float) -> None:
        with printing:
            counts[finding.status] += 1
            reported.add(check.key)
            name = finding.name or check.name
            line = f"{finding.status:<6} {check.group}  {name}: {finding.says}  ({seconds:.1f} s)"
            print(line, flush=True)
            if log:
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n{finding.detail}")

    def serve() -> None:
        worker = Worker(source, device)
        while True:
            try:
                check = waiting.popleft()
            except IndexError:
                break
            left = began + limit - time.perf_counter()
            if left <= 0:
                report(check, Finding("absent", f"not run within the {limit:.0f} s for all checks"), 0.0)
                continue
            found = worker.ask(check, min(LONGEST, left))
            for finding, seconds in found or [(Finding("absent", "found nothing"), 0.0)]:
                report(check, finding, seconds)
        worker.stop()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(workers, len(waiting)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for check in checks:  # whatever went wrong, none is left out without a word
        if check.key not in reported:
            report(check, Finding("absent", "never ran"), 0.0)
    absent = f", {counts['absent']} absent" if counts["absent"] else ""
    print(f"{time.perf_counter() - began:.0f} s with {len(threads)} processes on {device}")
    print(f"{counts['ok']} passed, {counts['FAIL']} failed{absent}", flush=True)
    return counts["ok"] > 0 and set(counts) == {"ok"}
