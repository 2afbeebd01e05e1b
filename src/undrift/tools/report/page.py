"""The page: one file with data, style and scripts, including Plotly, so that it opens offline."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from undrift.errors import UndriftError
from undrift.files import write_text

SCRIPTS = ("table.js", "drift.js", "page.js", "print.js")
FILES = ("page.html", "page.css", *SCRIPTS)


def write(file: Path, payload: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, page(payload))
    except OSError as error:
        raise UndriftError(f"{file} cannot be written ({error.strerror}); choose another with --out.") from error


def page(payload: dict[str, Any], live: bool = False) -> str:
    """The page as HTML, from the result of `gather`. A live page polls its server for new data."""
    from plotly.offline import get_plotlyjs

    here = files("undrift.tools.report")
    texts = {name: here.joinpath(name).read_text(encoding="utf-8") for name in FILES}
    parts = {"html": texts["page.html"], "css": texts["page.css"], "js": "".join(texts[name] for name in SCRIPTS)}
    return Template(parts.pop("html")).substitute(
        parts,
        title=html.escape(f"{payload['title']} – undrift"),
        data=numbers({**payload, "live": live}).replace("<", "\\u003c"),  # no text in it can close the script
        plotly=get_plotlyjs(),
    )


def numbers(payload: dict[str, Any]) -> str:
    return json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
