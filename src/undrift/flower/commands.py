"""`undrift flower …`: the commands for real federations. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrift.tools.cli_helpers import Command, Group, Import, Trust, examples
from undrift.tools.output import say

flower = typer.Typer(cls=Group, no_args_is_help=True, help="Run the same experiment on real nodes, with Flower.")

File = Annotated[Path, typer.Argument(help="An experiment file (TOML).", show_default=False)]
Deadline = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="Ignore replies that arrive later than this in a round.")
]


@flower.command(
    cls=Command,
    epilog=examples("undrift flower new app --from experiment.toml --nodes 3", "flwr run app SUPERLINK --stream"),
)
def new(
    folder: Annotated[Path, typer.Argument(help="The app's folder, new or empty.", show_default=False)],
    file: Annotated[Path, typer.Option("--from", metavar="FILE", help="The experiment file.", show_default=False)],
    nodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Wait until N nodes are connected before the first round.")
    ] = 2,
    deadline: Deadline = 3600.0,
    imports: Import = None,
    trust: Trust = False,
) -> None:
    """Write a Flower app for an experiment, to be started with flwr run."""
    from undrift.flower.new import write_app

    write_app(folder, file, nodes=nodes, deadline=deadline, imports=imports or [], trust=trust)
    say(f"written: {folder}; start it with: flwr run {folder} SUPERLINK --stream")


@flower.command(cls=Command, epilog=examples("undrift flower up experiment.toml --nodes 3"))
def up(
    file: File,
    nodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="The number of nodes that share the experiment's clients.")
    ] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write to.", show_default="a new folder in runs/")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Use Flower's simulation engine instead of processes of its own.")
    ] = False,
    deadline: Deadline = 3600.0,
    imports: Import = None,
    trust: Trust = False,
) -> None:
    """Start a SuperLink and its nodes on this machine, run the experiment on them, and shut them down again.

    To continue an interrupted run, repeat the command with the same --out.
    """
    from undrift.flower.launch import launch as real
    from undrift.flower.launch import simulated

    started = simulated if simulate else real
    started(file, nodes, out, deadline, say, imports or [], trust)


@flower.command(cls=Command, epilog=examples("undrift flower certificates certs --host superlink.example.org"))
def certificates(
    folder: Annotated[Path, typer.Argument(help="The folder to write to.", show_default=False)],
    host: Annotated[
        list[str],
        typer.Option(
            metavar="HOST", help="A host name or address of the SuperLink. May be repeated.", show_default=False
        ),
    ],
) -> None:
    """Create a certificate authority, and a certificate and key for the SuperLink."""
    from undrift.flower.certificates import make_certificates

    make_certificates(folder, host)
    say(f"written: ca.crt (for every node), server.crt and server.key (for the SuperLink alone), in {folder}")


@flower.command(cls=Command, epilog=examples("undrift flower key keys hospital-1"))
def key(
    folder: Annotated[Path, typer.Argument(help="The folder to write to.", show_default=False)],
    name: Annotated[str, typer.Argument(help="The node's name.", show_default=False)],
) -> None:
    """Create a key pair for a node. Run it on the node, so that the private key never leaves it."""
    from undrift.flower.certificates import make_key

    private, public = make_key(folder, name)
    say(f"written: {private} (stays on the node) and {public} (register it with the SuperLink)")
