"""pfl-research's CIFAR-10 benchmark: pfl 0.6.0 through its public API beside undrift, on the same data, in one run.

    python -m benchmarks.pfl [--rounds 20] [--json FILE]

1,000 users of 50 samples, a cohort of 50, batches of 10, one local epoch, its CNN of 1.6 million parameters. A figure
is the median of whole rounds: sampling, local training, aggregation, the server's step. Needs `pip install pfl==0.6.0`
(or a folder that has it on PYTHONPATH). Samples are random bytes: what is timed does not depend on them. Where torch
sees no GPU, both sides run on the CPU, on `--threads` of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import undrift as ud

USERS, EACH, COHORT, BATCH, LR = 1000, 50, 50, 10, 0.1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class CNN(nn.Sequential):
    """The benchmark's network; `loss` and `metrics` are what pfl asks a module for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.train(not eval)
        return F.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict:
        return {}


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (USERS * EACH, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return x, torch.randint(0, 10, (USERS * EACH,), generator=generator)


def theirs(rounds: int, precision: str) -> float:
    """Seconds a round takes pfl, its data on the GPU beforehand, as its benchmark has them."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    x, y = samples()
    x, y = (x.float() / 255).to(DEVICE), y.to(DEVICE)

    def user(i: int) -> Dataset:
        rows = slice(i * EACH, (i + 1) * EACH)
        return Dataset(raw_data=[x[rows], y[rows]], user_id=str(i))

    data = FederatedDataset(user, get_user_sampler("random", list(range(USERS))))
    module = CNN()
    low = torch.bfloat16 if precision == "bfloat16" else None
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    model = PyTorchModel(module, torch.optim.SGD, optimizer, amp_dtype=low)
    times: list[float] = []

    class Watch(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[Watch()],
        send_metrics_to_platform=False,
    )
    return statistics.median(b - a for a, b in itertools.pairwise(times[rounds // 10 :]))


def ours(rounds: int, precision: str, compile: bool | None = None) -> float:
    """Seconds a round takes undrift: the wall clock over all rounds but the first ones."""
    x, y = samples()
    owner = np.repeat(np.arange(USERS), EACH)
    data = ud.FederatedDataset.from_owners({"x": x, "y": y}, np.arange(len(y)), owner, USERS)
    local = ud.Local(epochs=1, batch_size=BATCH, lr=LR)
    run = ud.train(
        CNN(), data, rounds=rounds, local=local, participation=COHORT, precision=precision, compile=compile,
        evaluate_every=rounds,
    )  # fmt: skip
    return statistics.median(row["seconds"] for row in run.history[rounds // 5 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20 if DEVICE == "cuda" else 5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(arguments.threads)
    gpu = {
        "pfl 0.6.0, tf32": lambda: theirs(arguments.rounds, "tf32"),
        "pfl 0.6.0, bf16": lambda: theirs(arguments.rounds, "bfloat16"),
        "undrift, tf32": lambda: ours(60, "tf32", False),
        "undrift, tf32, compiled": lambda: ours(60, "tf32", True),
        "undrift, bf16": lambda: ours(60, "bfloat16", False),
        "undrift, bf16, compiled": lambda: ours(60, "bfloat16", True),
    }
    cpu = {
        "pfl 0.6.0": lambda: theirs(arguments.rounds, "auto"),
        "undrift": lambda: ours(arguments.rounds, "auto"),
    }
    sides = gpu if DEVICE == "cuda" else cpu
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(arguments.repeats):  # by turns, so that a slow minute slows both
        for side, run in sides.items():
            times[side].append(run())
    median = {side: statistics.median(values) for side, values in times.items()}
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{arguments.threads} threads of a CPU"
    print(f"{where}, torch {torch.__version__}")
    print(f"{'':26}{'ms a round':>12}{'÷ pfl':>14}{'spread':>16}")
    for side, seconds in median.items():
        spread = f"{1e3 * min(times[side]):.2f} – {1e3 * max(times[side]):.2f}"
        print(f"{side:26}{1e3 * seconds:12.2f}{next(iter(median.values())) / seconds:13.2f}×{spread:>16}")
    if arguments.json:
        rows = [{"side": s, "ms": 1e3 * m, "all": [1e3 * t for t in times[s]]} for s, m in median.items()]
        head = {"benchmark": "pfl", "gpu": where, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
