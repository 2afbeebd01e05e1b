"""Samples that are tuples or dicts of tensors, from the data set to the trained weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import undrift as ud
from tests.handloop import called, hand_loop
from tests.problems import distance, same_bits
from undrift.functional.arguments import arguments
from undrift.random import uniform

SIZES = [7, 1, 4, 10]
WORDS, LENGTH = 11, 5


def texts(n: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens, of which the last are padding, and their mask."""
    rng = np.random.default_rng(seed)
    tokens = torch.tensor(rng.integers(1, WORDS, (n, LENGTH)))
    mask = torch.tensor(np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (n, 1))).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}, torch.tensor(rng.integers(0, 3, n))


def tables(n: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Numbers and categories."""
    rng = np.random.default_rng(seed)
    numbers, codes = torch.tensor(rng.normal(size=(n, 4))), torch.tensor(rng.integers(0, WORDS, (n, 2)))
    return (numbers, codes), torch.tensor(rng.integers(0, 3, n))


class Reader(nn.Module):
    """The mean embedding of the tokens that are no padding; takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embedding, self.head = nn.Embedding(WORDS, 6).double(), nn.Linear(6, 3).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weight = attention_mask.to(torch.float64).unsqueeze(-1)
        return self.head((self.embedding(input_ids) * weight).sum(-2) / weight.sum(-2))


class Mixed(nn.Module):
    """Numbers and embedded categories; takes its inputs in order."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.embedding, self.head = nn.Embedding(WORDS, 2).double(), nn.Linear(8, 3).double()

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        return self.head(torch.cat([numbers, self.embedding(codes).flatten(-2)], -1))


def clients_of(make, sizes=SIZES) -> ud.FederatedDataset:
    pairs = [make(n, i) for i, n in enumerate(sizes)]
    return ud.FederatedDataset.from_clients(pairs, test=make(12, 90), server=make(9, 91), validation=make(6, 92))


@pytest.mark.parametrize("make", [texts, tables])
def test_the_store_is_flat_and_samples_are_trees(make):
    data = clients_of(make)
    names = {texts: ["x/input_ids", "x/attention_mask", "y"], tables: ["x/0", "x/1", "y"]}[make]
    for store in (data.store, data.test_rows.store, data.server_rows.store):
        assert list(store) == names
    for i, n in enumerate(SIZES):
        (x, y), (given, labels) = data[i], make(n, i)
        assert type(x) is type(given) and torch.equal(y, labels)
        pairs = zip(x.values(), given.values(), strict=True) if isinstance(x, dict) else zip(x, given, strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    assert isinstance(data.test[0], type(data[0][0])) and data.classes == 3
    assert ("{input_ids: (5,), attention_mask: (5,)}" if make is texts else "((4,), (2,))") in repr(data)


@pytest.mark.parametrize(("make", "net"), [(texts, Reader), (tables, Mixed)])
@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_training_is_that_of_a_loop_by_hand(make, net, engine):
    data, local = clients_of(make), ud.Local(epochs=2, batch_size=3, lr=0.3)  # clients of 7, 4 and 10: short batches
    result = ud.train(net(), data, rounds=3, local=local, engine=engine, lanes=None if engine == "plain" else 2)
    want = hand_loop(net(), data, local, 3)
    found = dict(result.model.named_parameters())
    assert distance(found, want) < 1e-12
    model = net()
    model.load_state_dict(want)
    x, y = data.test
    with torch.no_grad():
        z = called(model, x)
    assert result.history[-1]["loss"] == pytest.approx(float(nn.functional.cross_entropy(z, y)))
    assert result.history[-1]["accuracy"] == pytest.approx(float((z.argmax(-1) == y).double().mean()))
    assert "validation_loss" in result.history[-1]


class Batches(Reader):
    """Takes its inputs as one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(**batch)


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor
    note: str = ""


class Answers(Reader):
    """Returns a dataclass."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Answer:
        z = super().forward(input_ids, attention_mask)
        return Answer(z, z.tanh())


@pytest.mark.parametrize("net", [Batches, Answers])
@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_a_dict_as_one_argument_and_outputs_in_a_dataclass(net, engine):
    data, local = clients_of(texts), ud.Local(epochs=2, batch_size=3, lr=0.3)
    result = ud.train(net(), data, rounds=2, local=local, engine=engine)
    assert distance(dict(result.model.named_parameters()), hand_loop(Reader(), data, local, 2)) < 1e-12
    assert isinstance(result.model, net)


def test_all_outputs_of_a_dataclass_are_a_dict():
    def loss(outputs, target: Tensor) -> Tensor:
        own = nn.functional.cross_entropy(outputs["logits"], target, reduction="none")
        return own + outputs["hidden"].square().mean(1)

    def by_hand(z: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(z, target) + z.tanh().square().mean()

    data, local = clients_of(texts), ud.Local(epochs=1, batch_size=3, lr=0.3)
    found = ud.train(Answers(), data, rounds=2, local=local, loss=loss, metrics={}, output="all").model
    assert distance(dict(found.named_parameters()), hand_loop(Reader(), data, local, 2, by_hand)) < 1e-12


def test_misspelt_inputs_are_not_taken_for_one_dict():
    pairs = [({"input_ids": x["input_ids"], "mask": x["attention_mask"]}, y) for x, y in (texts(4, i) for i in (0, 1))]
    data = ud.FederatedDataset.from_clients(pairs)
    with pytest.raises(ud.UndriftError, match=r"unexpected keyword argument 'mask' \(They are {input_ids: "):
        ud.train(Reader(), data, rounds=1, local=ud.Local(steps=1, lr=0.1))


class WithLabels(Reader):
    """Takes its inputs as one dict, and computes its loss."""

    def forward(self, batch: dict[str, Tensor], labels: Tensor | None = None) -> dict[str, Tensor]:
        z = super().forward(**batch)
        return {"logits": z} if labels is None else {"logits": z, "loss": nn.functional.cross_entropy(z, labels)}


class AlwaysWithLabels(WithLabels):
    def forward(self, batch: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
        return super().forward(batch, labels)


class Scaled(WithLabels):
    """Takes one of the inputs by name."""

    def forward(
        self, batch: dict[str, Tensor], attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        assert attention_mask is not None and batch.keys() == {"input_ids"}
        return super().forward({**batch, "attention_mask": attention_mask}, labels)


@pytest.mark.parametrize("net", [WithLabels, AlwaysWithLabels, Scaled])
@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_a_dict_as_one_argument_beside_labels(net, engine):
    data, local = clients_of(texts), ud.Local(epochs=1, batch_size=1 if engine == "lanes" else 3, lr=0.1)
    result = ud.train(net(), data, rounds=2, local=local, engine=engine, loss="model")
    assert distance(dict(result.model.named_parameters()), hand_loop(Reader(), data, local, 2)) < 1e-12


class TwoTexts(Reader):
    def forward(self, input_ids: Tensor | None = None, mask: Tensor | None = None, labels: Tensor | None = None):
        return {"logits": super().forward(input_ids, mask)}


def test_one_dict_is_only_what_nothing_else_can_be():
    x = {"input_ids": torch.zeros(2, LENGTH).long(), "attention_mask": torch.ones(2, LENGTH).long()}
    y = torch.zeros(2).long()
    ids, mask = {"ids": x["input_ids"]}, {"attention_mask": x["attention_mask"]}
    for net, given, wanted in (
        (Reader(), x, ((), x)),
        (Reader(), {**ids, **mask}, ((), {**ids, **mask})),  # misspelt
        (TwoTexts(), {**ids, "labels": y}, ((), {**ids, "labels": y})),
        (TwoTexts(), {"input_ids": y, "masc": y, "labels": y}, ((), {"input_ids": y, "masc": y, "labels": y})),
        (Batches(), x, ((x,), {})),
        (WithLabels(), {**x, "labels": y}, ((x,), {"labels": y})),
        (WithLabels(), {"batch": x, "labels": y}, ((), {"batch": x, "labels": y})),
        (WithLabels(), {"*": y, "labels": y}, ((y,), {"labels": y})),
    ):
        assert arguments(net, given) == wanted


def nested(n: int, seed: int) -> tuple[dict[str, Any], Tensor]:
    """A dict in a dict, and a tuple in one."""
    (numbers, codes), _ = tables(n, seed)
    x, y = texts(n, seed)
    return {"text": {"tokens": x}, "table": (numbers, codes)}, y


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader, self.mixed = Reader(), Mixed()

    def forward(self, text: dict[str, Any], table: tuple[Tensor, Tensor]) -> Tensor:
        return self.reader(**text["tokens"]) + self.mixed(*table)


class Flat(Nested):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, numbers: Tensor, codes: Tensor) -> Tensor:
        return self.reader(input_ids, attention_mask) + self.mixed(numbers, codes)


def flattened(x: dict[str, Any]) -> dict[str, Tensor]:
    return {**x["text"]["tokens"], "numbers": x["table"][0], "codes": x["table"][1]}


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_dicts_and_tuples_may_be_nested(engine):
    data, local = clients_of(nested), ud.Local(epochs=2, batch_size=3, lr=0.3)
    assert list(data.store)[:3] == ["x/text//tokens//input_ids", "x/text//tokens//attention_mask", "x/table//0"]
    assert "{text: {tokens: {input_ids: (5,), attention_mask: (5,)}}, table: ((4,), (2,))}" in repr(data)
    flat = ud.FederatedDataset.from_clients([(flattened(x), y) for x, y in (data[i] for i in range(len(SIZES)))])
    result = ud.train(Nested(), data, rounds=2, local=local, engine=engine)
    assert distance(dict(result.model.named_parameters()), hand_loop(Flat(), flat, local, 2)) < 1e-12


@pytest.mark.parametrize("lazy", [False, True])
def test_data_sets_and_arrays_may_yield_nested_samples(lazy):
    x, y = nested(12, 5)
    rows = [
        ({"text": {"tokens": {n: t[i] for n, t in x["text"]["tokens"].items()}}}, int(y[i])) for i in range(len(y))
    ]  # fmt: skip
    data = ud.load(rows_of(rows), ud.IID(), 2, lazy=lazy)
    found = torch.cat([data[i][0]["text"]["tokens"]["input_ids"] for i in range(2)])
    assert sorted(found.tolist()) == sorted(x["text"]["tokens"]["input_ids"].tolist())
    data = ud.load((x, y), ud.IID(), 2, lazy=lazy)
    found = torch.cat([data[i][0]["table"][1] for i in range(2)])
    assert sorted(found.tolist()) == sorted(x["table"][1].tolist())


def rows_of(rows: list[Any]) -> torch.utils.data.Dataset:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, i: int) -> Any:
            return rows[i]

    return Rows()


@pytest.mark.parametrize("name", ["a//b", "/a", "a/"])
def test_names_that_would_be_ambiguous_are_refused(name):
    with pytest.raises(ud.UndriftError, match="single slashes"):
        ud.FederatedDataset.from_clients([({name: torch.zeros(3, 2)}, torch.zeros(3, dtype=torch.long))])


@pytest.mark.parametrize("method", ["FedCurv(0.1)", "FedCL(0.1)", "ServerTraining(0.1, batch_size=4)", "CCVR()"])
def test_methods_that_look_at_samples_take_trees(method):
    data, local = clients_of(texts, [7, 3, 4]), ud.Local(steps=2, batch_size=3, lr=0.1)
    found = [
        ud.train(Reader(), data, method=method, rounds=2, local=local, engine=engine).model.state_dict()
        for engine in ("plain", "lanes")
    ]
    assert distance(*found) < 1e-10


def test_an_augmentation_is_given_the_tree():
    seen = []

    def drop(x: dict[str, Tensor], key) -> dict[str, Tensor]:
        seen.append(sorted(x))
        keep = uniform(key, x["input_ids"].shape) > 0.3
        first = torch.arange(LENGTH) == 0
        return {**x, "attention_mask": x["attention_mask"] * (keep | first)}

    local = ud.Local(epochs=1, batch_size=3, lr=0.3)
    weights = []
    for engine in ("plain", "lanes"):
        data = clients_of(texts)
        data.augment = drop
        weights.append(ud.train(Reader(), data, rounds=2, local=local, engine=engine).model.state_dict())
    without = ud.train(Reader(), clients_of(texts), rounds=2, local=local).model.state_dict()
    assert distance(*weights) < 1e-12 and distance(weights[0], without) > 1e-4
    assert seen[0] == ["attention_mask", "input_ids"]
    data = clients_of(texts)
    data.augment = lambda x, key: x["input_ids"]
    with pytest.raises(ud.UndriftError, match=r"must keep the shape and type of a batch, {attention_mask: .2, 5."):
        ud.train(Reader(), data, rounds=1, local=local)
    data.augment = ud.CropFlip()
    with pytest.raises(ud.UndriftError, match=r"CropFlip needs images .* not samples of shape {input_ids: "):
        ud.train(Reader(), data, rounds=1, local=local)


def test_load_partitions_trees_and_holds_some_out():
    x, y = texts(60, 5)
    data = ud.load(
        (x, y), ud.Dirichlet(0.5), 4, server_fraction=0.1, client_test_fraction=0.2, test=texts(12, 6),
    )  # fmt: skip
    held = [data[i] for i in range(4)] + [data.client_test[i] for i in range(4)] + [data.server]
    found = torch.cat([x["input_ids"] * 3 + y[:, None] for x, y in held])
    assert sorted(found.tolist()) == sorted((x["input_ids"] * 3 + y[:, None]).tolist())
    local = ud.Local(steps=2, batch_size=4, lr=0.2)
    row = ud.train(Reader(), data, rounds=1, local=local, personalize_every=1).history[-1]
    assert {"loss", "client_loss", "tuned_loss"} <= row.keys()
    assert ud.load(((x["input_ids"], x["attention_mask"]), y), ud.IID(), 3)[0][0][0].shape == (20, LENGTH)


def test_integers_in_a_tree_stay_and_a_single_uint8_tensor_is_a_picture():
    pixels, y = torch.full((2, 3), 255, dtype=torch.uint8), torch.tensor([0, 1])
    assert ud.FederatedDataset.from_clients([(pixels[:, None], y)])[0][0].tolist() == [[[1.0] * 3]] * 2
    assert ud.FederatedDataset.from_clients([(pixels, y)])[0][0].tolist() == [[255] * 3] * 2
    x, _ = ud.FederatedDataset.from_clients([({"tokens": pixels, "size": torch.ones(2)}, y)])[0]
    assert x["tokens"].dtype == torch.uint8 and x["tokens"].tolist() == [[255] * 3] * 2
    data = ud.FederatedDataset.from_clients([(pixels, y)])
    with pytest.raises(
        ud.UndriftError, match=r"They are torch.uint8, as tokens are; for flattened images, pass x.float\(\) / 255"
    ):
        ud.train(nn.Linear(3, 2), data, rounds=1, local=ud.Local(steps=1, lr=0.1))
    tokens = ud.FederatedDataset.from_clients([(pixels[:, None], y)])
    model = nn.Sequential(nn.Flatten(), nn.Embedding(256, 2), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(ud.UndriftError, match=r"given as uint8, which means images .* for tokens, pass x.long"):
        ud.train(model, tokens, rounds=1, local=ud.Local(steps=1, lr=0.1))


def test_the_digest_sees_every_input():
    data, other = clients_of(texts), clients_of(texts)
    assert data.digests == other.digests
    other.store["x/attention_mask"][0, 0] = 1 - other.store["x/attention_mask"][0, 0]
    assert data.digests["training data"] != other.digests["training data"]


def test_bits_repeat():
    data, local = clients_of(texts), ud.Local(steps=2, batch_size=2, lr=0.1)
    runs = [ud.train(Reader(), data, rounds=2, local=local) for _ in range(2)]
    assert same_bits(*(run.model.state_dict() for run in runs))


A, B, LABELS = torch.zeros(3, 2), torch.zeros(3, 4), torch.tensor([0, 1, 0])
NAN = torch.tensor([[0.0, 0.0], [0.0, float("nan")], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([((A, B[:2]), LABELS)], "as many x as y, not shapes ..3, 2., .2, 4.. and .3,."),
        ([({"a": A, "b": torch.tensor(0.0)}, LABELS)], "as many x as y"),
        ([(A, B, LABELS)], r"not 3 arrays; .*\(\(x1, x2\), y\)"),
        ([({"a": {"b": A, 0: A}}, LABELS)], "names that are words"),
        ([({"a": {"b": A}}, LABELS), ({"a": A}, LABELS)], "Client 1's samples are {a: .2,. torch.float32}"),
        ([({}, LABELS)], "names that are words"),
        ([({0: A}, LABELS)], "names that are words"),
        ([({"0": A}, LABELS)], "names that are words"),
        ([({"a": A}, LABELS), ({"b": A}, LABELS)], "Client 1's samples are {b: .2,. torch.float32}"),
        ([((A, B), LABELS), ((B, A), LABELS)], "make them alike"),
        ([(A, LABELS), ((A,), LABELS)], "make them alike"),
        ([({"a": A, "b": NAN}, LABELS)], "Client 0, sample 1 has NaN in its x/b"),
    ],
)
def test_wrong_trees_get_a_sentence(clients, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.FederatedDataset.from_clients(clients)


def test_the_order_of_names_is_the_first_clients():
    data = ud.FederatedDataset.from_clients([({"a": A, "b": B}, LABELS), ({"b": B + 1, "a": A + 2}, LABELS)])
    x, _ = data[1]
    assert list(x) == ["a", "b"] and x["a"].tolist() == (A + 2).tolist() and x["b"].tolist() == (B + 1).tolist()


def test_models_by_name_take_one_input():
    with pytest.raises(ud.UndriftError, match=r"'mlp' takes one input, but samples have several, of shape .*give"):
        ud.train("mlp", clients_of(tables), rounds=1, local=ud.Local(steps=1, lr=0.1))


def test_a_model_that_does_not_take_the_inputs_gets_their_names():
    with pytest.raises(ud.UndriftError, match=r"samples of shape {input_ids: .5,., attention_mask: .5,.}: .*not dict"):
        ud.train(nn.Linear(5, 3), clients_of(texts), rounds=1, local=ud.Local(steps=1, lr=0.1))
