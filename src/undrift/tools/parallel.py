"""Many runs at once: which run where, in worker processes, and how they continue after an interruption.

Sweeps, studies and comparisons run their points here, on several CPUs or devices. On a GPU, runs that differ only in
numbers train as one program.

Workers end on request, and when their parent has ended for any reason: each has a thread that reads from a pipe whose
other end only the parent has. Only the parent receives Ctrl-C. If a worker is killed, the task that it was running is
lost, and a new worker takes its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from undrift.cpus import THREADS, usable_cpus
from undrift.data import warn_once
from undrift.errors import DEBUG, UndriftError, first_line, machine_trouble, quoted
from undrift.files import lock, made, parse_json, read_bytes, regular, write_text
from undrift.tools import plugins
from undrift.tools.config import Document, checked
from undrift.tools.experiment import about, arguments, run
from undrift.tools.run_folders import RunFolder
from undrift.tools.stopping import Stop, stopping
from undrift.training import side_by_side
from undrift.training.argument_checks import find_device
from undrift.training.nonfinite import mute
from undrift.training.run_folder import finished, stopped
from undrift.training.threads import use_threads

if TYPE_CHECKING:
    from undrift.tools.live_table import LiveTable


MOST = 10_000
"""The most runs of a sweep or a study."""
NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
LONGEST = 200
"""The most bytes in the name of a run's folder."""
IN_USE = ".in-use"
"""The file with the number of the process that runs a sweep or a study in its folder."""


@dataclass(frozen=True, eq=False)
class Point:
    """A run: the name of its folder, and its settings."""

    name: str
    settings: Document


@dataclass(frozen=True)
class Parallel:
    """How many runs train at a time, and where. None leaves it to undrift."""

    workers: int | None = None
    """The number of processes."""
    devices: list[str] | None = None
    """Instead, the device of each process."""
    together: int | None = None
    """The largest number of runs in one process that train as one program."""


def parse_parallel(workers: int | None, devices: str | None, together: int | None) -> Parallel:
    """The options of a command. A device that is named twice, as in `cuda:0,cuda:0`, takes two processes."""
    if devices is None:
        return Parallel(workers, None, together)
    names = [name.strip() for name in devices.split(",")]
    if workers is not None:
        raise UndriftError("--workers and --devices both set how many runs train in parallel; use only one of them.")
    for name in names:
        find_device(name or quoted(devices))
    return Parallel(None, names, together)


def unique_names(points: list[Point]) -> list[Point]:
    """The points with unique names that are valid folder names on every file system."""
    seen: dict[str, int] = {}
    named = []
    for point in points:
        name = point.name
        if len(raw := os.fsencode(name)) > LONGEST:
            name = f"{raw[: LONGEST - 9].decode(errors='ignore')}-{hashlib.sha256(raw).hexdigest()[:8]}"
        seen[name] = seen.get(name, 0) + 1
        named.append(Point(name if seen[name] == 1 else f"{name}-{seen[name]}", point.settings))
    return named


def word(value: Any) -> str:
    """A value as it appears in a folder's name."""
    return re.sub(r"[^A-Za-z0-9.+=-]+", "_", str(value)).strip("_")[:60]


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A context in which no other process runs a sweep or a study in this folder, which is created if need be."""
    with made(folder), lock(folder, folder / IN_USE):
        yield


def run_in_table(
    table: LiveTable,
    points: Sequence[Point],
    folder: Path,
    where: str,
    how: Parallel,
    ended: Callable[[Point], None],
    kind: str = "sweep",
) -> tuple[list[RunFolder], dict[str, str]]:
    """Run the points that are not finished, and show them in the table.

    Calls `ended` with each point that is done. Returns the runs that ended, and the messages of those that failed.
    """
    waiting = [point for point in points if not finished(folder / point.name)]
    for point in {str(point.settings.get("data")): point for point in waiting}.values():
        with about(where):  # report errors in the data, which runs share, before the first run
            arguments(checked(point.settings, where))
    rounds = {folder / point.name: point.settings.get("rounds", 0) for point in waiting}
    table.add_runs(rounds, len(points) - len(waiting))
    for point in points:
        if point not in waiting:
            ended(point)
    failed: dict[str, str] = {}

    def done(point: Point, message: str | None) -> None:
        if folder / point.name in table.open:
            table.end_run(folder / point.name)
            ended(point)
        if message:
            failed[point.name] = message
            table.say(f"error: {point.name}: {message}")

    return run_points(list(points), folder, where, how, done, kind), failed


def run_points(
    points: list[Point],
    out: Path,
    where: str,
    how: Parallel,
    done: Callable[[Point, str | None], None],
    kind: str = "sweep",
) -> list[RunFolder]:
    """Run the points that are not finished yet, in parallel on CPUs or devices.

    `kind` is what messages call all of them together. Returns the runs that finished or stopped.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UndriftError(f"The folder {quoted(str(out), 200)} cannot be created ({error.strerror}).") from error
    _refuse_other_files(out)
    for point in points:
        _claim_folder(point, out, kind)
    waiting = [point for point in points if not finished(out / point.name)]
    some: Sequence[str | None] = how.devices or [None] * (how.workers or _count_workers(points[0], where))
    share = min(side_by_side.MAX_RUNS, -(-len(points) // len(some)))  # so that every process has some
    size = how.together or (share if any(_on_gpu(points[0], where, place) for place in some) else 1)
    # Bundles with a run that is not finished are those of the first time: the others' bits depend on the finished ones.
    left = set(waiting)
    together = [bundle for bundle in bundle_points(points, max(1, size)) if left.intersection(bundle)]
    places = some[: len(together)]
    chosen = any(name in os.environ for name in THREADS)  # which torch has read, in every process
    threads = None if chosen else max(1, usable_cpus() // max(len(places), 1))
    tasks = {
        bundle: ([(point.settings, str(out / point.name), where, threads) for point in bundle],) for bundle in together
    }
    for point, message in _train_bundles(tasks, places):
        if point in left or message:
            done(point, message)
    runs = []
    for point in points:
        folder = out / point.name
        try:
            if finished(folder) or stopped(folder):
                runs.append(RunFolder.read(folder))
        except UndriftError as error:  # damaged: still list the others
            done(point, str(error))
    return runs


def _refuse_other_files(out: Path) -> None:
    """Raise if the folder has a `sweep.json`, which would be replaced, that no sweep wrote."""
    file = out / "sweep.json"
    if not os.path.lexists(file):
        return
    try:
        ours = regular(file) and {"chosen_by", "settings"} <= parse_json(read_bytes(file)).keys()
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise UndriftError(f"{file} was not written by a sweep; choose another --out, or move that file away.")


def _claim_folder(point: Point, out: Path, kind: str) -> None:
    """Record the settings of a run's folder; raise if it has other settings, so that a sweep only continues itself."""
    file = out / f"{point.name}.json"
    mine = json.dumps(point.settings, sort_keys=True)
    if file.exists() and read_bytes(file) != mine.encode():
        raise UndriftError(f"{out / point.name} is a run with other settings; choose another --out for this {kind}.")
    write_text(file, mine)


def _count_workers(point: Point, where: str) -> int:
    """How many processes: one per CPU that may be used, as small models gain little from threads, or one on a GPU."""
    return 1 if _on_gpu(point, where, None) else usable_cpus()


def _on_gpu(point: Point, where: str, place: str | None) -> bool:
    asked = checked(point.settings, where).device if place is None else place
    return asked.startswith("cuda") or (asked == "auto" and torch.cuda.is_available())


def bundle_points(points: list[Point], size: int) -> list[tuple[Point, ...]]:
    """The points, up to `size` at a time, such that those of a bundle seem to differ only in numbers.

    Training finds out whether they do; those that do not take turns.
    """
    alike: dict[str, list[Point]] = {}
    for point in points:
        alike.setdefault(NUMBER.sub("#", json.dumps(point.settings, sort_keys=True)), []).append(point)
    return [tuple(own[i : i + size]) for own in alike.values() for i in range(0, len(own), size)]


def _train_bundles(
    tasks: dict[tuple[Point, ...], Any], places: Sequence[str | None]
) -> Iterator[tuple[Point, str | None]]:
    """Points as they finish, with an error message or None. Raises KeyboardInterrupt after a stop."""
    with stopping() as stop:
        if len(places) > 1:
            answers = run_in_workers(_train_together, tasks, places, stop)
        else:
            answers = ((bundle, _train_together(places[0], runs, stop.check)) for bundle, (runs,) in tasks.items())
        for bundle, answer in answers:
            messages = [answer] * len(bundle) if isinstance(answer, str) else answer  # about a process that died
            yield from zip(bundle, messages, strict=True)


def _train_together(
    device: str | None, runs: list[tuple[Document, str, str, int | None]], check: Callable[[], None]
) -> list[str | None]:
    """Train runs in this process, as one program where they can. Returns for each why it did not finish, or None."""
    check()
    tasks = [partial(_train_one, device, *given, check=check) for given in runs]
    if len(tasks) == 1:
        return [tasks[0]()]
    messages: list[str | None] = []
    for message in side_by_side.side_by_side(tasks):
        if isinstance(message, BaseException):  # only a stop is not a message
            raise message
        messages.append(message)
    return messages


def _train_one(
    device: str | None, settings: Document, folder: str, where: str, threads: int | None, check: Callable[[], None]
) -> str | None:
    """Train a run in this process. Returns why it did not finish, or None; no exception must end the sweep.

    `device` replaces that of the settings. `threads` is the number of torch's threads; None leaves it as it is.
    """
    mute()  # the reason for a stop is returned
    if parent_process() is not None:  # that process has read the data, and given the warnings about them
        warn_once.silence()
    _wait_for(Path(folder))
    settings = settings if device is None else {**settings, "device": device}
    try:
        resume = (Path(folder) / "config.toml").exists()
        with use_threads(threads):
            result = run(checked(settings, where), folder, resume, on_round=lambda row: check())
    except UndriftError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        if DEBUG in os.environ:
            traceback.print_exc()
        return machine_trouble(error) or f"{type(error).__name__}: {first_line(error)}"
    return f"stopped. {result.stopped}" if result.stopped else None


def _wait_for(folder: Path) -> None:
    """Wait until the workers of a parent that was killed have left the folder, as long as they may take to end."""
    end = time.monotonic() + 2 * GRACE
    while folder.is_dir() and time.monotonic() < end:
        try:
            with lock(folder):
                return
        except UndriftError:
            time.sleep(0.1)


# ---- worker processes ----------------------------------------------------------------------------------------------


CONTEXT = get_context("spawn")
"""Not "fork": a process forked after torch has started threads may hang."""
GRACE = 5.0
"""Seconds that a worker has to finish its round once its parent is gone."""
GLANCE = 0.1
"""Seconds between two checks for a stop request."""


class Worker:
    """A process, the pipe to it, its place, and the key of the task that it is running."""

    def __init__(self, function: Callable[..., Any], place: Any) -> None:
        self.pipe, there = CONTEXT.Pipe()
        self.place = place
        self.process = CONTEXT.Process(target=_work, args=(partial(function, place), there, plugins.places()))
        with _without_interrupts():
            self.process.start()
        there.close()
        self.key: Any = None

    def give(self, key: Any, task: tuple[Any, ...]) -> None:
        self.key = key
        with contextlib.suppress(OSError):  # it has died, which reading from the pipe will show
            self.pipe.send(task)

    def dismiss(self) -> None:
        """Ask it to stop after this round."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)

    def died(self) -> str:
        """Wait for it to end. Returns how it ended."""
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended early, with status {code}"
        return f"its process {how}{', perhaps for lack of memory' if code == -signal.SIGKILL else ''}"


def run_in_workers(
    function: Callable[..., Any], tasks: Mapping[Any, tuple[Any, ...]], places: Sequence[Any], stop: Stop
) -> Iterator[tuple[Any, Any]]:
    """Call `function(place, *task, check)` in a process per place; yields each task's key and result as they arrive.

    `check` raises KeyboardInterrupt once a stop is requested. If a worker died, the result is a sentence about how.
    Nothing is yielded for tasks that were stopped. Raises KeyboardInterrupt after a stop.
    """
    waiting, crew, free, dismissed = deque(tasks.items()), list[Worker](), deque(places), False
    try:
        while waiting or any(worker.key is not None for worker in crew):
            if stop.asked and not dismissed:
                dismissed = True
                waiting.clear()
                for worker in crew:
                    worker.dismiss()
            while waiting and free:
                crew.append(Worker(function, free.popleft()))
                crew[-1].give(*waiting.popleft())
            for pipe in connection.wait([worker.pipe for worker in crew], GLANCE):
                worker = next(worker for worker in crew if worker.pipe is pipe)
                key, worker.key = worker.key, None
                try:
                    done, answer = worker.pipe.recv()
                except (EOFError, OSError):
                    done, answer = False, None
                if not done:  # it has stopped or died, and takes no more tasks
                    crew.remove(worker)
                    free.append(worker.place)
                    answer = worker.died()
                if key is not None and (done or not stop.asked):
                    yield key, answer
                if done and waiting and not stop.asked:
                    worker.give(*waiting.popleft())
        stop.check()
    finally:
        _end(crew, 0.0 if stop.asked else GRACE)


def _end(crew: list[Worker], seconds: float) -> None:
    """End the workers; kill those that have not ended after `seconds`."""
    for worker in crew:
        worker.dismiss()
    end = time.monotonic() + seconds
    for worker in crew:
        worker.process.join(max(0.0, end - time.monotonic()))
    for worker in crew:
        worker.process.kill()
    for worker in crew:
        worker.died()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process started in this context never receives Ctrl-C, and imports nothing from the working directory as it
    starts.
    """
    resource_tracker.ensure_running()  # otherwise it would be started in here, and unblock the signals
    blocks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else set()
    safe = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if safe is None:
            del os.environ["PYTHONSAFEPATH"]
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(function: Callable[..., Any], pipe: Any, modules: plugins.Places) -> None:
    plugins.adopt(modules)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.pop("PYTHONSAFEPATH", None)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stop = threading.Event()

    def ask(*signal: Any) -> None:
        stop.set()
        inbox.put(None)

    def check() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ask)
    threading.Thread(target=_listen, args=(pipe, inbox, ask), daemon=True).start()
    while (task := inbox.get()) is not None:
        try:
            check()
            answer = True, function(*task, check)
        except KeyboardInterrupt:
            answer = False, None
        try:
            pipe.send(answer)
        except OSError:  # the parent is gone
            return


def _listen(pipe: Any, inbox: queue.SimpleQueue[Any], ask: Callable[[], None]) -> None:
    """Pass on tasks until the parent asks to stop or has ended; in the latter case, end the process soon."""
    try:
        while (task := pipe.recv()) is not None:
            inbox.put(task)
        ask()
        pipe.recv()  # blocks until the parent has ended
    except (EOFError, OSError):
        pass
    ask()
    time.sleep(GRACE)
    os._exit(1)
