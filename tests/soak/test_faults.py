"""30% dropout, 10% NaN and 20% stragglers at once, 200 rounds on digits: near the clean run, and all accounted for.

make soak
"""

from __future__ import annotations

import pytest

import undrift as ud

FAULTS = ud.Faults(dropout=0.3, stragglers=0.2, nan=0.1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["FedAvg()", "Scaffold()"])
def test_two_hundred_rounds_with_faulty_clients(method, seed):
    data = ud.load("digits", ud.Dirichlet(0.3), clients=20, seed=seed)
    local = ud.Local(epochs=1, batch_size=16, lr=0.05)
    settings = {"rounds": 200, "local": local, "participation": 10, "seed": seed, "evaluate_every": 200}
    clean = ud.train("mlp", data, method, **settings)
    faulty = ud.train("mlp", data, method, faults=FAULTS, on_nonfinite="skip", **settings)
    assert faulty.stopped is None and len(faulty.history) == 200
    tally = dict.fromkeys(("survivors", "dropped", "skipped", "stragglers"), 0)
    for row, before in zip(faulty.history, clean.history, strict=True):
        gone = row["dropped"] + row["skipped"]
        assert row["clients"] == before["clients"] and set(gone) | set(row["stragglers"]) <= set(row["clients"])
        assert len(set(gone)) == len(gone) == 10 - row["survivors"]
        for name in tally:
            tally[name] += row[name] if name == "survivors" else len(row[name])
    scores = [run.history[-1]["accuracy"] for run in (clean, faulty)]
    print(f"\n{method}, seed {seed}: clean {scores[0]:.4f}, faulty {scores[1]:.4f}; of 2000 sampled: {tally}")
    assert abs(scores[0] - scores[1]) <= 0.03
