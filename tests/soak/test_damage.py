"""Bit flips, cuts and removals at 200 random places of run folders, each followed by `undrift resume`.

A resumed run ends with the bits of an unbroken one, or in an error that names the damaged file; never in other weights.

make soak
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.killing import EXPERIMENT, count, finish, undrift, what_it_left

METHODS = ["FedAvg()", "Scaffold()", "FedDyn(0.1) + FedNLR()", "TwoDLRD(5)", "ServerAdam(0.01)"]
PLACES = 40
ROUNDS = 30

# Many resumes in one process, since torch takes seconds to import: a folder a line in, an exit code and a message out.
SERVE = """
import contextlib, io, json, sys
import torch
from undrift.tools.cli import main
for line in sys.stdin:
    said, code = io.StringIO(), 0
    sys.argv = ["undrift", "resume", line.strip()]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    print(json.dumps([code, said.getvalue()]), flush=True)
"""


def damage(folder: Path, chance: random.Random) -> tuple[str, str]:
    """Damage one file somewhere; returns its name and what was done to it."""
    file = chance.choice(sorted(f for f in folder.rglob("*") if f.is_file()))
    how = chance.choice(["flip", "flip", "cut", "remove"])
    bits = bytearray(file.read_bytes())
    if how == "remove":
        file.unlink()
    elif how == "cut":
        file.write_bytes(bits[: chance.randrange(len(bits))])
    else:
        place = chance.randrange(len(bits))
        bits[place] ^= 1 << chance.randrange(8)
        file.write_bytes(bits)
    return str(file.relative_to(folder)), how


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ended", [False, True], ids=["stopped", "finished"])
def test_damage_at_random_places(tmp_path, method, ended):
    (tmp_path / "e.toml").write_text(EXPERIMENT.format(method=method, rounds=ROUNDS))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(undrift("run", "e.toml", "--out", whole, cwd=tmp_path))
    expected = what_it_left(whole)
    if ended:
        shutil.copytree(whole, broken)
    else:
        process = undrift("run", "e.toml", "--out", broken, cwd=tmp_path)
        while process.poll() is None and count(broken) < 9:
            pass
        process.kill()
        process.communicate()
        assert count(broken) < ROUNDS, "it was too fast to be killed"
    command = [sys.executable, "-c", SERVE]
    chance, fates = random.Random(len(method) + ended), Counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        assert server.stdin and server.stdout
        for i in range(PLACES // 2):
            folder = tmp_path / f"copy-{i}"
            shutil.copytree(broken, folder)
            name, how = damage(folder, chance)
            server.stdin.write(f"{folder}\n")
            server.stdin.flush()
            code, said = json.loads(server.stdout.readline())
            fates[fate(folder, expected, Path(name).name, code, said, f"{name}, {how}: {code} {said}")] += 1
            shutil.rmtree(folder)
        server.stdin.close()
    print(f"{method}, {'finished' if ended else 'stopped'}: {dict(fates)}")


def fate(folder: Path, expected: object, name: str, code: int, said: str, case: str) -> str:
    """What became of the run; fails if it is neither the same bits nor an error that names the file."""
    if code == 0:
        assert what_it_left(folder) == expected, case
        return "same bits"
    assert code == 2 and name in said, case
    return "refused"
