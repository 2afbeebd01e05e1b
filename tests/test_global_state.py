"""A run leaves the process as it found it, and runs in threads do not disturb one another."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import undrift as ud
from tests.problems import make_clients, net, same_bits
from undrift.tools import config, experiment, parallel
from undrift.training.torch_flags import CUBLAS, Flags, full_precision, use_flags

CPU = torch.device("cpu")
BY_OPERATION = hasattr(torch._C, "_get_fp32_precision_getter")
EACH = [("generic", "all")] + [(one, op) for one in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]


def get(seed):
    return ud.models.get("cnn", classes=3, shape=(1, 8, 8), seed=seed).state_dict()


def test_models_by_name_have_the_same_weights_in_threads():
    """A9: of 800 models made in four threads, 312 had wrong weights."""
    alone = [get(seed) for seed in range(4)]

    def often(seed):
        return all(same_bits(get(seed), alone[seed]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(often, range(4))) == [True] * 4


def test_models_by_name_leave_the_generators_alone(monkeypatch):
    """CUDA's too: `torch.manual_seed` would seed that as well."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    get(0)
    assert torch.equal(torch.get_rng_state(), before) and not seeded


@pytest.mark.parametrize("name", ["mlp", "cnn", "lenet5", "vgg9", "resnet20", "gru", "lstm"])
def test_layers_start_as_after_a_seed_of_torch_s_own(name):
    """The generator is another, its numbers are the same: figures of earlier versions stay true."""
    from undrift.models import MODELS
    from undrift.random import torch_seed

    shape, options = ((5,), {"vocabulary": 9}) if name in ("gru", "lstm") else ((3, 32, 32), {})
    mine = ud.models.get(name, classes=3, shape=shape, seed=4, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(4, "model"))
        theirs = MODELS[name](3, shape, **options)
    assert same_bits(mine.state_dict(), theirs.state_dict())


def test_a_registered_model_may_draw_as_it_likes():
    def odd(classes, shape):
        model = torch.nn.Linear(6, classes)
        with torch.no_grad():
            model.weight.copy_(torch.randn(classes, 6) + torch.rand_like(model.weight) + torch.randperm(6))
            torch.nn.init.trunc_normal_(model.bias)
        return model

    ud.register_model("odd", odd)
    try:
        one, same, other = (ud.models.get("odd", classes=4, shape=(6,), seed=s).state_dict() for s in (1, 1, 2))
    finally:
        ud.models.MODELS.pop("odd")
    assert same_bits(one, same) and not same_bits(one, other)


def test_switches_are_put_back_whatever_the_order(monkeypatch):
    """Two runs at once: the first to start is the first to end."""
    before = Flags.current()
    first, second = use_flags("tf32", True, CPU), use_flags("tf32", True, CPU)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with second:
            entered.set()
            leave.wait(10)
            assert torch.backends.cuda.matmul.allow_tf32 and torch.are_deterministic_algorithms_enabled()

    with ThreadPoolExecutor(1) as pool:
        with first:
            assert Flags.current() != before and os.environ[CUBLAS]
            running = pool.submit(other)
            assert entered.wait(10)
            with (
                pytest.raises(ud.UndriftError, match="in another thread of this process has a different precision"),
                use_flags("auto", True, CPU),
            ):
                pass
        leave.set()
        running.result()
    assert Flags.current() == before


def test_a_run_within_a_run_may_have_a_precision_of_its_own():
    before = Flags.current()
    with use_flags("tf32", False, CPU):
        with use_flags("auto", True, CPU):
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32 and not torch.are_deterministic_algorithms_enabled()
    assert Flags.current() == before


def test_autocast_around_a_run_changes_nothing():
    options = {"rounds": 2, "local": ud.Local(steps=2, batch_size=4, lr=0.1)}
    data = make_clients([10, 7], torch.float32)
    plain = ud.train(net().float(), data, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = ud.train(net().float(), data, **options)
    assert same_bits(plain.params, inside.params)


def of_torch():
    """What torch says about precision; older settings raise if newer ones contradict them."""

    def read(setting):
        try:
            return setting()
        except RuntimeError:
            return "contradicts"

    older = [torch.get_float32_matmul_precision, lambda: torch.backends.cuda.matmul.allow_tf32]
    older += [lambda: torch.backends.cudnn.allow_tf32]
    newer = [torch._C._get_fp32_precision_getter(*each) for each in EACH] if BY_OPERATION else []
    return [*map(read, older), *newer]


def by_operation(backend, operation, value):
    if not BY_OPERATION:
        pytest.skip("torch has no such setting before 2.9")
    torch._C._set_fp32_precision_setter(backend, operation, value)


PRECISIONS = {
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "ieee": lambda: torch.set_float32_matmul_precision("highest"),
    "cuBLAS": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "no cuDNN": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "everything": lambda: by_operation("generic", "all", "tf32"),
    "everything, bfloat16": lambda: by_operation("generic", "all", "bf16"),
    "CUDA": lambda: by_operation("cuda", "all", "ieee"),
    "oneDNN": lambda: by_operation("mkldnn", "all", "bf16"),
    "oneDNN's products": lambda: by_operation("mkldnn", "matmul", "bf16"),
    "oneDNN's convolutions": lambda: by_operation("mkldnn", "conv", "bf16"),
    "cuBLAS, by operation": lambda: by_operation("cuda", "matmul", "tf32"),
    "cuDNN's convolutions": lambda: by_operation("cuda", "conv", "ieee"),
}


@pytest.fixture
def switches():
    before = Flags.current()
    yield
    before.set()


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_run_has_the_precision_that_its_choices_say(name, switches):
    """oneDNN rounded to bfloat16 with "medium", and torch's getter raised after the run."""
    options = {"rounds": 1, "local": ud.Local(steps=2, batch_size=8, lr=0.1)}
    data, seen = ud.load("digits", ud.IID(), clients=4), []
    alone = ud.train("mlp(hidden=64)", data, **options)
    PRECISIONS[name]()
    before = of_torch()
    found = ud.train("mlp(hidden=64)", data, **options, on_round=lambda row: seen.append(of_torch()))
    assert of_torch() == before
    assert seen[0][:3] == ["highest", False, False] and not {"tf32", "bf16"} & set(seen[0][3:])
    assert same_bits(alone.params, found.params)
    with use_flags("tf32", False, CPU):
        assert of_torch()[:3] == ["high", True, True]
    assert of_torch() == before


def test_precision_that_was_inherited_still_is(switches):
    before = of_torch()
    by_operation("generic", "all", "tf32")
    with use_flags("auto", False, CPU):
        pass
    by_operation("generic", "all", "none")
    assert of_torch() == before


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_inference_mode_around_a_run_changes_nothing(engine):
    """Models by name were refused for having no gradient."""
    options = {"rounds": 2, "local": ud.Local(steps=2, batch_size=4, lr=0.1), "engine": engine}
    alone = ud.train("mlp", ud.load("digits", ud.IID(), clients=4), **options)
    own = ud.train(net().float(), make_clients([10, 7], torch.float32), **options)
    with torch.inference_mode():
        inside = ud.train("mlp", ud.load("digits", ud.IID(), clients=4), **options)
        own_inside = ud.train(net().float(), make_clients([10, 7], torch.float32), **options)
        assert torch.is_inference_mode_enabled()
    assert same_bits(alone.params, inside.params) and same_bits(own.params, own_inside.params)


@pytest.mark.parametrize("start", ["a run", "a sweep"])
def test_threads_are_put_back(start, tmp_path):
    local, data = {"steps": 1, "lr": 0.1}, {"name": "digits", "clients": 3}
    settings = {"data": data, "model": "logistic", "rounds": 1, "threads": 3, "local": local}
    before, seen = torch.get_num_threads(), []

    def look(*_):
        seen.append(torch.get_num_threads())

    if start == "a run":
        experiment.run(config.checked(settings, "e"), tmp_path / "run", on_round=look)
    else:
        assert parallel._train_one(None, settings, str(tmp_path / "run"), "e", 2, look) is None
    assert seen == [3] and torch.get_num_threads() == before


SEEN = set()


class Tried(torch.nn.Linear):
    """Records whether its products may be rounded to tf32, on four samples: a trial is on halves of eight."""

    def forward(self, x):
        if len(x) == 4:
            SEEN.add((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return super().forward(x)


@pytest.mark.parametrize("precision", ["auto", "tf32"])
def test_trials_before_a_run_are_not_in_tf32(precision, monkeypatch):
    """On a GPU, another order of summation gives other digits in tf32; a trial then took samples to interact."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # torch's default
    SEEN.clear()
    before, data = Flags.current(), make_clients([7, 5], torch.float32)
    local = ud.Local(epochs=1, batch_size=3, lr=0.1)
    ud.train(Tried(6, 4), data, rounds=1, local=local, precision=precision, device="cpu")
    assert SEEN == {(False, False)} and Flags.current() == before


class Nested(torch.nn.Linear):
    """Trains another model when it is called."""

    def forward(self, x):
        if not SEEN:
            SEEN.add("within")
            ud.train("logistic", make_clients([5, 5], torch.float32), rounds=1, local=ud.Local(steps=1, lr=0.1))
        return super().forward(x)


def test_a_run_within_a_trial():
    SEEN.clear()
    with full_precision():
        Nested(6, 4)(torch.zeros(2, 6))
    assert SEEN == {"within"}


def test_trials_leave_a_run_in_another_thread_alone():
    with ThreadPoolExecutor(1) as pool:
        active = use_flags("tf32", False, CPU)
        pool.submit(active.__enter__).result()
        try:
            with full_precision():
                assert torch.backends.cuda.matmul.allow_tf32
        finally:
            pool.submit(active.__exit__, None, None, None).result()
    assert not torch.backends.cuda.matmul.allow_tf32
