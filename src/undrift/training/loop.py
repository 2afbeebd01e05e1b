"""One federated run, readable from top to bottom: data → plan → lanes → sums → server → history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from undrift.data.dataset import FederatedDataset
from undrift.data.holdings import holdings
from undrift.engine.cohort import Orders, on_device
from undrift.errors import UndriftError, require, whole
from undrift.faults import Faults
from undrift.local import Local
from undrift.losses import reserved
from undrift.method import Method, Part
from undrift.methods.fedavg import FedAvg
from undrift.roles import Totals
from undrift.training import nonfinite
from undrift.training.arithmetic import arithmetic
from undrift.training.checkpoint import Checkpoints, Progress
from undrift.training.clock import Clock
from undrift.training.evaluate import evaluate
from undrift.training.identity import compare, compare_versions, versions
from undrift.training.personal import Personal
from undrift.training.record import record, same_settings
from undrift.training.result import Folder, Result, intact
from undrift.training.setup import Setup, prepare, selected
from undrift.training.survivors import Conditions, collect
from undrift.training.track import Trackers
from undrift.tree import Tree, tree_add, tree_bytes, tree_to

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
    given = dict(locals())
    run = prepare(
        model, data, method, rounds=rounds, local=local, participation=participation, seed=seed, loss=loss,
        metrics=metrics, device=device, precision=precision, engine=engine, lanes=lanes, compile=compile,
        conditions=Conditions(faults, max_norm_ratio, min_clients),
    )  # fmt: skip
    require(whole(evaluate_every) and evaluate_every >= 1, f"evaluate_every must be 1 or more, not {evaluate_every!r}.")
    fine = personalize_every is None or (whole(personalize_every) and personalize_every >= 1)
    require(fine, f"personalize_every must be a whole number from 1, or None, not {personalize_every!r}.")
    require(on_round is None or callable(on_round), f"on_round must be a function of a round's row, not {on_round!r}.")
    nonfinite.check(on_nonfinite)
    nonfinite.check_start(run.model.start)
    files, skip = Folder(out, resume), on_nonfinite == nonfinite.SKIP
    checkpoints = Checkpoints(files.path, run, checkpoint_every)
    trackers = Trackers(track, files.path)
    switches = arithmetic(precision, deterministic, run.resident.device)
    with files as folder, selected(run.resident.device), switches, trackers:
        start = tree_to(bound(run, 0).start(run.model.start), run.resident.device)
        now = Progress(run.model.start, start)
        config = record(run, given) if folder.path or trackers else ""
        if folder.path:
            evaluations = {"evaluate_every": str(evaluate_every), "personalize_every": str(personalize_every)}
            known = {"identity": run.identity | evaluations, "versions": versions(run.resident.device)}
            checkpoints.record = known | {"config": config}
        if resume:
            done = resumed(run, folder, checkpoints, allow_version_change)
            if isinstance(done, Result):
                return done
            now = done or now
        folder.note(checkpoints.record)
        trackers.begin(config, now.history)
        folder.config()
        if folder.path and not now.round:
            folder.partition(holdings(data))
        folder.begin(now.history)
        personal, clock, stopped = Personal(run), Clock(run.resident.device), None
        watch = nonfinite.Watch(run, start, lambda before: orders_of(run, bound(run, before.round), before), skip)

        def settle(wait: bool) -> None:
            """Hand on the rows of rounds that the device is done with. Raises `NonFiniteError`."""
            for done in clock.settled(wait):
                folder.row(done)
                try:
                    trackers.row(done)
                    if on_round:
                        on_round(done)
                except BaseException:  # whoever stops a run here, with Ctrl-C say, finds it where it stood
                    folder.sync()
                    checkpoints.save(now)
                    raise

        def blamed(error: Exception) -> nonfinite.NonFiniteError:
            """The round that left something non-finite, which is why a hook or a metric failed; else raises `error`."""
            try:
                settle(wait=True)
                watch.check()
            except nonfinite.NonFiniteError as found:
                return found
            raise error

        try:
            while now.round < rounds:
                t, last, before = now.round, now.round == rounds - 1, now
                if run.method.overriding("plan"):  # it may look at the state, which must be known to be finite then
                    settle(wait=True)
                clock.start()
                method, server = bound(run, t), run.server(t)

                orders = orders_of(run, method, now)
                answers = collect(run, orders, skip)
                cohort = answers.cohort

                totals = Totals(cohort.sums, cohort.size, cohort.weight, run.population, cohort.update)
                update, states = method.transform(totals, now.states)
                untrack = run.model.track(nonfinite.unless_nobody(cohort, cohort.statistics, run.model.tracked))
                params = method.refine(tree_add(now.params, update), server)
                states = method.after(params, now.params, states)
                params = nonfinite.unless_nobody(cohort, params, now.params)
                states = [
                    nonfinite.unless_nobody(cohort, new, old) for new, old in zip(states, now.states, strict=True)
                ]
                watch.add(before, answers, undo=[untrack, run.kept.commit(cohort.kept)])
                plan, sampled = answers.plan, answers.clients
                down = len(sampled) * tree_bytes([orders.shared["start"], orders.shared["received"], run.model.tracked])
                up = len(plan.clients) * tree_bytes([cohort.update, cohort.sums, cohort.statistics, cohort.weight])
                if last and method.overriding("finish"):
                    params, sent = finish(run, method, params, t)
                    down, up = down + run.population * tree_bytes(params), up + sent
                watch.left(params, states)

                now = replace(
                    now,
                    params=params,
                    states=states,
                    round=t + 1,
                    total_steps=now.total_steps + int(plan.steps.sum()),
                    constant_steps=now.constant_steps + int(run.steps_at(0, sampled).sum()),
                    total_bytes=now.total_bytes + down + up,
                )
                row = {
                    "round": t + 1,
                    "clients": sampled.tolist(),
                    **answers.columns,
                    "steps": int(plan.steps.sum()),
                    "total_steps": now.total_steps,
                    "steps_fraction": now.total_steps / now.constant_steps,
                    "local_steps": plan.span,
                    "lr": float(plan.lr),
                    "samples": answers.samples,
                    "bytes_down": down,
                    "bytes_up": up,
                    "total_bytes": now.total_bytes,
                }
                clock.stop(row, partial(late_figures, watch, row, method, states))
                if last or (t + 1) % evaluate_every == 0:
                    row |= evaluate(run, params) | personal.shared(params, last)
                if last or (personalize_every and (t + 1) % personalize_every == 0):
                    row |= personal.tuned(params, states, method, t)
                now.history.append(row)
                due = checkpoints.due(now)
                settle(wait=bool(last or due or trackers or on_round))
                if due:
                    folder.sync()
                    checkpoints.save(now)
        except Exception as error:
            # Undone here, not where the flag is read: that is on another stream, beside rounds still under way.
            found = error if isinstance(error, nonfinite.NonFiniteError) else blamed(error)
            now, stopped = watch.undo(found)
        trained = run.model.load(now.params)
        if stopped:
            folder.sync()
            checkpoints.save(now)
            folder.stopped(stopped)
            trackers.failed = True
        else:
            folder.model(trained)
    return Result(now.params, trained, now.history, run.choices, stopped)


def resumed(
    run: Setup, folder: Folder, checkpoints: Checkpoints, allow_version_change: bool
) -> Result | Progress | None:
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
        return Result(params, run.model.module.eval(), folder.rows(), run.choices)
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


def orders_of(run: Setup, method: Method, now: Progress) -> Orders:
    """The next round's orders to the engine: the cohort, its work, and what clients get beside the weights."""
    plan = run.conditions.plan(run.checked(method.plan(run.plan(now.round), now.states)), run.seed)
    received = method.broadcast(now.params, now.states, run.server(now.round))
    return run.orders(plan, now.params, received)


def bound(run: Setup, t: int) -> Method:
    """The method with the numbers of round `t` in it."""
    return run.method.bind(on_device(run.method.numbers(t), run.resident.device))


def late_figures(watch: nonfinite.Watch, row: dict[str, Any], method: Method, states: list[Tree]) -> dict[str, Any]:
    """What must be read from the device for a round's row. Raises `NonFiniteError`."""
    settled, own = watch.settle(row), method.history(states)
    for name in own:
        require(
            name not in row and not reserved(name),
            f"A part's history has {name!r}, which is a column of the history already; rename it.",
        )
    return settled | own


def finish(run: Setup, method: Method, params: Tree, t: int) -> tuple[Tree, int]:
    """Once, after the last round: what parts make of what they measure over all clients, and the bytes sent for it."""
    everyone = run.everyone(t, params)
    sums = run.engine.survey(everyone)
    size = torch.full((), run.population, dtype=torch.float64, device=run.resident.device)
    totals = Totals(sums, size, everyone.lanes["weight"].sum(), run.population, None)
    return method.finish(params, totals, run.server(t)), run.population * tree_bytes(sums)
