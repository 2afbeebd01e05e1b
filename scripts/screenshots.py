"""Pictures of the report and a recording of a run in a terminal, from real runs: python scripts/screenshots.py [FOLDER]

Needs Chromium and Playwright's Python package. Eight runs of 30 rounds on digits take a few minutes; those that FOLDER
has already are not run again.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from undrift.training.run_folder import finished

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = DOCS / "images"
METHODS = {
    "fedavg": "FedAvg()",
    "fedprox": "FedProx(mu=0.1)",
    "feddyn-fednlr": "FedDyn(alpha=0.1) + FedNLR()",
    "twodlrd": "TwoDLRD(window=3)",
}
EXPERIMENT = """
model = "mlp"
method = "{method}"
rounds = 30
participation = 0.4
seed = {seed}

[data]
name = "digits"
partition = "Dirichlet(0.1)"
clients = 20
validation_fraction = 0.1
client_test_fraction = 0.2

[local]
epochs = 2
batch_size = 32
lr = "decay(0.2, 0.98)"
"""


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(*sys.argv[1:2] or [folder]).resolve()
        for name, method in METHODS.items():
            for seed in (0, 1):
                file = where / "experiment.toml"
                file.write_text(EXPERIMENT.format(method=method, seed=seed))
                out = f"runs/{name}-{seed}"
                if finished(where / out):
                    continue
                frames = record([sys.executable, "-m", "undrift", "run", str(file), "--out", out], where)
                if (name, seed) == ("fedprox", 0):
                    said = "$ undrift run experiment.toml --out runs/fedprox-0"
                    (IMAGES / "live.txt").write_text("\n".join([said, *frames]) + "\n")
        runs = sorted(str(run) for run in (where / "runs").iterdir())
        subprocess.run(
            [sys.executable, "-m", "undrift", "report", *runs, "--out", "report.html"], cwd=where, check=True
        )
        photograph((where / "report.html").as_uri())


def record(command: list[str], where: Path) -> list[str]:
    """What a command shows on a terminal of 100 columns: a line a second, its time first, without colours."""
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": "100", "LINES": "24", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=where, env=env, stdout=slave, stderr=slave, stdin=slave)
    os.close(slave)
    began, shown, frames, last = time.monotonic(), b"", [], -1.0
    while True:
        try:
            shown += os.read(master, 65536)
        except OSError:  # its end, as Linux says it
            break
        now = time.monotonic() - began
        lines = [line for line in re.split(r"[\r\n]+", bare(shown.decode(errors="replace"))) if line.strip()]
        if lines and now - last >= 1.0:
            frames.append(f"[{now:5.1f} s] {lines[-1].rstrip()}")
            last = now
    if process.wait():
        sys.exit(f"{' '.join(command)} failed:\n{shown.decode(errors='replace')}")
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", bare(shown.decode())) if line.strip()]
    return [*frames, f"[{now:5.1f} s] {lines[-2]}", lines[-1]]


def bare(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def photograph(address: str) -> None:
    from playwright.sync_api import sync_playwright

    shots = {
        "report-wide": ({"width": 1280, "height": 900}, "light", 2400),
        "report-dark": ({"width": 1280, "height": 900}, "dark", 1500),
        "report-phone": ({"width": 390, "height": 844}, "light", 2600),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (viewport, scheme, height) in shots.items():
            phone = viewport["width"] < 600
            context = browser.new_context(viewport=viewport, color_scheme=scheme, has_touch=phone, is_mobile=phone)
            page = context.new_page()
            page.goto(address)
            everything(page)
            whole = page.evaluate("document.documentElement.scrollHeight")
            clip = {"x": 0, "y": 0, "width": viewport["width"], "height": min(height, whole)}
            page.screenshot(path=IMAGES / f"{name}.png", full_page=True, clip=clip)
            context.close()
        browser.close()


def everything(page) -> None:  # type: ignore[no-untyped-def]
    """Scroll through the page, so that all its charts are drawn, and back."""
    for y in range(0, page.evaluate("document.documentElement.scrollHeight"), 600):
        page.evaluate(f"scrollTo(0, {y})")
        page.wait_for_timeout(80)
    page.wait_for_function("[...document.querySelectorAll('.chart')].every((card) => card.dataset.drawn)")
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(300)


if __name__ == "__main__":
    main()
