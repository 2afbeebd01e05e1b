"""The README's code, run as printed."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from undrift import models
from undrift.data import sources

ROOT = Path(__file__).parent.parent


def test_the_readmes_python_runs_as_printed_and_learns():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    names: dict = {"__name__": "readme"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks[0], names)
    assert float(printed.getvalue()) > 0.85
    exec(blocks[1], names)
    assert names["result"].history[-1]["accuracy"] > 0.3
    own = re.search(r"@dataclass.*?\n\n\nlocal", blocks[1], re.DOTALL).group().removesuffix("local").strip()
    assert len(own.splitlines()) <= 10


def test_the_data_pages_python_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    exec("\n".join(blocks), {"__name__": "data"})


def test_the_data_page_has_every_name():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for name in (*sources.names(), *models.MODELS):
        assert f"`{name}`" in page, name


def test_what_the_readme_points_to_is_there():
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target
