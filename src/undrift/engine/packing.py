"""Which lane trains which client, and when: fixed by the plan, before anything runs."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def pack(steps: np.ndarray, lanes: int) -> list[list[int]]:
    """Return each lane's clients, in order: the longest first, always to the lane that is free soonest.

    Ties go to the lower client and the lower lane, so the packing is a function of the step counts only.
    """
    queues: list[list[int]] = [[] for _ in range(lanes)]
    free = [(0, lane) for lane in range(lanes)]
    for client in np.argsort(-steps, kind="stable").tolist():
        load, lane = heapq.heappop(free)
        queues[lane].append(client)
        heapq.heappush(free, (load + int(steps[client]), lane))
    return queues


def busy(steps: np.ndarray, queues: list[list[int]]) -> float:
    """Return the share of the steps in which a lane is not idle."""
    return float(steps.sum() / (len(queues) * max(steps[queue].sum() for queue in queues)))


@dataclass(frozen=True)
class Segment:
    """Local steps during which no lane changes its client."""

    begins: list[tuple[int, int]]
    """(lane, client) pairs that start here."""
    steps: np.ndarray
    """steps × lanes: the local step each lane takes; an idle lane repeats its last."""
    clients: np.ndarray
    """The client on each lane; an idle lane keeps its last."""
    ends: list[tuple[int, int]]
    """(lane, client) pairs that have finished after it."""


def segments(steps: np.ndarray, queues: list[list[int]]) -> Iterator[Segment]:
    """Yield the whole round as segments between changes of client, given each lane's clients."""
    lanes, queues = len(queues), [queue[::-1] for queue in queues]
    clients, done = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    busy = np.zeros(lanes, bool)
    while True:
        begins = []
        for lane in np.flatnonzero(~busy).tolist():
            if queues[lane]:
                clients[lane], done[lane], busy[lane] = queues[lane].pop(), 0, True
                begins.append((lane, int(clients[lane])))
        if not busy.any():
            return
        length = int((steps[clients] - done)[busy].min())
        taken = np.minimum(done[None] + np.arange(length)[:, None], steps[clients][None] - 1)
        done = done + np.where(busy, length, 0)
        ended = busy & (done == steps[clients])
        busy = busy & ~ended
        yield Segment(
            begins, taken, clients.copy(), [(lane, int(clients[lane])) for lane in np.flatnonzero(ended).tolist()]
        )
