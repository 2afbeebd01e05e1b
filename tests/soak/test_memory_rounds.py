"""Five thousand rounds, with a run folder and checkpoints: resident memory settles and stays.

Each run is a process of its own, so that nothing else is in its memory. What may grow is the history, which a run keeps
until it returns it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ROUNDS, SETTLED = 5000, 200

SCRIPT = """
import json, sys
from pathlib import Path
import torch
import undrift as ud

torch.set_num_threads(1)
method, rounds, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
resident = []

def look(row):
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident.append(pages)

ud.train(
    "mlp",
    ud.load("digits", partition="Dirichlet(0.3)", clients=20),
    method,
    rounds=rounds,
    local=ud.Local(steps=2, batch_size=16, lr=0.05),
    participation=0.2,
    evaluate_every=10,
    out=folder,
    checkpoint_every=100,
    on_round=look,
)
print(json.dumps(resident))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
@pytest.mark.parametrize("method", ["FedAvg()", "Scaffold()"])
def test_memory_of_five_thousand_rounds(tmp_path, method):
    command = [sys.executable, "-c", SCRIPT, method, str(ROUNDS), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    resident = json.loads(done.stdout.splitlines()[-1])
    assert len(resident) == ROUNDS
    growth = max(resident[SETTLED:]) / resident[SETTLED - 1] - 1
    at = {
        r: f"{resident[r - 1] * os.sysconf('SC_PAGE_SIZE') / 2**20:.1f} MiB" for r in (1, SETTLED, 1000, 2500, ROUNDS)
    }
    print(f"{method}: {at}, {growth:+.2%} after round {SETTLED}")
    assert growth < 0.02
