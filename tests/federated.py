"""Experiments that run here and on nodes, and nodes in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError
from undrift.flower.engine import Trouble
from undrift.flower.node import Node
from undrift.flower.server import serve
from undrift.tools import config
from undrift.tools.config import Experiment
from undrift.tools.experiment import arguments
from undrift.training.loop import train
from undrift.training.result import Result

BASE: dict[str, Any] = {
    "model": "net64",
    "rounds": 3,
    "data": {"name": "blobs64", "partition": "Dirichlet(0.5)", "clients": 7, "client_test_fraction": 0.2},
    "local": {"epochs": 1, "batch_size": 8, "lr": 0.1},
}
FOUR: dict[str, dict[str, Any]] = {
    "scaffold": {"method": "Scaffold() + FedNLR()"},
    "feddyn": {"method": "FedDyn(0.1)"},
    "adam": {"local": BASE["local"] | {"optimizer": "Adam()", "lr": 0.01}, "participation": 4},
    "personal": {"method": "PersonalHead()", "participation": 0.6},
}
"""The issue's four experiments, as changes of the base."""


def experiment(changes: dict[str, Any]) -> Experiment:
    return config.checked(BASE | changes, "a test")


def here(changes: dict[str, Any], out: Path | None = None) -> Result:
    """The same experiment without nodes."""
    given = arguments(experiment(changes))
    return train(**(given | {"checkpoint_every": None}), out=out)


class Near:
    """Nodes in this process; `spoil` may change a reply, lose it, or raise."""

    def __init__(
        self,
        folder: Path,
        changes: dict[str, Any],
        nodes: int = 3,
        spoil: Callable[..., Any] | None = None,
        own: list[dict[str, Any]] | None = None,
    ) -> None:
        self.spoil, self.asked = spoil, []
        self.nodes = {}
        for i in range(nodes):
            share = {"partition-id": i, "num-partitions": nodes} if own is None else own[i]
            place = {"name": f"n{i}", "state": str(folder / f"state{i}"), **share}
            self.nodes[f"{i:064x}"] = Node(experiment(changes), place)

    def ask(self, kind: str, requests: dict[str, bytes]) -> dict[str, bytes | Trouble]:
        found: dict[str, bytes | Trouble] = {}
        for key, request in reversed(requests.items()):  # in any order
            self.asked.append((kind, int(key, 16)))
            try:
                reply: Any = self.nodes[key].answer(kind, request)
            except UndriftError as error:  # Flower makes an error message of it
                found[key] = Trouble(str(error))
                continue
            found[key] = self.spoil(kind, int(key, 16), request, reply) if self.spoil else reply
        return found

    def keys(self) -> list[str]:
        return list(self.nodes)


def near(folder: Path, changes: dict[str, Any], link: Near | None = None, replies: int = 1) -> Result:
    """The experiment on nodes in this process."""
    link = link or Near(folder, changes)
    return serve(experiment(changes), link, link.keys, folder / "out", replies)
