"""The server's side of a run: who takes part, the run on the outline of their data, and its loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from undrift.engine.client_states import ClientStates
from undrift.errors import UndriftError, listed, quoted, require
from undrift.flower.agreement import Report, fitted
from undrift.flower.engine import FlowerEngine, Link, Versions
from undrift.flower.evaluation import Sums, added, check_sums, columns
from undrift.flower.federation import Federation, founded, read
from undrift.flower.messages import RefusedError, decode, encode
from undrift.flower.outline import check_report
from undrift.metrics.base import Metric
from undrift.tools.config import Experiment
from undrift.tools.experiment import arguments, loaded
from undrift.tools.plugins import import_plugins
from undrift.training.evaluation import empty_sums, has_own_models
from undrift.training.loop import train_with
from undrift.training.model_rehearsal import rehearse_model
from undrift.training.result import Result
from undrift.training.rounds import broadcast
from undrift.training.run import Run
from undrift.training.run_folder import RUN
from undrift.training.settings import Settings
from undrift.training.state import State
from undrift.training.threads import use_threads

log = logging.getLogger("undrift.flower")

STATUS = "status.json"
"""The file with the status of a run."""
REPORT = 1 << 26
"""The most bytes of a node's report about its data, and of its sums in an evaluation."""


@dataclass(frozen=True)
class ServerRun(Run):
    """A run whose clients, and what they keep, are on nodes."""

    def no_states(self) -> ClientStates:
        return Versions.none(self.composed, self.device, self.population)

    def held_out(self, state: State, last: bool) -> dict[str, Any] | None:
        """Loss and metrics on what nodes hold out, from their sums."""
        engine = self.engine
        assert isinstance(engine, FlowerEngine)
        clients, t = self.data.nonempty, state.round - 1
        plan = replace(self.plan(t), clients=clients, steps=np.ones_like(clients))
        received = None
        if has_own_models(self):
            server = replace(self.server(t, state), cohort=clients, client_weights=self.weights(clients))
            received = broadcast(self, self.bound(t), plan, state, server)
        inputs, wanted = self.inputs(plan, state, received, state.clients), empty_sums(self, state)

        def accept(key: str, reply: bytes) -> Sums:
            sent, notes = decode(reply, REPORT)
            if notes.get("round") != t:
                raise RefusedError("it is of another round")
            check_sums(sent, engine.federation.members[key].ids, wanted)
            return sent

        accepted, others = engine.collect("evaluate", engine.requests(inputs), accept)
        found: Sums = {"splits": {}, "clients": {}}
        for key in engine.federation.members:
            found = added(found, accepted[key]) if key in accepted else found
        row = columns(self, found, last)
        names = [engine.federation.members[key].name for key in others]
        return row | ({"not_evaluated": names} if names else {})


def met(link: Link, keys: list[str]) -> Federation:
    """Return a new federation of the nodes with these keys, which report about their data."""
    reports: dict[str, tuple[str, Report]] = {}
    for key, reply in link.ask("hello", dict.fromkeys(keys, encode((), {}))).items():
        if not isinstance(reply, bytes):
            raise UndriftError(f"A node cannot take part: {reply.why}")
        _, notes = decode(reply, REPORT)
        found, name = notes.get("report"), str(notes.get("name", ""))[:80]
        if not isinstance(found, dict):
            raise RefusedError(f"The first answer of the node {quoted(name)} has no report about its data.")
        try:
            check_report(found)
        except RefusedError as error:
            raise UndriftError(f"The node {quoted(name)} cannot take part: {error}.") from error
        reports[key] = (name, found)
    require(bool(reports), "No node answered.")
    return founded(reports)


def serve(
    experiment: Experiment,
    link: Link,
    found: Callable[[], list[str]],
    out: Path,
    replies: int = 1,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Run an experiment on nodes, or continue the run in `out`.

    Args:
        experiment: What to run.
        link: The way to the nodes.
        found: Waits for the nodes and returns their keys. A run that goes on waits too, so that it does not leave out
            nodes which are about to come back.
        out: The folder of the federation, with the run in `run/`.
        replies: How many nodes must answer in every round.
        on_round: Called with each round's history.
    """
    require(
        experiment.personalize_every is None, "personalize_every needs clients' weights, which stay on their nodes."
    )
    import_plugins(experiment.imports)
    out.mkdir(parents=True, exist_ok=True)
    known, keys = read(out), found()
    federation = met(link, keys) if known is None else known
    with use_threads(experiment.threads):
        given = settings(experiment, federation, out / "run")
        if known is None:
            federation.save(out)  # only now, so that nodes which do not fit together can be corrected and asked again
        return train_with(replace(given, on_round=on_round), lambda run: served(run, federation, link, replies))


def settings(experiment: Experiment, federation: Federation, folder: Path) -> Settings:
    """Return the experiment's settings for the server, which saves every round and continues where it stopped.

    Figures of client drift are left out: nodes would have to send more than the method needs.
    """
    rows = None
    if experiment.data.server_fraction:
        try:
            rows = fitted(loaded(experiment), federation.common).server_rows
        except UndriftError as error:
            raise UndriftError(f"The server's own data do not suit those of the nodes: {error}") from error
    data = federation.data(origin=experiment.data.model_dump(), server_rows=rows)
    own = {"engine": "plain", "drift": False, "lanes": None, "compile": None, "checkpoint_every": 1, "out": folder}
    return Settings(**(arguments(experiment, data) | own | {"resume": (folder / RUN).exists()}))


def served(run: Run, federation: Federation, link: Link, replies: int) -> ServerRun:
    """Return the run with the nodes for an engine."""
    whole = [name for name, measure in run.measures.items() if not isinstance(measure, Metric)]
    require(
        not whole,
        f"{listed(whole)} cannot be computed from sums, which are all that nodes send; leave it out of metrics.",
    )
    # Evaluation must call the model as the nodes do, which rehearse it too. What clients keep is on their nodes.
    run = replace(rehearse_model(run), files=None)
    given = {entry.name: getattr(run, entry.name) for entry in fields(run)}
    engine = FlowerEngine(run, federation, link, replies)
    choices = run.choices | {"engine": "flower", "why": f"{len(federation.members)} nodes train"}
    choices.pop("kept", None)
    return ServerRun(**(given | {"engine": engine, "choices": choices}))


def described(row: dict[str, Any], rounds: int) -> str:
    """Return a round as one line of text."""
    shown = [f"{name} {row[name]:.4g}" for name in ("loss", "accuracy") if name in row]
    left = [f"{how} {row[how]}" for how in ("missing", "refused") if row.get(how)]
    return "  ".join([f"round {row['round']} of {rounds}", *shown, *left])
