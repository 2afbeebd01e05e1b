"""LoRA on a transformer of 100 million parameters: the memory of lanes, and their speed beside an ordinary loop.

    python -m benchmarks.lora [--json FILE] [--tiny] [--seconds 75]

A BERT-base with random weights, frozen, has adapters of rank 8 at its queries and values: PEFT's where it can be
imported, otherwise the same formula written here. Each of 32 clients takes four steps of AdamW on batches of 8. One
row per way to compute, with
  memory    what is allocated on the GPU between two local steps, with one lane and with 32: the backbone is shared by
            all lanes, so only adapters, their moments and the samples may grow; 1.5 times is the limit in float32
  samples   samples per second of an ordinary PyTorch loop over the clients and of 32 lanes, median of warm rounds
Before a figure counts, the weights of both must agree after the first round. Prints one line of JSON. Without a GPU
memory is not measured; `--tiny` has small sizes for that. Rows that would begin after `--seconds` are left out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift as ud
from benchmarks import record
from benchmarks.agree import Weights, change, check, ended, finite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEMORY_LIMIT = 1.5
"""How many times the memory of one lane all lanes may have between steps."""
TARGETS = ("query", "value")
ALPHA = 16


@dataclass(frozen=True)
class Sizes:
    layers: int = 12
    width: int = 768
    vocabulary: int = 30_522
    length: int = 64
    clients: int = 32
    batch: int = 8
    steps: int = 4
    rounds: int = 4
    """How many rounds are taken on each side; the first, which traces and warms up, is not timed."""
    rank: int = 8
    lr: float = 1e-3
    """What Adam changes at every step does not depend on the gradients' size, so neither does any time."""

    @property
    def samples(self) -> int:
        """Samples in a round of all clients."""
        return self.clients * self.batch * self.steps


TINY = Sizes(layers=2, width=32, vocabulary=64, length=8, clients=4, batch=2, steps=3, rounds=2, rank=2)
ROWS = (("float32", "sdpa"), ("bfloat16", "sdpa"), ("float32", "eager"))
"""The backbone's precision and the attention of each row. Adapters and their moments are float32 throughout."""


class Adapted(nn.Module):
    """A frozen linear layer plus a product of two thin ones, `W·x + (α/r)·B·A·x`, as PEFT computes it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, ALPHA / rank
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base_layer(x)
        return (found + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scaling).to(found.dtype)


def backbone(sizes: Sizes, attention: str) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(1, sizes.width // 64),
        intermediate_size=4 * sizes.width,
        num_labels=4,
        hidden_dropout_prob=0.0,  # the loop would draw other masks
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )
    return BertForSequenceClassification(config)


def library() -> str:
    """Whose adapters are trained."""
    return "peft" if importlib.util.find_spec("peft") else "our own"


def make(sizes: Sizes, precision: str, attention: str) -> nn.Module:
    """The frozen transformer with its adapters, on the device."""
    torch.manual_seed(0)
    model = backbone(sizes, attention).to(getattr(torch, precision)).requires_grad_(False)
    if library() == "peft":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=sizes.rank, lora_alpha=ALPHA, target_modules=list(TARGETS)))
    else:
        for layer in list(model.modules()):
            for name in TARGETS:
                if isinstance(getattr(layer, name, None), nn.Linear):
                    setattr(layer, name, Adapted(getattr(layer, name), sizes.rank))
    # Where B is 0, as it is at first, A has no gradient, and a step of Adam would be round-off alone.
    for p in adapters(model).values():
        p.data = torch.randn_like(p, dtype=torch.float32) * 0.02
    return model.to(DEVICE).train()


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make_data(sizes: Sizes) -> ud.FederatedDataset:
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.clients, sizes.batch * sizes.steps)
    x = torch.randint(0, sizes.vocabulary, (*shape, sizes.length), generator=generator)
    y = torch.randint(0, 4, shape, generator=generator)
    return ud.FederatedDataset.from_clients(list(zip(x, y, strict=True)))


def work(sizes: Sizes) -> ud.Local:
    return ud.Local(epochs=1, batch_size=sizes.batch, lr=sizes.lr, optimizer=ud.AdamW())


def loop(sizes: Sizes, given: nn.Module, data: ud.FederatedDataset) -> tuple[list[float], dict[str, Tensor]]:
    """Seconds per round of one client after another, and the weights after the first round."""
    model = copy.deepcopy(given)
    own = adapters(model)
    start = {name: p.detach().clone() for name, p in own.items()}
    clients = [[t.to(DEVICE) for t in data[i]] for i in range(len(data))]
    times, first = [], {}
    for t in range(sizes.rounds):
        orders = [ud.batches(data, work(sizes), client=i, round=t, seed=0) for i in range(len(data))]
        places = [[rows.to(DEVICE) for rows in order] for order in orders]
        synchronize()
        began = time.perf_counter()
        mean = {name: torch.zeros_like(p) for name, p in start.items()}
        for (x, y), order in zip(clients, places, strict=True):
            with torch.no_grad():
                for name, p in own.items():
                    p.copy_(start[name])
            optimizer = torch.optim.AdamW(own.values(), lr=sizes.lr, fused=DEVICE == "cuda")
            for rows in order:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]).logits, y[rows]).backward()
                optimizer.step()
            for name, p in own.items():
                mean[name] += p.detach() / len(clients)
        synchronize()
        times.append(time.perf_counter() - began)
        start = mean
        first = first or {name: p.clone() for name, p in mean.items()}
    finite("the loop", start)
    return times[1:], first


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def train(sizes: Sizes, model: nn.Module, data: ud.FederatedDataset, lanes: int, rounds: int) -> ud.Result:
    options: dict[str, Any] = {"engine": "lanes", "lanes": lanes, "device": DEVICE, "evaluate_every": rounds}
    if DEVICE == "cuda":
        options["compile"] = False  # compiling takes longer than all rounds
    run = ud.train(model, data, rounds=rounds, local=work(sizes), **options)
    ended(f"{lanes} lanes", run, rounds)
    return run


@contextmanager
def between_steps() -> Iterator[list[int]]:
    """What is allocated whenever a step is about to be replayed; the allocator counts on the host, so nothing waits."""
    found: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        found.append(torch.cuda.memory_allocated())
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def memory(sizes: Sizes, model: nn.Module, data: ud.FederatedDataset) -> dict[str, Any]:
    """Bytes between steps and at most, with one lane and with all, and the ratio of the former."""
    found: dict[str, Any] = {}
    for lanes in (1, sizes.clients):
        gc.collect()  # an earlier run's graphs may be part of cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with between_steps() as seen:
            train(sizes, model, data, lanes, 1)
        found[f"lanes_{lanes}"] = {"between_steps": max(seen), "peak": torch.cuda.max_memory_allocated()}
    one, many = (found[f"lanes_{lanes}"]["between_steps"] for lanes in (1, sizes.clients))
    return found | {"ratio": many / one, "within_limit": many <= MEMORY_LIMIT * one}


def speed(sizes: Sizes, model: nn.Module, data: ud.FederatedDataset, precision: str) -> dict[str, Any]:
    """Samples per second of both sides, and how far apart their updates are. Raises `SystemExit` if too far."""
    start = adapters(model)
    loop_times, reference = loop(sizes, model, data)
    after = train(sizes, model, data, sizes.clients, 1).params
    apart = check("lanes", change(after, start), change(reference, start), precision, "the loop")
    run = train(sizes, model, data, sizes.clients, sizes.rounds)
    ours = statistics.median(row["seconds"] for row in run.history[1:])
    theirs = statistics.median(loop_times)
    return {
        "loop": sizes.samples / theirs,
        "lanes": sizes.samples / ours,
        "ratio": theirs / ours,
        "agrees": apart,
        "largest_difference": _largest(after, reference),
        "bytes_up_per_client": run.history[-1]["bytes_up"] / sizes.clients,
    }


def _largest(one: Weights, other: Weights) -> float:
    return max(float((one[name].to(w.device) - w).abs().max()) for name, w in other.items())


def row(sizes: Sizes, precision: str, attention: str) -> dict[str, Any]:
    began, data, model = time.perf_counter(), make_data(sizes), make(sizes, precision, attention)
    found = {
        "precision": precision,
        "attention": attention,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in adapters(model).values()),
        "samples_per_second": speed(sizes, model, data, precision),
    }
    if DEVICE == "cuda":
        found["memory"] = memory(sizes, model, data)
    return found | {"took": time.perf_counter() - began}


def failed(found: dict[str, Any]) -> bool:
    """Whether a row was refused, or lanes take too much memory beside a backbone in float32."""
    within = found.get("memory", {}).get("within_limit", True)
    return "refused" in found or (found["precision"] == "float32" and not within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=75.0)
    arguments = parser.parse_args()
    began, sizes = time.perf_counter(), TINY if arguments.tiny else Sizes()
    import transformers

    head = record.head("lora", transformers=transformers.__version__, adapters=library(), sizes=vars(sizes))
    rows: list[dict[str, Any]] = []
    for precision, attention in ROWS:
        if time.perf_counter() - began > arguments.seconds:
            break
        try:
            rows.append(row(sizes, precision, attention))
        except (SystemExit, Exception) as error:  # one row that fails must not cost the others
            rows.append({"precision": precision, "attention": attention, "refused": f"{type(error).__name__}: {error}"})
    text = json.dumps(head | {"rows": rows})
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    raise SystemExit(any(failed(found) for found in rows))


if __name__ == "__main__":
    main()
