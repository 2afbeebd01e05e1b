"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[
    Path, typer.Argument(help="An experiment file (TOML), or the folder of a run to repeat.", show_default=False)
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as local.lr=0.05. May be repeated."),
]
Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE",
        help="Import your own methods, models or data: an installed module, or one in the working directory or next "
        "to the experiment file. May be repeated.",
    ),
]  # fmt: skip
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Read data sets from this folder, laid out like the Hugging Face hub."),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The folder to write to.", show_default="a new folder in runs/")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import the modules named in the run's config.toml. This executes their code.")
]
