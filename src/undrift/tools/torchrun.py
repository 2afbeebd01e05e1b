"""Commands that torchrun has started in several processes: which of them talks to the user."""

from __future__ import annotations

import os

from undrift.errors import UndriftError


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def speaks() -> bool:
    """Whether this process talks to the user: of those that torchrun has started, the first does."""
    return not under_torchrun() or os.environ.get("RANK") == "0"


def refuse_torchrun(command: str) -> None:
    """Raise for a command that starts processes of its own."""
    if under_torchrun():
        raise UndriftError(
            f"undrift {command} runs many experiments, each in one process; start it without torchrun. "
            "To use several GPUs: undrift sweep --devices cuda:0,cuda:1."
        )
