"""The settings of a run, each defined once: its type, its default, and the role it plays around the training.

Derived from here are the keys of experiment files (`tools/config.py`), the lines of a run's `config.toml`
(`config_writer.py`), what must stay the same when a run is resumed (`identity.py`, `tools/experiment.py`), and which
runs are repetitions of one experiment (`tools/compare.py`). Only `ud.train` repeats the settings, in its signature and
its docstring, for editors, `help` and type checkers; `tests/test_settings.py` compares the two.

Imports nothing heavy: an experiment file is checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from undrift.data.dataset import FederatedDataset
    from undrift.method.faults import Faults
    from undrift.method.local import Local
    from undrift.method.part import Method, Part
    from undrift.training.callbacks import Callback, RoundRecord

Form = Literal[
    "section", "text", "texts", "count", "seed", "number", "switch", "interval", "threads", "modules", "drift"
]
"""What a value looks like in an experiment file; `tools/config.py` has the type of each."""


@dataclass(frozen=True)
class Role:
    """What a setting means for experiment files, resumed runs and comparisons."""

    form: Form | None
    """Its form in experiment files and in `config.toml`; None if it has no place there."""
    resume: Literal["same", "length", "digits", "free"] = "same"
    """In a resumed run it must be the "same", as it decides the result and belongs to the run's identity; or it is the
    run's "length", which may change as long as no round is undone; or it may change the last "digits", which
    `allow_version_change` permits; or it is "free" to change, unless `stop_when` depends on it (`resume.py`)."""
    compared: bool = True
    """Whether runs that differ in it are different experiments, not repetitions of one."""
    argument: bool = True
    """Whether `ud.train` takes it. If not, only experiment files do."""
    file_default: Any = None
    """The default in experiment files, where it is not that of `ud.train`."""


def role(form: Form | None, **roles: Any) -> Mapping[str, Role]:
    """Metadata for a field of `Settings`."""
    return {"role": Role(form, **roles)}


OF_THE_CALL = role(None, resume="free")
"""Settings that concern one call of `ud.train`, not the run: no file has them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """The arguments of `ud.train`, in its order; see its docstring."""

    model: nn.Module | str | Callable[[], nn.Module] = field(metadata=role("text"))
    data: FederatedDataset = field(metadata=role("section"))
    method: Method | Part | str = field(default="FedAvg()", metadata=role("text"))
    rounds: int = field(metadata=role("count", resume="length"))
    local: Local = field(metadata=role("section"))
    participation: int | float = field(default=1.0, metadata=role("number"))
    seed: int = field(default=0, metadata=role("seed", compared=False))
    loss: Any = field(default=None, metadata=role("text"))
    metrics: Any = field(default=None, metadata=role("texts"))
    output: str | None = field(default=None, metadata=role("text"))
    device: str | torch.device = field(default="auto", metadata=role("text", resume="free", compared=False))
    precision: str = field(default="auto", metadata=role("text"))
    engine: str = field(default="auto", metadata=role("text", resume="digits", compared=False))
    lanes: int | None = field(default=None, metadata=role("count", resume="digits", compared=False))
    compile: bool | None = field(default=None, metadata=role("switch", resume="digits", compared=False))
    rehearse: bool = field(default=True, metadata=role("switch", resume="free", compared=False))
    data_on: str = field(default="auto", metadata=role("text", resume="free", compared=False))
    deterministic: bool = field(default=False, metadata=role("switch", resume="digits"))
    threads: int | None = field(default=None, metadata=role("threads", resume="digits", compared=False))
    evaluate_every: int = field(default=1, metadata=role("count", resume="free", compared=False))
    personalize_every: int | None = field(default=None, metadata=role("count", resume="free", compared=False))
    drift: bool | str = field(default=False, metadata=role("drift", resume="digits", compared=False))
    out: str | Path | None = field(default=None, metadata=OF_THE_CALL)
    checkpoint_every: int | str | None = field(
        default=None, metadata=role("interval", resume="free", compared=False, file_default="30s")
    )
    resume: bool = field(default=False, metadata=OF_THE_CALL)
    track: str | Sequence[str] | None = field(default=None, metadata=role("texts", resume="free", compared=False))
    on_round: Callable[[dict[str, Any]], None] | None = field(default=None, metadata=OF_THE_CALL)
    callbacks: Sequence[Callback | Callable[[RoundRecord], Any]] = field(default=(), metadata=OF_THE_CALL)
    progress: bool = field(default=False, metadata=OF_THE_CALL)
    notes: dict[str, Any] | None = field(default=None, metadata=OF_THE_CALL)
    on_nonfinite: str = field(default="stop", metadata=role("text", resume="free"))
    stop_when: Callable[[Sequence[dict[str, Any]]], Any] | str | None = field(
        default=None, metadata=role("text", resume="free")
    )
    faults: Faults | None = field(default=None, metadata=role("section"))
    max_norm_ratio: float | None = field(default=None, metadata=role("number"))
    min_clients: int | float | None = field(default=None, metadata=role("number"))
    allow_version_change: bool = field(default=False, metadata=OF_THE_CALL)
    replace: bool = field(default=False, metadata=role(None, resume="free", argument=False))  # undrift run --force
    imports: Sequence[str] = field(
        default=(), metadata=role("modules", resume="free", compared=False, argument=False)
    )  # a user's own methods, models and data, imported before anything else


FIELDS = {entry.name: entry for entry in fields(Settings)}
ROLES: dict[str, Role] = {name: entry.metadata["role"] for name, entry in FIELDS.items()}
KEYS: dict[str, Role] = {name: role for name, role in ROLES.items() if role.form} | {
    "data.seed": Role("seed", compared=False),
    "data.data_dir": Role("text", resume="free", compared=False),
    "data.workers": Role("count", resume="free", compared=False),
}
"""The keys of experiment files. Keys of a section have its role, except for those that are listed here."""
