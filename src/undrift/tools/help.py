"""How `--help` looks: arguments in capitals, flags without a type, and examples at the end."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from undrift.tools.trust import gated


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "\n".join([" Examples:" if len(commands) > 1 else " Example:", *(f"   {line}" for line in commands), ""])


class _Readable:
    """Shared by commands and groups."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if text := options.get("help"):  # Typer would break lines where the source does
            options["help"] = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        self.examples = options.pop("epilog", None)  # whose lines Typer would join, or put blank lines between
        super().__init__(*arguments, **options)

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            if isinstance(param, TyperArgument):
                param.metavar = param.metavar or str(param.name).upper() + ("..." if param.nargs != 1 else "")
                param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
            elif getattr(param, "is_flag", False):
                param.metavar = ""
        return found

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "").replace("......", "...") for piece in pieces]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)  # type: ignore[misc]
        if self.examples:
            typer.echo(self.examples)


class Command(_Readable, TyperCommand):
    """A command. What it may import is for itself alone to decide."""

    def invoke(self, ctx: Any) -> Any:
        with gated():
            return super().invoke(ctx)


class Group(_Readable, TyperGroup):
    """A group of commands."""
