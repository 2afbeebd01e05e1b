"""`ud.load`: find a data set by name, path or value, hold out some of it, and partition the rest over clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from undrift.data import sources, warn_once
from undrift.data.array_ops import unique_inverse
from undrift.data.augment import parse_augmentation
from undrift.data.dataset import FederatedDataset
from undrift.data.normalize import normalize_source, scales_warning, with_own_scales
from undrift.data.partition import IID, MAX_CLIENTS, ByKey, Partition, parse_partition, partition_text
from undrift.data.paths import as_path
from undrift.data.source import Source, client_names
from undrift.data.splits import check_fractions, hold_out, split_masks, with_test
from undrift.data.tables import is_frame
from undrift.data.user_data import (
    UserDataOptions,
    check_unchanged,
    source_from_function,
    source_from_path,
    source_from_values,
)
from undrift.errors import UndriftError, quoted, unknown, whole
from undrift.random import host_generator

EMPTY = "%s of %s clients have no samples, as there are only %s to train on; ask for fewer clients"


def load(
    name: Any,
    partition: Partition | str | None = None,
    clients: int | None = None,
    seed: int = 0,
    server_fraction: float = 0.0,
    validation_fraction: float = 0.0,
    client_test_fraction: float = 0.0,
    *,
    test: Any = None,
    test_fraction: float | None = None,
    test_size: int | None = None,
    label: str = "label",
    client: str | None = None,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] | None = None,
    missing: str | None = None,
    resize: int | Sequence[int] | None = None,
    normalize: bool = False,
    augment: Any = None,
    data_dir: str | Path | None = None,
    lazy: bool = False,
    workers: int | None = None,
) -> FederatedDataset:
    """Load a data set and partition it over clients.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.Dirichlet(0.3), clients=20, server_fraction=0.05)
        >>> len(data)
        20

    Args:
        name: The data set. One of `undrift list data`; the path of a parquet or CSV file (with a `label` column and
            perhaps a `client` column), of such files in hub layout, of a folder of images with one subfolder per class,
            or of a folder in the format of LEAF or PFLlib; the id of a data set on the Hugging Face hub; a pair
            `(x, y)`, where x may be a tuple or a dict of arrays; a pandas `DataFrame`; a torch `Dataset` that yields
            `(x, y)`, `(x1, x2, y)` or a dict; or a `datasets.Dataset`, a table or tokenized.
        partition: How samples are assigned to clients, such as `ud.Dirichlet(0.1)`, or the same as a string. By default
            `ud.IID()`; data of a registered function that returns a `FederatedDataset` keep its clients.
        clients: The number of clients. Leave it out with `ud.ByKey()`, which uses the data's own clients.
        seed: The seed of the partition and of what is held out for the server, for validation and for clients' tests.
        server_fraction: A class-balanced fraction of the training data that goes to the server instead of the clients.
        validation_fraction: A class-balanced fraction of the training data, held out to choose settings by.
        client_test_fraction: A class-balanced fraction of each client's samples, held out to test that client.
        test: The test data, if `name` is a pair, a `DataFrame` or a `Dataset`.
        test_fraction: The fraction to test on if the data have no test set. It does not depend on the seed.
        test_size: The maximum number of samples to test on.
        label: The column of the labels, in your own files and in data sets of dicts (where "labels" works too).
        client: The column of the client ids, in your own files and tables.
        columns: The feature columns, in your own tables of numbers; by default all but label and client.
        drop: The columns that are not features, as an alternative.
        missing: How to treat empty cells and NaN in your own tables. By default they are rejected. `"drop"` leaves out
            rows that have one. `"mean"` fills in the column's mean over the training split, computed before any of its
            rows are held out.
        resize: The size of images in your own files and tables: one number, or height and width. By default, all images
            must have the same size.
        normalize: Subtract the mean and divide by the standard deviation: per channel for images in files, per column
            for tables and for arrays with one row of floats per sample. Both are computed over the training split,
            before any of its rows are held out. A column without deviation is only centred.
        augment: `ud.CropFlip()`, or a function of `(x, key)`, applied to training batches.
        data_dir: A folder in hub layout to read from, instead of the hub (or set UNDRIFT_DATA).
        lazy: Read samples when they are needed, and keep none in memory: for a folder of images, a torch `Dataset`, or
            arrays such as `numpy.memmap`.
        workers: With `lazy`, the number of threads that decode images, by default the number of cores, up to 8; or the
            number of processes that read a `Dataset`, by default only this one.

    Returns:
        The clients' data, with the test, validation and server data.

    Raises:
        UndriftError: If the data cannot be found or read, or an argument does not match them.
    """
    arguments = dict(locals())
    partition = None if partition is None else _check_partition(partition)
    augment = _check_augmentation(augment)
    returned = sources.FUNCTIONS[name]() if isinstance(name, str) and name in sources.FUNCTIONS else None
    if isinstance(returned, FederatedDataset):
        check_unchanged(arguments, partition)
        return replace(returned, augment=augment or returned.augment, origin=_origin(arguments, ByKey(), augment))
    partition = IID() if partition is None else partition
    natural = isinstance(partition, ByKey)
    _check_clients(clients, natural)
    check_fractions(server_fraction, validation_fraction, client_test_fraction, test_fraction)
    if test_size is not None and (not whole(test_size) or test_size < 1):
        raise UndriftError(f"test_size must be a whole number from 1, not {quoted(test_size)}.")
    options = UserDataOptions(label, client, columns, drop, missing, resize, data_dir, lazy, workers)
    source = _find_source(name, test, options, returned)
    if not len(source.labels):
        raise UndriftError("There are no training samples: the data set is empty, or every text is too short.")
    if isinstance(partition, ByKey) and source.keys is not None:
        chosen = partition.chosen(source.keys)
        source = source if chosen.all() else with_own_scales(source.only(chosen))
    source = _number_clients(source)  # before anything is held out, so that a client's number never changes
    if normalize:
        source = normalize_source(source)
    elif warning := scales_warning(source.scales):
        warn_once.warn(warning)
    own_name = name if isinstance(name, str) and name in sources.names() else None
    source = with_test(source, own_name, test_fraction, test_size)
    left = np.arange(len(source.labels))
    server, left = hold_out(source, left, server_fraction, seed, "server")
    # Both fractions are of the whole training set.
    validation, left = hold_out(source, left, validation_fraction / (1 - server_fraction), seed, "validation")
    if not len(left):
        raise UndriftError(f"Nothing is left to train on of {len(source.labels)} samples; use smaller fractions.")
    owner, count = _draw_owners(source, left, partition, clients, seed)
    common: dict[str, Any] = {"take": source.take, "task": source.task, "names": source.names}
    common |= {"client_names": source.clients if natural else None, "scales": source.scales}
    personal = _clients_own_tests(source, count, **common) if natural else None
    if personal and client_test_fraction:
        raise UndriftError("The clients have test data of their own; leave client_test_fraction out.")
    if client_test_fraction:
        held, kept = split_masks(source, left, client_test_fraction, host_generator(seed, "client test data"), owner)
        if not held.any():
            raise UndriftError("client_test_fraction is less than one sample of every client; make it larger.")
        personal = _assign(source, left[held], owner[held], count, **common)
        left, owner = left[kept], owner[kept]
    data = _assign(
        source, left, owner, count, test_rows=source.test, server_rows=server, validation_rows=validation,
        client_test=personal, augment=augment, origin=_origin(arguments, partition, augment), **common,
    )  # fmt: skip
    if 2 * data.population < count:
        warn_once.warn(EMPTY % (f"{count - data.population:,}", f"{count:,}", f"{len(left):,}"))
    return data


def _number_clients(source: Source) -> Source:
    """Return the source with its natural clients numbered from 0, without those that have no training samples."""
    if source.keys is None:
        return source
    known, keys = unique_inverse(source.keys)
    test_keys = source.test_keys
    if test_keys is not None:
        place = np.searchsorted(known, test_keys).clip(max=len(known) - 1)
        test_keys = np.where(known[place] == test_keys, place, -1)
    return replace(source, keys=keys, clients=client_names(known, source.clients), test_keys=test_keys)


def _clients_own_tests(source: Source, clients: int, **common: Any) -> FederatedDataset | None:
    """Return each client's own test data, where the data come with them."""
    if source.test is None or source.test_keys is None:
        return None
    mine = source.test_keys >= 0
    if not mine.any():  # the test data of other clients, none of which trains
        return None
    rows = source.test.index.numpy()[mine]
    return FederatedDataset.from_owners(source.test.store, rows, source.test_keys[mine], clients, **common)


def _origin(arguments: dict[str, Any], partition: Partition, augment: Any) -> dict[str, Any] | None:
    """Return the arguments as an experiment file can hold them, or None if one of them is a Python object."""
    given, data_dir = arguments["name"], arguments["data_dir"]
    text = partition_text(partition, arguments["partition"])
    has_text = text is not None and (augment is None or type(augment).__module__ == "undrift.data.augment")
    if not has_text or not isinstance(given, str | Path):
        return None
    is_path = given not in sources.names() and os.path.exists(as_path(given))
    changed = {
        "name": str(as_path(given).resolve()) if is_path else str(given),
        "partition": text,
        "augment": repr(augment) if augment else None,
        "data_dir": str(as_path(data_dir).resolve()) if data_dir else None,
    }
    return {name: value for name, value in {**arguments, **changed}.items() if name != "test"}


def _draw_owners(
    source: Source, samples: np.ndarray, partition: Partition, clients: int | None, seed: int
) -> tuple[np.ndarray, int]:
    """Return the owner of each of these training samples, and the number of clients."""
    if isinstance(partition, ByKey) and source.keys is not None:
        assert source.clients
        return source.keys[samples], len(source.clients)  # includes clients whose data are all held out
    keys = source.keys[samples] if source.keys is not None else None
    count = int(clients or 0)
    try:
        owner = np.asarray(partition(source.labels[samples], count, host_generator(seed, "partition"), keys))
    except TypeError as error:
        raise UndriftError(
            f"{quoted(partition)} must be a function of (labels, clients, rng, keys) ({error})."
        ) from error
    fine = owner.shape == samples.shape and owner.dtype.kind in "iu"
    if not fine or owner.min() < 0 or owner.max() >= count:
        raise UndriftError(
            f"{quoted(partition)} must return an owner for each of the {len(samples)} samples, a whole number from 0 "
            f"to {count - 1}."
        )
    return owner.astype(np.int64), count


def _assign(source: Source, samples: np.ndarray, owner: np.ndarray, clients: int, **rest: Any) -> FederatedDataset:
    return FederatedDataset.from_owners(source.store, source.in_store(samples), owner, clients, **rest)


def _find_source(name: Any, test: Any, options: UserDataOptions, returned: Any) -> Source:
    """Return the data that an argument stands for. `returned`: by the function of this name, if there is one."""
    if not isinstance(name, str | Path):
        sequence = hasattr(name, "__len__") and hasattr(name, "__getitem__") and not hasattr(name, "keys")
        if not is_frame(name) and not isinstance(name, tuple | list) and not sequence:
            splits = ' Name one of its splits: load(data["train"], …).' if hasattr(name, "column_names") else ""
            raise UndriftError(
                "load needs a name, a path, a pair (x, y) or a torch Dataset with a length, not "
                f"{type(name).__name__}.{splits}"
            )
        return source_from_values(name, test, options)
    if test is not None:
        raise UndriftError(
            "test is for arrays and torch Datasets; files and named data sets have their own. Leave it out."
        )
    if name in sources.FUNCTIONS:
        return source_from_function(str(name), returned, options)
    if name in sources.RECIPES:
        if options.client is not None:
            raise UndriftError(f"client names a column of your own file; {name} has its own clients. Leave it out.")
        options.refuse(str(name), "columns", "drop", "missing", "resize")
        options.refuse_lazy(name)
        return sources.load_named(str(name), options.data_dir)
    if str(name) and (isinstance(name, Path) or "/" in name or Path(name).suffix or os.path.exists(name)):
        return source_from_path(name, options)
    raise unknown("data set", str(name), sources.names())


def _check_clients(clients: Any, natural: bool) -> None:
    if natural and clients is not None:
        raise UndriftError("ByKey() takes the data's own clients; leave `clients` out.")
    if not natural and (not whole(clients) or int(clients or 0) < 1):
        raise UndriftError(f"clients must be a whole number from 1, not {quoted(clients)}.")
    if clients is not None and clients > MAX_CLIENTS:
        raise UndriftError(f"clients must be at most {MAX_CLIENTS:,}, not {quoted(int(clients))}.")


def _check_partition(partition: Any) -> Partition:
    if isinstance(partition, str):
        return parse_partition(partition)
    if not callable(partition) or isinstance(partition, type):
        raise UndriftError(
            f"partition must be an object such as Dirichlet(0.1), or the same as a string, not {quoted(partition)}."
        )
    return partition


def _check_augmentation(augment: Any) -> Any:
    if isinstance(augment, str):
        return parse_augmentation(augment)
    if augment is not None and (not callable(augment) or isinstance(augment, type)):
        raise UndriftError(f"augment must be CropFlip(), or a function of (x, key), not {quoted(augment)}.")
    return augment
