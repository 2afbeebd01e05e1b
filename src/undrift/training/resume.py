"""Resuming a run, and continuing a finished one with more rounds: what is compared, and where the run continues."""

from __future__ import annotations

import logging
import tomllib
from typing import Any

from torch import Tensor

from undrift.engine.fallback import Fallback
from undrift.errors import UndriftError, first_line
from undrift.training.barrier import resume_round
from undrift.training.checkpoint import Checkpoints
from undrift.training.early_stopping import COLUMN, Rule, stop_reason
from undrift.training.evaluation import has_own_models
from undrift.training.identity import (
    changed_defaults,
    compare_identities,
    depending_on_rounds,
    identity,
    version_differences,
)
from undrift.training.learning_checks import find_divergence
from undrift.training.provenance import session
from undrift.training.result import Result
from undrift.training.run import Run
from undrift.training.run_folder import Folder, complete, intact
from undrift.training.settings import Settings
from undrift.training.state import State

log = logging.getLogger("undrift")

FINISHED = -1
"""In place of the round of a checkpoint, if the run is finished."""
FLAG = "allow_version_change=True, or undrift resume --allow-version-change"
EVALUATED = ("evaluate_every", "personalize_every")
"""Settings that decide which rounds have figures, and so when a rule ends the run."""


def resume_everywhere(
    run: Run, given: Settings, folder: Folder, checkpoints: Checkpoints, rule: Rule | None
) -> Result | State | None:
    """Return what `resume_run` finds. The first of several processes compares and chooses; the others read the same."""
    ranks = run.ranks
    outcome = ranks.first(lambda: resume_run(run, given, folder, checkpoints, rule))
    if not ranks.several:
        return outcome
    where = ranks.said(lambda: FINISHED if isinstance(outcome, Result) else outcome.round if outcome else None)
    return ranks.together(lambda: outcome if ranks.leads else read_on_other_rank(run, given, checkpoints, where))


def read_on_other_rank(run: Run, given: Settings, checkpoints: Checkpoints, where: int | None) -> Result | State | None:
    """Return what another process has found in the run's folder: a result, or the checkpoint of a round."""
    if where is None:
        return None
    try:
        if where == FINISHED:
            return finished_result(run, Folder(given.out, resume=True))
        state, _ = checkpoints.read(where)
    except Exception as error:  # the files here may be damaged in any way
        raise UndriftError(
            f"Process {run.ranks.rank} cannot read the checkpoint in {given.out} that the first process reads "
            f"({first_line(error)}); all processes need access to the same folder."
        ) from error
    checkpoints.saved_round = where
    restore_engine(run, state)
    return state


def resume_run(
    run: Run, given: Settings, folder: Folder, checkpoints: Checkpoints, rule: Rule | None
) -> Result | State | None:
    """Return the result of a finished run, the state from which to continue, or None if there is no checkpoint.

    Compares before it changes anything. Raises `UndriftError` if the folder's run is not the same run.
    """
    known = folder.recorded()
    known = known if complete(known) else checkpoints.recorded()
    if known is None or not complete(known):
        raise UndriftError(
            f"{folder.path} has no readable run.json or checkpoint, so it cannot be resumed; start in another folder."
        )
    before = int(known["identity"]["rounds"])
    allowed = allowed_differences(run, given, folder, checkpoints, known)
    refuse_fewer(run, folder, checkpoints)
    assert folder.path
    whole = folder.finished and bool(known.get("results")) and intact(folder.path, known)
    rows = folder.rows() if whole else []
    shared = resume_round(run)
    if shared is not None and shared < len(rows):  # it ended after the last round that all runs side by side have
        whole, rows = False, []
    early = rows[-1].get(COLUMN) if rows else None
    if whole and not early and len(rows) == run.rounds:
        return finished_result(run, folder)
    state = checkpoints.restore(shared)
    if whole and early:
        if state is None or state.round < len(rows):  # the last checkpoint could not be written, or is damaged
            if run.rounds == before:
                return finished_result(run, folder)
        elif state.round < run.rounds and stop_reason(rule, state.history):
            if run.rounds > before:
                log.warning(
                    "%s ended after round %d (%s), and stop_when would end it there again; to train further, change or "
                    "remove stop_when", folder.path, len(rows), early,
                )  # fmt: skip
            return finished_result(run, folder)
    if state is not None:
        restore_engine(run, state)
    if state is None and folder.finished and shared is None:
        raise UndriftError(no_checkpoint_message(folder, whole))
    if state is None:
        log.warning(
            "%s has no checkpoint%s, so training starts over from round 1 (%d rounds were done)",
            folder.path,
            "" if shared is None else " of a round that all runs beside it have",
            rounds_in_history(folder),
        )
    if run.rounds != before:
        warn_of_schedules(run, before, known["config"], folder)
    again = {"after_round": state.round if state else 0, "rounds": run.rounds, "allowed": allowed}
    checkpoints.record |= {
        "started": known.get("started"),
        "resumed": [*(known.get("resumed") or ()), session(checkpoints.record["versions"], run.choices) | again],
    }
    return state


def restore_engine(run: Run, state: State) -> None:
    """Continue with the engine that the run had in this state."""
    for row in state.history:
        if "lanes" in row and isinstance(run.engine, Fallback) and run.engine.width > row["lanes"]:
            run.engine.narrow(row["round"] - 1, row["lanes"])
        if "switched" in row and isinstance(run.engine, Fallback) and run.engine.plain:
            run.engine.switch(row["round"] - 1, row["switched"])


def allowed_differences(
    run: Run, given: Settings, folder: Folder, checkpoints: Checkpoints, known: dict[str, Any]
) -> list[str]:
    """Return the differences from the run so far that are allowed. Raises `UndriftError` for any others."""
    now = identity(run, given, int(known["identity"]["rounds"]))
    hints = changed_defaults(run.method, known["identity"]["method"])
    changed = compare_identities(known["identity"], now, folder.path, hints=hints)
    versions = version_differences(known["versions"], checkpoints.record["versions"])
    names = " and ".join(changed)
    if changed and not given.allow_version_change:
        raise UndriftError(
            f"The code of {names}, or code that it uses, has changed since the run in {folder.path} was started, so "
            f"the result may not be that of an uninterrupted run. Change it back, or resume anyway: {FLAG}."
        )
    if versions and not given.allow_version_change:
        raise UndriftError(
            f"{folder.path} was started with {'; '.join(versions)}. Its results may differ from an uninterrupted "
            f"run's in the last digits; to resume anyway: {FLAG}."
        )
    evaluated = changed_evaluation(given, known["config"]) if given.stop_when is not None else []
    if evaluated and not given.allow_version_change:
        raise UndriftError(
            f"{folder.path} had {'; '.join(evaluated)}. With stop_when, the rounds that are evaluated decide where the "
            f"run ends, so a resumed run must keep them. Change it back, or resume anyway: {FLAG}."
        )
    return [*(f"the code of {name}" for name in changed), *versions, *evaluated]


def changed_evaluation(given: Settings, config: str) -> list[str]:
    """Return how often the model is evaluated, where that is not as in this `config.toml`."""
    before, now = tomllib.loads(config), {name: getattr(given, name) for name in EVALUATED}
    return [f"{name} {before.get(name)}, now {now[name]}" for name in EVALUATED if before.get(name) != now[name]]


def refuse_fewer(run: Run, folder: Folder, checkpoints: Checkpoints) -> None:
    done = max(rounds_in_history(folder), checkpoints.newest)
    if done > run.rounds:
        raise UndriftError(
            f"The run in {folder.path} has already trained {done} rounds, but rounds is {run.rounds}; ask for at least "
            f"{done}, or choose another folder."
        )


def rounds_in_history(folder: Folder) -> int:
    """Return how many rounds the history has, as far as it can be read."""
    try:
        return len(folder.rows())
    except (ValueError, OSError):  # damaged; the checkpoints have a copy
        return 0


def finished_result(run: Run, folder: Folder) -> Result:
    """Return the result of a finished run, as its folder has it."""
    folder.load(run.model.module)
    weights = dict(run.model.module.named_parameters())
    params = {name: weights[name].detach().clone() for name in run.model.start}
    rows = folder.rows()
    diverged = find_divergence(run, rows)
    return Result(
        params=params,
        model=run.model.released(),
        history=rows,
        choices=run.choices,
        stopped_early=rows[-1].get(COLUMN),
        diverged=str(diverged) if diverged else None,
        find_own=refuse_own_model if has_own_models(run) else None,
    )


def refuse_own_model(client: int) -> dict[str, Tensor]:
    """Raise, since the folder of a finished run only has the global model."""
    raise UndriftError(
        "A run's folder does not have clients' own weights; only the result of the call that trained them has."
    )


def no_checkpoint_message(folder: Folder, whole: bool) -> str:
    if not whole:
        return (
            f"The results in {folder.path} are damaged, and there is no checkpoint to restore them from; run it "
            "again in another folder."
        )
    return (
        f"The run in {folder.path} is finished and has no checkpoint to continue from; train all rounds in another "
        "folder."
    )


def warn_of_schedules(run: Run, before: int, config: str, folder: Folder) -> None:
    """Warn about values that depend on the number of rounds, which was different in the rounds that are done."""
    names = depending_on_rounds(run, before)
    chosen = tomllib.loads(config).get("compile")
    if chosen is not None and chosen != run.choices["compile"]:
        names.append(f"compile, which is now {run.choices['compile']}")
    if names:
        log.warning(
            "%s was started with %d rounds and now has %d. The number of rounds decides %s, so the result may not be "
            "that of an uninterrupted run", folder.path, before, run.rounds, " and ".join(names),
        )  # fmt: skip
