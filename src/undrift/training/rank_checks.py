"""A run in several processes: checks that all of them have the same settings."""

from __future__ import annotations

from typing import Any

from undrift.engine.ranks import checksum
from undrift.errors import UndriftError, listed
from undrift.training.callbacks import as_callbacks
from undrift.training.identity import describe
from undrift.training.run import Run
from undrift.training.settings import Settings


def check_agreement(run: Run, given: Settings) -> None:
    """Reject a run that is not the same in all processes, each of which has called `ud.train` itself."""
    if not run.ranks.several:
        return
    mine = fingerprint(run, given)
    first, *others = run.ranks.gathered(mine)
    different = [name for name in first if any(other[name] != first[name] for other in others)]
    if "weights" in different or "data" in different:
        raise UndriftError(
            f"The processes that torchrun started differ in their {' and '.join(different)}. Call torch.manual_seed "
            "with the same seed in all of them before the script draws anything at random."
        )
    if different:
        raise UndriftError(
            f"The processes that torchrun started differ in {listed(different)}; call ud.train with the same "
            "arguments in all of them. On different machines, automatic choices may differ: set engine and lanes."
        )


def fingerprint(run: Run, given: Settings) -> dict[str, Any]:
    """Return a short description of what must be the same in all processes."""
    weights = [int(checksum(w)) for w in (*run.model.start.values(), *run.model.tracked.values())]
    data = run.data.digests
    settings = {name: value for name, value in vars(given).items() if name not in ELSEWHERE}
    chosen = {name: run.choices[name] for name in ("engine", "lanes", "compile", "dtype")}
    listening = {name: not getattr(given, name) for name in ("out", "on_round", "stop_when", "track")}
    late = [callback.late for callback in as_callbacks(given.callbacks)]
    return {
        "weights": weights,
        "data": data,
        "device": run.device.type,
        **{name: describe(value) for name, value in (settings | chosen).items()},
        **{f"{name} (given or not)": value for name, value in listening.items()},
        "callbacks (late or not)": late,
    }


ELSEWHERE = ("model", "data", "device", "out", "notes", "on_round", "callbacks", "progress", "stop_when", "track")
"""Settings that are compared otherwise, or may differ: the device is each process's own, the folder the first one's."""
