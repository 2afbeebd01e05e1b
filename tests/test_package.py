from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import undrift as ud
from tests.only import canonical, closure
from undrift.tools.info import source

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_there():
    for name in ud.__all__:
        assert getattr(ud, name) is not None
    assert set(ud.__all__) <= set(dir(ud))


def test_importing_undrift_imports_neither_torch_nor_numpy():
    script = (
        "import undrift, sys; assert not {'torch', 'numpy', 'rich', 'pandas'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_the_digest_of_the_source_covers_every_file_of_the_package(tmp_path):
    """Results carry it, so that they can be traced to the code that made them."""
    package = Path(ud.__file__).parent
    files = sorted(package.rglob("*.py"))
    assert {"engine", "methods", "tools"} <= {file.parent.name for file in files}
    copy = tmp_path / "undrift"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = source(copy)
    assert before == source()
    for file in (copy / "engine/lanes.py", copy / "methods/fedavg.py"):
        file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
        before, earlier = source(copy), before
        assert before != earlier


def metadata() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def only(packages: str, *words: str, **options) -> subprocess.CompletedProcess:
    """Run as if only these packages, and what they need, were installed."""
    command = [sys.executable, str(ROOT / "tests" / "only.py"), packages, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_reproduce_needs_torch_numpy_and_safetensors_only(tmp_path):
    done = only(
        "torch,numpy,safetensors", "papers", "--help", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0 and "--budget" in done.stdout, done.stderr
    done = only("torch,numpy,safetensors", "undrift", "--help", cwd=tmp_path)
    assert "No module named 'typer'" in done.stderr, "packages that are not allowed must not be found"


def test_the_demo_needs_what_make_demo_installs():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (words,) = re.findall(r"^\t\.venv/demo/bin/pip install .*-c requirements\.txt (.+)$", makefile, re.M)
    done = only(words.replace(" ", ","), str(ROOT / "examples" / "demo.py"), "--help")
    assert done.returncode == 0 and "--out" in done.stdout, done.stderr
    pins = {canonical(line.partition("==")[0]) for line in (ROOT / "requirements.txt").read_text().splitlines()}
    assert closure(words.split()) <= pins, "the demo installs versions that are not pinned"


def test_the_pins_are_sorted_and_have_what_the_tests_and_the_site_need():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line[0] != "#"]
    names = [canonical(line.partition("==")[0]) for line in lines]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert closure(names) == set(names), "a package that these require has no pin"
    project = metadata()
    extras = project["optional-dependencies"]
    for line in (*project["dependencies"], *extras["docs"], *extras["dev"], *extras["search"]):
        name = canonical(re.match(r"[\w.-]+", line).group())
        assert name in names or name == "undrift", f"{name} is not in requirements.txt"
    assert not [name for name in names if name.startswith("mkdocs")]


def test_every_extra_is_documented():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for name, packages in metadata()["optional-dependencies"].items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.M)
        if name != "dev":
            for line in packages:
                package = re.match(r"[\w-]+", line).group()
                assert f"`{package}`" in row, (name, package)


def test_only_pythons_that_are_tested_have_a_classifier():
    versions = [line.rpartition(" ")[2] for line in metadata()["classifiers"] if "Python :: 3." in line]
    assert versions == ["3.11", "3.12"]
    assert "Python 3.13 is untested" in " ".join((ROOT / "docs" / "install.md").read_text(encoding="utf-8").split())


def test_the_citation_file():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= found.keys(), "the format requires these"
    assert found["cff-version"] == "1.2.0" and found["type"] == "software"
    assert found["authors"] == [{"name": "The undrift authors"}]
    assert found["version"] == ud.__version__ and found["license"] == metadata()["license"] == "Apache-2.0"


def test_the_changelogs_sections_are_those_that_people_know():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.+)$", text, re.M)
    assert versions[0] == "Unreleased" and all(re.match(r"\d+\.\d+\.\d+ – \d{4}-\d\d-\d\d$", v) for v in versions[1:])
    known = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= set(known)
