"""The digests of data cover every value of every split, and are computed once."""

from __future__ import annotations

import copy
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import undrift as ud
from tests import hub
from undrift.data import digest

SPLITS = ["training data", "test data", "validation data", "server data", "clients' test data"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)


def pair(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)).astype(np.float32), rng.integers(0, 4, n)


def whole() -> ud.FederatedDataset:
    """Every split there is, each with a store of its own. A thousand rows, so that samples of them would not do."""
    data = ud.FederatedDataset.from_clients(
        [pair(700, 0), pair(300, 1)], test=pair(200, 2), server=pair(200, 3), validation=pair(200, 4)
    )
    data.client_test = ud.FederatedDataset.from_clients([pair(100, 5), pair(100, 6)])
    return data


def stores(data: ud.FederatedDataset) -> dict[str, dict[str, torch.Tensor]]:
    held = [data.test_rows, data.validation_rows, data.server_rows, data.client_test]
    return dict(zip(SPLITS, [data.store, *(part.store for part in held)], strict=True))


def test_every_split_has_one():
    digests = whole().digests
    assert list(digests) == SPLITS and all(len(bytes.fromhex(text)) == 32 for text in digests.values())
    assert len(set(digests.values())) == 5 and digests == whole().digests
    assert list(ud.FederatedDataset.from_clients([pair(5, 0)]).digests) == ["training data"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPLITS), st.sampled_from("xy"), st.integers(0, 10**6))
def test_every_value_counts(split, name, place):
    data = whole()
    before = data.digests
    values = stores(data)[split][name].view(-1)
    values[place % len(values)] += 1
    assert {s for s in SPLITS if data.digests[s] != before[s]} == {split}


def test_who_holds_what_counts():
    data = whole()
    before = data.digests
    data.offsets = np.array([0, 699, 1000])
    assert {s for s in SPLITS if data.digests[s] != before[s]} == {"training data"}
    data.offsets = np.array([0, 700, 1000])
    assert data.digests == before
    data.index[[3, 4]] = data.index[[4, 3]]
    data.test_rows.index[0] = 1
    data.client_test.offsets[1] -= 1
    changed = {"training data", "test data", "clients' test data"}
    assert {s for s in SPLITS if data.digests[s] != before[s]} == changed


def test_names_types_and_shapes_count():
    x = torch.arange(24.0)
    stores = [
        {"x": x}, {"z": x}, {"x": x.view(6, 4)}, {"x": x.view(4, 6)}, {"x": x.view(torch.int32)}, {"x": x, "y": x},
        {"x": x, "y": x[:0]}, {"x": x[:0], "y": x}, {},
    ]  # fmt: skip
    assert len({digest.of_parts(store) for store in stores}) == len(stores)
    assert digest.of_parts({"x": x, "y": x + 1}) == digest.of_parts({"y": x + 1, "x": x}), "but not the order of names"


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 100])
def test_chunks_that_threads_hash(monkeypatch, length):
    monkeypatch.setattr(digest, "CHUNK", 16)
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    chunks = [hashlib.sha256(data[i : i + 16].tobytes()).digest() for i in range(0, length, 16)]
    assert digest.sha256(data) == hashlib.sha256(b"".join(chunks)).hexdigest()
    if length:
        other = data.copy()
        other[-1] ^= 1
        assert digest.checksum(other) != digest.checksum(data.copy()) == digest.checksum(data)


def test_any_tensor_has_one():
    x = torch.arange(24, dtype=torch.float32).view(4, 6)
    assert digest.of_tensor(x.T.contiguous()) == digest.of_tensor(x.T), "values count, not how they lie in memory"
    for tensor in (x.bool(), x.bfloat16(), x.half(), x[:0], x[0, 0], x.to(torch.int8)):
        assert digest.of_tensor(tensor) == digest.sha256(np.frombuffer(digest.as_bytes(tensor).tobytes(), np.uint8))
    with torch.inference_mode():
        made = ud.load((x.numpy(), np.arange(4)), ud.IID(), 1)
    assert made.digests == ud.load((x.numpy(), np.arange(4)), ud.IID(), 1).digests


def test_copies_have_the_same(tmp_path):
    data = whole()
    for other in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert other.digests == data.digests
        other.store["x"][0, 0] += 1
        assert other.digests != data.digests


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A table, and a set of pictures with a test set."""
    n = 600
    frame = pd.DataFrame(
        {"a": np.arange(n) / 7, "b": np.arange(n), "label": np.arange(n) % 3, "client": np.arange(n) % 5}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    hub.pictures(tmp_path / "hub", "some/set", {"train": 30, "test": 10}, (8, 8, 3), 2)
    return {"t.csv": tmp_path / "t.csv", "pictures": tmp_path / "hub" / "some/set"}


@pytest.mark.parametrize("name", ["t.csv", "pictures"])
def test_data_from_the_cache_are_not_hashed_again(files, monkeypatch, name):
    options = {"validation_fraction": 0.2, "server_fraction": 0.1, "client_test_fraction": 0.2}
    first = ud.load(files[name], ud.Dirichlet(1.0), 3, **options)
    expected = first.digests
    assert len(expected) == (5 if name == "pictures" else 4)
    known = [digest.as_bytes(tensor).tobytes() for tensor in first.store.values()]
    hashed: list[bytes] = []
    real = digest.sha256
    monkeypatch.setattr(digest, "sha256", lambda data: hashed.append(data.tobytes()) or real(data))
    again = ud.load(files[name], ud.Dirichlet(1.0), 3, **options)
    assert again.digests == expected and not set(known) & set(hashed), "only indices and offsets"
    before = len(hashed)
    assert again.digests == expected and len(hashed) - before == 2, "and those once, but for the two offsets"
    assert copy.deepcopy(again).digests == expected and set(known) <= set(hashed), "what was kept is right"


def test_another_row_in_a_file_is_another_digest(files):
    before = ud.load(files["t.csv"], ud.ByKey(), test_fraction=0.2).digests
    lines = files["t.csv"].read_text().splitlines()
    lines[437] = "1" + lines[437]
    files["t.csv"].write_text("\n".join(lines))
    assert ud.load(files["t.csv"], ud.ByKey(), test_fraction=0.2).digests["training data"] != before["training data"]


def test_another_partition_is_another_digest_of_the_training_data_alone():
    one, other = (ud.load("digits", ud.Dirichlet(0.1), 5, seed=seed).digests for seed in (0, 1))
    assert one["training data"] != other["training data"] and one["test data"] == other["test data"]
