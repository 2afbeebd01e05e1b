"""`undrift flower …`: the commands for real federations. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

flower = typer.Typer(no_args_is_help=True, help="The same experiment on real nodes, with Flower.")

File = Annotated[Path, typer.Argument(help="An experiment file.", show_default=False)]


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The app's folder, empty or not there yet.", show_default=False)],
    file: Annotated[Path, typer.Option("--from", help="The experiment file.", show_default=False)],
    nodes: Annotated[int, typer.Option(min=1, help="Wait for so many nodes before the first round.")] = 2,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds until a round's replies are too late.")] = 3600.0,
) -> None:
    """Write a Flower app for an experiment, which `flwr run` starts."""
    from undrift.flower.new import write_app

    write_app(folder, file, nodes=nodes, deadline=deadline)
    typer.echo(f"written: {folder}; start it with: flwr run {folder} SUPERLINK --stream")


@flower.command()
def up(
    file: File,
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes share the experiment's clients.")] = 2,
    out: Annotated[Path | None, typer.Option(help="The folder to write to.  [default: a new one in runs/]")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Use Flower's simulation engine instead.")] = False,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds until a round's replies are too late.")] = 3600.0,
) -> None:
    """Start a SuperLink and nodes on this machine, run the experiment on them, and stop what was started.

    The same command with the same --out continues a run that was stopped.
    """
    from undrift.flower.launch import launch, simulated

    started = simulated if simulate else launch
    started(file, nodes, out, deadline, typer.echo)


@flower.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="The folder to write to.", show_default=False)],
    host: Annotated[list[str], typer.Option(help="A name or address under which nodes reach the SuperLink.")],
) -> None:
    """Make a certificate authority, and the SuperLink's certificate and key."""
    from undrift.flower.certificates import make_certificates

    make_certificates(folder, host)
    typer.echo(f"written: ca.crt (for every node), server.crt and server.key (for the SuperLink alone), in {folder}")


@flower.command()
def key(
    folder: Annotated[Path, typer.Argument(help="The folder to write to.", show_default=False)],
    name: Annotated[str, typer.Argument(help="The node's name.", show_default=False)],
) -> None:
    """Make a node's key. Run it on the node: the private part never has to leave it."""
    from undrift.flower.certificates import make_key

    private, public = make_key(folder, name)
    typer.echo(f"written: {private} (stays on the node) and {public} (register it with the SuperLink)")
