"""What users meet first: help, what objects print as, names in strings, and other systems than Linux."""

from __future__ import annotations

import doctest
import inspect
import operator
import re
import subprocess
import sys
from dataclasses import make_dataclass

import pytest
import torch

import undrift as ud
from tests.problems import make_clients, net
from undrift.method.parse import parse_method

WITH_ATTRIBUTES = {"FederatedDataset", "Result", "Number", "UndriftError"}
"""Classes whose attributes are documented one by one, or that have none."""
ARGUMENTS = sorted(name for name in ud._PUBLIC if name not in WITH_ATTRIBUTES and ".method." not in ud._PUBLIC[name])
OTHERS = [
    "decay",
    "inverse",
    "warmup",
    "cosine",
    "Local",
    "Group",
    "Optimizer",
    *ud.OPTIMIZERS,
    "Number",
    "tree_map",
    "bound_neurons",
    "register_model",
    "UndriftError",
    "models.get",
    "random.Key",
]
EXAMPLES = sorted(name for name in ud._PUBLIC if ud._PUBLIC[name].startswith(("undrift.data", "undrift.training")))


@pytest.mark.parametrize("name", [*ARGUMENTS, "Local", "Group", *ud.OPTIMIZERS])
def test_help_has_every_argument(name):
    text, names = inspect.getdoc(getattr(ud, name)), inspect.signature(getattr(ud, name)).parameters
    assert not [name for name in names if not re.search(rf"^ +\**{name}: ", text, re.M)]


@pytest.mark.parametrize("name", [*EXAMPLES, *OTHERS])
def test_the_example_in_help_runs(name):
    found = operator.attrgetter(name)(ud)
    examples = [test for test in doctest.DocTestFinder().find(found, name) if test.examples]
    assert examples and all(doctest.DocTestRunner(verbose=False).run(test).failed == 0 for test in examples)


def test_data_and_results_print_as_a_few_lines():
    data = ud.load("digits", ud.Dirichlet(0.3), clients=5, server_fraction=0.1, client_test_fraction=0.1)
    result = ud.train("mlp", data, rounds=2, local=ud.Local(steps=1, lr=0.1))
    assert repr(data).startswith("FederatedDataset: 5 clients, 1,") and "held out: test 359, server 143" in repr(data)
    assert "2 rounds" in repr(result) and "accuracy 0." in repr(result)
    assert max(repr(thing).count("\n") for thing in (data, result)) < 4
    alone = ud.FederatedDataset.from_clients([make_clients([3])[0]])
    plain = ud.train(net(), alone, rounds=1, local=ud.Local(steps=1, lr=0.1))
    assert repr(plain) == "Result: 1 rounds, 92 trained weights, lanes engine on cpu"
    assert repr(alone) == "FederatedDataset: 1 clients, 3 samples of shape (6,), 3 classes (3 to 3 per client)"


def test_a_part_that_is_defined_again_wins_in_strings_too():
    """As when a notebook's cell is run twice."""
    made = [make_dataclass("DefinedAgain", [("mu", float, 1.0)], bases=(ud.FedProx,), frozen=True) for _ in range(3)]
    assert type(parse_method("DefinedAgain()").parts[0]) is made[-1]


def test_a_users_model_decides_what_its_options_may_be():
    def mine(classes, shape, depth=2, p=0.5, kind="a"):
        assert (depth, p, kind) == (0, 0.25, "b")
        return net().float()

    ud.register_model("mine", mine)
    try:
        data = make_clients([4], dtype=torch.float32)
        ud.train("mine(depth=0, p=0.25, kind='b')", data, rounds=1, local=ud.Local(steps=1, lr=0.1))
    finally:
        ud.models.MODELS.pop("mine")


ELSEWHERE = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # importing one of them raises ModuleNotFoundError
import undrift as ud
data = ud.load("digits", partition=ud.Dirichlet(alpha=0.1), clients=20, seed=0)
local = ud.Local(epochs=1, batch_size=32, lr=0.1)
result = ud.train("mlp", data, ud.FedDyn(alpha=0.1) + ud.FedNLR(), rounds=2, local=local, participation=0.4, out="run")
print(result.history[-1]["accuracy"])
"""


def test_the_quickstart_needs_torch_numpy_and_safetensors_alone_and_nothing_that_only_linux_has(tmp_path):
    missing = ["fcntl", "resource", "triton", "pandas", "matplotlib", "rich", "sklearn", "pydantic", "datasets"]
    command = [sys.executable, "-c", ELSEWHERE, *missing]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and 0 < float(done.stdout) < 1, done.stderr


OWN = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import undrift as ud


@dataclass(frozen=True)
class Clip(ud.Part):
    """Updates of at most this length."""

    norm: ud.Number

    def update(self, delta: Any, client: ud.Client) -> Any:
        length = torch.stack([d.square().sum() for d in delta.values()]).sum().sqrt()
        return ud.tree_map(lambda d: d * torch.clamp(self.norm / length, max=1.0), delta)


data = ud.load("digits", ud.IID(), 4)
result = ud.train("mlp", data, Clip(1.0) + ud.FedProx(0.1), rounds=1, local=ud.Local(steps=1, lr=0.1))
accuracy: float = result.history[-1]["accuracy"]
'''


@pytest.mark.long
def test_a_users_part_passes_strict_type_checking(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "own.py"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
