"""Whatever trains is saved and read again; what cannot be saved is refused before the first round."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import nn

import undrift as ud
from tests.problems import make_clients, net
from undrift.functional.examine import named_tensors
from undrift.functional.layouts import equal
from undrift.training import safetensors_io

LOCAL = ud.Local(epochs=1, batch_size=4, lr=0.1)
SIZES = [10, 7, 4, 3]


class Net(nn.Module):
    """What derived classes have apart from this does not decide its outputs, or is multiplied with its features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def features(self, h):
        return h

    def forward(self, x):
        return self.last(self.features(torch.tanh(self.first(x))))


class Versioned(Net):
    """Extra state of every kind that is written down."""

    def __init__(self, version: int = 3) -> None:
        super().__init__()
        self.extra = {"version": version, "names": ["a", None, 0.5, True], "scale": torch.arange(2.0), 4: ()}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Slices(Net):
    """Two parameters that are parts of one tensor, which nobody else has."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 8).double()
        self.scale, self.shift = nn.Parameter(both[0]), nn.Parameter(both[1])

    def features(self, h):
        return self.scale * h + self.shift


class Expanded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1, 1), 1.5).double().expand(8, 8))

    def features(self, h):
        return h @ self.scale


class Replaced(Expanded):
    """A buffer that is expanded at first only."""

    def features(self, h):
        if self.training:
            self.scale = self.scale * 0.9
        return super().features(h)


class Overlapping(Net):
    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(16.0).double()
        self.register_buffer("scale", numbers[:8])
        self.register_buffer("shift", numbers[4:12])

    def features(self, h):
        return self.scale * h + self.shift


class Rotary(Net):
    """Complex rotations, as Llama keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotations", torch.polar(torch.ones(4).double(), torch.arange(4.0).double()))
        self.register_buffer("also", torch.zeros(3, dtype=torch.complex64))

    def features(self, h):
        pairs = torch.view_as_complex(h.unflatten(1, (4, 2)).contiguous())
        return torch.view_as_real(pairs * self.rotations).flatten(1)


class Graph(Net):
    """A sparse adjacency matrix."""

    def __init__(self, kind=torch.Tensor.to_sparse) -> None:
        super().__init__()
        self.register_buffer("adjacency", kind((torch.eye(8) + torch.eye(8).roll(1, 0)).double()))
        self.also = kind(torch.eye(2))

    def features(self, h):
        return (self.adjacency @ h.T).T


class Tied(Net):
    """A tied weight, whose memory is not in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight = nn.Parameter(torch.randn(6, 8).double().T)
        self.other = nn.Linear(6, 8).double()
        self.other.weight = self.first.weight

    def forward(self, x):
        return super().forward(x) + self.last(self.other(x))


class Noted(Net):
    """Whose state has a text."""

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "note": "from here"}


KINDS = {
    "ordinary": Net,
    "extra state": Versioned,
    "slices": Slices,
    "expanded": Expanded,
    "expanded at first": Replaced,
    "overlapping": Overlapping,
    "complex": Rotary,
    "sparse": Graph,
    "sparse, compressed rows": lambda: Graph(torch.Tensor.to_sparse_csr),
    "sparse, compressed columns": lambda: Graph(torch.Tensor.to_sparse_csc),
    "tied": Tied,
    "a text in its state": Noted,
}


def made(kind) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


@pytest.mark.parametrize("engine", ["auto", "plain"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
def test_a_run_is_saved_and_read_again(kind, engine, tmp_path):
    options = {"rounds": 2, "local": LOCAL, "engine": engine, "out": tmp_path / "run", "checkpoint_every": 1}
    module = made(KINDS[kind])
    before = {name: t.detach().clone() for name, t in named_tensors(module).items()}
    found = ud.train(module, make_clients(SIZES), **options)
    alone = ud.train(made(KINDS[kind]), make_clients(SIZES), **(options | {"out": None, "checkpoint_every": None}))
    again = ud.train(made(KINDS[kind]), make_clients(SIZES), resume=True, **options)
    assert_alike(found.model, alone.model)
    assert_alike(found.model, again.model)
    assert getattr(module, "extra", None) is None or again.model.extra.keys() == module.extra.keys()
    assert all(equal(t, before[name]) for name, t in named_tensors(module).items()), "the caller's module has changed"
    # A checkpoint, too, has all that a run continues from.
    (tmp_path / "run" / "model.safetensors").unlink()
    longer = ud.train(made(KINDS[kind]), make_clients(SIZES), resume=True, **(options | {"rounds": 3}))
    whole = ud.train(made(KINDS[kind]), make_clients(SIZES), **(options | {"rounds": 3, "out": tmp_path / "other"}))
    assert_alike(longer.model, whole.model)


def assert_alike(a: nn.Module, b: nn.Module) -> None:
    a, b = named_tensors(a), named_tensors(b)
    assert a.keys() == b.keys() and all(equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_extra_state_is_what_it_was(tmp_path):
    file, old, new = tmp_path / "model.safetensors", made(Versioned), made(lambda: Versioned(0))
    safetensors_io.write_model(old, file)
    safetensors_io.read_model(new, file)
    assert torch.equal(old.extra.pop("scale"), new.extra.pop("scale")) and old.extra == new.extra
    assert new.extra["version"] == 3 and type(new.extra["names"][2]) is float and new.extra[4] == ()


def test_keys_of_extra_state_are_what_they_were(tmp_path):
    """JSON has no tuples."""
    file, old, new = tmp_path / "model.safetensors", made(Versioned), made(lambda: Versioned(0))
    old.extra = {(1, 2): 3, ("a", (None, 0.5)): [True], (): {False: "b", None: 1.5}}
    safetensors_io.write_model(old, file)
    safetensors_io.read_model(new, file)
    assert new.extra == old.extra and [*map(type, new.extra[()])] == [bool, type(None)]


@pytest.mark.parametrize("make", [net, lambda: nn.GRU(3, 4, num_layers=2), nn.BatchNorm1d, Tied, Slices])
def test_the_file_is_that_of_safetensors_wherever_they_can_write_it(make, tmp_path):
    module = made(make) if make is not nn.BatchNorm1d else nn.BatchNorm1d(3)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    safetensors_io.write_model(module, ours)
    try:
        save_model(module, str(theirs))
    except RuntimeError:
        assert make in (Tied, Slices)
        assert load_file(ours).keys() == module.state_dict().keys() - {"other.weight"}
    else:
        assert ours.read_bytes() == theirs.read_bytes()
        load_model(module, ours)


def test_a_file_of_another_module_is_not_read(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors_io.write_model(made(Net), file)
    with pytest.raises(RuntimeError, match=r"the file lacks scale, shift"):
        safetensors_io.read_model(made(Slices), file)
    safetensors_io.write_model(made(Slices), file)
    with pytest.raises(RuntimeError, match=r"the module has no scale, shift"):
        safetensors_io.read_model(made(Net), file)


class Opaque(Net):
    def get_extra_state(self):
        return object()

    def set_extra_state(self, state):
        pass


class OddKeys(Opaque):
    def get_extra_state(self):
        return {(b"a", 1): 2}


class Failing(Net):
    def state_dict(self, *args, **kwargs):
        raise KeyError("nothing")


class Rotating(Rotary):
    def features(self, h):
        if self.training:
            self.rotations = self.rotations * self.rotations[1]
        return super().features(h)


class Fading(Graph):
    def features(self, h):
        if self.training:
            self.adjacency = 0.9 * self.adjacency
        return super().features(h)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Opaque, "state_dict has '_extra_state', which cannot be saved: a object has no form"),
        (OddKeys, "state_dict has '_extra_state', which cannot be saved: a dict with a key of type bytes has no form"),
        (Failing, r"state_dict\(\) fails \('nothing'\)"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_the_first_round(kind, words, tmp_path):
    seen = []
    with pytest.raises(ud.UndriftError, match=words):
        ud.train(made(kind), make_clients(SIZES), rounds=1, local=LOCAL, out=tmp_path / "run", on_round=seen.append)
    assert not seen and not (tmp_path / "run").exists()
    assert len(ud.train(made(kind), make_clients(SIZES), rounds=1, local=LOCAL).history) == 1, "nothing is to be saved"


def test_extra_state_that_training_makes_unwritable_costs_that_entry_alone(tmp_path, caplog):
    done = []

    class Later(Net):
        def get_extra_state(self):
            return object() if done else None

        def set_extra_state(self, state):
            pass

    ud.train(made(Later), make_clients(SIZES), rounds=1, local=LOCAL, out=tmp_path / "run", on_round=done.append)
    assert "'_extra_state' of the trained module's state_dict is not saved" in caplog.text
    assert len(load_file(tmp_path / "run" / "model.safetensors")) == 4


@pytest.mark.parametrize(
    ("kind", "words"), [(Rotating, "'rotations', which is complex"), (Fading, "'adjacency', which is sparse")]
)
@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_complex_and_sparse_buffers_that_training_changes_are_refused(kind, words, engine):
    with pytest.raises(ud.UndriftError, match=words):
        ud.train(made(kind), make_clients(SIZES), rounds=1, local=LOCAL, engine=engine)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:Lazy modules")
def test_a_run_with_hooks_is_resumed_in_the_same_process(tmp_path):
    """Torch numbers the hooks of a process, and layers keep these numbers."""

    def hooked():
        module = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.LazyBatchNorm1d(), nn.Linear(8, 4))
        module.handle = module[2].register_forward_hook(lambda layer, args, output: 2 * output)
        return module.double()

    local = ud.Local(epochs=1, batch_size=4, lr=0.1, drop_last=True)
    options = {"rounds": 1, "local": local, "out": tmp_path / "run", "engine": "plain"}
    found = ud.train(made(hooked), make_clients(SIZES), **options)
    again = ud.train(made(hooked), make_clients(SIZES), resume=True, **options)
    assert_alike(found.model, again.model)
