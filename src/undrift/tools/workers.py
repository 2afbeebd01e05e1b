"""Processes that run one task after another.

They end when they are told to and when the process that started them is gone, however it ended: each has a thread that
listens to a pipe whose other end only the parent has. Ctrl-C is for the parent alone. A worker that is killed costs the
task that it was running; another takes its place.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, get_context, resource_tracker
from typing import Any

from undrift.tools.stopping import Stop

CONTEXT = get_context("spawn")
"""A process forked after torch has started threads may hang."""
GRACE = 5.0
"""Seconds that a worker has to finish its round once its parent is gone."""
GLANCE = 0.1
"""Seconds between two looks at whether a stop was asked for."""


class Worker:
    """A process, the pipe to it, and the key of the task that it is running."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.pipe, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_work, args=(function, there))
        with _shielded():
            self.process.start()
        there.close()
        self.key: Any = None

    def give(self, key: Any, task: tuple[Any, ...]) -> None:
        self.key = key
        with contextlib.suppress(OSError):  # it has died; the pipe says so when it is read
            self.pipe.send(task)

    def dismiss(self) -> None:
        """Tell it to stop after this round."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)

    def died(self) -> str:
        """Wait for its end. Returns how it ended."""
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended early, with status {code}"
        return f"its process {how}{', perhaps for lack of memory' if code == -signal.SIGKILL else ''}"


def each(
    function: Callable[..., Any], tasks: Mapping[Any, tuple[Any, ...]], workers: int, stop: Stop
) -> Iterator[tuple[Any, Any]]:
    """Call `function(*task, check)` in `workers` processes; yields each task's key and what came back, as it comes.

    `check` raises KeyboardInterrupt once a stop is asked for. Of a worker that died, a sentence about how comes back.
    Tasks that were stopped yield nothing. Raises KeyboardInterrupt after a stop.
    """
    waiting, crew, told = deque(tasks.items()), list[Worker](), False
    try:
        while waiting or any(worker.key is not None for worker in crew):
            if stop.asked and not told:
                told = True
                waiting.clear()
                for worker in crew:
                    worker.dismiss()
            while waiting and len(crew) < workers:
                crew.append(Worker(function))
                crew[-1].give(*waiting.popleft())
            for pipe in connection.wait([worker.pipe for worker in crew], GLANCE):
                worker = next(worker for worker in crew if worker.pipe is pipe)
                key, worker.key = worker.key, None
                try:
                    done, answer = worker.pipe.recv()
                except (EOFError, OSError):
                    done, answer = False, None
                if not done:  # it has stopped or died, and takes no further task
                    crew.remove(worker)
                    answer = worker.died()
                if key is not None and (done or not stop.asked):
                    yield key, answer
                if done and waiting and not stop.asked:
                    worker.give(*waiting.popleft())
        stop.check()
    finally:
        _end(crew, 0.0 if stop.asked else GRACE)


def _end(crew: list[Worker], seconds: float) -> None:
    """End the workers, by force if they are not done in so many seconds."""
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
    """A process started inside it never sees Ctrl-C, and imports nothing from the working directory as it starts."""
    resource_tracker.ensure_running()  # else it is started inside, and unblocks signals when it is
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


def _work(function: Callable[..., Any], pipe: Any) -> None:
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
    """Hand on tasks until the parent says stop or is gone; in the latter case the process ends soon."""
    try:
        while (task := pipe.recv()) is not None:
            inbox.put(task)
        ask()
        pipe.recv()  # nothing more comes, but the end
    except (EOFError, OSError):
        pass
    ask()
    time.sleep(GRACE)
    os._exit(1)
