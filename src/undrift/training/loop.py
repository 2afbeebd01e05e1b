"""`ud.train`: a run from its arguments to its result, round by round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from undrift.data.dataset import FederatedDataset
from undrift.data.holdings import holdings
from undrift.errors import UndriftError, quoted, require
from undrift.losses import reserved
from undrift.method.faults import Faults
from undrift.method.local import Local
from undrift.method.part import Method, Part
from undrift.methods.fedavg import FedAvg
from undrift.training import nonfinite
from undrift.training.arithmetic import arithmetic
from undrift.training.build import prepare, selected
from undrift.training.checkpoint import Checkpoints
from undrift.training.checks import check_listening
from undrift.training.clock import Clock
from undrift.training.early import COLUMN, Rule, as_rule, check_column
from undrift.training.evaluate import evaluate
from undrift.training.identity import compare, compare_versions, identity, versions
from undrift.training.personal import Personal
from undrift.training.record import record, same_settings
from undrift.training.result import Folder, Result, intact
from undrift.training.rounds import Round, federated_round, finish
from undrift.training.run import Run
from undrift.training.settings import Settings
from undrift.training.state import State
from undrift.training.track import Trackers
from undrift.tree import Tree, tree_finite

log = logging.getLogger("undrift")


def train(
    model: nn.Module | str,
    data: FederatedDataset,
    method: Method | Part | str = FedAvg(),  # noqa: B008 - parts are frozen
    *,
    rounds: int,
    local: Local,
    participation: int | float = 1.0,
    seed: int = 0,
    loss: Any = None,
    metrics: Any = None,
    device: str | torch.device = "auto",
    precision: str = "auto",
    engine: str = "auto",
    lanes: int | None = None,
    compile: bool | None = None,
    deterministic: bool = False,
    evaluate_every: int = 1,
    personalize_every: int | None = None,
    out: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    resume: bool = False,
    track: str | Sequence[str] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    notes: dict[str, Any] | None = None,
    on_nonfinite: str = "stop",
    stop_when: Callable[[Sequence[dict[str, Any]]], Any] | str | None = None,
    faults: Faults | None = None,
    max_norm_ratio: float | None = None,
    min_clients: int | float | None = None,
    allow_version_change: bool = False,
) -> Result:
    """Train a model over many clients, and return it with its history.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.Dirichlet(0.1), clients=20)
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.1)
        >>> result = ud.train("mlp", data, ud.FedProx(mu=0.1), rounds=2, local=local, participation=0.4)
        >>> len(result.history)
        2

    Args:
        model: Any `nn.Module`, which is left as it is, or the name of a model (`undrift list models`), with its options
            if any: `"mlp(hidden=32)"`.
        data: The clients' data, from `ud.load` or `ud.FederatedDataset.from_clients`.
        method: A part, a sum of parts, or the expression for one in a string: `"FedDyn(0.1) + FedNLR()"`.
        rounds: How many rounds to train.
        local: What a client does in a round: steps or epochs, batch size, learning rate.
        participation: Who trains in a round. An int is a number of clients, a float a fraction of those with data.
        seed: Decides the cohorts, the batches, every draw of a method, and the weights of a model given by name.
        loss: A name (`undrift list losses`), or a function `(output, target) -> one value per sample`. By default what
            the data ask for, else cross-entropy.
        metrics: Names, or a dict of names and functions of `(output, target)`. By default accuracy for classes.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; `"auto"` takes a GPU if there is one.
        precision: `"auto"` computes in the model's own dtype; `"tf32"` and `"bfloat16"` are faster on a GPU.
        engine: `"lanes"` (the cohort as one vectorized program), `"plain"` (one client at a time), or `"auto"`;
            `result.choices` says what was chosen and why.
        lanes: How many clients train side by side with `engine="lanes"`. By default as many as pay.
        compile: Whether to compile the local step with `torch.compile`, on a GPU. By default if the run is long enough.
        deterministic: Use torch's deterministic algorithms throughout.
        evaluate_every: Evaluate on the test and validation data every so many rounds, and after the last.
        personalize_every: Where clients have test data of their own: every so many rounds, and after the last, also
            measure each client's model after one more local epoch.
        out: A folder for the run's files, empty or not there yet.
        checkpoint_every: Rounds (`10`) or seconds (`"30s"`) between checkpoints in `out`.
        resume: Continue the run in `out` from its last checkpoint, after making sure that everything that decides the
            result is as it was.
        track: `"tensorboard"`, `"mlflow"` or a list of both, which get each round's figures too.
        on_round: A function that is called with each round's history.
        notes: Settings of the caller's own, to be kept in the run's `config.toml`.
        on_nonfinite: What to do when weights, a loss, or what a client sends or keeps become NaN or infinite. `"stop"`
            ends the run with the state before that round; `result.stopped` says why, and `resume=True` continues from
            there. `"skip"` leaves such clients out of the round and names them in its history (`skipped`).
        stop_when: A function of the history so far, called after each round; the run ends after the round in which it
            returns something true, which is the reason. It must depend on the history alone, so that a resumed run
            ends where it would have. `ud.EarlyStopping` is one, and may be given as a string.
        faults: The clients' simulated failures. The history names those that dropped out (`dropped`) and the stragglers
            (`stragglers`).
        max_norm_ratio: Leave out clients whose update is longer than this multiple, at least 1, of the median length of
            the round's finite updates, and name them in the history (`left_out`). With a median of 0, nobody is.
        min_clients: Skip a round in which fewer clients count: a number (an int) or a fraction of the cohort (a float).
            A skipped round leaves the model, the server's state and what clients keep as they were, and its
            `round_skipped` is true. A round in which no client counts is always skipped.
        allow_version_change: Resume also with other versions of torch, undrift and so on, or on another device, where
            the last digits may differ.

    Returns:
        The trained weights and model, the history with one dict per round, and what was chosen automatically.

    Raises:
        UndriftError: If an argument is wrong, or if they do not fit together; before anything is trained or written.
    """
    return train_with(
        Settings(
            model=model, data=data, method=method, rounds=rounds, local=local, participation=participation, seed=seed,
            loss=loss, metrics=metrics, device=device, precision=precision, engine=engine, lanes=lanes, compile=compile,
            deterministic=deterministic, evaluate_every=evaluate_every, personalize_every=personalize_every, out=out,
            checkpoint_every=checkpoint_every, resume=resume, track=track, on_round=on_round, notes=notes,
            on_nonfinite=on_nonfinite, stop_when=stop_when, faults=faults, max_norm_ratio=max_norm_ratio,
            min_clients=min_clients, allow_version_change=allow_version_change,
        )
    )  # fmt: skip


def train_with(given: Settings) -> Result:
    """The run with these settings: prepared, resumed where that is asked for, and trained."""
    run = prepare(given)
    check_listening(given)
    nonfinite.check(given.on_nonfinite)
    rule = as_rule(given.stop_when)
    nonfinite.check_start(run.model.start)
    files, where = Folder(given.out, given.resume), run.device
    checkpoints = Checkpoints(files.path, run, given.checkpoint_every)
    trackers = Trackers(given.track, files.path)
    with files as folder, selected(where), arithmetic(given.precision, given.deterministic, where), trackers:
        first = run.start()
        config = record(run, given) if folder.path or trackers else ""
        if folder.path:
            checkpoints.record = {
                "identity": identity(run, given), "versions": versions(where), "config": config
            }  # fmt: skip
        earlier = resumed(run, folder, checkpoints, given.allow_version_change) if given.resume else None
        if isinstance(earlier, Result):
            return earlier
        state = earlier or first
        folder.note(checkpoints.record)
        trackers.begin(config, state.history)
        folder.config()
        if folder.path and not state.round:
            folder.partition(holdings(run.data))
        folder.begin(state.history)
        watch = nonfinite.Watch(run, first.parts, skip=given.on_nonfinite == nonfinite.SKIP)
        listeners = Listeners(folder, checkpoints, trackers, given.on_round)
        return Loop(run, watch, listeners, given.evaluate_every, given.personalize_every, rule, state).train()


@dataclass(frozen=True)
class Listeners:
    """The receivers of each round's row: the folder, checkpoints, trackers, `on_round`."""

    folder: Folder
    checkpoints: Checkpoints
    trackers: Trackers
    on_round: Callable[[dict[str, Any]], None] | None

    @property
    def impatient(self) -> bool:
        """Whether one of them needs a round's row at once."""
        return bool(self.trackers or self.on_round)

    def row(self, row: dict[str, Any], state: State) -> None:
        self.folder.row(row)
        try:
            self.trackers.row(row)
            if self.on_round:
                self.on_round(row)
        except BaseException:  # a run that is stopped here, say with Ctrl-C, can be resumed from this round
            self.save(state)
            raise

    def save(self, state: State) -> None:
        self.folder.sync()
        self.checkpoints.save(state)

    def stopped(self, state: State, why: str) -> None:
        self.save(state)
        self.folder.stopped(why)
        self.trackers.failed = True


@dataclass
class Loop:
    """A run under way: one round after another, each with its row of the history."""

    run: Run
    watch: nonfinite.Watch
    listeners: Listeners
    evaluate_every: int
    personalize_every: int | None
    rule: Rule | None
    """When to end the run before its last round."""
    state: State

    def __post_init__(self) -> None:
        self.personal, self.clock = Personal(self.run), Clock(self.run.device)
        self.early: str | None = self.state.history[-1].get(COLUMN) if self.state.history else None

    def train(self) -> Result:
        """All rounds that are left, or as many as stay finite and as the rule allows."""
        stopped = None
        try:
            while self.state.round < self.run.rounds and not self.early:
                self.round()
        except Exception as error:
            # Undone here, not where the flag is read: that is on another stream, beside rounds still under way.
            found = error if isinstance(error, nonfinite.NonFiniteError) else self.blamed(error)
            self.state, stopped = self.watch.undo(found)
        trained = self.run.model.at(self.state.tracked).load(self.state.params)
        if stopped:
            self.listeners.stopped(self.state, stopped)
        else:
            self.listeners.folder.model(trained)
        return Result(self.state.params, trained, self.state.history, self.run.choices, stopped, self.early)

    def round(self) -> None:
        """Train one round, evaluate, and tell the listeners about rounds that the device is done with."""
        run, before = self.run, self.state
        last = before.round == run.rounds - 1
        if run.method.overriding("plan"):  # it may look at the state, which must be known to be finite then
            self.settle(wait=True)
        self.clock.start()
        state, done = federated_round(run, before, self.watch.skip)
        self.watch.add(before, done.answers)
        if last:
            state, done = finish(run, state, done)
        self.watch.left(state)
        self.state, self.done = state, done

        row = history_row(state, done)
        self.clock.stop(row, partial(late_figures, self.watch, row, done.method, state.parts))
        self.evaluate(row, done.method, last)
        state.history.append(row)
        due = self.listeners.checkpoints.due(state)
        self.settle(wait=last or due or self.listeners.impatient or self.rule is not None)
        if due:
            self.listeners.save(self.state)

    def evaluate(self, row: dict[str, Any], method: Method, last: bool) -> None:
        """Add to the row how the model does on the test and validation data and on clients' own, if that is due."""
        state = self.state
        if last or state.round % self.evaluate_every == 0:
            row |= evaluate(self.run, state) | self.personal.shared(state, last)
        if last or (self.personalize_every and state.round % self.personalize_every == 0):
            row |= self.personal.tuned(state, method, state.round - 1)

    def settle(self, wait: bool) -> None:
        """Hand on the rows of rounds that the device is done with. Raises `NonFiniteError`."""
        for row in self.clock.settled(wait):
            if self.rule and row["round"] < self.run.rounds:
                self.consider(self.rule, row)
            self.listeners.row(row, self.state)

    def consider(self, rule: Rule, row: dict[str, Any]) -> None:
        """End the run with this round if the rule says so: what follows the last round is done now."""
        check_column(rule, self.state.history)
        why = rule(self.state.history)
        if not why:
            return
        self.early = row[COLUMN] = why if isinstance(why, str) else f"stop_when returned {quoted(why)}"
        self.state, done = finish(self.run, self.state, self.done)
        finite = tree_finite((self.state.params, self.state.tracked))
        require(bool(finite), "The method's finish made weights that are not finite.")
        row |= {"bytes_down": done.bytes_down, "bytes_up": done.bytes_up, "total_bytes": self.state.total_bytes}
        self.evaluate(row, done.method, last=True)

    def blamed(self, error: Exception) -> nonfinite.NonFiniteError:
        """The round that left something non-finite, which is why a hook or a metric failed; else raises `error`."""
        try:
            self.settle(wait=True)
            self.watch.check()
        except nonfinite.NonFiniteError as found:
            return found
        raise error


def history_row(state: State, done: Round) -> dict[str, Any]:
    """The columns of a round that are known as soon as it has been launched."""
    work, answers = done.answers.work, done.answers
    return {
        "round": state.round,
        "clients": answers.clients.tolist(),
        **answers.columns,
        "steps": int(work.steps.sum()),
        "total_steps": state.total_steps,
        "steps_fraction": state.total_steps / state.constant_steps if state.constant_steps else 1.0,
        "local_steps": work.span,
        "lr": float(work.lr),
        "samples": answers.samples,
        "bytes_down": done.bytes_down,
        "bytes_up": done.bytes_up,
        "total_bytes": state.total_bytes,
    }


def late_figures(watch: nonfinite.Watch, row: dict[str, Any], method: Method, states: list[Tree]) -> dict[str, Any]:
    """The columns of a round that must be read from the device. Raises `NonFiniteError`."""
    settled, own = watch.settle(row), method.history(states)
    for name in own:
        require(
            name not in row and not reserved(name),
            f"A part's history has {name!r}, which is a column of the history already; rename it.",
        )
    return settled | own


def resumed(run: Run, folder: Folder, checkpoints: Checkpoints, allow_version_change: bool) -> Result | State | None:
    """The result of a run that is finished, where its last checkpoint stands, or None where there is no checkpoint.

    Compares before it changes anything. Raises `UndriftError` if the folder's run is not the one that is asked for.
    """
    known = folder.recorded() or checkpoints.recorded()
    if known is None:
        raise UndriftError(f"Nothing in {folder.path} says which run it is of; start it again in another folder.")
    compare(known["identity"], checkpoints.record["identity"], folder.path)
    if not allow_version_change:
        compare_versions(known["versions"], checkpoints.record["versions"], folder.path)
    if same_settings(known["config"], checkpoints.record["config"]):  # its comments say why what was chosen
        checkpoints.record["config"] = known["config"]
    if folder.path and folder.finished and intact(folder.path, known):
        folder.load(run.model.module)
        weights = dict(run.model.module.named_parameters())
        params = {name: weights[name].detach().clone() for name in run.model.start}
        rows = folder.rows()
        return Result(params, run.model.released(), rows, run.choices, stopped_early=rows[-1].get(COLUMN))
    now = checkpoints.restore()
    if now is None and folder.finished:
        raise UndriftError(
            f"The results in {folder.path} are damaged, and there is no checkpoint to make them again from; run it "
            "again in another folder."
        )
    if now is None:
        rounds = len(folder.rows())
        log.warning("%s has no checkpoint, so its %d rounds are trained again from the first", folder.path, rounds)
    return now
