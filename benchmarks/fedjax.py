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
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from benchmarks import beside
from benchmarks.agree import Weights, finite
from benchmarks.cifar10 import BATCH, CNN, COHORT, DEVICE, EACH, LR, USERS, between, first_round, samples


def train(rounds: int, orders: dict[int, torch.Tensor] | None = None) -> tuple[list[float], Weights]:
    """When each round ended, and the weights after the last, with the jit backend and JAX's layout, channels last.

    With `orders`, every round has these users, with their samples in this order, and no dropout.
    """
    import jax

    jax.tree_map = jax.tree_util.tree_map
    import fedjax
    import haiku as hk

    pictures, labels = samples()
    x = (pictures.float() / 255).permute(0, 2, 3, 1).contiguous().numpy()
    y = labels.int().numpy()
    rows = {i: order.numpy() for i, order in orders.items()} if orders else {}
    rows = rows or {i: slice(i * EACH, (i + 1) * EACH) for i in range(USERS)}
    data = fedjax.InMemoryFederatedData({i: {"x": x[mine], "y": y[mine]} for i, mine in rows.items()})

    def network(batch: dict[str, jax.Array]) -> jax.Array:
        def drop(rate: float) -> Any:
            return lambda z: z if orders else hk.dropout(hk.next_rng_key(), rate, z)

        layers = [
            hk.Conv2D(32, 3, padding="VALID"), jax.nn.relu, hk.Conv2D(64, 3, padding="VALID"), jax.nn.relu,
            hk.MaxPool(2, 2, "VALID"), drop(0.25), hk.Flatten(), hk.Linear(128), jax.nn.relu, drop(0.5), hk.Linear(10),
        ]  # fmt: skip
        return hk.Sequential(layers)(batch["x"])

    model = fedjax.create_model_from_haiku(
        hk.transform(network),
        sample_batch={"x": x[:BATCH], "y": y[:BATCH]},
        train_loss=lambda batch, z: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], z),
    )
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, skip_shuffle=bool(orders))
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(LR),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=batches,
    )
    cohorts = fedjax.client_samplers.UniformGetClientSampler(data, COHORT, seed=0)
    state = algorithm.init(jax.tree_util.tree_map(jax.numpy.asarray, to_haiku(CNN())))
    ends: list[float] = []
    for _ in range(rounds):
        state, _ = algorithm.apply(state, cohorts.sample())
        jax.block_until_ready(state.params)
        ends.append(time.perf_counter())
    weights = from_haiku(state.params)
    finite("FedJAX", weights)
    return ends, weights


LAYERS = {"conv2_d": "0", "conv2_d_1": "2", "linear": "7", "linear_1": "10"}
"""Haiku's names of the layers, and `CNN`'s."""


def to_haiku(module: CNN) -> dict[str, dict[str, np.ndarray]]:
    """The weights as Haiku has them: channels last, and so the hidden layer's inputs in another order."""
    found = {}
    for name, layer in LAYERS.items():
        w, b = (t.detach().numpy() for t in (module[int(layer)].weight, module[int(layer)].bias))
        if w.ndim == 4:
            w = w.transpose(2, 3, 1, 0)
        else:
            w = (w.reshape(-1, 64, 14, 14).transpose(0, 2, 3, 1).reshape(len(w), -1) if name == "linear" else w).T
        found[name] = {"w": np.ascontiguousarray(w), "b": b}
    return found


def from_haiku(params: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    found = {}
    for name, layer in LAYERS.items():
        w, b = (torch.tensor(np.asarray(params[name][part])) for part in ("w", "b"))
        if w.dim() == 4:
            w = w.permute(3, 2, 0, 1)
        else:
            w = w.T.reshape(-1, 14, 14, 64).permute(0, 3, 1, 2).flatten(1) if name == "linear" else w.T
        found |= {f"{layer}.weight": w, f"{layer}.bias": b}
    return found


def main() -> None:
    chosen = beside.options(__doc__).parse_args()
    if DEVICE == "cuda":
        raise SystemExit("FedJAX is timed on a CPU: hide the GPU from undrift with CUDA_VISIBLE_DEVICES=''.")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: chosen.threads])  # JAX has no setting for its threads
    beside.need("pip install fedjax==0.0.17 jax==0.7.2 jaxlib==0.7.2", "jax", "haiku", "optax")
    peer = beside.Peer(lambda: between(train(chosen.rounds)[0], chosen.rounds // 5), lambda: train(1, first_round())[1])
    beside.compare("FedJAX", {f"FedJAX {version('fedjax')}": peer}, chosen, jax=version("jax"))


if __name__ == "__main__":
    main()
