"""`ud.train`: a run from its arguments to its result, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undrift.columns import directions
from undrift.data.dataset import FederatedDataset
from undrift.data.partition_summary import partition_summary
from undrift.engine.ranks import Ranks, launched
from undrift.errors import machine_trouble
from undrift.method.faults import Faults
from undrift.method.local import Local
from undrift.method.part import Method, Part
from undrift.methods.fedavg import FedAvg
from undrift.training import learning_checks, nonfinite, safetensors_io, threads, torch_flags
from undrift.training.argument_checks import check_listening
from undrift.training.barrier import Interrupted, announce_checkpoints
from undrift.training.build import current_device, prepare
from undrift.training.callbacks import Callback, RoundRecord, as_callbacks
from undrift.training.checkpoint import Checkpoints
from undrift.training.config_writer import config_toml
from undrift.training.early_stopping import COLUMN, Rule, as_rule, check_possible, stop_reason, warn_if_late
from undrift.training.evaluation import Columns, Personal, evaluate, has_own_models, own_model, warn_without_test
from undrift.training.history import Clock, history_row, late_columns
from undrift.training.identity import identity, versions
from undrift.training.model_rehearsal import few_outputs, rehearse_model, warn_of_another_evaluation
from undrift.training.observers import Observers
from undrift.training.progress import progress_of
from undrift.training.provenance import session
from undrift.training.rank_checks import check_agreement
from undrift.training.result import Result
from undrift.training.resume import resume_everywhere
from undrift.training.rounds import Round, federated_round, finish
from undrift.training.run import Run
from undrift.training.run_folder import Folder, ReplacedFolder, enter_folder
from undrift.training.settings import Settings
from undrift.training.side_by_side import check_interrupted, join
from undrift.training.state import State
from undrift.training.track import Trackers
from undrift.tree import tree_finite


def train(
    model: nn.Module | str | Callable[[], nn.Module],
    data: FederatedDataset,
    method: Method | Part | str = FedAvg(),  # noqa: B008 - parts are frozen
    *,
    rounds: int,
    local: Local,
    participation: int | float = 1.0,
    seed: int = 0,
    loss: Any = None,
    metrics: Any = None,
    output: str | None = None,
    device: str | torch.device = "auto",
    precision: str = "auto",
    engine: str = "auto",
    lanes: int | None = None,
    compile: bool | None = None,
    rehearse: bool = True,
    data_on: str = "auto",
    deterministic: bool = False,
    threads: int | None = None,
    evaluate_every: int = 1,
    personalize_every: int | None = None,
    drift: bool | str = False,
    out: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    resume: bool = False,
    track: str | Sequence[str] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    callbacks: Sequence[Callback | Callable[[RoundRecord], Any]] = (),
    progress: bool = False,
    notes: dict[str, Any] | None = None,
    on_nonfinite: str = "stop",
    stop_when: Callable[[Sequence[dict[str, Any]]], Any] | str | None = None,
    faults: Faults | None = None,
    max_norm_ratio: float | None = None,
    min_clients: int | float | None = None,
    allow_version_change: bool = False,
) -> Result:
    """Train one model over many clients with a federated method.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.Dirichlet(0.1), clients=20)
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.1)
        >>> result = ud.train("mlp", data, ud.FedProx(mu=0.1), rounds=2, local=local, participation=0.4)
        >>> len(result.history)
        2

    Args:
        model: Any `nn.Module`, which is not modified, or the name of a model (`undrift list models`), optionally with
            arguments: `"mlp(hidden=32)"`. Or a function that makes a module, such as `lambda: Net()`: for modules that
            cannot be copied, or not faithfully. Its initial weights then depend on `seed`.
        data: The clients' data, from `ud.load` or `ud.FederatedDataset.from_clients`.
        method: A part, a sum of parts, or such an expression as a string: `"FedDyn(0.1) + FedNLR()"`.
        rounds: The number of rounds, including those already trained if the run is resumed.
        local: What a client does in a round: steps or epochs, batch size, learning rate, local optimizer.
        participation: The clients per round: an int is a number of clients, a float a fraction of the clients that have
            data.
        seed: Determines the cohorts, the batches, every random draw of the method, and the initial weights of a model
            given by name.
        loss: A name (`undrift list losses`), a loss of torch, or a function `(output, target)` that returns one value
            per sample. One number for a whole batch will do where batches are full, and on the plain engine.
            Defaults to the loss that belongs to the data, otherwise to cross-entropy.
        metrics: Names (`undrift list metrics`), or a dict from names to functions of `(output, target)` or to objects
            with `update` and `compute`, such as those of torchmetrics. Defaults to accuracy for classification.
        output: If the model returns several tensors, the one that the loss, the metrics and the hooks receive: its
            name, its position in a tuple (`"0"`), or `"all"`. Defaults to `logits` if there is one.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`, or `"auto"` for a GPU if there is one.
        precision: `"auto"` computes in the model's own dtype. `"tf32"` and `"bfloat16"` are faster on a GPU.
        engine: `"lanes"` (the cohort as one vectorized program), `"plain"` (one client at a time), or `"auto"`.
            `result.choices` has what was chosen, and why.
        lanes: The number of clients that train side by side with `engine="lanes"`. Chosen by a rule by default.
        compile: Whether to compile the local step with `torch.compile` on a GPU. By default, long runs are compiled.
        rehearse: Whether to try a model, a loss and hooks of your own on a few samples before training. Two local steps
            must agree with ordinary PyTorch on your module itself; otherwise the run trains on the plain engine, with
            the reason in `result.choices["why"]`, or is refused. Hooks are refused that ignore `batch.mask`, that
            return something else for the same arguments, or that ignore the losses or the gradient they are given
            without saying so.
        data_on: Where the samples are kept: `"device"`, or `"host"`, from where batches are transferred while the
            device computes. `"auto"` uses the host only for data too large for the GPU's memory. The result is the
            same.
        deterministic: Whether to use torch's deterministic algorithms throughout.
        threads: The number of CPU threads for torch. By default one for small models, which do not benefit from more,
            and torch's own number otherwise. `OMP_NUM_THREADS` and `torch.set_num_threads` take precedence over this
            rule.
        evaluate_every: The number of rounds between evaluations on test and validation data. The last round is always
            evaluated.
        personalize_every: If clients have their own test data: the number of rounds between evaluations of each
            client's model after one more local epoch. These always take place after the last round.
        drift: Whether to record figures of client drift in the history: norms of client updates, their agreement, and
            training losses. `"layers"` adds the agreement per layer. See `docs/drift.md`.
        out: A folder for the run's files. It must be empty or not exist.
        checkpoint_every: The rounds (`10`) or seconds (`"30s"`) between checkpoints in `out`.
        resume: Whether to continue the run in `out` from its last checkpoint. Everything that determines the result
            must be unchanged. With more `rounds`, a finished run is continued from its weights before the method's
            `finish` hook, and ends like an uninterrupted run of that many rounds.
        track: `"tensorboard"`, `"mlflow"`, `"wandb"` or a list of these, to which each round's figures are also sent.
        on_round: A function that is called with each row of the history.
        callbacks: Objects of subclasses of `ud.Callback`, or functions of a round's record (`ud.RoundRecord`), which
            see every round and may end the run.
        progress: Whether to show progress: a live line on a terminal and in a notebook, elsewhere a log line per
            twentieth of the rounds or every 30 seconds.
        notes: Settings of your own to keep in the run's `config.toml`.
        on_nonfinite: What to do if weights, a loss, or what a client sends or keeps become NaN or infinite. `"stop"`
            ends the run with the state before that round, with the reason in `result.stopped`; `resume=True` continues
            from there. `"skip"` leaves such clients out of the round and lists them in its row (`skipped`).
        stop_when: A function of the history, called after every round. The run ends as soon as it returns something
            true, which is the reason. It must depend on the history alone, so that a resumed run ends in the same
            round. `ud.EarlyStopping` is such a function, and may be given as a string. To continue a run that ended
            this way, resume it with another rule or none.
        faults: Simulated client failures. The history lists clients that dropped out (`dropped`) and stragglers
            (`stragglers`).
        max_norm_ratio: Leaves out clients whose update is longer than this multiple (at least 1) of the median length
            of the round's finite updates, and lists them in the history (`left_out`). No client is left out if the
            median is 0.
        min_clients: Skips a round in which fewer clients count: a number (int) or a fraction of the cohort (float). A
            skipped round changes neither the model nor the state of server and clients; its row has `round_skipped`. A
            round in which no client counts is always skipped, unless a part's `plan` hook selected no client.
        allow_version_change: Whether to resume with other versions of torch, undrift and so on, or on another device,
            where the last digits may differ, and with your own code (methods, models, losses, metrics, schedules)
            changed since the run was started. `run.json` records what was allowed.

    Returns:
        The trained weights and model, the history with one dict per round, and the automatic choices.

    Raises:
        UndriftError: If an argument is invalid or arguments contradict each other. Nothing has been trained or written
            then.
    """
    return train_with(
        Settings(
            model=model, data=data, method=method, rounds=rounds, local=local, participation=participation, seed=seed,
            loss=loss, metrics=metrics, output=output, device=device, precision=precision, engine=engine, lanes=lanes,
            compile=compile, rehearse=rehearse, data_on=data_on, deterministic=deterministic, threads=threads,
            evaluate_every=evaluate_every, personalize_every=personalize_every, drift=drift, out=out,
            checkpoint_every=checkpoint_every, resume=resume, track=track, on_round=on_round, callbacks=callbacks,
            progress=progress, notes=notes, on_nonfinite=on_nonfinite, stop_when=stop_when, faults=faults,
            max_norm_ratio=max_norm_ratio, min_clients=min_clients, allow_version_change=allow_version_change,
        )
    )  # fmt: skip


def train_with(given: Settings, put: Callable[[Run], Run] = lambda run: run) -> Result:
    """Return the result of a run with these settings: prepared, resumed where that is asked for, and trained.

    `put` may put another engine in the place of the one that was chosen.
    """
    with torch.inference_mode(False), launched() as ranks:  # within it, nothing has a gradient
        run, rule = ranks.together(lambda: prepare_run(given, ranks, put))
        check_agreement(run, given)
        ranks.use(run.device)
        with threads.use_threads(run.choices["threads"]):
            join(run, given)
            with current_device(run.device), torch_flags.use_flags(given.precision, given.deterministic, run.device):
                run = rehearse_model(run)
            return train_run(run, rule, given)


def prepare_run(given: Settings, ranks: Ranks, put: Callable[[Run], Run]) -> tuple[Run, Rule | None]:
    """Return the run, and the rule that ends it early. Raises `UndriftError` for what it cannot be."""
    run = put(prepare(given, ranks))
    check_listening(given)
    nonfinite.check_on_nonfinite(given.on_nonfinite)
    rule = as_rule(given.stop_when, directions(run.metrics))
    check_possible(rule, run)
    warn_if_late(rule, run, given)
    nonfinite.check_start(run.model.start)
    if given.out is not None:
        safetensors_io.check_savable(run.model.module)
    return run, rule


def train_run(run: Run, rule: Rule | None, given: Settings) -> Result:
    """Train the run, and write its files. Of several processes, the first writes and tells; all read a checkpoint."""
    ranks, where = run.ranks, run.device
    files = ranks.first(lambda: (ReplacedFolder if given.replace else Folder)(given.out, given.resume)) or Folder(None)
    checkpoints = Checkpoints(Path(given.out) if given.out else None, run, given.checkpoint_every)
    trackers = ranks.first(lambda: Trackers(given.track, files.path)) or Trackers(None, None)
    with (
        enter_folder(files, ranks) as folder,
        current_device(where),
        torch_flags.use_flags(given.precision, given.deterministic, where),
        trackers,
    ):
        first = run.start()
        config = config_toml(run, given) if folder.path or trackers else ""
        if folder.path:
            checkpoints.record = {
                "identity": identity(run, given), "versions": versions(where), "config": config, "choices": run.choices
            }  # fmt: skip
        earlier = resume_everywhere(run, given, folder, checkpoints, rule) if given.resume else None
        if isinstance(earlier, Result):
            return earlier
        if folder.path and not given.resume:
            checkpoints.record["started"] = session(checkpoints.record["versions"], run.choices)
        announce_checkpoints(run, checkpoints.due)
        guard = nonfinite.FiniteGuard(run, first.parts, skip=given.on_nonfinite == nonfinite.SKIP)
        callbacks = as_callbacks(given.callbacks)
        impatient = bool(given.track or given.on_round or any(not callback.late for callback in callbacks))
        state = earlier or first
        progress = progress_of(run, state.round) if given.progress and ranks.leads else None
        observers = Observers(folder, checkpoints, trackers, given.on_round, callbacks, ranks, impatient, progress)
        loop = Loop(run, guard, observers, given.evaluate_every, given.personalize_every, rule, state)
        ranks.first(lambda: observers.begin(config, loop.rows, given.resume))
        if given.out and not loop.state.round:
            ranks.first(lambda: folder.partition(partition_summary(run.data)))
        with progress or nullcontext():
            return loop.train()


@dataclass
class Loop:
    """A run under way: one round after another, each with its row of the history."""

    run: Run
    guard: nonfinite.FiniteGuard
    observers: Observers
    evaluate_every: int
    personalize_every: int | None
    rule: Rule | None
    """When to end the run before its last round."""
    state: State

    def __post_init__(self) -> None:
        self.personal, self.clock = Personal(self.run), Clock(self.run.device, not self.run.ranks.several)
        warn_without_test(self.run, len(self.personal.clients))
        self.over = False
        self.unchanged: Tensor | None = None
        """Whether the first round has changed the weights, until its row is final."""
        self.noticed = False
        self.stopped: str | None = None
        self.early: str | None = None
        self.why = self.stops() if self.state.round < self.run.rounds else None
        """Why a resumed run ends where it stands, if the rule says so."""
        self.complete = False
        """Whether the latest row has all columns of a last round."""
        self.extra: set[str] = set()
        """Those of its columns that no other round would have."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history, without the last row if what follows a last round is still to be done."""
        return self.state.history[:-1] if self.at_end else self.state.history

    @property
    def at_end(self) -> bool:
        return self.state.round >= self.run.rounds or self.why is not None

    def train(self) -> Result:
        """Train all rounds that are left, or as many as stay finite and as the rule allows."""
        try:
            if self.at_end:
                self.conclude_resumed()
            while not self.over:
                self.round()
        except Exception as error:
            if self.run.ranks.several and machine_trouble(error):  # of one process: the others are elsewhere
                raise
            # Undone here, not where the flag is read: that is on another stream, beside rounds still under way.
            failure = error if isinstance(error, nonfinite.NonFiniteError) else self.blamed(error)
            self.state, self.stopped = self.guard.undo(failure)
        outputs = few_outputs(self.run, self.state)
        trained = self.run.model.at(self.state.tracked).load(self.state.params)
        warn_of_another_evaluation(self.run, outputs, trained)
        ranks, folder = self.run.ranks, self.observers.folder
        ranks.same((self.state.params, self.state.tracked, self.state.parts))
        diverged = None if self.stopped else learning_checks.warn_of_divergence(self.run, self.state.history)
        if not self.stopped:
            learning_checks.warn_of_nan_metrics(self.run, self.state.history)
            if not self.noticed:
                learning_checks.warn_if_nothing_trained(self.run, self.state)
        if self.stopped:
            self.observers.stopped(self.state, self.stopped)
        else:
            ranks.first(lambda: folder.model(trained, asdict(diverged) if diverged else None))
        result = Result(
            params=self.state.params,
            model=trained,
            history=self.state.history,
            choices=self.run.choices,
            stopped=self.stopped,
            stopped_early=self.early,
            diverged=str(diverged) if diverged else None,
            find_own=partial(own_model, self.run, self.state) if has_own_models(self.run) else None,
        )
        self.observers.end(result)
        return result

    def round(self) -> None:
        """Train one round, evaluate, and tell observers of rounds that the device is done with."""
        run, before = self.run, self.state
        last = before.round == run.rounds - 1
        if run.method.overriding("plan"):  # it may look at the state, which must be known to be finite then
            self.settle(wait=True)
        self.clock.start()
        try:
            check_interrupted()
            self.state, self.done = federated_round(run, before, self.guard.skip)
        except Interrupted:
            self.settle(wait=True)
            self.observers.save(before)
            raise
        state, method = self.state, self.done.method
        if before.round == 0:
            self.unchanged = learning_checks.weights_unchanged(run, before.params, self.state.params)
        self.guard.add(before, self.done.answers)
        self.guard.left(state)

        self.clock.stop()
        self.complete = last and not method.overriding("finish")
        figures, self.extra = self.figures(method, self.complete)
        if run.rehearsal and run.rehearsal.due(last):
            run.ranks.together(run.rehearsal.repeat)
        row = history_row(run, state, self.done)
        self.clock.add(row, partial(late_columns, self.run, self.guard, row, self.done, state.parts, figures))
        state.history.append(row)
        due = self.observers.due(state)
        self.settle(wait=last or due or self.observers.impatient or self.rule is not None)
        if due:
            self.observers.save(self.state)

    def figures(self, method: Method, last: bool) -> tuple[Columns, set[str]]:
        """Evaluate the model on the test and validation data and on clients' own, as far as that is due.

        Returns a function that returns the columns, and the names of those that only a last round has.
        """
        state, columns, tuned, evaluated = self.state, {}, {}, dict  # type: State, Any, Any, Columns
        due = state.round % self.evaluate_every == 0
        tuning = bool(self.personalize_every and state.round % self.personalize_every == 0)
        if last or due:
            columns = self.run.held_out(state, last)
            if columns is None:
                evaluated, columns = evaluate(self.run, state), self.personal.shared(state, last)
        if last:  # the names of all columns are needed
            columns, evaluated = evaluated() | columns, dict
        if last or tuning:
            tuned = self.personal.tuned(state, method, state.round - 1)
        extra = {"by_client"} | (set() if due else columns.keys()) | (set() if tuning else tuned.keys())
        return lambda: evaluated() | columns | tuned, extra

    def settle(self, wait: bool) -> None:
        """Hand on the rows of rounds that the device is done with. Raises `NonFiniteError`."""
        for row in self.clock.settled(wait):
            if row["round"] == 1:
                self.notice(row)
            self.observers.row(self.seen(self.ended(row)), self.state)

    def seen(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row after callbacks have seen it, which may end the run with this round."""
        why = self.observers.asks_to_stop(row, self.state)
        return self.conclude(row, why) if why and not self.over else row

    def notice(self, row: dict[str, Any]) -> None:
        """Warn if the first round has not changed the weights, and no later one will."""
        same, self.unchanged = self.unchanged, None
        if (
            learning_checks.clients_trained(row)
            and same is not None
            and bool(same)
            and learning_checks.every_round_must_change(self.run)
        ):
            learning_checks.warn_nothing_trained(self.run, 1)
            self.noticed = True

    def ended(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row, after what follows a last round if the run ends with it."""
        if self.state.history[-1] is not row:  # there are later rounds
            return row
        last = row["round"] == self.run.rounds
        why = None if last else self.stops()
        return self.conclude(row, why) if last or why else row

    def stops(self) -> str | None:
        """Return why the rule ends the run here, if it does. The first process decides: times in rows are its own."""
        return self.run.ranks.said(lambda: stop_reason(self.rule, self.state.history)) if self.rule else None

    def conclude(self, row: dict[str, Any], why: str | None) -> dict[str, Any]:
        """Do what follows the last round, which this is, if not by number then because the rule says so.

        First the state is saved as it is in a longer run, with that run's row, so that this one can be continued.
        Returns the row as it is in this run.
        """
        self.over, state = True, self.state
        longer = {name: value for name, value in row.items() if name not in self.extra}
        state.history[-1] = longer
        self.observers.close(state)
        final = row | ({COLUMN: why} if why else {})
        if not self.complete:
            self.state, done = finish(self.run, state, self.done)
            final |= {"bytes_down": done.bytes_down, "bytes_up": done.bytes_up, "total_bytes": self.state.total_bytes}
            finite = bool(tree_finite((self.state.params, self.state.tracked)))
            final |= self.figures(done.method, last=True)[0]() if finite else {}
            self.stopped = nonfinite.problem_at_end(final, finite, bool(done.method.overriding("finish")))
        if self.stopped:
            self.state = state
            return longer
        self.early, state.history[-1] = why, final
        return final

    def conclude_resumed(self) -> None:
        """Conclude a run whose last round is in its checkpoint: it was killed after that, or is to be shorter."""
        row, method = self.state.history[-1], self.run.bound(self.state.round - 1)
        self.done = Round(method, None, row["bytes_down"], row["bytes_up"])  # type: ignore[arg-type]
        self.observers.row(self.seen(self.conclude(row, self.why)), self.state)

    def blamed(self, error: Exception) -> nonfinite.NonFiniteError:
        """Return the round that left something non-finite, which made a hook or a metric fail; else raise `error`."""
        try:
            self.settle(wait=True)
            self.guard.check()
        except nonfinite.NonFiniteError as failure:
            return failure
        raise error
