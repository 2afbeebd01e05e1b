"""Text data sets: windows of characters, bags of words, sequences of words.

The store holds the text itself, as small integers; windows and bags are built when a batch is taken.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.cache import Notes, Writer
from undrift.data.dataset import Rows, Task
from undrift.data.labels import Labels, encode_names
from undrift.data.samples import Pick, Store, declare_halves, gather
from undrift.data.source import Source, source_from_arrays
from undrift.data.tables import Place
from undrift.errors import UndriftError

PADDING, UNKNOWN = 0, 1


@dataclass(frozen=True)
class Windows:
    """Sample p is the `length` characters from position p; its target is the character after them."""

    length: int

    def __call__(self, store: Store, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.finish(self.gather(store, indices), store)

    def gather(self, store: Store, indices: Tensor, pick: Pick = operator.getitem) -> Store:
        span = torch.arange(self.length, device=indices.device)
        return {"x": pick(store["x"], indices[:, None] + span), "y": pick(store["y"], indices)}

    def finish(self, rows: Store, store: Store) -> tuple[Tensor, Tensor]:
        return rows["x"].long(), rows["y"].long()


@dataclass(frozen=True)
class Bags:
    """Bags of words, as frequencies in a vocabulary of `words`; tags, as 0/1 vectors of length `tags`."""

    words: int
    tags: int

    def __call__(self, store: Store, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.finish(gather(store, indices), store)

    def gather(self, store: Store, indices: Tensor, pick: Pick = operator.getitem) -> Store:
        return gather(store, indices, pick)

    def finish(self, rows: Store, store: Store) -> tuple[Tensor, Tensor]:
        bag = _counts(rows["x"].long(), self.words)
        return bag / bag.sum(1, keepdim=True).clamp(min=1), _counts(rows["y"].long(), self.tags)


def _counts(ids: Tensor, size: int) -> Tensor:
    """Return how often each number below `size` occurs in each sample; samples are padded with `size` itself."""
    sample = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    counts = torch.zeros(len(ids), size + 1, device=ids.device)
    return counts.index_put((sample, ids), torch.ones((), device=ids.device), accumulate=True)[:, :size]


def sequences(store: Store, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Word ids as int64, the type that embeddings take."""
    return _sequences(gather(store, indices), store)


def _sequences(rows: Store, store: Store) -> tuple[Tensor, Tensor]:
    return rows["x"].long(), rows["y"]


declare_halves(sequences, gather, _sequences)


@dataclass(frozen=True)
class Characters:
    """Next-character prediction from the `length` characters before, per speaker, as in LEAF.

    The last fifth of each speaker's text is for testing; no window crosses that cut.
    """

    hub: str
    client: str
    text: str | None = None
    """The column with a speaker's whole text …"""
    window: tuple[str, str] | None = None
    """… or the two columns with each window and the character after it, in the order of the text."""
    length: int = 80

    def decode(self, places: list[Place], write: Writer) -> None:
        pieces = [(who, text) for who, text in self._pieces(places[0]) if text]
        letters = np.unique(np.concatenate([_code_points(text) for _, text in pieces] or [np.empty(0, np.uint32)]))
        if not len(letters) or len(letters) > 256:
            raise UndriftError(f"{places[0].name} has {len(letters)} different characters; 1 to 256 are supported.")
        codes: dict[Any, int] = {}
        for who, text in pieces:
            write.append("text", np.searchsorted(letters, _code_points(text)).astype(np.uint8))
            write.append("lengths", np.array([len(text)], np.int64))
            write.append("speakers", np.array([codes.setdefault(who, len(codes))], np.int32))
        write.notes |= {"letters": "".join(map(chr, letters)), "speakers": list(map(str, codes))}

    def open(self, arrays: dict[str, Tensor], notes: Notes) -> Source:
        length, text = self.length, arrays["text"]
        sizes, speakers = arrays["lengths"].numpy(), arrays["speakers"].numpy()
        ends = np.cumsum(sizes)
        begins, cuts = ends - sizes, ends - sizes + sizes * 4 // 5
        # A window needs `length` characters and one more, all on one side of the cut.
        own, train = _ranges(begins, np.maximum(cuts - length, begins))
        _, test = _ranges(cuts, np.maximum(ends - length, cuts))
        store = {"x": text, "y": text[length:]}  # a view: sample p's target is `length` characters further on
        take = Windows(length)
        letters = list(notes["letters"])
        return Source(
            store,
            store["y"].numpy()[train],
            indices=train,
            spans=own,
            gap=length,
            clients=notes["speakers"],
            test=Rows(store, torch.from_numpy(test), take),
            keys=speakers[own],
            take=take,
            task=Task("cross_entropy", {"accuracy": "accuracy"}, classes=len(letters), vocabulary=len(letters)),
            names=letters,
        )

    def _pieces(self, place: Place) -> Iterator[tuple[Any, str]]:
        """Speakers, each with a piece of their text."""
        if self.text:
            for table in place.batches("train", [self.client, self.text]):
                yield from zip(table[self.client].to_pylist(), table[self.text].to_pylist(), strict=True)
            return
        assert self.window
        speaker, text = None, ""
        grown: list[str] = []
        for table in place.batches("train", [self.client, *self.window]):
            for who, before, after in zip(*(column.to_pylist() for column in table.itercolumns()), strict=True):
                if len(before) != self.length or len(after) != 1:
                    raise UndriftError(
                        f"{place.name} has a window of {len(before)} characters and {len(after)} after it, not "
                        f"{self.length} and 1."
                    )
                if who == speaker and before == text:  # the next window of the same text
                    grown.append(after)
                else:
                    if grown:
                        yield speaker, "".join(grown)
                    speaker, grown = who, [before, after]
                text = before[1:] + after
        if grown:
            yield speaker, "".join(grown)


@dataclass(frozen=True)
class Tags:
    """Tag prediction from titles: several tags per title, from a bag of the most frequent words.

    Titles without a frequent tag or without an author are left out.
    """

    hub: str
    title: str
    tags: str
    client: str | None = None
    words: int = 10_000
    most_tags: int = 500
    limit: int | None = None
    """The most rows to take; with a limit, the data are streamed, and the rest is not downloaded."""

    def decode(self, places: list[Place], write: Writer) -> None:
        columns = [self.title, self.tags, *([self.client] if self.client else [])]
        posts: list[tuple[list[str], list[str], Any]] = []
        for table in places[0].batches("train", columns):
            cells = [column.to_pylist() for column in table.itercolumns()]
            who = cells[2] if self.client else [""] * len(table)
            rows = zip(*cells[:2], who, strict=True)
            posts += [
                (split_words(title), _split_tags(tags), c)
                for title, tags, c in rows
                if title and tags and c is not None
            ]
            if self.limit and len(posts) >= self.limit:
                break
        known = most_frequent((tags for _, tags, _ in posts), self.most_tags)
        posts = [post for post in posts if set(post[1]).intersection(known)]
        if not posts:
            raise UndriftError(f"{places[0].name} has no row with a title and tags.")
        titles, tags, who = (list(column) for column in zip(*posts, strict=True))
        vocabulary = most_frequent(titles, self.words)
        write.append("x", _word_ids(titles, vocabulary))
        write.append("y", _word_ids(tags, known))
        codes: dict[Any, int] = {}
        if self.client:
            write.append("key", encode_names(who, codes))
        write.notes |= {"words": vocabulary, "tags": known, "clients": list(map(str, codes))}

    def open(self, arrays: dict[str, Tensor], notes: Notes) -> Source:
        count = len(notes["tags"])
        return Source(
            {"x": arrays["x"], "y": arrays["y"]},
            arrays["y"][:, 0].numpy().astype(np.int64),  # partitions go by the first tag
            keys=arrays["key"].numpy() if "key" in arrays else None,
            take=Bags(len(notes["words"]), count),
            task=Task("binary_cross_entropy", {"recall_at_5": "recall_at_5"}, classes=count),
            names=notes["tags"],
            clients=notes["clients"] or None,
        )


def _split_tags(cell: list[str] | str) -> list[str]:
    """Return a list of tags, from a list or from a string such as `<python><list>` or `python|list`."""
    return re.findall(r"[^<>|,\s]+", cell) if isinstance(cell, str) else list(cell)


@dataclass(frozen=True)
class Sentences:
    """Sentences with one class each, as word ids: 0 is padding (in front), 1 an unknown word."""

    hub: str
    text: str = "text"
    label: str = "label"
    words: int = 10_000
    length: int = 64

    def decode(self, places: list[Place], write: Writer) -> None:
        place, codes = places[0], {}
        labels = Labels(place, self.label)
        for split in ("train", "test"):
            sentences: list[list[str]] = []
            for table in place.batches(split, [self.text, self.label]):
                rows = range(len(sentences), len(sentences) + len(table))
                write.append(f"{split}_y", labels.encode(table[self.label], split, rows))
                sentences += [split_words(text or "") for text in table[self.text].to_pylist()]
            if split == "train":  # the vocabulary must not depend on the test set
                vocabulary = most_frequent(sentences, self.words)
                codes = {word: i + UNKNOWN + 1 for i, word in enumerate(vocabulary)}
            ids = np.full((len(sentences), self.length), PADDING, np.int32)
            for line, sentence in zip(ids, sentences, strict=True):
                for back, word in enumerate(reversed(sentence[: self.length]), 1):
                    line[-back] = codes.get(word, UNKNOWN)
            write.append(f"{split}_x", ids)
        labels.check()
        write.notes |= {"words": vocabulary, "classes": labels.names}

    def open(self, arrays: dict[str, Tensor], notes: Notes) -> Source:
        task = Task(vocabulary=len(notes["words"]) + UNKNOWN + 1)
        return source_from_arrays(arrays, notes, take=sequences, task=task)


def split_words(text: str) -> list[str]:
    """Return the words in lower case. They may contain a point, an apostrophe or a hyphen; `c++` and `c#` are words."""
    return re.findall(r"[a-z0-9+#]+(?:[.'-][a-z0-9+#]+)*", text.lower())


def most_frequent(texts: Iterable[list[str]], count: int) -> list[str]:
    """Return the most frequent words; those of equal count in alphabetical order."""
    counted = Counter(word for text in texts for word in text)
    return [word for word, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:count]]


def _word_ids(texts: list[list[str]], vocabulary: list[str]) -> np.ndarray:
    """Return the ids of each text's known words, one row per text, padded with the size of the vocabulary."""
    codes = {word: i for i, word in enumerate(vocabulary)}
    known = [[codes[word] for word in text if word in codes] for text in texts]
    padded = np.full((len(texts), max(1, *map(len, known))), len(vocabulary), np.int32)
    for line, own in zip(padded, known, strict=True):
        line[: len(own)] = own
    return padded


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _ranges(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all ranges, concatenated; first the range that each belongs to, then the numbers."""
    sizes = ends - begins
    which = np.repeat(np.arange(len(sizes)), sizes)
    return which, np.arange(sizes.sum()) + np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
