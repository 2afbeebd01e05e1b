"""The README's code, run as printed, and what pages say about files and names."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.pages import DOCS, ROOT, blocks, commands, console, python
from undrift import models
from undrift.data import sources
from undrift.tools import config

README = ROOT / "README.md"


def test_the_readmes_python_runs_as_printed_and_learns():
    first, second = (block.code for block in blocks(README) if block.language == "python")
    names: dict = {"__name__": "readme"}
    assert float(python(first, names)) > 0.85
    python(second, names)
    assert names["result"].history[-1]["accuracy"] > 0.3
    own = re.search(r"@dataclass.*?\n\n\nlocal", second, re.DOTALL).group().removesuffix("local").strip()
    assert len(own.splitlines()) <= 10


@pytest.mark.parametrize("shell", [commands, pytest.param(console, marks=pytest.mark.long)])
def test_the_readmes_commands_run_as_printed(shell, tmp_path, monkeypatch, one_core):
    monkeypatch.chdir(tmp_path)
    (code,) = (block.code for block in blocks(README) if block.language == "console")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert "best by validation accuracy" in shell(code, tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 1e6


def test_the_example_in_the_page_on_runs_is_an_experiment():
    (code,) = (block.code for block in blocks(DOCS / "runs.md") if block.language == "toml")
    assert config.checked(tomllib.loads(code), "docs/runs.md").local.lr == "decay(0.1, 0.99)"


def test_the_data_page_has_every_name():
    page = (DOCS / "data.md").read_text(encoding="utf-8")
    for name in (*sources.names(), *models.MODELS):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("page", [README, *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem)
def test_what_a_page_points_to_is_there(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target
