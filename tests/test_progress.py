"""The progress of a run: when a line is shown, what it says, and that nothing waits for it."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import undrift as ud
from tests.problems import make_clients, net
from undrift.training import loop, progress
from undrift.training.observers import Observers
from undrift.training.progress import Progress

OPTIONS = {"rounds": 4, "local": ud.Local(steps=1, batch_size=4, lr=0.1), "participation": 2}
DATA = make_clients([9, 5, 7])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(rounds: int, seconds: float, stream: io.StringIO, done: int = 0, evaluate_every: int = 1) -> list[str]:
    """The lines of a made-up run whose rounds take so many seconds."""
    now = [0.0]
    with Progress(rounds, done, "about", ["f1"], stream, lambda: now[0]) as shown:
        for t in range(done + 1, rounds + 1):
            now[0] += seconds
            figures = {"loss": 2 / t, "f1": t / rounds} if t % evaluate_every == 0 else {}
            shown.row({"round": t, "samples": 10, **figures})
    return stream.getvalue().splitlines()


def rounds_of(lines: list[str]) -> list[int]:
    return [int(re.match(r"round +(\d+)/", line)[1]) for line in lines]


def test_a_log_line_for_every_twentieth_of_the_rounds_or_thirty_seconds():
    about, *lines = watched(100, 0.1, io.StringIO())
    assert about == "about" and rounds_of(lines) == [1, *range(6, 100, 5), 100]
    assert lines[1] == "round 6/100, f1 0.0600, loss 0.3333, 0:09 left", "94 rounds of 0.1 s"
    assert lines[-1] == "round 100/100, f1 1.0000, loss 0.0200, 0:10 in all"
    assert rounds_of(watched(1000, 12.0, io.StringIO())[1:])[:4] == [1, 4, 7, 10], "three rounds take 36 seconds"
    assert len(watched(100_000, 0.001, io.StringIO())) <= 23


def test_a_resumed_run_and_rounds_without_an_evaluation():
    _, *lines = watched(20, 60.0, io.StringIO(), done=10, evaluate_every=6)
    assert lines[0] == "round 11/20, 9:00 left", "nothing is known of the rounds before"
    assert lines[1] == "round 12/20, f1 0.6000, loss 0.1667, 8:00 left"
    assert lines[2].startswith("round 13/20, f1 0.6000, loss 0.1667"), "those of the latest evaluation"
    assert progress.format_duration(3725.4) == "1:02:05"


@pytest.mark.parametrize("columns", [30, 44, 60, 100, 200])
def test_the_live_line_keeps_the_round_on_narrow_terminals(columns):
    shown = Progress(3000, 0, "", ["accuracy"], io.StringIO(), lambda: 7.0)
    with shown:
        shown.row({"round": 12, "samples": 5, "accuracy": 0.5, "loss": 1.25})
        line = shown.line(12, 3600.0, columns)
    assert len(line) < columns and line.startswith("round   12/3000")
    assert ("left" in line) == (columns >= 44) and ("accuracy 0.5000" in line) == (columns >= 60)
    assert ("samples/s" in line) == (columns >= 100)


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_has_one_line_that_is_updated(monkeypatch, rich):
    found = progress.importlib.util.find_spec
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: found(name) if rich else None)
    stream = Terminal()
    watched(40, 0.25, stream)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "round 17/40" in text and text.rstrip().endswith("0:10 in all")
    assert len(text.splitlines()) > 40 or "\r" in text
    assert ("\x1b" in stream.getvalue()) == rich


def test_a_notebook_gets_a_plain_line_and_a_file_no_control_characters(monkeypatch, capsys):
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    ud.train(net(), DATA, progress=True, **OPTIONS)
    said = capsys.readouterr().out
    assert "\rround 4/4" in said and "\x1b" not in said
    monkeypatch.delitem(sys.modules, "IPython")
    ud.train(net(), DATA, progress=True, **OPTIONS)
    said = capsys.readouterr().out
    assert said.startswith("4 rounds, 2 of 3 clients per round, ") and not set(said) & {"\r", "\x1b"}
    ud.train(net(), DATA, **OPTIONS)
    assert capsys.readouterr().out == "", "unless it is asked for"


def test_it_makes_no_round_wait(monkeypatch):
    """Rows come as they settle: neither is the loop impatient, nor is a row asked for before its time."""
    seen = []

    def watched_observers(*arguments):
        found = Observers(*arguments)
        seen.append((found.impatient, found.progress is not None))
        return found

    monkeypatch.setattr(loop, "Observers", watched_observers)
    ud.train(net(), DATA, progress=True, **OPTIONS)
    assert seen == [(False, True)]


def test_a_run_that_ends_early_shows_its_last_round(capsys):
    ud.train(
        net(), DATA, progress=True, **{**OPTIONS, "rounds": 400}, stop_when=lambda rows: len(rows) == 5 and "enough"
    )
    assert "round 5/400" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(ud.UndriftError, match="progress must be True or False"):
        ud.train(net(), DATA, progress="yes", **OPTIONS)


EXPERIMENT = """
model = "logistic"
rounds = 3
participation = 3
[data]
name = "digits"
clients = 5
[local]
steps = 1
lr = 0.1
"""


def test_undrift_run_on_a_terminal_of_sixty_columns(tmp_path):
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": "60", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "undrift", "run", "e.toml", "--out", "r"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=slave, stderr=slave, stdin=slave)
    os.close(slave)
    said = b""
    while True:
        try:
            said += os.read(master, 65536)
        except OSError:  # its end, as Linux says it
            break
    os.close(master)
    assert process.wait() == 0, said
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()))
    assert "3 rounds, 3 of 5 clients per round, lanes engine on cpu" in lines
    assert any(re.fullmatch(r"round 3/3 .*loss \d\.\d+ .*in all *", line) for line in lines), lines
