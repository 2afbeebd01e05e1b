"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from undrift import __version__

app = typer.Typer(
    name="undrift", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Federated learning that holds its course when clients' data differ.",
)  # fmt: skip
data = typer.Typer(no_args_is_help=True, help="Data sets and who holds them.")
app.add_typer(data, name="data")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"undrift {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@data.command()
def show(
    name: Annotated[str, typer.Argument(help="A data set's name, a file, or a folder.")],
    partition: Annotated[str, typer.Option(help='How it is dealt out: "Dirichlet(0.1)", "ByKey()" …')] = "IID()",
    clients: Annotated[int | None, typer.Option(help="To how many clients; ByKey() has its own.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it: a .png, .svg or .pdf file.")] = None,
    label: Annotated[str, typer.Option(help="Of a file of your own: the label's column.")] = "label",
    client: Annotated[str | None, typer.Option(help="Of a file of your own: the client's column.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="A folder in hub layout to read from.")] = None,
) -> None:
    """Who holds what: a picture, sizes, and how much clients' data differ."""
    from rich.console import Console

    from undrift.data import show as shown
    from undrift.data.load import load

    if clients is None and not partition.startswith("ByKey"):
        clients = 10
    loaded = load(name, partition, clients, seed, label=label, client=client, data_dir=data_dir)
    title = f"{name}, {partition}"
    file = picture or Path(re.sub(r"\W+", "-", f"{Path(name).stem}-{partition}-{len(loaded)}").strip("-") + ".png")
    shown.picture(loaded, title, file)
    Console(highlight=False).print(shown.report(loaded, title))
    typer.echo(f"\ndrawn in {file}")


def main() -> None:
    """What the command `undrift` runs: bad input ends in one sentence, not in a traceback."""
    from undrift.errors import UndriftError

    try:
        app()
    except UndriftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
