"""When, with which versions and from which commit a run was started or resumed, for its `run.json`."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from typing import Any

PATIENCE = 2.0
"""Seconds after which git is not waited for."""
modules: dict[str, str] = {}
"""The users' modules that this process has imported by name, with the folder that each was found in."""


def session(versions: dict[str, str], choices: dict[str, Any]) -> dict[str, Any]:
    """The time, the versions, the commit of the working directory, where users' modules are, and how many processes and
    which runs train as one.

    `commit` is None where there is no commit or no git. `dirty` is whether tracked files differ from it, and None where
    git takes too long to tell, or would run commands that the repository itself names as filters.
    """
    commit = _git("rev-parse", "--verify", "HEAD")
    changes = None
    if commit and not _own_filters():
        changes = _git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        **({"modules": dict(modules)} if modules else {}),
        **{name: choices[name] for name in ("processes", "beside") if name in choices},
    }


def _own_filters() -> bool:
    """Whether the repository's own configuration has commands that git applies to files before it compares them."""
    filters = _git("config", "--show-scope", "--get-regexp", r"^filter\.") or ""
    return any(not line.startswith(("system", "global")) for line in filters.splitlines())


def _git(*arguments: str) -> str | None:
    """What a git command prints; None if it fails."""
    command = ["git", "-c", "core.fsmonitor=false", *arguments]  # which could be any command of the repository's
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # it only reads
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
