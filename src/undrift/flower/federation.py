"""Who takes part: nodes by their key, the clients that each of them has, and what they report about their data.

It is fixed when a run starts, and kept in a file next to it, so that a server which restarts knows the same nodes, also
those that are not back yet. Flower's ids of nodes change; keys do not.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from undrift.data.dataset import FederatedDataset
from undrift.errors import UndriftError
from undrift.files import seal, unseal
from undrift.flower.agreement import Report, places
from undrift.flower.messages import RefusedError
from undrift.flower.outline import agreed, check_report, outline

FILE = "federation.json"


@dataclass(frozen=True)
class Member:
    """A node, as the server knows it."""

    key: str
    """A digest of the public key that the node proved to have."""
    name: str
    """What it calls itself, for messages."""
    ids: list[int]
    """Its clients."""
    report: Report


@dataclass(frozen=True)
class Federation:
    """The members of a run."""

    run: str
    """The run's name on the nodes, under which they keep their clients' states."""
    members: dict[str, Member]
    """By key, in the order of their first client."""
    total: int
    """How many clients there are, those without data included."""

    @cached_property
    def common(self) -> Report:
        """What the nodes have agreed on."""
        return agreed({member.name: member.report for member in self.members.values()})

    def data(self, **rest: Any) -> FederatedDataset:
        """Return the data without a sample."""
        common, sizes = self.common, np.zeros(self.total, np.int64)
        counted = all(member.report["counts"] is not None for member in self.members.values())
        counts = np.zeros((self.total, common["classes"]), np.int64) if counted and common["classes"] else None
        for member in self.members.values():
            sizes[member.ids] = member.report["sizes"]
            if counts is not None:
                own = np.array(member.report["counts"])
                mine = places(member.report["names"], common["names"], own.shape[1])[: own.shape[1]]
                counts[np.ix_(member.ids, mine)] = own
        return outline(sizes, counts, common, **rest)

    def owners(self, clients: np.ndarray) -> dict[str, np.ndarray]:
        """By key: which of these clients a node has, for the nodes that have some, in the order of the clients."""
        found = {key: clients[np.isin(clients, member.ids)] for key, member in self.members.items()}
        some = {key: own for key, own in found.items() if len(own)}
        return dict(sorted(some.items(), key=lambda item: int(item[1][0])))

    def save(self, folder: Path) -> None:
        members = [asdict(member) for member in self.members.values()]
        seal(folder / FILE, {"run": self.run, "total": self.total, "members": members})


def read(folder: Path) -> Federation | None:
    """Return the federation of a run that was started before."""
    if not (folder / FILE).exists():
        return None
    body = unseal(folder / FILE)
    members = [Member(**member) for member in body["members"]]
    try:
        for member in members:
            check_report(member.report)
    except RefusedError as error:
        raise UndriftError(
            f"{folder / FILE} is of another version of undrift ({member.name}: {error}); start a new run, with another "
            "out."
        ) from error
    return Federation(body["run"], {member.key: member for member in members}, body["total"])


def founded(reports: dict[str, tuple[str, Report]]) -> Federation:
    """Return a new federation, from nodes' names and reports by key.

    Where the experiment's clients are shared out, nodes say which of them they have. Nodes with data of their own get
    the next free numbers, in the order of their names, then of their keys.
    """
    order = sorted(reports, key=lambda key: (reports[key][0], key))
    shared = {key: report["ids"] for key, (_, report) in reports.items()}
    if any(ids is None for ids in shared.values()) != all(ids is None for ids in shared.values()):
        raise UndriftError(
            "Some nodes have data of their own and others a share of the experiment's; give all the same."
        )
    if any(ids is not None for ids in shared.values()):
        total, ids = _dealt(reports)
    else:
        ends = np.cumsum([len(reports[key][1]["sizes"]) for key in order]).tolist()
        ids = {key: list(range(end - len(reports[key][1]["sizes"]), end)) for key, end in zip(order, ends, strict=True)}
        total = ends[-1]
    called = Counter(name for name, _ in reports.values())
    names = {key: reports[key][0] or f"node {key[:8]}" for key in order}
    names |= {key: f"{name} ({key[:8]})" for key, name in names.items() if called[name] > 1}
    members = [Member(key, names[key], ids[key], reports[key][1]) for key in order]
    members.sort(key=lambda member: member.ids[0])
    return Federation(secrets.token_hex(16), {member.key: member for member in members}, total)


def _dealt(reports: dict[str, tuple[str, Report]]) -> tuple[int, dict[str, list[int]]]:
    """Return the number of clients, and which node has which. Raises `UndriftError` if a client is claimed twice."""
    totals = {report["total"] for _, report in reports.values()}
    if len(totals) != 1:
        raise UndriftError(f"The nodes count {sorted(totals)} clients of the experiment; give them the same data.")
    ids = {key: report["ids"] for key, (_, report) in reports.items()}
    flat = sorted(client for own in ids.values() for client in own)
    total = totals.pop()
    for before, client in itertools.pairwise(flat):
        if before == client:
            raise UndriftError(f"Two nodes have client {client}; give each a partition-id of its own.")
    if flat and not (0 <= flat[0] and flat[-1] < total):
        raise UndriftError(f"A node has client {flat[-1]} of {total}, which does not exist.")
    return total, ids
