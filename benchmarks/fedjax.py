"""pfl-research's CIFAR-10 benchmark: FedJAX 0.0.17 through its public API beside undrift, in one run, on a CPU.

    python -m benchmarks.fedjax [--rounds 5] [--json FILE]

The problem is in `cifar10.py`. A figure is the median of whole rounds, without compilation and the first rounds. Needs
`pip install fedjax==0.0.17 jax==0.7.2 jaxlib==0.7.2` (or a folder that has them on PYTHONPATH). FedJAX's last release
calls `jax.tree_map`, which JAX has removed. With that one name put back it runs on JAX 0.10.2, the newest tried; 0.7.2
is what it was fastest with on a CPU.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version

from benchmarks import beside
from benchmarks.cifar10 import BATCH, COHORT, DEVICE, EACH, LR, USERS, between, samples


def theirs(rounds: int) -> float:
    """Seconds a round takes FedJAX, with its jit backend and the layout that JAX prefers, channels last."""
    import jax

    jax.tree_map = jax.tree_util.tree_map
    import fedjax
    import haiku as hk

    pictures, labels = samples()
    x = (pictures.float() / 255).permute(0, 2, 3, 1).contiguous().numpy()
    y = labels.int().numpy()
    users = [slice(i * EACH, (i + 1) * EACH) for i in range(USERS)]
    data = fedjax.InMemoryFederatedData({i: {"x": x[rows], "y": y[rows]} for i, rows in enumerate(users)})

    def network(batch: dict[str, jax.Array]) -> jax.Array:
        layers = [
            hk.Conv2D(32, 3, padding="VALID"), jax.nn.relu, hk.Conv2D(64, 3, padding="VALID"), jax.nn.relu,
            hk.MaxPool(2, 2, "VALID"), hk.Flatten(), hk.Linear(128), jax.nn.relu, hk.Linear(10),
        ]  # fmt: skip
        return hk.Sequential(layers)(batch["x"])

    model = fedjax.create_model_from_haiku(
        hk.transform(network),
        sample_batch={"x": x[:BATCH], "y": y[:BATCH]},
        train_loss=lambda batch, z: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], z),
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(LR),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1),
    )
    cohorts = fedjax.client_samplers.UniformGetClientSampler(data, COHORT, seed=0)
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    ends: list[float] = []
    for _ in range(rounds):
        state, _ = algorithm.apply(state, cohorts.sample())
        jax.block_until_ready(state.params)
        ends.append(time.perf_counter())
    return between(ends, rounds // 5)


def main() -> None:
    chosen = beside.options(__doc__).parse_args()
    if DEVICE == "cuda":
        raise SystemExit("FedJAX is timed on a CPU: hide the GPU from undrift with CUDA_VISIBLE_DEVICES=''.")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: chosen.threads])  # JAX has no setting for its threads
    beside.need("pip install fedjax==0.0.17 jax==0.7.2 jaxlib==0.7.2", "jax", "haiku", "optax")
    side = f"FedJAX {version('fedjax')}"
    beside.compare("FedJAX", {side: lambda: theirs(chosen.rounds)}, chosen, jax=version("jax"))


if __name__ == "__main__":
    main()
