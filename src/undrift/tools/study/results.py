"""What a study found: `study.json`, and the same as tables and figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from undrift import __version__
from undrift.errors import UndriftError
from undrift.files import write_text
from undrift.tools import tables
from undrift.tools.compare import Comparison, Figures, choose_metric, lower_is_better_in, measure, validation_name
from undrift.tools.run_folders import main_figure
from undrift.tools.study.file import Study
from undrift.tools.study.run import Outcome


def figures(outcomes: list[Outcome], study: Study) -> tuple[dict[str, list[Figures]], Comparison]:
    """The figures of every cell, by partition, and what they are figures of.

    Raises:
        UndriftError: If no run on a fresh seed was evaluated.
    """
    plan = study.plan
    runs = [run for outcome in outcomes for run in outcome.runs if any(main_figure(row) for row in run.rows)]
    if not runs:
        why = next((outcome.why for outcome in outcomes if outcome.why), "its data have no test set")
        raise UndriftError(f"The study has nothing to report: {why}.")
    target = None if plan.target is None else float(plan.target)
    metric = choose_metric(runs, plan.metric)
    comparison = Comparison(metric, plan.last, target, plan.baseline, lower_is_better_in(runs, metric))
    blocks = {}
    for partition in study.partitions:
        own = {outcome.cell.method: outcome for outcome in outcomes if outcome.cell.partition == partition}
        measured = measure({method: outcome.runs for method, outcome in own.items()}, comparison)
        blocks[partition] = [row | _choice(own[row["name"]]) for row in measured]
    return blocks, comparison


def _choice(outcome: Outcome) -> Figures:
    """What was chosen for a cell, and from what."""
    cell, chosen = outcome.cell, outcome.chosen
    choice: Figures = {"setting": {key: value for key, value in (chosen or {}).items() if key not in cell.fixed}}
    if chosen is not None:
        choice["method"] = cell.chosen(chosen, 0, "")["method"]
    choice["tried"] = [
        {"setting": {key: value for key, value in values.items() if key not in cell.fixed}}
        | {"validation": [value if math.isfinite(value) else None for _, value in own]}
        for values, own in outcome.tried
    ]
    choice["settings_tried"] = len({json.dumps(one["setting"], default=str) for one in choice["tried"]})
    choice["at_edge"] = cell.at_edge(chosen) if chosen is not None and outcome.tried else []
    return choice | ({"why": outcome.why} if outcome.why else {})


def write(outcomes: list[Outcome], study: Study, out: Path) -> tuple[dict[str, list[Figures]], Comparison]:
    """Write `study.json`, `study.csv`, `study.tex` and `study.md` into the study's folder. Returns the figures."""
    blocks, comparison = figures(outcomes, study)
    plan = study.plan
    head: dict[str, Any] = {
        "undrift": __version__,
        "metric": comparison.metric,
        "chosen_by": validation_name(comparison.metric) if study.tuned else None,
        "last_rounds": plan.last,
        "baseline": plan.baseline,
        "target": comparison.target,
        "search": {"kind": plan.search, "trials": plan.trials} if study.tuned else None,
        "tuning_seeds": plan.tuning_seeds,
        "seeds": plan.seeds,
    }
    cells = [{"partition": name, **row} for name, rows in blocks.items() for row in rows]
    write_text(out / "study.json", json.dumps(head | {"cells": cells}, indent=1) + "\n")
    write_text(out / "study.csv", tables.csv_text(blocks))
    write_text(out / "study.tex", tables.latex(blocks, comparison))
    write_text(out / "study.md", tables.markdown(blocks, comparison))
    return blocks, comparison


def draw(outcomes: list[Outcome], study: Study, folder: Path) -> list[str]:
    """Draw the figures of a paper, with one panel per partition. Returns their names."""
    from undrift.tools.report.figures import DOUBLE, SINGLE, draw_panels
    from undrift.tools.report.gather import gather

    payloads = {}
    for partition in study.partitions:
        own = [outcome for outcome in outcomes if outcome.cell.partition == partition and outcome.runs]
        labels = {run.folder: outcome.cell.method for outcome in own for run in outcome.runs}
        if labels:
            payloads[partition] = gather(list(labels), labels)
            for group in payloads[partition]["groups"]:  # undrift report draws the others
                group["curves"] = {key: own for key, own in group["curves"].items() if key.startswith("test.")}
    return draw_panels(payloads, folder, DOUBLE if len(payloads) > 1 else SINGLE)
