"""How large a report is, and how soon it is drawn:  python -m benchmarks.report_page [RUNS] [ROUNDS]

The runs are made up by this script, with all that rows of real runs have: two metrics on test, validation and clients'
own data, accuracy by class and by client, rates, the diagnostic, FedNLR's temperatures. Needs Chromium.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CLASSES, CLIENTS, COHORT = 10, 100, 20
CONFIG = """model = "mlp"
method = "FedProx(mu={strength}) + TwoDLRD(window=5) + FedNLR()"
rounds = {rounds}
seed = {seed}
metrics = ["accuracy"]

[data]
name = "digits"
partition = "Dirichlet(0.1)"
clients = 100

[local]
epochs = 2
batch_size = 32
lr = 0.1
"""


def make_run(folder: Path, strength: float, seed: int, rounds: int) -> None:
    """A finished run's folder, with numbers that look like learning."""
    rng = np.random.default_rng([seed, int(1000 * strength)])
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(strength=strength, rounds=rounds, seed=seed))
    counts = rng.integers(0, 60, (CLIENTS, CLASSES))
    sizes = counts.sum(1)
    partition = {
        "clients": CLIENTS,
        "empty": 0,
        "samples": int(sizes.sum()),
        "smallest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": int(sizes.max()),
        "listed": list(range(CLIENTS)),
        "sizes": sizes.tolist(),
        "classes": [str(c) for c in range(CLASSES)],
        "counts": counts.tolist(),
    }
    (folder / "partition.json").write_text(json.dumps(partition))
    total = 0
    with (folder / "metrics.jsonl").open("w") as file:
        for t in range(rounds):
            steps = rng.integers(10, 60, COHORT)
            total += int(steps.sum())
            file.write(json.dumps(row(rng, t, steps, total, strength, last=t == rounds - 1)) + "\n")
    (folder / "model.safetensors").touch()


def row(rng: Any, t: int, steps: Any, total: int, strength: float, last: bool) -> dict[str, Any]:
    accuracy = (1 - np.exp(-t / 200)) * (0.95 - strength / 5)
    noisy = lambda scale=0.02: float(np.clip(accuracy + scale * rng.normal(), 0, 1))  # noqa: E731
    found: dict[str, Any] = {
        "round": t + 1,
        "clients": np.sort(rng.choice(CLIENTS, COHORT, replace=False)).tolist(),
        "steps": int(steps.sum()),
        "total_steps": total,
        "steps_fraction": 1.0,
        "local_steps": {"fewest": int(steps.min()), "mean": float(steps.mean()), "most": int(steps.max())},
        "lr": 0.1 * 0.999**t,
        "samples": 32 * int(steps.sum()),
        "bytes_down": 400_000,
        "bytes_up": 400_000,
        "total_bytes": 800_000 * (t + 1),
        "diagnostic": float(rng.normal()),
        "decays": t // 200,
        "rates": [0.1 * 0.9 ** (k * (t // 200)) for k in range(4)],
        "temperature": {str(layer): float(rng.random()) for layer in range(6)},
        "ratio": {str(layer): 2 + layer / 3 for layer in range(6)},
        "seconds": 0.1 + float(rng.random()) / 50,
        "class_accuracy": [noisy(0.1) for _ in range(CLASSES)],
    }
    for prefix in ("", "validation_", "client_"):
        found |= {f"{prefix}loss": 2.3 * (1 - noisy()), f"{prefix}accuracy": noisy()}
    for ending in ("std", "worst"):
        found |= {f"client_loss_{ending}": 1 - noisy(), f"client_accuracy_{ending}": noisy() / 2}
    if last:
        each = {name: rng.random(CLIENTS).tolist() for name in ("loss", "accuracy")}
        found["by_client"] = {"client": list(range(CLIENTS)), **each}
    return found


def main() -> None:
    count, rounds = (int(word) for word in [*sys.argv[1:], *("20", "1000")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        runs = [where / f"{i}" for i in range(count)]
        for i, run in enumerate(runs):
            make_run(run, i / count, 0, rounds)
        from undrift.tools.report.gather import gather
        from undrift.tools.report.page import write

        began = time.perf_counter()
        write(where / "report.html", gather(runs))
        print(f"{count} runs × {rounds:,} rounds, no two of one group")
        print(f"gathered and written in {time.perf_counter() - began:.1f} s")
        print(f"size {(where / 'report.html').stat().st_size / 1e6:.2f} MB")
        opened((where / "report.html").as_uri())


def opened(address: str) -> None:
    from playwright.sync_api import sync_playwright

    near = "[...document.querySelectorAll('.chart')].filter((c) => c.getBoundingClientRect().top < 2 * innerHeight)"
    every = "[...document.querySelectorAll('.chart')]"
    drawn = ".every((card) => card.dataset.drawn) && document.querySelectorAll('.chart').length > 0"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for attempt in ("first", "second", "third"):
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            began = time.perf_counter()
            page.goto(address)
            page.wait_for_function(near + drawn, polling=20)
            two = time.perf_counter() - began
            while not page.evaluate(every + drawn):
                page.mouse.wheel(0, 900)
                page.wait_for_timeout(16)
            charts = page.evaluate("document.querySelectorAll('.chart').length")
            whole = time.perf_counter() - began
            print(f"{attempt} time: first two screens drawn after {two:.2f} s, all {charts} charts after {whole:.2f} s")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
