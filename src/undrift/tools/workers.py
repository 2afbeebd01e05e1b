"""Worker processes, each of which runs one task after another.

They end on request, and when their parent has ended for any reason: each has a thread that reads from a pipe whose
other end only the parent has. Only the parent receives Ctrl-C. If a worker is killed, the task that it was running is
lost, and a new worker takes its place.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import connection, get_context, resource_tracker
from typing import Any

from undrift.tools import plugins
from undrift.tools.stopping import Stop

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
        with _shielded():
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


def each(
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
def _shielded() -> Iterator[None]:
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


# ---- in the worker -----------------------------------------------------------------------------------------------


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
