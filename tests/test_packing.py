from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from undrift.engine.packing import pack, segments


@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.integers(1, 12))
def test_every_step_of_every_client_is_taken_once_and_in_order(steps, lanes):
    lanes = min(lanes, len(steps))
    steps = np.array(steps)
    taken: dict[int, list[int]] = {c: [] for c in range(len(steps))}
    running: dict[int, int] = {}
    for s in segments(steps, pack(steps, lanes)):
        for lane, client in s.begins:
            assert lane not in running and s.clients[lane] == client
            running[lane] = client
        for lane, client in running.items():
            taken[client] += s.steps[:, lane].tolist()
        assert (s.steps < steps[s.clients]).all() and (s.steps >= 0).all()  # idle lanes take valid steps too
        for lane, client in s.ends:
            assert running.pop(lane) == client
    assert not running and all(taken[c] == list(range(k)) for c, k in enumerate(steps))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.integers(1, 12))
def test_lanes_are_about_as_busy_as_can_be(steps, lanes):
    loads = [sum(steps[c] for c in queue) for queue in pack(np.array(steps), lanes)]
    assert max(loads) <= sum(steps) / lanes + max(steps)  # Graham's bound
