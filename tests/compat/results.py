"""The results of all cases as a file, and the table of them in the documentation."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.compat.case import GROUPS, Case
from tests.compat.trial import Finding
from undrift.tools.info import source

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "tests" / "compat" / "results.json"
PAGE = ROOT / "docs" / "how-to" / "compatibility.md"
BEGIN, END = "<!-- compat table -->", "<!-- /compat table -->"
PACKAGES = (
    "torch", "torchvision", "timm", "transformers", "peft", "monai", "segmentation-models-pytorch", "torch-geometric",
    "x-transformers", "pytorch-tabnet", "rtdl", "tabm", "loralib", "neuraloperator", "pykan", "revtorch",
    "rotary-embedding-torch", "snntorch", "spikingjelly",
)  # fmt: skip
OUTCOMES = {
    "lanes": "train in lanes",
    "plain": "train on the plain engine",
    "refused": "are refused",
    "torch": "are refused by PyTorch too",
    "traceback": "fail with a traceback",
    "wrong": "train wrongly",
}


def entry(case: Case, found: Finding) -> dict[str, Any]:
    """What the file has about a case."""
    numbers = {key: rounded(getattr(found, key)) for key in ("lanes_plain", "hand", "bound", "moved", "drawn")}
    return {
        "group": case.group,
        "name": case.name,
        "outcome": found.outcome,
        "lanes": found.lanes,
        "why": portable(found.why),
        **numbers,
        "repeats": found.repeats,
        "engines": {engine: portable(says) for engine, says in found.engines.items()},
        "problems": [portable(problem) for problem in found.problems],
        "note": case.note,
        "review": list(case.review),
        "seconds": found.seconds,
    }


def portable(text: str) -> str:
    """A message without the paths of this machine: files are named from the repository or from their package on."""
    text = re.sub(r"[^\s()'\"]*/site-packages/", "", text)
    return text.replace(f"{ROOT}{os.sep}", "").replace(f"{Path(os.__file__).parent}{os.sep}", "")


def rounded(x: float | None) -> float | str | None:
    """Two digits; JSON has no infinity."""
    if x is None or math.isfinite(x):
        return x and float(f"{x:.1e}")
    return str(x)


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        found[name] = metadata.version(name)
    return found


def save(file: Path, order: Iterable[Case], entries: dict[str, dict[str, Any]]) -> None:
    content = {"versions": versions(), "source": source(), "cases": [entries[case.name] for case in order]}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_table(page: Path, results: dict[str, Any]) -> None:
    """Put the table between the markers of the page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}", encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    """The summary and a table per group, in Markdown."""
    cases, used = results["cases"], results["versions"]
    compared = [case["hand"] for case in cases if case["hand"] is not None]
    lines = [
        f"{summary(cases)} {len(compared)} were compared with a FedAvg loop in PyTorch. "
        f"({', '.join(f'{name} {version}' for name, version in used.items())}.)",
    ]
    for group, title in GROUPS.items():
        lines += ["", f"## {title}", "", "| model | engine | lanes vs plain | vs PyTorch | reason, note |"]
        lines += ["|---|---|---:|---:|---|"]
        lines += [row(case) for case in cases if case["group"] == group]
    return "\n".join(lines)


def summary(cases: list[dict[str, Any]]) -> str:
    counts = Counter(case["outcome"] for case in cases)
    parts = [f"{counts[outcome]} {says}" for outcome, says in OUTCOMES.items() if counts[outcome]]
    return f"Of {len(cases)} models and workloads, {', '.join(parts)}."


def row(case: dict[str, Any]) -> str:
    engine = case["outcome"] + (f"\u00a0×\u00a0{case['lanes']}" if case["outcome"] == "lanes" else "")
    why = case["why"] if case["outcome"] in ("plain", "refused", "torch") else "; ".join(case["problems"])
    why = " ".join(filter(None, (why, case["note"])))
    hand = figure(case["hand"])
    if case["drawn"] is not None and case["repeats"]:
        hand = "draws; repeats"
    cells = (case["name"], engine, figure(case["lanes_plain"]), hand, why)
    return f"| {' | '.join(map(escaped, cells))} |"


def escaped(text: str) -> str:
    """Text for a cell of a Markdown table."""
    for special, written in {"|": "∣", "\n": " ", "<": "&lt;", "*": "\\*", "__": "\\_\\_"}.items():
        text = text.replace(special, written)
    return text


def figure(x: float | str | None) -> str:
    return "–" if x is None else str(x) if isinstance(x, str) else f"{x:.0e}" if x else "0"
