"""Runs side by side: each is what it is alone, whatever the others are and do."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import undrift as ud
from tests import cuda_graphs
from tests.killing import Dead, what_it_left
from tests.parts import METHOD, Normed
from tests.problems import distance, make_clients, net, same_bits, split
from undrift.engine.outputs import Outputs
from undrift.engine.stacked import StackedEngine
from undrift.training.barrier import Call, answer_together
from undrift.training.checkpoint import Checkpoints
from undrift.training.run_folder import recorded
from undrift.training.side_by_side import side_by_side

SIZES = ([23, 5, 0, 41, 10, 17, 1], [9, 30, 2, 2, 14, 40], [12, 12, 12, 12, 12])


@pytest.fixture
def rounds(monkeypatch):
    """How many runs' cohorts each round had that was trained in one program."""
    seen, train = [], StackedEngine.run_all

    def watched(self, inputs, *rest):
        seen.append(len(inputs.each))
        return train(self, inputs, *rest)

    monkeypatch.setattr(StackedEngine, "run_all", watched)
    return seen


def one_store():
    """Three partitions of the same samples, which overlap, and differ in sizes and in the number of clients."""
    whole = make_clients([60, 60])
    rows = torch.randperm(120, generator=torch.Generator().manual_seed(0)).numpy()
    found = []
    for sizes in SIZES:
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).numpy()
        found.append(
            ud.FederatedDataset.from_owners(
                whole.store,
                rows[: len(owner)],
                owner,
                len(sizes),
                test_rows=whole.test_rows,
                server_rows=whole.server_rows,
            )
        )
    return found


def settings(seed, **changed):
    local = ud.Local(epochs=2, batch_size=8, lr=0.1 / (seed + 1), weight_decay=0.01 * (seed + 1))
    return {"rounds": 3, "local": local, "participation": 4, "seed": seed, "device": "cpu", **changed}


def noisy():
    return net(dropout=0.2)


def trained(methods, module=noisy, data=None, **changed):
    """Each method's run alone, and beside the others."""
    data = data or one_store()
    tasks = []
    for seed, method in enumerate(methods):
        torch.manual_seed(seed)  # starting weights of its own
        model = module()
        tasks.append(partial(ud.train, model, data[seed % len(data)], method, **settings(seed, **changed)))
    alone = [task() for task in tasks]
    return alone, side_by_side(tasks)


ALIKE = {
    "FedAvg": [ud.FedAvg()] * 3,
    "numbers": [ud.FedProx(0.1), ud.FedProx(ud.decay(1.0, 0.5)), ud.FedProx(3)],
    "kept states": [ud.Scaffold()] * 3,
    "measured": [ud.FedDyn(0.1) + ud.FedNLR(), ud.FedDyn(0.3) + ud.FedNLR(base=2.0), ud.FedDyn(0.2) + ud.FedNLR()],
    "server": [ud.ServerAdam(lr=0.1), ud.ServerAdam(lr=0.2), ud.ServerAdam(lr=0.3, beta1=0.5)],
    "plans": [ud.TwoDLRD(window=1)] * 3,
    "curvature": [ud.FedCurv(0.1), ud.FedCurv(0.2), ud.FedCurv(0.3)],
}


def same(one, other):
    assert distance(one.params, other.params) < 1e-12
    for mine, theirs in zip(one.history, other.history, strict=True):
        assert mine.keys() == theirs.keys() and mine["clients"] == theirs["clients"]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-12)


@pytest.mark.parametrize("name", ALIKE)
def test_a_run_beside_others_is_the_run_alone(name, rounds):
    alone, beside = trained(ALIKE[name])
    assert rounds and set(rounds) == {3}
    for one, other in zip(alone, beside, strict=True):
        same(one, other)


def test_every_hook(rounds):
    alone, beside = trained([METHOD] * 2, data=[make_clients(SIZES[0])])
    assert rounds == [2] * 4, "the rehearsal of the model, and three rounds"
    for one, other in zip(alone, beside, strict=True):
        same(one, other)


def test_the_same_bits_each_time():
    first, again = (trained([ud.Scaffold()] * 3)[1] for _ in range(2))
    assert all(same_bits(a.params, b.params) for a, b in zip(first, again, strict=True))


def test_running_statistics_and_own_models(rounds):
    alone, beside = trained([ud.FedAvg()] * 2, Normed, [make_clients([20, 10, 16, 7, 12])])
    assert set(rounds) == {2}
    for one, other in zip(alone, beside, strict=True):
        state = other.model.state_dict()
        assert all(torch.allclose(t, state[name], atol=1e-12) for name, t in one.model.state_dict().items())
    alone, beside = trained([ud.FedAvg()] * 2, net, [split()], personalize_every=2)
    assert {len(rounds), *rounds} >= {2}
    for one, other in zip(alone, beside, strict=True):
        assert one.history[-1]["tuned_loss"] == pytest.approx(other.history[-1]["tuned_loss"], abs=1e-12)


def test_faults_and_rules(rounds):
    given = {"faults": ud.Faults(dropout=0.3, nan=0.1, explode=0.2), "max_norm_ratio": 1.5}
    alone, beside = trained([ud.Scaffold()] * 3, **given)
    assert rounds
    for one, other in zip(alone, beside, strict=True):
        assert distance(one.params, other.params) < 1e-12
        assert [row["left_out"] for row in one.history] == [row["left_out"] for row in other.history]
        assert [row["dropped"] for row in one.history] == [row["dropped"] for row in other.history]


def test_runs_of_another_shape_take_turns(rounds):
    alone, beside = trained([ud.FedAvg(), ud.Scaffold(), ud.FedAvg()])
    assert set(rounds) == {2}
    assert all(distance(one.params, other.params) < 1e-12 for one, other in zip(alone, beside, strict=True))


@dataclass(frozen=True)
class Broken(ud.Part):
    """Fails in the hook of one run in round 2: where the number is 7."""

    number: ud.Number = 0.0

    def transform(self, update, state, server):
        if float(self.number) == 7 and server.round == 1:
            raise RuntimeError("this hook is broken")
        return update, state


def test_a_run_that_fails_or_ends_early_leaves_the_others_alone(rounds):
    methods = [Broken(1.0), Broken(7.0), Broken(2.0)]
    data = one_store()
    tasks = [
        partial(ud.train, net(), data[i], method, **settings(i, rounds=2 if i == 0 else 4))
        for i, method in enumerate(methods)
    ]
    first, second, third = side_by_side(tasks)
    assert isinstance(second, ud.UndriftError) and "this hook is broken" in str(second)
    assert rounds == [3, 3, 3, 1, 1], "the rehearsal of the model, and four rounds"
    assert len(first.history) == 2 and distance(third.params, tasks[2]().params) < 1e-12


@dataclass(frozen=True)
class Unmappable(ud.Part):
    """A client's hook that fails for all lanes but not for one client at a time."""

    def gradient(self, g, params, client):
        if torch._C._functorch.is_batchedtensor(client.lr):  # the rate is each lane's own only beside other runs
            raise RuntimeError("not beside others")
        return g


def test_what_fails_together_goes_on_alone(rounds, caplog):
    alone, beside = trained([Unmappable()] * 3)
    assert rounds == [3] and "one after another" in caplog.text
    assert all(distance(one.params, other.params) < 1e-12 for one, other in zip(alone, beside, strict=True))


def test_folders_name_the_others_and_are_resumed_alone(tmp_path, rounds):
    data = one_store()

    def task(i, count, resume=False):
        given = settings(i, rounds=count, out=tmp_path / f"run-{i}", resume=resume)
        return partial(ud.train, net(), data[i], ud.Scaffold(), **given)

    side_by_side([task(i, 2) for i in range(3)])
    assert recorded(tmp_path / "run-1")["started"]["beside"] == ["run-0", "run-2"]
    longer = task(1, 4, resume=True)()
    assert "beside" not in recorded(tmp_path / "run-1")["resumed"][-1]
    whole = ud.train(net(), data[1], ud.Scaffold(), **settings(1, rounds=4))
    assert distance(longer.params, whole.params) < 1e-12
    assert [row["clients"] for row in longer.history] == [row["clients"] for row in whole.history]
    alone = ud.train(net(), data[1], ud.Scaffold(), **settings(1, rounds=2, out=tmp_path / "alone"))
    assert {f.name for f in (tmp_path / "alone").iterdir()} == {f.name for f in (tmp_path / "run-1").iterdir()}
    assert alone.history[0].keys() == longer.history[0].keys()


# ---- stopped and resumed -----------------------------------------------------------------------------------------


ROUNDS = (6, 8, 8, 3)


def in_folders(where: Path, on_round=None, stop_when=None) -> list:
    """Runs of uneven lengths, of which the fourth ends by itself before its last round, in folders."""
    data = one_store()
    tasks = []
    for i, rounds in enumerate(ROUNDS):
        folder = where / f"run-{i}"
        given = settings(i, rounds=rounds, out=folder, resume=(folder / "config.toml").exists(), checkpoint_every=2)
        given |= {"max_norm_ratio": 1.2, "on_round": on_round}
        if i == 1:
            given["stop_when"] = lambda history: len(history) == 5 and "this is enough"
        torch.manual_seed(i)
        tasks.append(partial(ud.train, net(), data[i % 3], ud.Scaffold(), **given))
    return side_by_side(tasks)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    where = tmp_path_factory.mktemp("unbroken")
    assert all(isinstance(found, ud.Result) for found in in_folders(where))
    return where


def same_folders(one: Path, other: Path) -> None:
    for i in range(len(ROUNDS)):
        assert what_it_left(one / f"run-{i}") == what_it_left(other / f"run-{i}")


@pytest.mark.parametrize("count", [0, 2, 7, 13])
def test_killed_between_two_checkpoints(tmp_path, monkeypatch, unbroken, count):
    """Of some runs the checkpoint of a round was written, of others not, and some were finished."""
    write, left = Checkpoints._write, [count]

    def until_killed(self, now):
        left[0] -= 1
        if left[0] < 0:
            raise Dead
        write(self, now)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_write", until_killed)
        assert any(isinstance(found, Dead) for found in in_folders(tmp_path))
    assert all(isinstance(found, ud.Result) for found in in_folders(tmp_path))
    same_folders(unbroken, tmp_path)


@pytest.mark.parametrize("count", [1, 12])
def test_a_stop_ends_all_in_one_round(tmp_path, unbroken, count):
    left = [count]

    def stop(row):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    found = in_folders(tmp_path, stop)
    assert any(isinstance(one, KeyboardInterrupt) for one in found)
    running = [i for i, one in enumerate(found) if not isinstance(one, ud.Result)]
    newest = [max(int(f.stem[6:]) for f in (tmp_path / f"run-{i}/checkpoint").glob("*.json")) for i in running]
    assert len(set(newest)) == 1
    in_folders(tmp_path)
    same_folders(unbroken, tmp_path)


def test_without_a_checkpoint_in_common_there_is_a_warning(tmp_path, unbroken, caplog):
    shutil.copytree(unbroken, tmp_path / "w")
    for i in range(3):
        (tmp_path / f"w/run-{i}/model.safetensors").unlink()
    for file in (tmp_path / "w/run-2/checkpoint").glob("round-*.json"):
        file.unlink()
    in_folders(tmp_path / "w")
    assert "have no checkpoint of one round in common: the last digits of their results may differ" in caplog.text


class Scaled(torch.nn.Module):
    """A number that neither its repr nor its tensors show."""

    def __init__(self, scale):
        super().__init__()
        self.inner, self.scale = net(), scale

    def forward(self, x):
        return self.scale * self.inner(x)


class Settings:
    def __init__(self, rate):
        self.rate = rate


@dataclass(frozen=True)
class Rated(ud.Part):
    settings: Settings | None = None

    def rate(self, k, client):
        return self.settings.rate


def test_constants_of_a_program_are_never_another_runs(rounds):
    data = one_store()
    modules = [partial(ud.train, Scaled(scale), data[0], **settings(0)) for scale in (1.0, 3.0)]
    heads = [partial(ud.train, Attentive(heads), data[0], **settings(0)) for heads in (1, 2)]
    parts = [partial(ud.train, net(), data[0], Rated(Settings(rate)), **settings(0)) for rate in (1.0, 0.1)]
    for tasks in (modules, heads, parts):
        alone = [task() for task in tasks]
        assert all(same_bits(a.params, b.params) for a, b in zip(alone, side_by_side(tasks), strict=True))
    assert not rounds


@dataclass(frozen=True)
class Found(ud.Part):
    """Finds something out about its number when it is made."""

    number: ud.Number = 0.0

    def __post_init__(self):
        object.__setattr__(self, "off", self.number == 0)

    def gradient(self, g, params, client):
        return g if self.off else ud.tree_map(lambda t: t * self.number, g)


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_off_in_one_run_is_not_in_another(first, rounds):
    """A number of 0 may be left out of a program, which is then another one."""
    local = settings(0)["local"]
    data = one_store()[0]
    kinds = [
        [partial(settings, 0, local=replace(local, weight_decay=0.0, optimizer=ud.SGD(x))) for x in (0.0, 0.9)],
        [
            partial(settings, 0, local=replace(local, weight_decay=0.0, optimizer=ud.Adam(weight_decay=x)))
            for x in (0.0, 0.5)
        ],
        [partial(settings, 0, method=Found(x)) for x in (0.0, 0.5)],
    ]
    for pair in kinds:
        tasks = [partial(ud.train, net(), data, **given()) for given in (pair[first], pair[1 - first])]
        alone = [task() for task in tasks]
        assert all(same_bits(a.params, b.params) for a, b in zip(alone, side_by_side(tasks), strict=True))
        assert distance(alone[0].params, alone[1].params) > 1e-3
    assert not rounds


class Attentive(torch.nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(6, heads, batch_first=True, dtype=torch.float64)
        self.head = torch.nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x):
        x = x[:, None]
        return self.head(self.inner(x, x, x, need_weights=False)[0][:, 0])


def test_runs_that_need_other_switches_of_the_process_take_turns():
    data = one_store()
    tasks = [partial(ud.train, net(), data[i], **settings(i, deterministic=i % 2 == 1)) for i in range(3)]
    found = side_by_side(tasks)
    assert [len(result.history) for result in found] == [3, 3, 3]
    assert not torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class Leaving(ud.Part):
    number: ud.Number = 0.0

    def gradient(self, g, params, client):
        raise SystemExit("a hook that leaves")


def test_a_hook_that_leaves_is_its_own_runs():
    found = side_by_side([partial(ud.train, net(), data, Leaving(), **settings(0)) for data in one_store()])
    assert all(isinstance(error, SystemExit | ud.UndriftError) for error in found)


def test_ctrl_c_ends_runs_that_train_alone_too():
    """In a process of its own: two runs that cannot share a program, and a Ctrl-C in the middle."""
    script = """
        import os, signal, undrift as ud
        data = ud.load("digits", partition=ud.IID(), clients=4)
        seen = []
        def run(size):
            def look(row):
                seen.append(row["round"])
                if len(seen) == 5:
                    os.kill(os.getpid(), signal.SIGINT)
            local = ud.Local(steps=1, batch_size=size, lr=0.1)
            return lambda: ud.train("logistic", data, rounds=3000, local=local, evaluate_every=3000, on_round=look)
        try:
            ud.side_by_side([run(4), run(8)])
        except KeyboardInterrupt:
            print("stopped", len(seen) < 2000)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["stopped", "True"], done.stderr


@pytest.fixture
def evaluated(monkeypatch):
    """How many runs' models each batch of an evaluation was for, on a CPU that takes itself for a GPU."""
    seen, of_all = [], Outputs._in_lanes

    def watched(self, params, *rest):
        found = of_all(self, params, *rest)
        seen.append(len(found))
        return found

    monkeypatch.setattr(Outputs, "_in_lanes", watched)
    cuda_graphs.put_in_place(monkeypatch)
    return seen


def evaluations(models, **changed):
    """Runs of different lengths, the second with another metric, alone and beside each other."""
    data, tasks = one_store(), []
    for seed, module in enumerate(models):
        torch.manual_seed(seed)
        own = {**settings(seed), "rounds": 3 + seed, "metrics": METRICS[seed % 2], **changed}
        tasks.append(partial(ud.train, module(), data[seed], ud.FedAvg(), **own))
    return [task() for task in tasks], side_by_side(tasks)


METRICS = ({"accuracy": "accuracy"}, {"accuracy": "accuracy", "top": lambda z, y: z.max(1).values})


class Branches(nn.Module):
    """Looks at values in evaluation mode, which a traced pass cannot."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        z = self.inner(x)
        return z if self.training or z.sum() > 0 else -z


@pytest.mark.parametrize("module", [net, Branches])
def test_models_are_evaluated_together(module, evaluated):
    alone, beside = evaluations([module] * 3)
    assert (3 in evaluated) == (module is net), "all three as one, while all three train"
    for one, other in zip(alone, beside, strict=True):
        assert [row.keys() for row in one.history] == [row.keys() for row in other.history]
        for row, same in zip(one.history, other.history, strict=True):
            for name in {"loss", "accuracy", "top"} & row.keys():
                assert same[name] == pytest.approx(row[name], rel=1e-9, abs=1e-12), name
            assert same["class_accuracy"] == row["class_accuracy"]


def test_a_metric_that_fails_is_its_own_runs(evaluated):
    def fails(output, target):
        if len(target) > 2:  # not on the samples that a run tries before it starts
            raise ArithmeticError("no such figure")
        return target.double()

    def task(seed):
        torch.manual_seed(seed)
        given = settings(seed, metrics={"figure": fails}) if seed == 1 else settings(seed)
        return partial(ud.train, net(), one_store()[seed], ud.FedAvg(), **given)

    found = side_by_side([task(seed) for seed in range(3)])
    assert isinstance(found[1], ArithmeticError)
    assert all(len(found[i].history) == 3 for i in (0, 2)) and {3, 2} <= set(evaluated)


class Share:
    """An accuracy that is an object with a state."""

    def __init__(self):
        self.right = self.seen = 0

    def reset(self):
        self.__init__()

    def update(self, output, target):
        self.right, self.seen = self.right + int((output.argmax(1) == target).sum()), self.seen + len(target)

    def compute(self):
        return self.right / self.seen


def test_evaluations_of_every_kind_are_those_alone(evaluated, rounds):
    """Other test sets, other rounds to evaluate, metrics that are objects, and one that writes to its arguments."""
    base, tasks = one_store(), []
    test = base[0].test_rows
    some, one = (replace(test, index=test.index[:n]) for n in (len(test) // 2, 1))

    def writes(output, target):
        found = (output.argmax(1) == target).double()
        target.zero_()
        return found

    kinds = [
        ((test, some), {"rounds": 5, "metrics": {"accuracy": "accuracy", "written": writes}}),
        ((test, None), {"rounds": 4, "evaluate_every": 2}),
        ((some, test), {"rounds": 6, "evaluate_every": 4, "stop_when": lambda h: "enough" if len(h) == 4 else None}),
        ((one, test), {"rounds": 4, "metrics": {"accuracy": "accuracy", "share": Share()}}),
        ((None, some), {"rounds": 7, "evaluate_every": 3}),
    ]
    for seed, ((tests, held), options) in enumerate(kinds):
        torch.manual_seed(seed)
        data = replace(base[seed % 3], test_rows=tests, validation_rows=held)
        tasks.append(partial(ud.train, net(), data, ud.FedAvg(), **{**settings(seed), **options}))
    alone = [task() for task in tasks]
    assert not evaluated
    for wanted, found in zip(alone, side_by_side(tasks), strict=True):
        assert not isinstance(found, BaseException), found
        assert len(wanted.history) == len(found.history)
        for row, same in zip(wanted.history, found.history, strict=True):
            del row["seconds"], same["seconds"]
            assert alike(same, row)
    assert max(evaluated) > 1, "some were evaluated together"
    assert rounds == [5, 5, 5, 5, 5, 2, 1, 1], "runs stay in step, whenever they evaluate"


def alike(found, wanted):
    """Equal, but for the last digits of numbers."""
    if isinstance(wanted, float):
        return found == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(alike(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return found == wanted


class Remembers(nn.Module):
    """Adds a number in evaluation mode, which becomes a constant of a traced pass."""

    offset = 0.0

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        z = self.inner(x)
        return z if self.training else z + Remembers.offset


def test_models_that_tracing_would_change_are_evaluated_one_by_one(evaluated, monkeypatch):
    called = Outputs._called

    def counting(self, params, tracked, x):
        Remembers.offset += 1.0
        return called(self, params, tracked, x)

    monkeypatch.setattr(Remembers, "offset", 0.0)
    monkeypatch.setattr(Outputs, "_called", counting)
    evaluations([Remembers] * 2, rounds=3, metrics=None)
    assert len(evaluated) <= 2, "then each run's model is called"


def test_what_fails_for_all_is_answered_one_by_one():
    def answer(items):
        if len(items) > 1 or items[0] == 2:
            raise MemoryError(f"{items} at once")
        return [10 * items[0]]

    found = answer_together([Call("kind", item, answer) for item in (1, 2, 3)])
    assert (found[0], found[2]) == (10, 30) and isinstance(found[1], MemoryError)


def test_runs_with_other_numbers_of_threads_take_turns(rounds):
    data = one_store()[0]
    tasks = [partial(ud.train, net(), data, ud.FedAvg(), **settings(i, threads=i + 1)) for i in range(2)]
    assert [len(found.history) for found in side_by_side(tasks)] == [3, 3] and not rounds
