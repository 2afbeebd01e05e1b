"""Models that do unusual things are trained as a loop written by hand in PyTorch trains them, or refused."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import undrift as ud
from tests.handloop import everything, hand_loop
from tests.problems import distance, make_clients, net
from undrift.functional.draws import fixed_key
from undrift.functional.model import Model

LOCAL, ROUNDS = ud.Local(epochs=2, batch_size=4, lr=0.1), 2
UNEVEN = [10, 7, 4, 1]  # short last batches, one full batch, one sample


def trained(module, data=None, **options):
    data = data or make_clients(UNEVEN)
    return ud.train(module, data, **{"rounds": ROUNDS, "local": LOCAL, **options})


def from_hand(result, module, data=None, rounds=ROUNDS, **options):
    """The largest distance from the hand loop: of trained weights, frozen ones and buffers."""
    wanted = hand_loop(module, data or make_clients(UNEVEN), LOCAL, rounds, **options)
    return distance(everything(result.model), wanted)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()


class Checkpointed(Wrapped):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("method", [ud.FedAvg(), ud.FedProx(0.1)])
def test_gradient_checkpointing(method):
    local = ud.Local(epochs=2, batch_size=4, lr=0.5)
    found = trained(Checkpointed(), method=method, local=local)
    bare = trained(net(), method=method, local=local, engine="plain")
    assert distance({n.removeprefix("inner."): w for n, w in found.params.items()}, bare.params) < 1e-12


def test_a_take_that_reads_from_elsewhere_is_not_traced():
    data = make_clients(UNEVEN)
    files = data.store["x"].clone()

    def from_files(store, indices):
        return torch.stack([files[i] for i in indices.tolist()]), store["y"][indices]

    def scaled(store, indices):
        return store["x"][indices] * 2, store["y"][indices]

    lazy = ud.FederatedDataset(data.store, data.index, data.offsets, take=from_files)
    found = trained(net(), lazy)
    assert found.choices["engine"] == "plain" and "`take`" in found.choices["why"]
    assert from_hand(found, net(), lazy) < 1e-12
    with pytest.raises(ud.UndriftError, match="`take` reads more"):
        trained(net(), lazy, engine="lanes")
    pure = ud.FederatedDataset(data.store, data.index, data.offsets, take=scaled)
    found = trained(net(), pure)
    assert found.choices["engine"] == "lanes" and from_hand(found, net(), pure) < 1e-12


class OwnStatistics(Wrapped):
    def forward(self, x):
        return self.inner(x - x.mean(0))


class SetAttention(Wrapped):
    def forward(self, x):
        return self.inner(torch.softmax(x @ x.T, -1) @ x)


class BatchNormalized(Wrapped):
    def forward(self, x):
        return self.inner(F.batch_norm(x, None, None, training=True)) if len(x) > 1 else self.inner(x)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)


def contrastive(z, y):
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)), reduction="none")


def weighted(z, y):
    """torch's weighted mean: the sum of weights is the batch's."""
    losses = F.cross_entropy(z, y, weight=WEIGHTS, reduction="none")
    return losses / WEIGHTS[y].sum() * len(y)


@pytest.mark.parametrize(
    ("make", "loss"),
    [(OwnStatistics, None), (SetAttention, None), (BatchNormalized, None), (net, contrastive), (net, weighted)],
)
def test_samples_that_interact_are_not_padded(make, loss):
    module = make()
    criterion = {"loss": lambda z, y: loss(z, y).mean()} if loss else {}
    found = trained(module, loss=loss)
    assert found.choices["engine"] == "plain" and "interact" in found.choices["why"]
    assert from_hand(found, module, **criterion) < 1e-12
    even = make_clients([8, 4, 12])  # full batches, which lanes take as they are
    found = trained(module, even, loss=loss)
    assert found.choices["engine"] == "lanes" and from_hand(found, module, even, **criterion) < 1e-12


def test_samples_on_their_own_stay_in_lanes():
    for module in (net(), net(dropout=0.5), nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)).double()):
        assert trained(module).choices["engine"] == "lanes"


class Teacher(nn.Module):
    """An average of the student's weights, written in `forward`."""

    def __init__(self, how) -> None:
        super().__init__()
        self.student, self.how = net(), how
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.how(slow, fast)
        return self.student(x) + self.teacher(x)


WAYS = {
    "in place": lambda slow, fast: slow.mul_(0.9).add_(fast, alpha=0.1),
    "through .data": lambda slow, fast: slow.data.mul_(0.9).add_(fast.data, alpha=0.1),
    ".data =": lambda slow, fast: setattr(slow, "data", 0.9 * slow.data + 0.1 * fast.data),
}


@pytest.mark.parametrize("how", WAYS)
def test_frozen_parameters_that_forward_writes(how):
    data = make_clients(UNEVEN)
    untested = ud.FederatedDataset(data.store, data.index, data.offsets)  # a test would write too, as in torch
    module = Teacher(WAYS[how])
    before = copy.deepcopy(module.state_dict())
    runs = [trained(module, untested) for _ in range(2)]
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items()), "the caller's module has changed"
    assert distance(everything(runs[0].model), everything(runs[1].model)) == 0
    assert runs[0].choices["engine"] == "plain" and from_hand(runs[0], module, untested) < 1e-12


def test_frozen_parameters_that_nobody_writes_are_not_copied():
    module = Wrapped()
    module.forward = module.inner.forward
    module.inner[0].requires_grad_(False)
    found = trained(module.inner)
    assert found.choices["engine"] == "lanes"
    assert found.model[0].weight.data_ptr() == module.inner[0].weight.data_ptr()
    assert from_hand(found, module.inner) < 1e-12


class Normed(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop, self.frozen = nn.Dropout(0.5), frozen
        self.double()

    def train(self, mode=True):
        super().train(mode)
        self.norm.train(mode and not self.frozen)
        return self

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def test_batch_norm_kept_in_evaluation_mode_by_train():
    torch.manual_seed(0)
    module = Normed(frozen=True)
    module.drop.p = 0.0
    found = trained(module)  # as built: train() has not been called yet
    assert int(found.model.norm.num_batches_tracked) == 0
    assert torch.equal(found.model.norm.running_mean, module.norm.running_mean)
    assert from_hand(found, module) < 1e-12


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_a_submodule_that_was_set_to_evaluation_mode_stays_there(engine):
    module = net(dropout=0.5)
    module[2].eval()
    found = trained(module, engine=engine)
    assert from_hand(found, net()) < 1e-12  # without dropout
    module.eval()  # all of it, as after loading weights: that is what training mode is for
    assert from_hand(trained(module, engine=engine), net()) > 1e-3


def test_ids_among_floats_are_refused_where_they_would_be_rounded():
    x = torch.tensor([[1001.0, 0.5], [257.0, 0.1], [3.0, 0.2]])
    data = ud.FederatedDataset.from_clients([(x, torch.tensor([0, 1, 1]))])
    with pytest.raises(ud.UndriftError, match=r"such as 1001, which torch\.bfloat16 rounds"):
        trained(nn.Linear(2, 2), data, precision="bfloat16")
    trained(nn.Linear(2, 2), data)
    small = ud.FederatedDataset.from_clients([(x.clamp(max=256), torch.tensor([0, 1, 1]))])
    trained(nn.Linear(2, 2), small, precision="bfloat16")


def test_the_loss_is_given_what_the_model_returns():
    kinds = []

    def loss(z, y):
        kinds.append(z.dtype)
        return F.cross_entropy(z, y, reduction="none")

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.back, self.head = nn.Linear(6, 8).bfloat16(), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.back(x.bfloat16()).float())

    for engine in ("lanes", "plain"):
        kinds.clear()
        found = trained(Mixed(), make_clients(UNEVEN, torch.float32), loss=loss, engine=engine)
        assert set(kinds) == {torch.float32}
        assert [found.params[n].dtype for n in ("back.weight", "head.weight")] == [torch.bfloat16, torch.float32]


class Bounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6, max_norm=0.5), nn.Linear(6, 4)
        self.double()

    def forward(self, tokens):
        return self.head(self.table(tokens).mean(1))


def test_an_embedding_with_a_largest_norm():
    torch.manual_seed(0)
    module = Bounded()
    clients = [(torch.randint(0, 9, (n, 3)), torch.randint(0, 4, (n,))) for n in UNEVEN]
    data = ud.FederatedDataset.from_clients(clients)
    assert from_hand(trained(module, data), module, data) < 1e-12


class Rebinding(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)  # so that the backward pass needs w
        self.w, self.how = nn.Parameter(torch.eye(6, 4, dtype=torch.float64) + 0.1), how

    def forward(self, x):
        with torch.no_grad():
            if self.how == "data":
                self.w.data = F.normalize(self.w.data, dim=0)
            else:
                self.w.copy_(F.normalize(self.w, dim=0))
        return self.inner(x) @ self.w


class Moving(nn.Module):
    """As cuDNN's recurrent layers on a GPU: the first forward pass moves the weights, which keep their values."""

    def __init__(self):
        super().__init__()
        self.inner, self.moved = net(), False

    def forward(self, x):
        if not self.moved:
            self.moved = True
            for p in self.inner.parameters():
                p.data = p.data.clone()
        return self.inner(x)


def test_weights_that_forward_only_moves():
    assert from_hand(trained(Moving()), Moving()) < 1e-12


def test_weights_that_forward_normalizes():
    data = make_clients(UNEVEN)
    untested = ud.FederatedDataset(data.store, data.index, data.offsets)
    for how in ("data", "copy"):
        torch.manual_seed(0)
        module = Rebinding(how)
        found = trained(module, untested)
        assert from_hand(found, module, untested) < 1e-12
        assert how == "copy" or ".data of 'w'" in found.choices["why"]


class Replaced(nn.Module):
    """A buffer that the forward pass replaces: a running mean of the inputs."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mean)


def test_a_buffer_that_is_replaced():
    found = trained(Replaced())
    assert found.choices["engine"] == "plain" and from_hand(found, Replaced()) < 1e-12


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("n", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.n = self.n + self.training
        return self.inner(x) / (1 + self.n)


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_a_buffer_that_is_replaced_whatever_the_samples(engine):
    data = make_clients(UNEVEN)
    untested = ud.FederatedDataset(data.store, data.index, data.offsets)
    assert from_hand(trained(Counting(), untested, engine=engine), Counting(), untested) < 1e-12


def test_lazy_layers_get_their_shapes_from_the_data():
    def lazy():
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4))

    module = lazy()
    one, two, other = (
        trained(m, make_clients(UNEVEN, torch.float32), seed=s) for m, s in ((module, 0), (lazy(), 0), (module, 1))
    )
    assert distance(one.params, two.params) == 0 and distance(one.params, other.params) > 0
    assert isinstance(module[0].weight, nn.UninitializedParameter)  # the caller's is as it was


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_norms_get_their_shapes_from_the_data():
    def layers(norm):
        return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 4)).double()

    data, local = make_clients([8, 4, 12]), ud.Local(epochs=1, batch_size=4, lr=0.1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lazy = layers(nn.LazyBatchNorm1d())
        torch.manual_seed(0)
        made = layers(nn.BatchNorm1d(8))
    one, two = (trained(module, data, local=local, rounds=1) for module in (lazy, made))
    assert distance(everything(one.model), everything(two.model)) == 0 and one.choices["engine"] == "lanes"
    assert isinstance(lazy[1].running_mean, nn.UninitializedBuffer)


class Jacobian(nn.Module):
    """Its features' derivatives with respect to the input are features, too."""

    def __init__(self, of):
        super().__init__()
        self.of, self.first, self.last = of, nn.Linear(6, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x):
        def features(row):
            return torch.tanh(self.first(row))

        return self.last(features(x) + torch.func.vmap(self.of(features))(x).sum(-1))


@pytest.mark.parametrize("of", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*torch.jit.script")
def test_jacobians_in_forward(of):
    module = Jacobian(of)
    assert from_hand(trained(module), module) < 1e-12


class Silent(nn.Module):
    """Whatever it does not have is None."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None

    def forward(self, x):
        return self.inner(x)


def test_a_module_with_every_attribute():
    module = Silent()
    assert from_hand(trained(module), module) < 1e-12


class Observed(nn.Module):
    """As quantization's observers: a buffer has no shape before the first batch."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("most", torch.zeros(0, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            high = x.detach().abs().amax(0)
            if not self.most.numel():
                self.most.resize_(high.shape)
                self.most.copy_(high)
            self.most.copy_(torch.maximum(self.most, high))
        return self.inner(x / self.most.clamp(min=1e-3)) if self.most.numel() else self.inner(x)


def test_buffers_that_get_their_shape_from_the_first_batch(caplog):
    found = trained(Observed())
    assert found.model.most.shape == (6,) and "called once on a sample" in caplog.text


class WithItsLoss(nn.Module):
    """Computes the mean loss itself where it is given labels, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, labels=None):
        z = self.inner(x)
        return {"logits": z} if labels is None else {"loss": F.cross_entropy(z, labels), "logits": z}


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_computes_its_own_loss(named):
    data = make_clients(UNEVEN)
    if named:
        data = ud.FederatedDataset.from_clients([({"x": x}, y) for x, y in data])
    wanted = trained(net(), make_clients(UNEVEN))
    found = trained(WithItsLoss(), data, loss="model")
    assert found.choices["engine"] == "plain" and "interact" in found.choices["why"]  # a mean over a batch
    assert distance({n.removeprefix("inner."): w for n, w in found.params.items()}, wanted.params) < 1e-12
    even = make_clients([8, 4])
    assert trained(WithItsLoss(), even, loss="model").choices["engine"] == "lanes"
    by_logits = trained(WithItsLoss(), data)
    assert distance(by_logits.params, found.params) < 1e-12 and by_logits.choices["engine"] == "lanes"


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about things of its own
def test_wrappers_are_taken_off():
    wanted = trained(net()).params
    for wrapped in (nn.DataParallel(net()), torch.compile(net())):
        found = trained(wrapped)
        assert found.choices["engine"] == "lanes" and distance(found.params, wanted) == 0


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_what_cannot_be_trained_is_refused_with_a_way_out():
    class Locked(Wrapped):
        def __init__(self):
            super().__init__()
            import threading

            self.lock = threading.Lock()

    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(6, 4, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.w).real

    for module, words in [
        (torch.jit.script(net()), "the Python module that it was made from"),
        (Locked(), "cannot be copied.*locks"),
        (Complex(), "'w' are complex.*view_as_real"),
    ]:
        with pytest.raises(ud.UndriftError, match=words):
            trained(module)


def pruned():
    from torch.nn.utils import prune

    module = net()
    prune.random_unstructured(module[0], "weight", 0.4)
    return module


@pytest.mark.filterwarnings("ignore")  # the older weight norm is deprecated
@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 4)).double(), pruned]
)
def test_weights_that_a_hook_computes(make):
    torch.manual_seed(0)
    module = make()
    found = trained(module)
    wanted = hand_loop(module, make_clients(UNEVEN), LOCAL, ROUNDS)
    assert distance(found.params, {name: wanted[name] for name in found.params}) < 1e-12


def test_sparse_gradients():
    class Sparse(Bounded):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 6, sparse=True).double()

    torch.manual_seed(0)
    module = Sparse()
    clients = [(torch.randint(0, 9, (n, 3)), torch.randint(0, 4, (n,))) for n in UNEVEN]
    data = ud.FederatedDataset.from_clients(clients)
    assert from_hand(trained(module, data), module, data) < 1e-12


class CheckpointedDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net(dropout=0.5)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_dropout_that_gradient_checkpointing_repeats():
    """The mask of the recomputed pass must be the first one's: the gradients are those without checkpointing."""
    module, bare = CheckpointedDropout(), net(dropout=0.5)
    runs = [trained(module) for _ in range(2)]
    assert runs[0].choices["engine"] == "plain" and "backward pass" in runs[0].choices["why"]
    assert distance(runs[0].params, runs[1].params) == 0
    wanted = Model(bare, torch.device("cpu"))._with(unkeyed="to compare")
    found = Model(module, torch.device("cpu"))._with(unkeyed="to compare")
    x, y = make_clients([8])[0]
    key = fixed_key(torch.device("cpu"))
    gradients = []
    for model in (wanted, found):
        with model.seeding(key):
            loss = lambda w, model=model: F.cross_entropy(model.train(w, x, key), y)  # noqa: E731
            gradients.append(model.gradient(loss, model.start))
    assert distance({f"inner.{n}": g for n, g in gradients[0].items()}, gradients[1]) < 1e-14


class OneBuffer(nn.Module):
    """As cuDNN's recurrent layers on a GPU: all weights lie in one buffer."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        whole = torch.cat([p.detach().flatten() for p in self.inner.parameters()])
        for p, part in zip(
            self.inner.parameters(), whole.split([p.numel() for p in self.inner.parameters()]), strict=True
        ):
            p.data = part.view_as(p)

    def forward(self, x):
        return self.inner(x)


def test_weights_in_one_buffer_are_saved(tmp_path):
    module = OneBuffer()
    found = ud.train(module, make_clients(UNEVEN), rounds=1, local=LOCAL, out=tmp_path / "run")
    module.inner.load_state_dict({k.removeprefix("inner."): v for k, v in found.model.state_dict().items()})
    again = ud.train(OneBuffer(), make_clients(UNEVEN), rounds=1, local=LOCAL, out=tmp_path / "run", resume=True)
    assert distance(again.params, found.params) == 0


class Zeros(nn.Module):
    """A head of zeros hides at first that samples interact."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.head, self.how = nn.Linear(6, 5), nn.Linear(5, 4), how
        nn.init.zeros_(self.head.weight)
        self.double()

    def forward(self, x):
        return self.head(self.how(torch.tanh(self.a(x))))


def test_a_head_of_zeros_hides_nothing():
    module = Zeros(lambda f: f - f.mean(0))
    found = trained(module)
    assert found.choices["engine"] == "plain" and from_hand(found, module) < 1e-12
    mixed = Zeros(lambda f: f + f[torch.randperm(len(f))])
    assert trained(mixed).choices["engine"] == "plain"


def test_labels_that_are_rare_are_tried():
    clients = [(x, torch.zeros(len(x), dtype=torch.int64)) for x, _ in make_clients([31, 37, 29])]
    for _, y in clients:
        y[17], y[5] = 1, 3
    data = ud.FederatedDataset.from_clients(clients)
    found = trained(net(), data, loss=weighted)
    assert found.choices["engine"] == "plain"
    assert from_hand(found, net(), data, loss=lambda z, y: weighted(z, y).mean()) < 1e-12


class Seldom(nn.Module):
    """Copies its weights to a frozen target now and then."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 4).double()
        self.target = copy.deepcopy(self.a).requires_grad_(False)
        self.register_buffer("k", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.k += 1
            if int(self.k) % 7 == 0:
                with torch.no_grad():
                    self.target.weight.copy_(self.a.weight)
        return self.a(x) + self.target(x)


def test_weights_that_are_written_now_and_then_are_refused_and_the_callers_stay():
    module = Seldom()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ud.UndriftError, match=r"changes 'target.weight', but not in its first training passes"):
        trained(module)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_a_tensor_that_a_module_keeps_is_no_trouble_for_trials():
    class Keeps(Wrapped):
        def forward(self, x):
            self.last = self.inner(x)
            return self.last

    assert from_hand(trained(Keeps()), Keeps()) < 1e-12


@pytest.mark.parametrize("draw", [torch.randn_like, lambda x: random.random()])
def test_an_augmentation_that_draws_from_elsewhere_is_refused(draw):
    data = dataclasses.replace(make_clients(UNEVEN), augment=lambda x, key: x + 0.1 * draw(x))
    with pytest.raises(ud.UndriftError, match=r"augmentation draws from .*draw from the key"):
        trained(net(), data)


def test_a_models_own_loss_with_augmentation_validation_and_clients_tests():
    data = make_clients([20, 14, 18])
    own = make_clients([6, 5, 7])
    data = dataclasses.replace(data, augment=lambda x, key: x * 2, client_test=own)
    found = trained(WithItsLoss(), data, loss="model")
    with torch.no_grad():
        losses = [float(F.cross_entropy(found.model(x)["logits"], y)) for x, y in own]
    assert found.history[-1]["by_client"]["loss"] == pytest.approx(losses)
    with pytest.raises(ud.UndriftError, match="FedLC changes logits"):
        trained(WithItsLoss(), data, method=ud.FedLC(1.0), loss="model")


class Coarse(nn.Module):
    """In bfloat16 its outputs depend on the size of the batch, as those of a deep network on a GPU do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        z = self.layer(x)
        return z * 1.3 if z.dtype == torch.bfloat16 and len(z) > 4 else z


def test_rounding_is_not_taken_for_samples_that_interact():
    clients = [(torch.randn(n, 6), torch.arange(n) % 3) for n in (13, 9)]
    data = ud.FederatedDataset.from_clients(clients, test=clients[0])
    local = ud.Local(epochs=1, batch_size=4, lr=0.1)
    run = ud.train(Coarse(), data, rounds=1, local=local, precision="bfloat16", device="cpu")
    assert run.choices["engine"] == "lanes", run.choices["why"]


def test_samples_that_interact_are_found_in_low_precision():
    clients = [(torch.randn(n, 6), torch.arange(n) % 3) for n in (13, 9)]
    data = ud.FederatedDataset.from_clients(clients, test=clients[0])
    model = nn.Sequential(Centered(), nn.Linear(6, 3))
    local = ud.Local(epochs=1, batch_size=4, lr=0.1)
    run = ud.train(model, data, rounds=1, local=local, precision="bfloat16", device="cpu")
    assert run.choices["engine"] == "plain" and "interact" in run.choices["why"]


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0)
