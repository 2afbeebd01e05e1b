"""The README's code, run as printed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from undrift import config, models
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


def test_the_readmes_commands_run_as_printed(tmp_path, monkeypatch):
    (block,) = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(block.splitlines()) == 6 and "best by validation accuracy" in done.stdout


def test_the_example_in_the_page_on_runs_is_an_experiment():
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(encoding="utf-8"), re.DOTALL)
    assert config.checked(tomllib.loads(block), "docs/runs.md").local.lr == "decay(0.1, 0.99)"


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
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), (page, target)
