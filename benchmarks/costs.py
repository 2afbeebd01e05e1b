"""What each method costs relative to FedAvg, measured; and the page of methods, which shows it.

    python -m benchmarks.costs [--repeats 5]              measure, into benchmarks/results/costs.json
    python -m benchmarks.costs --only FedAdam             measure those with this in their names, keep the rest
    python -m benchmarks.costs --write docs/methods.md    write the page, from that file and from the docstrings

Times are those of whole rounds on the digits MLP (20 clients, batch size 10). A method and FedAvg take turns in one
process, and the figure is the median of the ratios of their times; FedAvg is also measured against itself, which shows
the noise. Bytes are those of the trees that are sent and kept, in multiples of the size of the weights. Each run must
agree with the plain engine after two rounds, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

import undrift as ud
from benchmarks import record
from benchmarks.agree import Problem
from scripts.catalogue import HOOKS as HOOKS
from scripts.catalogue import METHODS, page
from undrift.training.build import prepare
from undrift.training.settings import Settings
from undrift.tree import tree_bytes

LOCAL = ud.Local(epochs=1, batch_size=10, lr=0.1)
ROUNDS = 60


def data() -> ud.FederatedDataset:
    return ud.load("digits", ud.IID(), clients=20, server_fraction=0.05)


def problem(method: str, held: ud.FederatedDataset) -> Problem:
    model = ud.models.get("mlp", classes=held.classes, shape=held[0][0].shape[1:])
    return Problem(model, held, LOCAL, method, rounds=2)


def seconds(side: str, given: Problem) -> tuple[float, float]:
    """Seconds per round, and the distance from the plain engine's weights."""
    run, apart = given.train(side, ROUNDS, evaluate_every=ROUNDS)
    return statistics.median(row["seconds"] for row in run.history[2:-1]), apart  # the first trace, the last finishes


def traffic(expression: str, held: ud.FederatedDataset) -> dict[str, float]:
    """Bytes that a client receives, sends and keeps, and that the server keeps, as multiples of the weights' size."""
    given = Settings(model="mlp", data=held, method=expression, rounds=1, local=LOCAL, device="cpu", engine="lanes")
    run = prepare(given)
    with torch.no_grad():
        method = run.bound(0)
        state = run.start()
        received = method.broadcast(state.params, state.parts, run.server(0, state))
        plan, _ = method.plan(run.plan(0), state.parts, run.server(0, state))
        inputs = run.inputs(run.checked(plan, 0), state, received, state.clients)
        outcome = run.engine.run(inputs)
    weights = tree_bytes(run.model.start)
    kept = sum(tree_bytes(next(iter(states.values()))) for states in outcome.kept.values())
    return {
        "down": 1 + tree_bytes(inputs.shared["received"]) / weights,
        "up": 1 + tree_bytes(outcome.sums) / weights,
        "kept": kept / weights,
        "server": tree_bytes(state.parts) / weights,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    file = Path(__file__).parent / "results" / "costs.json"
    if arguments.write:
        arguments.write.write_text(page(json.loads(file.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    torch.set_num_threads(2)
    held, rows = data(), json.loads(file.read_text(encoding="utf-8"))["rows"] if arguments.only else {}
    base = problem("FedAvg()", held)
    for expression in (e for group in METHODS.values() for e in group if arguments.only in e):
        given, ratios, apart = problem(expression, held), [], 0.0
        for _ in range(arguments.repeats):
            took, apart = seconds(expression, given)
            ratios.append(took / seconds("FedAvg()", base)[0])
        rows[expression] = {"round": statistics.median(ratios), **traffic(expression, held)}
        figures = "".join(f"{k} {v:6.2f}  " for k, v in rows[expression].items())
        print(f"{expression:50}{figures}agrees to {apart:.0e}", flush=True)
        rows[expression]["agrees"] = apart
    found = {**record.head("costs"), "rows": rows}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
