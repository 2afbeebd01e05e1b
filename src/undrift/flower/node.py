"""What a node does on request of the server: report on its data, train its clients, measure, evaluate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from undrift.data.dataset import FederatedDataset
from undrift.engine.base import RoundInputs
from undrift.engine.client_states import ClientStates
from undrift.engine.table import Table
from undrift.errors import UndriftError, quoted
from undrift.flower.evaluation import evaluated
from undrift.flower.holding import Holding, holding, state_folder
from undrift.flower.messages import Notes, decode, encode
from undrift.flower.node_state import NodeStates
from undrift.functional.model import Params
from undrift.method.context import Plan
from undrift.tools.config import Experiment
from undrift.tools.experiment import about, arguments
from undrift.tools.plugins import import_plugins
from undrift.training.build import current_device, prepare
from undrift.training.model_rehearsal import rehearse_model
from undrift.training.run import Run
from undrift.training.settings import Settings
from undrift.training.state import State
from undrift.training.threads import use_threads
from undrift.training.torch_flags import use_flags
from undrift.tree import Tree, tree_finite, tree_to

PLANNED = ("lr", "momentum", "weight_decay")


class Node:
    """Answers the server's requests. Whatever must outlive a reply is on disk."""

    def __init__(self, experiment: Experiment, config: Mapping[str, Any]) -> None:
        self.experiment, self.config = experiment, config

    def answer(self, kind: str, request: bytes) -> bytes:
        """Return the reply to a request, as bytes."""
        sent, notes = decode(request)
        import_plugins(self.experiment.imports)
        with use_threads(self.experiment.threads):
            name = str(self.config.get("name", ""))
            if kind == "hello":
                with about(f"node {quoted(name)}"):
                    return encode((), {"report": holding(self.experiment, self.config).report(), "name": name})
            held = holding(self.experiment, self.config)
            run = node_run(self.experiment, held, notes)
            exact = use_flags(self.experiment.precision, self.experiment.deterministic, run.device)
            with current_device(run.device), exact:
                run = rehearse_model(run)
                work = Work(run, state_folder(self.config), sent, notes)
                answers: dict[str, Callable[[], bytes]] = {"train": work.train, "measure": work.measure}
                return (answers | {"evaluate": work.evaluate})[kind]()


def node_run(experiment: Experiment, held: Holding, notes: Notes) -> Run:
    """Return the run as this node sees it: the same experiment, with data of the node's own clients alone."""
    data = held.among(notes["ids"], notes["total"], notes["common"])
    run = prepare(settings(experiment, data), cohort=notes["cohort"])
    return replace(run, files=None)  # what clients keep is on the disk anyway, and here for one answer


def settings(experiment: Experiment, data: FederatedDataset) -> Settings:
    """Return the experiment's settings for a node.

    A node's process lives for one answer, so tracing or compiling would have to pay within one round; and clients that
    are sampled differ in number from round to round. So clients train one after another.
    """
    given = arguments(experiment, data)
    engine = "plain" if given["engine"] == "auto" else given["engine"]
    asked = {"engine": engine, "participation": 1.0, "compile": False, "drift": False}
    # The rule would count a forward pass's operations, which imports torch's compiler.
    asked["threads"] = given["threads"] or torch.get_num_threads()
    asked |= {"lanes": 1 if asked["engine"] == "lanes" else None, "checkpoint_every": None, "track": None}
    return Settings(**(given | asked | {"stop_when": None, "notes": None, "personalize_every": None}))


class Work:
    """One request that needs a run."""

    def __init__(self, run: Run, folder: Path, sent: Tree, notes: Notes) -> None:
        self.run, self.sent, self.notes = run, tree_to(sent, run.device), notes
        self.states = NodeStates(folder, notes["run"])
        self.clients = np.array(notes["clients"], np.int64)
        self.keeping = [i for i, _ in run.composed.overriding("keep")]

    def inputs(self) -> RoundInputs:
        """Return the round's inputs, those of this node's clients."""
        notes, rates = self.notes, {name: self.notes[name] for name in PLANNED}
        plan = Plan(round=notes["round"], clients=self.clients, steps=np.array(notes["steps"], np.int64), **rates)
        found = self.run.inputs(plan, self.state, self.sent.get("received"), self.kept())
        return replace(found, clients=found.clients | self.sent.get("clients", {}))

    @property
    def state(self) -> State:
        params, tracked = (self.whole(self.sent[which], which) for which in ("start", "tracked"))
        return State(params, [], tracked, self.run.no_states(), self.notes["round"])

    def whole(self, sent: Params, which: str) -> Params:
        """Return the weights sent, with those that are personal as they began: they are not sent."""
        mine: Params = getattr(self.run.model, which)
        if strange := (mine.keys() ^ sent.keys()) - self.run.engine.program.personal:
            raise UndriftError(f"The server's model is not this node's: {min(strange)!r} is in one of them only.")
        return {name: sent.get(name, t) for name, t in mine.items()}

    def kept(self) -> ClientStates | None:
        """Return what these clients have kept, in the version that the server names."""
        versions = self.notes["versions"]
        if versions is None:
            return None
        found: dict[int, dict[int, Tree]] = {i: {} for i in self.keeping}
        for client, version in zip(self.clients.tolist(), versions, strict=True):
            for part, tree in self.states.read(client, version).items():
                found[part][client] = tree_to(tree, self.run.device)
        return replace(self.run.no_states(), parts={i: Table().updated(states) for i, states in found.items()})

    def train(self) -> bytes:
        """Train, keep what is to be kept, and reply with sums."""
        inputs, after = self.inputs(), self.notes["round"] + 1
        outcome = self.run.engine.run(inputs, skip=self.notes["skip"])
        for place, client in enumerate(self.clients.tolist() if self.keeping else []):
            own = {i: outcome.kept[i][client] for i in self.keeping}
            self.states.write(client, after, own, self.notes["versions"][place])
        finite = () if outcome.finite is None else outcome.finite
        sent = {"total": outcome.total, "updates": outcome.updates, "finite": finite}
        sound = bool(tree_finite(outcome.kept))
        return encode(sent, {"clients": self.clients.tolist(), "round": self.notes["round"], "kept_finite": sound})

    def measure(self) -> bytes:
        """Measure without training."""
        sums = self.run.engine.measure_all(self.inputs(), self.notes["when"])
        return encode({"sums": sums}, {"clients": self.clients.tolist(), "round": self.notes["round"]})

    @torch.no_grad()
    def evaluate(self) -> bytes:
        """Return sums of the loss and the metrics on this node's held-out data."""
        return encode(evaluated(self.run, self.state, self.inputs), {"round": self.notes["round"]})
