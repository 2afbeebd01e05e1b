"""Code in pages, run as printed: a page's blocks in order, in one namespace and one folder."""

from __future__ import annotations

import contextlib
import glob
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from undrift.tools.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RUN = ("python", "console")
LANGUAGES = {*RUN, "toml", "text", "py", "{eval-rst}"}
"""`text` shows something, or right after code what it prints; `py` is an excerpt of the source; `{eval-rst}` says what
the site takes from docstrings."""


class Block(NamedTuple):
    language: str
    title: str
    """The file that the reader is told to save it as, if any."""
    code: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(
        r'^```(\w*|\{eval-rst\})(?: title="(.+?)")?\n(.*?)^```$', page.read_text(encoding="utf-8"), re.DOTALL | re.M
    )
    return [Block(*block) for block in found]


def commands(code: str, folder: Path) -> str:
    """Run `undrift` commands in this process, with the words that a shell would give them; gives what they printed.

    A process for each, as in `console`, would spend seconds importing torch.
    """
    printed = ""
    for line in code.replace("\\\n", " ").splitlines():
        command, *words = shlex.split(line)
        assert command == "undrift", f"{line!r} needs a shell"
        words = [name for word in words for name in sorted(glob.glob(word)) or [word]]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        printed += done.stdout
    return printed


def run(page: Path, folder: Path, shell: Callable[[str, Path], str] = commands) -> str:
    """Run every block of a page in `folder`, which is the current one; gives all that they printed."""
    names: dict = {"__name__": page.stem}
    everything, printed = "", ""
    for block in blocks(page):
        if block.title and block.language != "py":
            (folder / block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "text" and printed:
            check_output(block.code, printed)
        printed = ""
        if block.language in RUN and not block.title:
            printed = python(block.code, names) if block.language == "python" else shell(block.code, folder)
            everything += printed
    return everything


def python(code: str, names: dict) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<page>", "exec", dont_inherit=True), names)  # without this file's __future__ imports
    return out.getvalue()


def console(code: str, folder: Path) -> str:
    """Run commands as a shell does, in `folder`; gives what they printed."""
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1"}  # tests run two at a time
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def check_output(shown: str, printed: str) -> None:
    """Every line that a page shows is printed, with numbers about as large: other machines round differently."""
    for line in shown.splitlines():
        assert any(alike(line, other) for other in printed.splitlines()), f"{line!r} is not printed:\n{printed}"


def alike(a: str, b: str) -> bool:
    if NUMBER.sub("#", a).split() != NUMBER.sub("#", b).split():
        return False
    pairs = zip(*([float(x.replace(",", "")) for x in NUMBER.findall(text)] for text in (a, b)), strict=True)
    return all(abs(x - y) <= (0.1 if x < 1 else 0.02 * x) for x, y in pairs)
