"""The named data sets: where each is found, which columns are read, and how they become arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from undrift.data import warn_once
from undrift.data.audio import spectrogram
from undrift.data.cache import Notes, Writer, cached_arrays
from undrift.data.dataset import Rows
from undrift.data.images import Images, grey
from undrift.data.source import Source
from undrift.data.splits import stratified_mask
from undrift.data.tables import Place, hub_place
from undrift.data.text import Characters, Sentences, Tags
from undrift.random import host_generator
from undrift.registry import Registry


class Recipe(Protocol):
    """How tables are decoded to arrays, once, and how arrays become a source, in every run. A frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def hub(self) -> str: ...

    def decode(self, places: list[Place], write: Writer) -> None: ...

    def open(self, arrays: dict[str, Tensor], notes: Notes) -> Source: ...


RECIPES: dict[str, Recipe] = {
    "cifar10": Images("uoft-cs/cifar10", image="img"),
    "cifar100": Images("uoft-cs/cifar100", image="img", label="fine_label"),
    "cinic10": Images("flwrlabs/cinic10"),
    "mnist": Images("ylecun/mnist", beside=("mnist_writers", "writer_id"), decoder=grey),
    "fashion_mnist": Images("zalando-datasets/fashion_mnist", decoder=grey),
    "emnist": Images("Royc30ne/emnist-byclass", decoder=grey),
    "femnist": Images("flwrlabs/femnist", label="character", client="writer_id", test=None, decoder=grey),
    "chars74k_hnd": Images("chars74k_hnd", label="character", client="writer_id", test=None, decoder=grey),
    "audiomnist": Images("audiomnist", client="speaker", test=None, decoder=grey),
    "speech_commands": Images(
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
    """1,797 handwritten digits of 8×8 pixels (UCI, as scikit-learn ships them), a fifth of them for testing."""
    file = load_file(Path(__file__).parent / "digits.safetensors")
    store = {"x": file["x"].float() / 16, "y": file["y"].long()}
    # The data have no test set of their own; this one is the same in every run, whatever its seed.
    held = torch.from_numpy(stratified_mask(store["y"].numpy(), 0.2, host_generator(0, "digits test set")))
    train, test = ({name: t[mask] for name, t in store.items()} for mask in (~held, held))
    return Source(train, train["y"].numpy(), test=Rows.whole(test))


FUNCTIONS: Registry[Callable[[], Any]] = Registry("data set", {"digits": digits}, replaceable=True)
"""Data sets that a function returns; `ud.register_data` adds a user's own."""


def load_named(name: str, data_dir: str | Path | None = None) -> Source:
    """Return a data set by name, from a folder in hub layout or from the hub, decoded on first use."""
    return open_recipe(name, RECIPES[name], places_of(RECIPES[name], data_dir))


def places_of(recipe: Recipe, data_dir: str | Path | None = None) -> list[Place]:
    """Return the locations of a recipe's tables."""
    few = getattr(recipe, "limit", None) is not None
    places = [hub_place(recipe.hub, getattr(recipe, "config", None), data_dir, stream=few)]
    if beside := getattr(recipe, "beside", None):
        other = hub_place(beside[0], None, data_dir)
        places += [other] if other.kind != "hub" else []  # it is not on the hub
    return places


def open_recipe(name: str, recipe: Recipe, places: list[Place]) -> Source:
    """Return the source that a recipe makes from these locations."""
    return open_with_warnings(recipe, *decoded(name, recipe, places))


def open_with_warnings(recipe: Recipe, arrays: dict[str, Tensor], notes: Notes) -> Source:
    """Return the source that a recipe makes of arrays, after logging its warnings, which concern every run."""
    for note in ("assumed", "incomplete", "rounded"):
        if notes.get(note):
            warn_once.warn(notes[note])
    return recipe.open(arrays, notes)


def decoded(name: str, recipe: Recipe, places: list[Place]) -> tuple[dict[str, Tensor], Notes]:
    """Return the arrays and notes that a recipe makes from these locations, from the cache if they are there.

    The recipe's fields are part of the key, decoders by their names: renaming one means decoding the data again.
    """
    every = {field: getattr(recipe, field.name) for field in fields(recipe)}
    settings = {f.name: value for f, value in every.items() if value is not None or "added" not in f.metadata}
    identity = [{n: getattr(v, "__name__", v) for n, v in settings.items()}, *(place.identity for place in places)]
    return cached_arrays(name, identity, lambda write: recipe.decode(places, write))


def names() -> list[str]:
    return [*FUNCTIONS, *RECIPES]


def register_data(name: str, function: Callable[[], Any]) -> None:
    """Register a data set under a name that `ud.load` and experiment files know.

    Example:
        >>> import undrift as ud
        >>> def noise():
        ...     x = torch.randn(100, 5)
        ...     return (x, (x[:, 0] > 0).long()), None
        >>> ud.register_data("noise", noise)
        >>> len(ud.load("noise", ud.IID(), clients=10))
        10

    Args:
        name: The name. An existing data set of this name is replaced.
        function: A function without arguments. It returns a pandas `DataFrame`, to which the arguments `label`,
            `client`, `columns`, `drop`, `missing` and `normalize` of `ud.load` apply; or a pair `(train, test)`, each a
            `DataFrame`, a pair `(x, y)` of arrays or a torch `Dataset`, where `test` may be None; or a
            `FederatedDataset`, which is used as it is, with its own clients.
    """
    FUNCTIONS.register(name, function)
