"""The page: one file with its numbers, its style and its script, Plotly's included, so that it opens offline."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from undrift.errors import UndriftError
from undrift.files import write_text


def write(file: Path, told: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, page(told))
    except OSError as error:
        raise UndriftError(f"{file} cannot be written ({error.strerror}); choose another with --out.") from error


def page(told: dict[str, Any], live: bool = False) -> str:
    """`told` is what `gather` gave. A live page asks where it came from for newer numbers."""
    from plotly.offline import get_plotlyjs

    here = files("undrift.tools.report")
    parts = {name: here.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    return Template(parts.pop("html")).substitute(
        parts,
        title=html.escape(f"{told['title']} – undrift"),
        data=numbers({**told, "live": live}).replace("<", "\\u003c"),  # nothing in it can end the script
        plotly=get_plotlyjs(),
    )


def numbers(told: dict[str, Any]) -> str:
    return json.dumps(told, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
