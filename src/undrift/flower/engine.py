"""The engine for remote clients: it sends requests to nodes, checks their replies, and adds them in client order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from undrift.engine.base import Outcome, RoundInputs, Visit
from undrift.engine.client import Program
from undrift.engine.client_states import ClientStates
from undrift.engine.sums import Sums
from undrift.errors import UndriftError
from undrift.flower.check import as_ints, check_finite, check_form, flags, reordered
from undrift.flower.federation import Federation
from undrift.flower.messages import SLACK, RefusedError, decode, encode
from undrift.flower.node import PLANNED
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import Tree, tree_add, tree_bytes, tree_leaves, tree_map, tree_to

log = logging.getLogger("undrift.flower")


@dataclass(frozen=True)
class Trouble:
    """Why a node has not replied."""

    why: str


class Link(Protocol):
    """The connection to the nodes."""

    def ask(self, kind: str, requests: dict[str, bytes]) -> dict[str, bytes | Trouble]:
        """Send each node its request, by key, and collect what comes back before the deadline."""


class Versions(ClientStates):
    """The states of clients as the server knows them: the number of the round after which their node has kept them."""

    def reader(
        self, newcomers: Callable[[Sequence[int], int], Tree], clients: np.ndarray
    ) -> Callable[[Sequence[int]], list[Tree]]:
        def found(where: Sequence[int]) -> list[Tree]:
            each: list[Tree] = [() for _ in range(self.count)]
            for i, states in self.parts.items():
                each[i] = torch.tensor([int(states.get(int(clients[c]), 0)) for c in where], dtype=torch.int64)
            return each

        return found


@dataclass
class FlowerEngine:
    """Trains cohorts on the nodes that have their clients."""

    local: Run
    """The run as it would be here, on data without samples: what it would send has the form that replies must have."""
    federation: Federation
    link: Link
    least: int = 1
    """The number of nodes that must reply for a round to count."""
    width: int = 1
    form: Tree = field(default=None, init=False)
    measured: dict[str, Tree] = field(default_factory=dict, init=False)

    @property
    def program(self) -> Program:
        return self.local.engine.program

    # ---- what is sent ----------------------------------------------------------------------------------------
    def requests(self, inputs: RoundInputs, **notes: Any) -> dict[str, bytes]:
        """Return one request per node that has clients of the cohort."""
        plan, without = inputs.plan, self.program.without_personal
        sent: dict[str, Tree] = {name: without(inputs.shared[name], drop=True) for name in ("start", "tracked")}
        sent |= {"received": inputs.shared["received"]} if "received" in inputs.shared else {}
        fates = {name: inputs.clients[name] for name in ("factor", "place") if name in inputs.clients}
        keeping = [i for i, _ in self.program.method.overriding("keep")]
        kept = inputs.kept(range(len(plan.clients)))
        versions = kept[keeping[0]].tolist() if keeping and has_versions(kept) else None
        shared = {"run": self.federation.run, "total": self.federation.total, "common": self.federation.common}
        shared |= {"cohort": self.local.cohort_size, "round": plan.round} | notes
        shared |= {name: float(getattr(plan, name)) for name in PLANNED}
        found = {}
        for key, own in self.federation.owners(plan.clients).items():
            places = np.searchsorted(plan.clients, own)
            mine = {"clients": tree_map(lambda t, p=places: t[torch.from_numpy(p)].cpu(), fates)} if fates else {}
            numbers = {"clients": own.tolist(), "steps": plan.steps[places].tolist()}
            numbers["ids"] = self.federation.members[key].ids
            numbers["versions"] = None if versions is None else [versions[p] for p in places]
            found[key] = encode(sent | mine, shared | numbers)
        return found

    def collect(
        self, kind: str, requests: dict[str, bytes], accept: Callable[[str, bytes], Any]
    ) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
        """Return the nodes' replies, as `accept` reads them, and why the others are missing or were rejected."""
        replies, accepted, others = self.link.ask(kind, requests), {}, {}
        for key in requests:
            reply = replies.get(key, Trouble("no answer"))
            if isinstance(reply, Trouble):
                others[key] = ("missing", reply.why)
                continue
            try:
                accepted[key] = accept(key, reply)
            except RefusedError as error:
                others[key] = ("refused", str(error))
        for key, (how, why) in others.items():
            log.warning("%s is %s: %s", self.federation.members[key].name, how, why)
        if len(accepted) < self.least:
            reasons = "; ".join(f"{self.federation.members[key].name}: {why}" for key, (_, why) in others.items())
            raise UndriftError(
                f"{len(accepted)} of {len(requests)} nodes gave an answer that can be used, and {self.least} must "
                f"({reasons}). Start the run again once they are back; it goes on from its last round."
            )
        return accepted, others

    # ---- what comes back -------------------------------------------------------------------------------------
    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        if visit is not None:
            raise UndriftError("Clients' weights after training stay on their nodes; leave personalize_every out.")
        plan = inputs.plan
        if not len(plan.clients):
            return replace(self._alone(inputs, cohort=0), total=())
        form = self._form(inputs)
        owners = self.federation.owners(plan.clients)

        def accept(key: str, reply: bytes) -> tuple[Tree, Tree, Tensor]:
            own = owners[key]
            updates = tree_map(lambda t: t.expand(len(own), *t.shape[1:]), form["updates"])
            sent, notes = decode(reply, most_bytes([form["total"], updates], len(own)))
            if as_ints(notes, "clients") != own.tolist() or notes.get("round") != plan.round:
                raise RefusedError("it is of another round, or of other clients")
            if not isinstance(sent, dict) or set(sent) != {"total", "updates", "finite"}:
                raise RefusedError("it does not have the parts of a reply")
            check_form([sent["total"], sent["updates"]], [form["total"], updates])
            counting = flags(sent["finite"], len(own)) if skip else torch.ones(len(own), dtype=torch.bool)
            check_finite([sent["total"], tree_map(lambda t: t[counting], sent["updates"])])
            if notes.get("kept_finite") is not True:
                raise RefusedError("what its clients keep has NaN or infinity")
            total = reordered(sent["total"], form["total"])
            single = reordered(sent["updates"], form["updates"])
            return *tree_to((total, single), self.local.device), counting

        requests = self.requests(inputs, skip=skip)
        accepted, others = self.collect("train", requests, accept)
        return self._outcome(inputs, owners, accepted, others, skip)

    def _outcome(
        self, inputs: RoundInputs, owners: dict[str, np.ndarray], accepted: dict[str, Any], others: Any, skip: bool
    ) -> Outcome:
        """Return the sums of all replies, added in the order of the nodes' first clients."""
        plan, sums = inputs.plan, Sums(self.program, inputs)
        lost, after = np.zeros(len(plan.clients), bool), torch.tensor(plan.round + 1)
        whose: dict[str, list[int]] = {"missing": [], "refused": []}
        for key, own in owners.items():
            places = np.searchsorted(plan.clients, own).tolist()
            if key in others:
                lost[places] = True
                whose[others[key][0]] += own.tolist()
                sums.noted.append((torch.zeros(len(own), dtype=torch.bool, device=self.local.device), places))
                continue
            total, updates, counting = accepted[key]
            sums.add(total)
            if updates:
                sums.updates |= {p: tree_map(lambda t, j=j: t[j], updates) for j, p in enumerate(places)}
            if skip or others:
                sums.noted.append((counting.to(self.local.device), places))
            for i, _ in self.program.method.overriding("keep"):
                sums.kept.setdefault(i, {}).update(dict.fromkeys(own.tolist(), after))
        if sums.updates:  # those that do not count are left out of what a part aggregates, but need a place
            like = next(iter(sums.updates.values()))
            sums.updates |= {int(p): tree_map(torch.zeros_like, like) for p in np.flatnonzero(lost)}
        names = {self.federation.members[key].name: f"{how}: {why}" for key, (how, why) in others.items()}
        columns: dict[str, Any] = {how: sorted(clients) for how, clients in whose.items()}
        found = replace(sums.outcome(), lost=lost if others else None, total=())
        return replace(found, columns=columns | ({"nodes": names} if names else {}))

    def measure_all(self, inputs: RoundInputs, when: str) -> list[Tree]:
        """Measure, as every engine does. All nodes must reply: a partial sum would look like a complete one.

        Raises `UndriftError` if one does not. A run that is started again asks all of them once more.
        """
        form = self._measured_form(inputs, when)
        owners = self.federation.owners(inputs.plan.clients)

        def accept(key: str, reply: bytes) -> Tree:
            sent, notes = decode(reply, most_bytes(form, len(owners[key])))
            if as_ints(notes, "clients") != owners[key].tolist() or notes.get("round") != inputs.plan.round:
                raise RefusedError("it is of another round, or of other clients")
            check_form(sent, {"sums": form})
            check_finite(sent)
            return tree_to(reordered(sent["sums"], form), self.local.device)

        accepted, others = self.collect("measure", self.requests(inputs, when=when), accept)
        if others:
            parts = ", ".join(type(part).__name__ for _, part in self.program.method.measuring(when))
            moment = "after the last round" if when == "finish" else f"in round {inputs.plan.round + 1}"
            reasons = "; ".join(
                f"{self.federation.members[key].name} is {how}: {why}" for key, (how, why) in others.items()
            )
            raise UndriftError(
                f"{parts} measures over all clients {moment}, and {reasons}. Start the run again once all nodes are "
                "back; it goes on from its last round."
            )
        return _sum(accepted[key] for key in owners)

    # ---- the form of replies ---------------------------------------------------------------------------------
    def _form(self, inputs: RoundInputs) -> Tree:
        """Return what a client sends, found by training one on made-up samples for one step."""
        if self.form is None:
            found = self._alone(inputs, cohort=1)
            self.form = tree_map(Tensor.cpu, {"total": found.total, "updates": found.updates})
        return self.form

    def _measured_form(self, inputs: RoundInputs, when: str) -> Tree:
        if when not in self.measured:
            alone = self._single(inputs, 1)
            self.measured[when] = tree_map(Tensor.cpu, self.local.engine.measure_all(alone, when))
        return self.measured[when]

    def _alone(self, inputs: RoundInputs, cohort: int) -> Outcome:
        return self.local.engine.run(self._single(inputs, cohort), skip=False)

    def _single(self, inputs: RoundInputs, cohort: int) -> RoundInputs:
        plan, shared = inputs.plan, inputs.shared
        alone = replace(plan, clients=plan.clients[:cohort], steps=np.ones(cohort, np.int64), fates=None)
        state = State(shared["start"], [], shared["tracked"], self.local.no_states(), plan.round)
        kept = self.local.no_states() if has_versions(inputs.kept(range(cohort))) else None
        return self.local.inputs(alone, state, shared.get("received"), kept)


def has_versions(kept: list[Tree]) -> bool:
    """Return whether the clients of a round's inputs have states, which at the server are versions."""
    return any(isinstance(tree, Tensor) for tree in kept)


def most_bytes(form: Tree, clients: int) -> int:
    """Return the most that a reply of this form may take: its tensors, their names, and some notes."""
    return tree_bytes(form) + 256 * len(tree_leaves(form)) + 64 * clients + SLACK


def _sum(trees: Iterable[Tree]) -> Tree:
    total: Tree = None
    for tree in trees:
        total = tree if total is None else tree_add(total, tree)
    return total
