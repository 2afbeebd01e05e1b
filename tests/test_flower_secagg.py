"""What Flower's secure aggregation (SecAgg+, its mod and its workflow) does with undrift's messages and sums.

`docs/deploy.md` says what follows from it. Needs Flower; `make flower` has it.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.federated import FOUR, Near, near
from tests.flower_runs import QUICK, problem
from undrift.flower.messages import decode
from undrift.tree import tree_leaves

__all__ = ["problem"]

NODES = 3

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Flower's imports


@pytest.fixture
def trained(tmp_path, flower_problem):
    """A round's requests to three nodes, and the sums in their replies, scalars as arrays of one entry.

    Flower 1.41 returns scalars wrong: it adds to them in place, which changes arrays only.
    """
    changes, asked = FOUR["scaffold"] | QUICK | {"rounds": 1}, []

    def seen(kind, node, request, reply):
        asked.extend([(request, decode(reply)[0]["total"])] if kind == "train" else [])
        return reply

    near(tmp_path, changes, Near(tmp_path, changes, NODES, seen))
    sums = [[leaf.double().numpy().reshape(-1) for leaf in tree_leaves(total)] for _, total in asked]
    return [request for request, _ in asked], sums


@pytest.fixture(autouse=True)
def task(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def context(node):
    from flwr.app import Context, RecordDict

    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


def test_the_mod_cannot_read_undrifts_messages(trained):
    from flwr.app import Message
    from flwr.client.mod import secaggplus_mod

    from undrift.flower.apps import wrapped

    with pytest.raises(KeyError, match="secaggplus_configs"):
        secaggplus_mod(Message(wrapped(trained[0][0]), 1, "train"), context(1), lambda *_: None)


@pytest.mark.parametrize(("limit", "error"), [(16.0, 5e-5), (1.0, None)])
def test_the_sums_themselves_can_be_added_under_masks(trained, limit, error):
    """In 22 bits, and only as far as they are within the limit that must be fixed beforehand: the rest is cut off."""
    total, messages = masked(trained[1], limit)
    exact = [sum(own) for own in zip(*trained[1], strict=True)]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(total, exact, strict=True))
    assert messages == 4 * NODES  # where undrift needs one exchange per round, this takes four
    assert worst < error if error else worst > 1


def masked(sums, limit):
    """The sum of these nodes' arrays by Flower's workflow and mod, and how many messages nodes have answered."""
    from flwr.app import ConfigRecord, Message
    from flwr.client.mod import secaggplus_mod
    from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.compat.common import recorddict_compat as compat
    from flwr.server.compat.legacy_context import LegacyContext
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key

    nodes, answered, found = {i + 1: context(i + 1) for i in range(len(sums))}, [], []

    def app(message, own):
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(sums[own.node_id - 1]), 1, {})
        return Message(compat.fitres_to_recorddict(result, False), reply_to=message)

    class Grid:
        def send_and_receive(self, messages, *, timeout=None):
            for sent in map(copy.deepcopy, messages):
                reply = secaggplus_mod(sent, nodes[sent.metadata.dst_node_id], app)
                reply.metadata.__dict__["_src_node_id"] = sent.metadata.dst_node_id
                answered.append(reply)
            return answered[-len(messages) :]

    class Proxy:
        def __init__(self, node):
            self.node_id = node

    class Strategy:
        def configure_fit(self, server_round, parameters, manager):
            return [(Proxy(node), FitIns(parameters, {})) for node in nodes]

        def aggregate_fit(self, server_round, results, failures):
            found.extend(parameters_to_ndarrays(results[0][1].parameters))
            return None, {}

    class Manager:
        def num_available(self):
            return len(nodes)

    legacy = LegacyContext(context(0), None, Strategy(), Manager())
    legacy.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    start = compat.parameters_to_arrayrecord(ndarrays_to_parameters([np.zeros(1)]), True)
    legacy.state.array_records[MAIN_PARAMS_RECORD] = start
    SecAggPlusWorkflow(3, 2, max_weight=1.0, clipping_range=limit)(Grid(), legacy)
    return [len(nodes) * mean for mean in found], len(answered)
