"""Samples of every kind that the cases need, as functions of a generator and of how many there shall be."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.compat.case import Samples


def labels(g: Generator, n: int, classes: int) -> Tensor:
    return torch.randint(classes, (n,), generator=g)


def vectors(*shape: int, classes: int = 3) -> Samples:
    """Tensors of normal numbers with a class each."""
    return lambda g, n: (torch.randn(n, *shape, generator=g), labels(g, n, classes))


def images(channels: int = 3, size: int = 16, classes: int = 4) -> Samples:
    return vectors(channels, size, size, classes=classes)


def tokens(length: int = 10, vocabulary: int = 40, classes: int = 3) -> Samples:
    """Token ids from 1; 0 is padding everywhere."""

    def make(g: Generator, n: int) -> tuple[Tensor, Tensor]:
        return torch.randint(1, vocabulary, (n, length), generator=g), labels(g, n, classes)

    return make


def masked_tokens(length: int = 10, vocabulary: int = 40, classes: int = 3) -> Samples:
    """What a tokenizer gives: ids and an attention mask, by name."""

    def make(g: Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.randint(1, vocabulary, (n, length), generator=g)
        mask = lengths(g, n, length)[:, None] > torch.arange(length)
        return {"input_ids": ids * mask, "attention_mask": mask.long()}, labels(g, n, classes)

    return make


def lengths(g: Generator, n: int, most: int) -> Tensor:
    """Lengths from half of the most, so that some are the most."""
    return torch.randint(most // 2, most + 1, (n,), generator=g)


def next_tokens(length: int = 10, vocabulary: int = 40) -> Samples:
    """Token ids whose target is themselves, one place on."""

    def make(g: Generator, n: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(1, vocabulary, (n, length + 1), generator=g)
        return ids[:, :-1], ids[:, 1:]

    return make


def language(length: int = 10, vocabulary: int = 40, ignored: bool = False) -> Samples:
    """Token ids and labels of the same shape, both as arguments of the model; labels of -100 are left out."""

    def make(g: Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.randint(1, vocabulary, (n, length), generator=g)
        hidden = torch.rand(n, length, generator=g) < 0.4
        hidden[:, 1] = False  # a sample without any label has no loss
        y = ids.masked_fill(hidden, -100) if ignored else ids.clone()
        return {"input_ids": ids, "labels": y}, y

    return make


def labelled(name: str, samples: Samples) -> Samples:
    """Samples with their targets among the model's arguments, for models that compute the loss themselves."""

    def make(g: Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
        x, y = samples(g, n)
        return {**(x if isinstance(x, dict) else {name: x}), "labels": y}, y

    return make


def series(length: int = 9, width: int = 5, classes: int = 3) -> Samples:
    return vectors(length, width, classes=classes)


def padded_series(length: int = 9, width: int = 5, classes: int = 3) -> Samples:
    """Series and their lengths."""

    def make(g: Generator, n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x, long = torch.randn(n, length, width, generator=g), lengths(g, n, length)
        return (x * (long[:, None, None] > torch.arange(length)[:, None]), long), labels(g, n, classes)

    return make


def numbers(*shape: int, targets: tuple[int, ...] = (1,)) -> Samples:
    """Tensors with normal targets."""
    return lambda g, n: (torch.randn(n, *shape, generator=g), torch.randn(n, *targets, generator=g))


def pictures(channels: int = 1, size: int = 16, classes: int = 3, dims: int = 2) -> Samples:
    """Images, or volumes, with a class per pixel."""

    def make(g: Generator, n: int) -> tuple[Tensor, Tensor]:
        shape = (size,) * dims
        return torch.randn(n, channels, *shape, generator=g), torch.randint(classes, (n, *shape), generator=g)

    return make


def themselves(*shape: int) -> Samples:
    """Tensors in (0, 1) that are their own targets."""

    def make(g: Generator, n: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(n, *shape, generator=g)
        return x, x.clone()

    return make


def two_inputs(first: tuple[int, ...], second: tuple[int, ...], classes: int = 3) -> Samples:
    """Pairs of tensors, which a module takes as two arguments."""

    def make(g: Generator, n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (torch.randn(n, *first, generator=g), torch.randn(n, *second, generator=g)), labels(g, n, classes)

    return make


def table(columns: int = 5, kinds: tuple[int, ...] = (3, 4), classes: int = 3, names: bool = True) -> Samples:
    """Rows of a table: numbers, and categories of so many kinds each."""

    def make(g: Generator, n: int) -> tuple[dict[str, Tensor] | tuple[Tensor, Tensor], Tensor]:
        x_num = torch.randn(n, columns, generator=g)
        x_cat = torch.stack([torch.randint(k, (n,), generator=g) for k in kinds], 1)
        x = {"x_num": x_num, "x_cat": x_cat} if names else (x_num, x_cat)
        return x, labels(g, n, classes)

    return make


def graphs(nodes: int = 6, width: int = 4, classes: int = 3) -> Samples:
    """Graphs as node features and a symmetric adjacency matrix, the second argument."""

    def make(g: Generator, n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        upper = (torch.rand(n, nodes, nodes, generator=g) < 0.4).float().triu(1)
        return (torch.randn(n, nodes, width, generator=g), upper + upper.mT), labels(g, n, classes)

    return make
