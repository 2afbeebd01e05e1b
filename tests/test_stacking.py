"""ud.load on Datasets that yield tuples or dicts, and on tokenized Hugging Face data."""

from __future__ import annotations

import logging

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

import undrift as ud


class Samples(Dataset):
    """A torch Dataset of these samples."""

    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> object:
        return self.samples[i]


def everything(labels: np.ndarray, *_: object) -> np.ndarray:
    return np.zeros(len(labels), int)


def loaded(data: object, **options: object) -> tuple:
    return ud.load(data, everything, 1, **options)[0]


A, B, Y = torch.arange(6.0).reshape(3, 2), torch.arange(9).reshape(3, 3), torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(A, B, Y),
        Subset(TensorDataset(A, B, Y), [0, 1, 2]),
        Samples([((a, b), int(y)) for a, b, y in zip(A, B, Y, strict=True)]),
        Samples([[(a.numpy(), b.numpy()), y] for a, b, y in zip(A, B, Y, strict=True)]),
    ],
)
def test_several_inputs_and_the_target_last(data):
    (a, b), y = loaded(data)
    assert torch.equal(a, A) and torch.equal(b, B) and torch.equal(y, Y)


def test_numbers_beside_arrays_are_inputs_and_numbers_alone_a_vector():
    (a, size), _ = loaded(Samples([((a, 2.5), 0) for a in A]))
    assert torch.equal(a, A) and size.tolist() == [2.5] * 3
    x, _ = loaded(Samples([((1.0, 2.0), 0), ((3.0, 4.0), 1)]))
    assert x.tolist() == [[1, 2], [3, 4]]
    (first, second), y = loaded(Samples([(1.0, 2.0, 0), (3.0, 4.0, 1)]))  # three values: two inputs and a target
    assert first.tolist() == [1, 3] and second.tolist() == [2, 4] and y.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["label", "labels", "kind"])
def test_dicts_with_their_labels(name):
    samples = [{"a": a, name: y, "b": b.tolist()} for a, b, y in zip(A, B, Y, strict=True)]
    x, y = loaded(Samples(samples), **({"label": "kind"} if name == "kind" else {}))
    assert list(x) == ["a", "b"] and torch.equal(x["a"], A) and torch.equal(x["b"], B) and torch.equal(y, Y)
    x, y = loaded(Samples([({"a": a, "b": b}, y) for a, b, y in zip(A, B, Y, strict=True)]))
    assert torch.equal(x["b"], B) and torch.equal(y, Y)


TOKENS = [[5, 6, 7], [8], [9, 4]]


def test_a_tokenized_data_set_is_padded_and_gets_a_mask(caplog):
    table = datasets.Dataset.from_dict({"text": ["a b c", "d", "e f"], "input_ids": TOKENS, "label": [1, 0, 1]})
    with caplog.at_level(logging.WARNING, "undrift"):
        x, y = loaded(table)
    assert "text is left out" in caplog.text
    assert x["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0], [9, 4, 0]] and y.tolist() == [1, 0, 1]
    assert x["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]


def test_what_is_aligned_with_tokens_is_padded_too():
    columns = {
        "input_ids": TOKENS,
        "token_type_ids": [[0, 1, 1], [1], [0, 1]],
        "attention_mask": [[1, 1, 1], [1], [0, 1]],  # the data's own, which is not made anew
        "score": [0.5, 1.5, 2.5],
        "labels": [[5, -100, 7], [8], [9, 4]],
    }
    x, y = loaded(datasets.Dataset.from_dict(columns))
    assert x["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [0, 1, 0]]
    assert x["token_type_ids"].tolist() == [[0, 1, 1], [1, 0, 0], [0, 1, 0]]
    assert x["score"].tolist() == [0.5, 1.5, 2.5]
    assert y.tolist() == [[5, -100, 7], [8, -100, -100], [9, 4, -100]]  # padding has no label
    x, y = loaded(Samples([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]))
    assert x["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0], [9, 4, 0]] and y[1].tolist() == [8, -100, -100]


def test_even_tokens_in_any_format_get_no_mask():
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [0, 1]})
    for held in (table, table.with_format("torch"), table.with_format("numpy"), Subset(table, [0, 1])):
        x, y = loaded(held)
        assert {name: t.tolist() for name, t in x.items()} == {"input_ids": [[1, 2], [3, 4]]} and y.tolist() == [0, 1]


def test_pictures_alone_in_a_table_are_one_tensor():
    pictures = [Image.fromarray(np.full((2, 3, 3), i, np.uint8)) for i in range(2)]
    x, _ = loaded(Samples([{"image": picture, "label": i} for i, picture in enumerate(pictures)]))
    assert x.shape == (2, 3, 2, 3) and x.dtype == torch.float32 and float(x[1, 0, 0, 0]) == pytest.approx(1 / 255)


def test_test_sets_and_one_sample():
    x, y = TensorDataset(A, B, Y), TensorDataset(A[:1], B[:1], Y[:1])
    data = ud.load(x, everything, 1, test=y)
    assert [t.tolist() for t in data.test[0]] == [[[0, 1]], [[0, 1, 2]]]
    assert loaded(y)[1].tolist() == [0]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (Samples([(torch.zeros(2), 0), (torch.zeros(3), 1)]), r"shapes from \(2,\) to \(3,\); pad them to one"),
        (Samples([{"tokens": [1, 2], "label": 0}, {"tokens": [1], "label": 1}]), "yield a dict with 'input_ids'"),
        (Samples([{"a": 1.0}, {"a": 2.0}]), "no 'label' among a; name the labels with label="),
        (Samples([{"text": "a", "label": 0}]), "no numbers besides 'label'; tokenize the text"),
        (Samples([]), "there are none"),
        (Samples([(1.0,)]), "must be pairs"),
        (Samples([{"a": 1.0, "label": 0}, {"label": 0}]), "sample 1 has no 'a'"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"a": [1], "label": [0]})}), r'\["train"\]'),
    ],
)
def test_what_does_not_stack_gets_a_sentence(data, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        loaded(data)


def test_partitions_go_by_the_class_or_by_nothing():
    seen = []

    def note(labels, clients, rng, keys):
        seen.append(labels.tolist())
        return np.zeros(len(labels), int)

    several = torch.tensor([[0, 1], [1, 0], [0, 1]])
    for y in (Y, several, torch.tensor([[3, 1], [2, 0], [7, 7]]), torch.zeros(3, 2, 2, dtype=int), torch.zeros(3)):
        ud.load((A, y), note, 1)
    assert seen == [[0, 1, 1], [1, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
