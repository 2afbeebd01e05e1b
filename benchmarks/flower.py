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

from benchmarks import beside
from benchmarks.cifar10 import COHORT, DEVICE, USERS, between

INSTALL = 'pip install "flwr[simulation]==1.41.0"'
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def theirs(rounds: int, threads: int, actors: int, nodes: int) -> float:
    """Seconds a round takes Flower, its actors with the data in their memory."""
    from flwr.simulation import run_simulation

    from benchmarks.flower_app import client, server

    ends: list[float] = []
    gpus = 1 if DEVICE == "cuda" else 0
    run_simulation(
        server_app=server(rounds, nodes, max(1, threads // actors), ends),
        client_app=client,
        num_supernodes=nodes,
        backend_config={
            "init_args": {"num_cpus": actors, "num_gpus": gpus, "log_to_driver": False, "logging_level": logging.ERROR},
            "client_resources": {"num_cpus": 1, "num_gpus": gpus / actors},
        },
    )
    return between(ends, rounds // 5)


def main() -> None:
    parser = beside.options(__doc__)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 4, 8] if DEVICE == "cuda" else [1, 2])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= QUIET | {"FLWR_HOME": home}
        beside.need(INSTALL, "flwr", "ray")
        logging.getLogger("flwr").setLevel(logging.ERROR)
        flower, most = f"Flower {version('flwr')}", max(chosen.actors)
        time = partial(theirs, chosen.rounds, chosen.threads)
        sides = {f"{flower}, {n} at a time": partial(time, n, COHORT) for n in chosen.actors}
        sides[f"{flower}, {most} at a time, {USERS:,} nodes"] = partial(time, most, USERS)
        beside.compare("Flower", sides, chosen, ray=version("ray"))


if __name__ == "__main__":
    main()
