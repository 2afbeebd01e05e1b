"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(help="An experiment file, or the folder of a run to repeat.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key: local.lr=0.05")]
Import = Annotated[
    list[str] | None, typer.Option("--import", metavar="MODULE", help="Import your own methods, models and data first.")
]
DataDir = Annotated[Path | None, typer.Option(help="A folder in hub layout to read data from.")]
Out = Annotated[Path | None, typer.Option(help="The folder to write to.  [default: a new one in runs/]")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import the modules that a run's config.toml names, which runs their code.")
]
