"""When, with which versions and from which commit a run was started or resumed, for its `run.json`."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from typing import Any

PATIENCE = 2.0
"""The timeout for git, in seconds."""
modules: dict[str, str] = {}
"""The users' modules that this process has imported by name, with the folder that each was found in."""


def session(versions: dict[str, str], choices: dict[str, Any]) -> dict[str, Any]:
    """Return the time, the versions, the commit of the working directory, where users' modules are, and which processes
    and runs train as one.

    `commit` is None if there is no commit or no git. `dirty` says whether tracked files differ from it. It is None if
    git takes too long, or would run commands that the repository itself names as filters.
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
    """Return whether the repository's own configuration has filter commands for files."""
    filters = _git("config", "--show-scope", "--get-regexp", r"^filter\.") or ""
    return any(not line.startswith(("system", "global")) for line in filters.splitlines())


def _git(*arguments: str) -> str | None:
    """Return what a git command prints; None if it fails."""
    command = ["git", "-c", "core.fsmonitor=false", *arguments]  # which could run any command in the repository
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # it only reads
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
