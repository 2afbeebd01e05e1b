"""The package as a stranger gets it: wheel and sdist, each in an empty environment, outside of the repository.

make wheel-check. Builds both into dist/, installs each with the versions of requirements.txt, compares the installed
files with the source, runs the README's Python and its commands, and then the unpacked wheel as if only torch, numpy
and safetensors were installed. Takes minutes and three gigabytes in a temporary folder, and needs a package registry.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAN = "torch,numpy,safetensors"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
COMMANDS = """undrift run examples/digits.toml --set rounds=3 --out check/a
undrift run examples/digits.toml --set rounds=3 --set method="FedDyn(0.1)" --out check/b
undrift compare check/a check/b --markdown check/table.md
undrift report check/a check/b --out check/report.html
undrift list methods
undrift list data
undrift info
"""
"""What must work, whatever the README shows."""
PIP = ["-m", "pip", "--disable-pip-version-check", "-q"]


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    env = {**ENVIRONMENT, **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def environment(folder: Path) -> Path:
    """An empty virtual environment; returns its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


def build(folder: Path) -> list[Path]:
    python = environment(folder / "builder")
    (required,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    run([python, *PIP, "install", required], folder)
    run([python, "-m", "hatchling", "build", "-d", folder / "dist", "-t", "wheel", "-t", "sdist"], ROOT)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    (ROOT / "dist").mkdir(exist_ok=True)
    for file in (wheel, sdist):
        (ROOT / "dist" / file.name).write_bytes(file.read_bytes())
    return [wheel, sdist]


def files(package: Path) -> set[str]:
    found = (file.relative_to(package) for file in package.rglob("*") if file.is_file())
    return {str(file) for file in found if "__pycache__" not in file.parts}


def blocks(language: str) -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", readme, re.DOTALL | re.M)


def quickstart(python: Path, folder: Path) -> None:
    """The README's Python and its commands, in a folder that has only the example files."""
    (folder / "examples").mkdir(parents=True)
    for file in (ROOT / "examples").glob("*.toml"):
        (folder / "examples" / file.name).write_bytes(file.read_bytes())
    (folder / "readme.py").write_text("\n".join(blocks("python")), encoding="utf-8")
    print("  README, Python:", run([python, "readme.py"], folder).strip().splitlines()[0])
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    for block in (*blocks("console"), COMMANDS):
        run(["bash", "-euo", "pipefail", "-c", block], folder, PATH=path)
        print("  commands:", *re.findall(r"^undrift (\w+)", block, re.M))


def check(file: Path, folder: Path) -> None:
    began = time.monotonic()
    python = environment(folder / "venv")
    run([python, *PIP, "install", "-c", ROOT / "requirements.txt", file], folder)
    took = time.monotonic() - began
    size = sum(one.stat().st_size for one in (folder / "venv").rglob("*") if not one.is_symlink())
    print(f"{file.name}: installed in {took:.0f} s, an environment of {size / 1e6:,.0f} MB")
    run([python, "-m", "pip", "check"], folder)
    where = Path(run([python, "-c", "import undrift; print(undrift.__file__)"], folder).strip()).parent
    if not where.is_relative_to(folder):
        sys.exit(f"undrift was imported from {where}, which is not in the new environment")
    if missing := files(ROOT / "src" / "undrift") - files(where):
        sys.exit(f"{file.name} lacks {sorted(missing)}")
    if added := files(where) - files(ROOT / "src" / "undrift"):
        sys.exit(f"{file.name} has files that are not in the source: {sorted(added)}")
    print(f"  all {len(files(where))} files of the package are there")
    quickstart(python, folder / "elsewhere")
    done = subprocess.run([python, "-m", "undrift", "reproduce"], capture_output=True, text=True, check=False)
    if done.returncode != 2 or "install undrift from a clone" not in done.stderr:
        sys.exit(f"undrift reproduce says, where there is no clone: {done.stderr or done.stdout}")
    if file.suffix == ".whl":
        lean(python, file, folder)


def lean(python: Path, wheel: Path, folder: Path) -> None:
    """The unpacked wheel, where only torch, numpy and safetensors are installed."""
    unpacked = folder / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    run([python, *PIP, "uninstall", "-y", "undrift"], folder)
    only = [python, ROOT / "tests" / "only.py", LEAN]
    elsewhere = {"PYTHONPATH": str(unpacked)}
    run([*only, folder / "elsewhere" / "readme.py"], folder / "elsewhere", **elsewhere)
    print("  unpacked, with torch, numpy and safetensors only: the README's Python runs")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="undrift-wheel-") as temporary:
        for file in build(Path(temporary)):
            folder = Path(temporary) / ("wheel" if file.suffix == ".whl" else "sdist")
            folder.mkdir()
            check(file, folder)
    print(f"Python {sys.version.split()[0]}: wheel and sdist install and run the quickstart; they are in dist/")


if __name__ == "__main__":
    main()
