"""The data sets that have a name: each says where it lies, which columns it reads, and what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from undrift.data import tables
from undrift.data.cache import Notes, Writer, cached
from undrift.data.dataset import Rows
from undrift.data.fractions import stratified
from undrift.data.pictures import Pictures, grey
from undrift.data.sound import spectrogram
from undrift.data.source import Source
from undrift.data.text import Characters, Sentences, Tags
from undrift.random import host_generator

log = logging.getLogger("undrift")


class Recipe(Protocol):
    """How tables become arrays, once, and arrays a source, at every start. A frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def hub(self) -> str: ...

    def decode(self, places: list[tables.Place], write: Writer) -> None: ...

    def open(self, arrays: dict[str, Tensor], notes: Notes) -> Source: ...


RECIPES: dict[str, Recipe] = {
    "cifar10": Pictures("uoft-cs/cifar10", image="img"),
    "cifar100": Pictures("uoft-cs/cifar100", image="img", label="fine_label"),
    "cinic10": Pictures("flwrlabs/cinic10"),
    "mnist": Pictures("ylecun/mnist", beside=("mnist_writers", "writer_id"), decoder=grey),
    "fashion_mnist": Pictures("zalando-datasets/fashion_mnist", decoder=grey),
    "emnist": Pictures("Royc30ne/emnist-byclass", decoder=grey),
    "femnist": Pictures("flwrlabs/femnist", label="character", client="writer_id", test=None, decoder=grey),
    "chars74k_hnd": Pictures("chars74k_hnd", label="character", client="writer_id", test=None, decoder=grey),
    "audiomnist": Pictures("audiomnist", client="speaker", test=None, decoder=grey),
    "speech_commands": Pictures(
        "google/speech_commands", image="audio", client="speaker_id", config="v0.02", decoder=spectrogram
    ),
    "shakespeare": Characters("flwrlabs/shakespeare", client="character_id", window=("x", "y")),
    "shakespeare_roles": Characters("shakespeare_roles", client="character_id", text="text"),
    "stackoverflow": Tags(
        "mikex86/stackoverflow-posts", title="Title", tags="Tags", client="OwnerUserId", limit=1_000_000
    ),
    "stackoverflow_tags": Tags("stackoverflow_tags", title="title", tags="tags", most_tags=100),
    "ag_news": Sentences("fancyzhx/ag_news"),
}


def digits() -> Source:
    """1,797 hand-written digits of 8×8 pixels (UCI, as scikit-learn ships them), a fifth of them for testing."""
    file = load_file(Path(__file__).parent / "digits.safetensors")
    store = {"x": file["x"].float() / 16, "y": file["y"].long()}
    labels = store["y"].numpy()
    # The data have no test set of their own; this one is the same in every run, whatever its seed.
    held = stratified(labels, 0.2, host_generator(0, "digits test set"))
    train = torch.from_numpy(np.flatnonzero(~held))
    test = torch.from_numpy(np.flatnonzero(held))
    return Source(
        {name: t[train] for name, t in store.items()},
        labels[~held],
        test=Rows({name: t[test] for name, t in store.items()}, torch.arange(len(test))),
    )


FUNCTIONS: dict[str, Callable[[], Any]] = {"digits": digits}
"""Data sets that a function makes: `ud.register_data` adds a user's own."""


def named(name: str, data_dir: str | Path | None = None) -> Source:
    """A data set by name, from a folder in hub layout or from the hub, decoded the first time it is asked for."""
    return opened(name, RECIPES[name], places_of(RECIPES[name], data_dir))


def places_of(recipe: Recipe, data_dir: str | Path | None = None) -> list[tables.Place]:
    """Where a recipe's tables lie."""
    few = getattr(recipe, "limit", None) is not None
    places = [tables.hub(recipe.hub, getattr(recipe, "config", None), data_dir, stream=few)]
    if beside := getattr(recipe, "beside", None):
        other = tables.hub(beside[0], None, data_dir)
        places += [other] if other.kind != "hub" else []  # it is no data set of the hub
    return places


def opened(name: str, recipe: Recipe, places: list[tables.Place]) -> Source:
    """What a recipe makes of these places."""
    arrays, notes = decoded(name, recipe, places)
    if assumed := notes.get("assumed"):  # said at every start, since every run assumes it
        log.warning("%s", assumed)
    return recipe.open(arrays, notes)


def decoded(name: str, recipe: Recipe, places: list[tables.Place]) -> tuple[dict[str, Tensor], Notes]:
    """The arrays and notes that a recipe makes of these places, from the cache if it has made them before."""
    settings = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    identity = [{n: getattr(v, "__name__", v) for n, v in settings.items()}, *(place.identity for place in places)]
    return cached(name, identity, lambda write: recipe.decode(places, write))


def names() -> list[str]:
    return [*FUNCTIONS, *RECIPES]


def register_data(name: str, function: Callable[[], Any]) -> None:
    """Give data a name that experiment files know: `function()` makes a pair (train, test).

    Each is a pair (x, y) or a torch `Dataset`; `test` may be None.
    """
    FUNCTIONS[name] = function
