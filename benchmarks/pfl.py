"""pfl-research's CIFAR-10 benchmark: pfl 0.6.0 through its public API beside undrift, on the same data, in one run.

    python -m benchmarks.pfl [--rounds 20] [--json FILE]

The problem is in `cifar10.py`. A figure is the median of whole rounds: sampling, local training, aggregation, the
server's step. Needs `pip install pfl==0.6.0` (or a folder that has it on PYTHONPATH). Where torch sees no GPU, both
sides run on the CPU, on `--threads` of it.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from benchmarks import beside
from benchmarks.cifar10 import BATCH, CNN, COHORT, DEVICE, EACH, LR, USERS, between, samples


class Asked(CNN):
    """The network with what pfl asks a module for."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.train(not eval)
        return F.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict:
        return {}


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
    module = Asked()
    low = torch.bfloat16 if precision == "bfloat16" else None
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    model = PyTorchModel(module, torch.optim.SGD, optimizer, amp_dtype=low)
    ends: list[float] = []

    class Watch(TrainingProcessCallback):
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
        callbacks=[Watch()],
        send_metrics_to_platform=False,
    )
    return between(ends, rounds // 10)


def main() -> None:
    chosen = beside.options(__doc__).parse_args()
    beside.need("pip install pfl==0.6.0", "pfl")
    gpu = {
        "pfl 0.6.0, tf32": lambda: theirs(chosen.rounds, "tf32"),
        "pfl 0.6.0, bf16": lambda: theirs(chosen.rounds, "bfloat16"),
    }
    cpu = {"pfl 0.6.0": lambda: theirs(chosen.rounds, "auto")}
    beside.compare("pfl", gpu if DEVICE == "cuda" else cpu, chosen)


if __name__ == "__main__":
    main()
