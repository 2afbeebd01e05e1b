"""`undrift flower new`: an experiment file as a Flower app that `flwr run` starts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from undrift.errors import require
from undrift.files import write_text
from undrift.tools import config
from undrift.tools.cli_helpers import read_settings
from undrift.tools.config import Experiment
from undrift.tools.experiment import understood
from undrift.tools.plugins import gated, run_folder
from undrift.training import provenance
from undrift.training.config_writer import toml_literal

FLOWER = ">=1.41,<1.42"
"""The versions of Flower that undrift is tested with."""
PACKAGE = "app"

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = {name}
version = "1.0.0"
description = "An undrift experiment as a Flower app"
license = "Apache-2.0"
dependencies = ["undrift[flower]", "flwr{flower}"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "undrift"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

# Each of these can be changed for one run:  flwr run . --run-config 'min-nodes=2'
[tool.flwr.app.config]
out = {out}          # the server's folder for the run; started again, a run there goes on
min-nodes = {nodes}       # wait for so many nodes before the first round
min-replies = {replies}     # stop, to be started again, if fewer nodes answer in a round
deadline = {deadline}   # seconds until a round's replies are too late
wait = {wait}        # seconds to wait for the nodes
"""
SHELL = '''\
"""Flower's {kind}: the experiment beside this file."""

from pathlib import Path

from undrift.flower.apps import {make}

app = {make}(Path(__file__).with_name("experiment.toml"))
'''
README = """\
# {name}

`{package}/experiment.toml` as a Flower app. Each node's config says where its data are and where its clients' state
lies, in the SuperNode's `--node-config`:

    data="/srv/data/train.parquet" label="label" state="/srv/undrift/state" name="hospital-a"

A node without `data` takes its share of the experiment's own data: `partition-id=0 num-partitions=3`.

Start a run with `flwr run . NAME --stream`, where NAME is the SuperLink's entry in Flower's configuration. See
`docs/deploy.md` of undrift for certificates, keys, and what each side can see.
"""


def write_app(
    folder: Path,
    experiment: Path,
    nodes: int = 2,
    replies: int = 1,
    deadline: float = 3600.0,
    wait: float = 300.0,
    out: str = "federation",
    imports: Sequence[str] = (),
    trust: bool = False,
) -> Experiment:
    """Write the app for an experiment file into a new or empty folder. The file is checked first.

    The modules that it imports travel with the app, unless they are installed. The folder of a run may only import the
    modules in `imports`, or any with `trust`.
    """
    require(not folder.exists() or not any(folder.iterdir()), f"{folder} is not empty; choose another folder.")
    with gated():
        settings = read_settings(experiment, None, list(imports), None, trust)
        settings.pop("sweep", None)
        found = config.checked(settings, str(experiment))
        understood(found)
    modules = own_modules(found.imports, None if run_folder(experiment) else experiment.resolve().parent)
    package = folder / PACKAGE
    package.mkdir(parents=True)
    name = re.sub(r"[^a-z0-9]+", "-", experiment.stem.lower()).strip("-") or "experiment"
    values = {"nodes": nodes, "replies": replies, "deadline": float(deadline), "wait": float(wait)}
    texts = {"name": json.dumps(name), "flower": FLOWER, "package": PACKAGE, "out": json.dumps(out)}
    write_text(folder / "pyproject.toml", PROJECT.format(**values, **texts))
    write_text(folder / "README.md", README.format(name=name, package=PACKAGE))
    write_text(package / "__init__.py", "")
    write_text(package / "server.py", SHELL.format(kind="ServerApp", make="server_app"))
    write_text(package / "client.py", SHELL.format(kind="ClientApp", make="client_app"))
    for module, code in modules.items():
        (folder / module).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / module, code)
    write_text(package / "experiment.toml", as_toml(settings))
    return found


def own_modules(imports: Sequence[str], beside: Path | None) -> dict[str, str]:
    """The code of imported modules that are not installed, by the files' names in an app; of a package, all of it.

    Those `beside` the experiment file are the user's own too, also where Python would find them by itself.
    """
    found: dict[str, str] = {}
    for name in imports:
        root = name.partition(".")[0]
        here = beside is not None and any((beside / file).is_file() for file in (f"{root}.py", f"{root}/__init__.py"))
        if not here and name not in provenance.modules:
            continue
        folder = beside if beside and here else Path(provenance.modules[name])
        require(
            root != PACKAGE, f"The module {name!r} cannot be in an app, which has an {root!r} of its own; rename it."
        )
        single = folder / f"{root}.py"
        package = (folder / root / "__init__.py").is_file() or not single.is_file()
        for file in sorted((folder / root).rglob("*.py")) if package else [single]:
            found[file.relative_to(folder).as_posix()] = file.read_text("utf-8")
    return found


def as_toml(settings: config.Document) -> str:
    """Return the settings as TOML: keys, then sections."""
    sections = {name: value for name, value in settings.items() if isinstance(value, dict)}
    lines = [f"{name} = {toml_literal(value)}" for name, value in settings.items() if name not in sections]
    for section, values in sections.items():
        lines += ["", f"[{section}]", *(f"{name} = {toml_literal(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"
