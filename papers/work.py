"""Runs one cell. A cell that runs out of time leaves a checkpoint, from which it is resumed."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from papers import parts, problems
from papers.catalogue import Cell, Settings
from papers.results import Result
from undrift.data.dataset import FederatedDataset
from undrift.data.load import load
from undrift.errors import LanesError, UndriftError, first_sentence
from undrift.files import parse_json, read_bytes, read_text, write_text
from undrift.method.calls import HookFailureError
from undrift.method.local import Local
from undrift.method.parse import as_method, parse_method
from undrift.method.part import Method
from undrift.tools.info import source
from undrift.training import identity
from undrift.training.checkpoint import rounds_in
from undrift.training.loop import train
from undrift.training.run_folder import CHECKPOINT, RUN, history

METRICS = ("accuracy", "recall_at_5", "loss")
Late = Callable[[int], bool]
SAVED = 60.0
"""The seconds between checkpoints."""
POINTS = 100
"""The most points in a curve of a column that `keep` names."""


class Paused(Exception):  # noqa: N818 - no error
    """The cell ran out of time. It continues after its last round when it is run again."""


class Enough(Exception):  # noqa: N818 - no error
    """The cell has used up its samples."""


def run(cell: Cell, folder: Path, late: Late = lambda t: False, device: str = "auto", beside: int = 1) -> Result:
    """Run a cell, or the rest of it; `folder` has its checkpoints until it is finished.

    `late` is called with the number of every round, and says whether to stop there. Raises `Paused` if so. `beside` is
    how many cells train in one program, this one included.
    """
    kind = cell.options.get("kind", "train")
    if kind not in KINDS:
        raise UndriftError(f"{cell.key}: there is no kind of cell called {kind!r}; known: {', '.join(KINDS)}.")
    device = "cpu" if kind in ARITHMETIC else device
    asked = in_lanes(cell) if _on_gpu(device) else cell
    began, code, earlier = time.monotonic(), source(), _earlier(folder)
    noted = began

    def seconds() -> float:
        return earlier["seconds"] + time.monotonic() - began

    def look(t: int) -> bool:
        nonlocal noted
        if time.monotonic() - noted >= SAVED:  # in case the process is killed
            noted = time.monotonic()
            _note(folder, seconds(), earlier["parts"] + 1)
        return late(t)

    try:
        found = KINDS[kind](asked, folder, look, device)
    except Paused:
        _note(folder, seconds(), earlier["parts"] + 1)
        raise
    except (LanesError, HookFailureError, torch.OutOfMemoryError) as error:
        if asked.settings.get("engine") != "lanes":
            raise
        why = getattr(error, "why", "") or first_sentence(error)
        raise UndriftError(
            f'on a GPU a cell must train in lanes, unless {cell.paper}.toml has engine = "plain" for it. Lanes cannot '
            f"train this one: {why}"
        ) from error
    return {
        "settings": cell.settings, "options": cell.options, "seed": cell.seed, "quick": cell.quick,
        **found, "seconds": round(seconds(), 2), "parts": earlier["parts"] + 1,
        "share": min(1.0, cell.share * beside) / beside if _on_gpu(device) else 1.0, "beside": beside,
        "hardware": hardware(device), "versions": identity.versions(_device(device)), "source": code,
    }  # fmt: skip


def _earlier(folder: Path) -> dict[str, Any]:
    """Return the time that earlier parts of the cell took, and their number."""
    try:
        found = parse_json(read_text(folder / "part.json"))
        return {"seconds": float(found["seconds"]), "parts": int(found["parts"])}
    except (OSError, ValueError, LookupError, TypeError):
        return {"seconds": 0.0, "parts": 0}


def _note(folder: Path, seconds: float, count: int) -> None:
    write_text(folder / "part.json", json.dumps({"seconds": seconds, "parts": count}))


def saved(folder: Path) -> set[int]:
    """Return the rounds of the cell's checkpoints, from which it can continue."""
    return set(rounds_in(folder / "run" / CHECKPOINT))


def share_done(folder: Path, cell: Cell) -> float:
    """Return the share of the cell's rounds that earlier parts have done, up to the last checkpoint."""
    return max(saved(folder), default=0) / int(cell.settings["rounds"])


def under_way(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return how many rounds a running cell has trained, and what its run chose; nothing before it has started."""
    try:
        rounds = read_bytes(folder / "run" / "metrics.jsonl").count(b"\n")
        return rounds, parse_json(read_bytes(folder / "run" / RUN))["body"]["choices"]
    except (OSError, ValueError, LookupError, TypeError):  # or while it is replaced
        return 0, {}


def forget(folder: Path) -> None:
    """Remove the checkpoints of a finished cell."""
    shutil.rmtree(folder, ignore_errors=True)


def _device(asked: str) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked)


def _on_gpu(device: str) -> bool:
    return _device(device).type == "cuda"


def in_lanes(cell: Cell) -> Cell:
    """Return the cell for a GPU: with an error where `engine="auto"` would train on the plain engine, which is slow."""
    engine = cell.settings.get("engine", "auto")
    return replace(cell, settings={**cell.settings, "engine": "lanes" if engine == "auto" else engine})


def hardware(device: str = "auto") -> str:
    where = _device(device)
    count = torch.get_num_threads()
    cpu = f"CPU, {count} thread{'s' if count > 1 else ''}"
    return torch.cuda.get_device_name(where) if where.type == "cuda" else cpu


# ---- the kinds of cells ------------------------------------------------------------------------------------------


def arguments(settings: Settings) -> dict[str, Any]:
    """An experiment file's settings as arguments of `ud.train`, without packages that only a full installation has."""
    given = {key: value for key, value in settings.items() if key != "threads"}
    data = {"seed": settings["seed"], "partition": "IID()", **given.pop("data")}
    local = problems.local_work(given.pop("local"))
    return {
        **given, "data": load(**data), "local": local, "method": parse_method(given.get("method", "FedAvg()"))
    }  # fmt: skip


def trained(cell: Cell, folder: Path, late: Late, device: str) -> Result:
    """Run the federated experiment."""
    given = arguments(cell.settings)
    if cell.options.get("training_loss"):
        given["method"] += parts.TrainingLoss()
    keep = cell.options.get("keep", [])
    return _train(given, folder, late, device, keep, cell.options.get("samples"))


def coordinates(cell: Cell, folder: Path, late: Late, device: str) -> Result:
    """Run the federated experiment, recording two coordinates of each round's update."""
    given = arguments(cell.settings)
    given["method"] += parts.Coordinates()
    return _train(given, folder, late, device, ["first", "second", "opposite"], points=1000)


def quadratic(cell: Cell, folder: Path, late: Late, device: str) -> Result:
    """Paper 2's one-dimensional problem."""
    settings = {key: value for key, value in cell.settings.items() if key != "model"}
    local = problems.local_work({"batch_size": 1, **settings.pop("local")})
    given = {
        **settings, "model": problems.Point(), "data": problems.population(), "loss": problems.point_loss,
        "local": local, "method": parse_method(settings["method"]) + parts.Weights(),
    }  # fmt: skip
    return _train(given, folder, late, device, ["x"], points=1000)


def steps(cell: Cell, folder: Path, late: Late, device: str) -> Result:
    """The number of local steps that a schedule takes, as a share of a constant number, counted by the engine."""
    return {"curve": problems.step_fractions(cell.settings["local"]["steps"], cell.settings["rounds"])}


def example(cell: Cell, folder: Path, late: Late, device: str) -> Result:
    """Paper 4's Example 1."""
    return {"curve": problems.example(cell.settings["method"])}


def bound_neurons(cell: Cell, folder: Path, late: Late, device: str) -> Result:
    """Paper 4's Table 4."""
    given = arguments(cell.settings)
    return {"curve": problems.bound_neurons(given, _device(device))}


def path(cell: Cell, folder: Path, late: Late, device: str) -> Result:
    """Paper 5's Figure 1: the global model's path in the plane of its first two principal components."""
    return {"curve": problems.path(arguments(cell.settings), cell.options["beta"], _device(device))}


KINDS: dict[str, Callable[[Cell, Path, Late, str], Result]] = {
    "train": trained,
    "coordinates": coordinates,
    "quadratic": quadratic,
    "steps": steps,
    "example": example,
    "bound neurons": bound_neurons,
    "path": path,
}
ARITHMETIC = ("quadratic", "steps", "example")
"""Kinds that would be slower on a GPU."""


# ---- a federated run in parts ------------------------------------------------------------------------------------


def _train(
    given: dict[str, Any],
    folder: Path,
    late: Late,
    device: str,
    keep: list[str],
    samples: int | None = None,
    points: int = POINTS,
) -> Result:
    """Train until the rounds, the samples or the time are used up.

    Samples are counted as local steps times the batch size, as papers do.
    """
    method: Method = as_method(given.pop("method"))
    local: Local = given["local"]
    most = math.inf if samples is None else samples / (local.batch_size or 1)
    if _on_gpu(device):
        given.setdefault("precision", "tf32")  # torch's default for convolutions on such a GPU

    def look(row: dict[str, Any]) -> None:
        if row["total_steps"] >= most:
            raise Enough
        if row["round"] < given["rounds"] and late(row["round"]):
            raise Paused

    out = folder / "run"
    resume = (out / RUN).exists()
    result, stopped, choices = None, None, {}
    try:
        result = train(
            **given, method=method, device=device, out=out, resume=resume, checkpoint_every=f"{SAVED}s", on_round=look
        )  # fmt: skip
        stopped, choices = result.stopped, result.choices
    except Enough:
        pass
    rows = result.history if result else history(out)
    enough = next((i for i, row in enumerate(rows) if row["total_steps"] >= most), len(rows) - 1)
    rows = rows[: enough + 1]
    data: FederatedDataset = given["data"]
    digest = hashlib.sha256(json.dumps(data.digests, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "curve": curve(rows, int(given.get("evaluate_every", 1)), keep, points), "rounds": len(rows),
        "samples": sum(row["samples"] for row in rows), "stopped": stopped,
        "processed": round(rows[-1]["total_steps"] * (local.batch_size or 1)) if rows else 0,
        "precision": given.get("precision", "auto"),
        "choices": {key: value for key, value in choices.items() if isinstance(value, str | int | bool)},
        "data": {"digest": digest, "clients": len(data), "samples": int(data.offsets[-1])},
    }  # fmt: skip


def curve(rows: list[dict[str, Any]], every: int, keep: list[str], points: int = POINTS) -> dict[str, list[Any]]:
    """Metrics at the evaluated rounds, and at most `points` of the columns that `keep` names; of dicts, the last."""
    chosen = [row for row in rows if row["round"] % every == 0 or row is rows[-1]]
    found: dict[str, list[Any]] = {"round": [row["round"] for row in chosen]}
    for name in (*METRICS, "steps_fraction", "training_loss"):
        if any(name in row for row in chosen):
            found[name] = [_short(row.get(name)) for row in chosen]
    stride = max(1, math.ceil(len(chosen) / points))
    for name in keep:
        values = [row.get(name) for row in chosen]
        few = [x if i % stride == 0 and not isinstance(x, dict) else None for i, x in enumerate(values[:-1])]
        found[name] = [_short(x) for x in (*few, values[-1])]
    return found


def _short(value: Any) -> Any:
    """Numbers rounded to five digits, which is more than a table shows."""
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
