"""pfl-research's CIFAR-10 benchmark: Flower's simulation through its public API beside undrift, in one run.

    python -m benchmarks.flower [--rounds 20] [--actors 1 2] [--json FILE]

The problem is in `cifar10.py`, the Flower app in `flower_app.py`. A figure is the median of whole rounds, without the
start of Ray and the first rounds. Needs `pip install "flwr[simulation]==1.41.0"` (or a folder that has it on
PYTHONPATH). Each of `--actors` is a row of its own: so many clients train at a time, each in a process with a share of
`--threads` or of the GPU. The app has a node for each user of a cohort; a last row has one for each of all 1,000.
"""

from __future__ import annotations

import logging
import os
import tempfile
from functools import partial
from importlib.metadata import version

import torch

from benchmarks import beside
from benchmarks.agree import Weights, finite
from benchmarks.cifar10 import COHORT, DEVICE, USERS, between, first_round

INSTALL = 'pip install "flwr[simulation]==1.41.0"'
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def train(
    rounds: int, threads: int, actors: int, nodes: int, orders: dict[int, torch.Tensor] | None = None
) -> tuple[list[float], Weights]:
    """When each round ended, and the weights after the last; actors have the data in their memory."""
    from flwr.simulation import run_simulation

    from benchmarks.flower_app import client, server

    ends: list[float] = []
    weights: dict[str, torch.Tensor] = {}
    gpus = 1 if DEVICE == "cuda" else 0
    run_simulation(
        server_app=server(rounds, nodes, max(1, threads // actors), ends, orders, weights),
        client_app=client,
        num_supernodes=nodes,
        backend_config={
            "init_args": {"num_cpus": actors, "num_gpus": gpus, "log_to_driver": False, "logging_level": logging.ERROR},
            "client_resources": {"num_cpus": 1, "num_gpus": gpus / actors},
        },
    )
    if len(ends) != rounds:
        raise SystemExit(f"Flower finished {len(ends)} of {rounds} rounds.")
    finite("Flower", weights)
    return ends, weights


def peer(rounds: int, threads: int, actors: int, nodes: int) -> beside.Peer:
    return beside.Peer(
        lambda: between(train(rounds, threads, actors, nodes)[0], rounds // 5),
        lambda: train(1, threads, actors, nodes, first_round())[1],
        "tf32" if DEVICE == "cuda" else "float32",
    )


def main() -> None:
    parser = beside.options(__doc__)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 4, 8] if DEVICE == "cuda" else [1, 2])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= QUIET | {"FLWR_HOME": home}
        beside.need(INSTALL, "flwr", "ray")
        logging.getLogger("flwr").setLevel(logging.ERROR)
        flower, most = f"Flower {version('flwr')}", max(chosen.actors)
        of = partial(peer, chosen.rounds, chosen.threads)
        sides = {f"{flower}, {n} at a time": of(n, COHORT) for n in chosen.actors}
        sides[f"{flower}, {most} at a time, {USERS:,} nodes"] = of(most, USERS)
        beside.compare("Flower", sides, chosen, ray=version("ray"))


if __name__ == "__main__":
    main()
