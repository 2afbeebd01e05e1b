"""The memory of this process, as Linux counts it, in MB of 10^6 bytes."""

from __future__ import annotations

from pathlib import Path

FIELDS = {"resident": "VmRSS", "peak": "VmHWM", "anonymous": "RssAnon", "mapped": "RssFile"}


def used(what: str) -> float:
    """`resident` now, its `peak`, or what of it now is `anonymous` or `mapped` from files."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{FIELDS[what]}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"This system does not tell a process's {what} memory.")


def forget_peak() -> None:
    """Count the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
