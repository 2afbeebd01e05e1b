"""pfl-research's CIFAR-10 benchmark: pfl 0.6.0 through its public API beside undrift, on the same data, in one run.

    python -m benchmarks.pfl [--rounds 20] [--json FILE]

The problem is in `cifar10.py`. A figure is the median of whole rounds: sampling, local training, aggregation, the
server's step. Needs `pip install pfl==0.6.0` (or a folder that has it on PYTHONPATH). Where torch sees no GPU, both
sides run on the CPU, on `--threads` of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import beside
from benchmarks.agree import Weights, finite
from benchmarks.cifar10 import BATCH, CNN, COHORT, DEVICE, EACH, LR, USERS, between, first_round, problem, samples
from benchmarks.warm import Job


class Asked(CNN):
    """The network with what pfl asks a module for."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.train(not eval)
        return F.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict:
        return {}


def train(
    module: Asked, rounds: int, precision: str, users: list[int], sampling: str, rows_of: Callable[[int], object]
) -> list[float]:
    """Train the module with pfl, its data on the device beforehand, as its benchmark has them; when each round ended.

    `users` are sampled as pfl's `sampling` does ("random", or "minimize_reuse": one after another); `rows_of(i)` are
    user i's samples, which pfl takes in that order.
    """
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
        rows = rows_of(i)
        return Dataset(raw_data=[x[rows], y[rows]], user_id=str(i))

    data = FederatedDataset(user, get_user_sampler(sampling, users))
    low = torch.bfloat16 if precision == "bfloat16" else None
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    model = PyTorchModel(module, torch.optim.SGD, optimizer, amp_dtype=low)
    ends: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    finite(f"pfl, {precision}", dict(module.named_parameters()))
    return ends


def timed(rounds: int, precision: str) -> float:
    """Seconds per round."""
    rows = [slice(i * EACH, (i + 1) * EACH) for i in range(USERS)]
    return between(train(Asked(), rounds, precision, list(range(USERS)), "random", rows.__getitem__), rounds // 10)


def once(precision: str) -> Weights:
    """The weights after undrift's first round, without dropout."""
    module, orders = Asked(dropout=False), first_round()
    train(module, 1, precision, list(orders), "minimize_reuse", lambda i: orders[i].to(DEVICE))
    return dict(module.named_parameters())


def jobs() -> list[Job]:
    """What compiles undrift's sides ahead of time."""
    return [["benchmarks.pfl", "--compile-only", precision] for precision in ("tf32", "bfloat16")]


def peer(rounds: int, precision: str) -> beside.Peer:
    return beside.Peer(partial(timed, rounds, precision), partial(once, precision), precision)


def main() -> None:
    parser = beside.options(__doc__)
    parser.add_argument("--compile-only", metavar="PRECISION", help="compile undrift's side and print no figures")
    chosen = parser.parse_args()
    if chosen.compile_only:
        problem().run(1, precision=chosen.compile_only, compile=True)
        return
    beside.need("pip install pfl==0.6.0", "pfl")
    gpu = {"pfl 0.6.0, tf32": peer(chosen.rounds, "tf32"), "pfl 0.6.0, bf16": peer(chosen.rounds, "bfloat16")}
    beside.compare("pfl", gpu if DEVICE == "cuda" else {"pfl 0.6.0": peer(chosen.rounds, "float32")}, chosen)


if __name__ == "__main__":
    main()
