"""Data that are damaged, hostile or not what was meant: an error of one sentence, or the right data; never a guess."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import stat
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

import undrift as ud
from tests import hub
from undrift.data import tables, warn_once
from undrift.data.audio import spectrogram
from undrift.data.images import picture

X, Y = np.arange(24.0, dtype=np.float32).reshape(12, 2), np.arange(12) % 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A pipe that is opened for reading waits for ever."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def everything(labels: np.ndarray, *_: object) -> np.ndarray:
    return np.zeros(len(labels), int)


def sentence(call: Callable[[], Any]) -> str:
    """The message of the error that a call must end in: one line, of a length that people read."""
    with pytest.raises(ud.UndriftError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and len(message) < 1500, message[:300]
    return message


def png(file: Path, value: int = 0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(file)
    return file


# What cannot be read.


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that other users can enter (pytest's own are private)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    for below in folder.rglob("*"):
        with contextlib.suppress(OSError):
            below.chmod(0o700)
    shutil.rmtree(folder)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may read everything, so be somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("what", ["pictures/a", "pictures", "pictures/a/0.png", "t.csv", "t.parquet", "hub/x/y"])
def test_what_cannot_be_read_is_named(shared_folder, monkeypatch, what):
    monkeypatch.setenv("UNDRIFT_CACHE", str(shared_folder / "cache"))
    (shared_folder / "cache").mkdir()
    (shared_folder / "cache").chmod(0o777)
    for name in ("a", "b"):
        png(shared_folder / "pictures" / name / "0.png")
    frame = pd.DataFrame({"a": [1, 2], "label": [0, 1]})
    frame.to_csv(shared_folder / "t.csv", index=False)
    frame.to_parquet(shared_folder / "t.parquet", index=False)
    hub.write(shared_folder / "hub", "x/y", "train", {"a": [1, 2], "label": [0, 1]})
    (shared_folder / what).chmod(0)
    where = {"p": shared_folder / "pictures", "h": "x/y"}.get(what[0], shared_folder / what)
    with unprivileged():
        message = sentence(lambda: ud.load(where, ud.IID(), 1, data_dir=shared_folder / "hub"))
    assert str(shared_folder / what) in message and "cannot be read (Permission denied)" in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("~nobody-of-that-name/x.csv", "there is no such home folder"),
        ("~nobody-of-that-name/x", "there is no such home folder"),
        ("a" * 5000, "There is no data set called"),
        ("a" * 5000 + ".csv", "File name too long"),
        ("b/" * 3000 + "x.csv", "File name too long"),
        ("x\0y.csv", "There is no file or folder"),
        ("\ud800.csv", "There is no file or folder"),
    ],
)
def test_names_that_no_file_can_have(name, expected):
    assert expected in sentence(lambda: ud.load(name, ud.IID(), 2))


def test_homes_that_do_not_exist_as_folders_of_data_and_of_the_cache(tmp_path, monkeypatch):
    nobody = "~nobody-of-that-name/x"
    assert "no such home folder" in sentence(lambda: ud.load("cifar10", ud.IID(), 2, data_dir=nobody))
    pd.DataFrame({"a": [1, 2], "label": [0, 1]}).to_csv(tmp_path / "t.csv", index=False)
    monkeypatch.setenv("UNDRIFT_CACHE", nobody)
    assert "no such home folder" in sentence(lambda: ud.load(tmp_path / "t.csv", ud.IID(), 2))


# Paths are paths.


def test_a_path_is_that_file_whatever_stands_in_it(tmp_path):
    strange = tmp_path / "run [1]" / "{a,b}" / ".hidden" / "c::d"
    strange.mkdir(parents=True)
    for name, rows in (("q*.parquet", 2), ("q1.parquet", 4), ("q[1].parquet", 3), ("q?.csv", 5), ("q2.csv", 6)):
        frame = pd.DataFrame({"a": range(rows), "label": [0, 1] * (rows // 2) + [1] * (rows % 2)})
        getattr(frame, f"to_{name.split('.')[1]}")(strange / name, index=False)
        assert ud.load(strange / name, ud.IID(), 1).sizes.tolist() == [rows], name
    hub.write(tmp_path, "some/set", "train", {"a": [1, 2, 3], "label": [0, 1, 1]}, parts=2)
    (tmp_path / "some").rename(strange / "some")
    assert ud.load("some/set", ud.IID(), 1, data_dir=strange).sizes.tolist() == [3]
    png(strange / "pets" / "ca[t]" / "*.png"), png(strange / "pets" / "dog" / "1.png")
    assert ud.load(strange / "pets", ud.IID(), 1).names == ["ca[t]", "dog"]


# Labels and arrays that are not what they seem.


def said(caplog: pytest.LogCaptureFixture) -> str:
    """What was warned of since it was last asked."""
    text = "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    caplog.clear()
    return text


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_whole_numbers_written_as_floats_are_classes_and_that_is_said(tmp_path, caplog, ending):
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "label": [0.0, 1, 2, 1]})  # what pandas makes of classes with a gap
    getattr(frame, f"to_{ending}")(tmp_path / f"t.{ending}", index=False)
    for _ in range(2):  # from the file, and from the cache
        data = ud.load(tmp_path / f"t.{ending}", everything, 1)
        assert data.classes == 3 and data[0][1].tolist() == [0, 1, 2, 1] and data.task.loss is None
        assert "the whole numbers from 0 to 2, written as floats, and are treated as classes" in said(caplog)
        warn_once.warned.clear()  # as in another process


@pytest.mark.parametrize(
    ("labels", "warning"),
    [
        ([100_000.0, 250_000.0, 90_000.0], "are treated as numbers to predict. If they are classes, write them"),
        ([1.0, 2.0, 3.0], "are treated as numbers to predict"),
        ([-1.0, 0.0, 1.0], "are treated as numbers to predict"),
        ([0.0, 1.0, 1.5], ""),
    ],
)
def test_numbers_to_predict_stay_numbers(tmp_path, caplog, labels, warning):
    pd.DataFrame({"a": range(3), "label": labels}).to_parquet(tmp_path / "t.parquet", index=False)
    data = ud.load(tmp_path / "t.parquet", everything, 1)
    assert data.labels is None and data.task.loss == "mse" and data[0][1].tolist() == labels
    assert warning in (text := said(caplog)) and bool(warning) == bool(text)


def test_a_test_split_whose_labels_are_of_another_kind(tmp_path):
    for train, test in (([0.0, 1.0], ["a", "b"]), ([0, 1], [0.0, 0.5]), (["a", "b"], [0, 1]), ([0.5, 1.5], ["a", "b"])):
        hub.write(tmp_path, "x/y", "train", {"a": [1, 2], "label": train})
        hub.write(tmp_path, "x/y", "test", {"a": [1, 2], "label": test})
        sentence(lambda: ud.load("x/y", ud.IID(), 1, data_dir=tmp_path))


def test_labels_with_huge_gaps_are_refused_in_a_table(tmp_path):
    pd.DataFrame({"a": [1, 2, 3], "label": [0, 99_999, 0]}).to_csv(tmp_path / "t.csv", index=False)
    message = sentence(lambda: ud.load(tmp_path / "t.csv", ud.IID(), 1))
    assert "2 different labels up to 99,999, which would make a model of 100,000 outputs; number the classes" in message
    pd.DataFrame({"a": range(800), "label": range(200, 1000)}).to_csv(tmp_path / "u.csv", index=False)
    assert ud.load(tmp_path / "u.csv", ud.IID(), 1).classes == 1000, "some unused numbers do no harm"


def test_labels_with_huge_gaps_in_arrays(caplog):
    local = ud.Local(steps=1, lr=0.1)
    y = np.where(Y == 2, 99_999, 0)
    data = ud.load((X, y), ud.IID(), 1)
    assert not said(caplog), "one's own model may be meant for them"
    assert data.outputs == 100_000
    assert "2 different values up to 99,999, so a model gets 100,000 outputs" in said(caplog)
    given = ud.FederatedDataset.from_clients([(X, y)], task=ud.Task(classes=100_000))
    assert given.outputs == 100_000 and not said(caplog), "they are meant"
    for largest in (10**9, 2**63 - 2):
        data = ud.load((X, np.where(Y == 2, largest, 0)), ud.IID(), 2, client_test_fraction=0.2)
        assert f"labels run up to {largest:,}" in sentence(lambda d=data: ud.train("mlp", d, rounds=1, local=local))
        assert "too many to count" in sentence(lambda d=data: d.label_counts())


class Pairs(torch.utils.data.Dataset):
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.x[i], self.y[i]


class Sparse:
    """As scipy's sparse matrices look from outside."""

    def toarray(self) -> np.ndarray:
        return X


HIDDEN = np.ma.MaskedArray(X, X == 3)
WRONG = {
    "some values are masked": [(HIDDEN, Y), (X, np.ma.MaskedArray(Y, Y == 2)), (list(HIDDEN), Y)],
    "complex numbers must be given as two real ones": [(X + 1j, Y), (X, Y + 1j), (torch.tensor(X + 1j), Y)],
    "must be dense": [(torch.tensor(X).to_sparse(), Y), (torch.empty(12, 2, device="meta"), Y)],
    "sparse matrix must be made dense with .toarray": [(Sparse(), Y)],
}


@pytest.mark.parametrize("expected", WRONG)
def test_arrays_that_would_lose_something(expected):
    good = X, Y
    for pair in WRONG[expected]:
        assert expected in sentence(lambda pair=pair: ud.load(pair, ud.IID(), 2))
        assert expected in sentence(lambda pair=pair: ud.load(good, ud.IID(), 2, test=pair))
        assert expected in sentence(lambda pair=pair: ud.FederatedDataset.from_clients([good, pair]))
        assert expected in sentence(lambda pair=pair: ud.FederatedDataset.from_clients([good], server=pair))
        if all(isinstance(part, np.ndarray) for part in pair):
            assert expected in sentence(lambda pair=pair: ud.load(Pairs(*pair), ud.IID(), 2))
    nothing_hidden = np.ma.MaskedArray(X, np.zeros_like(X, bool))
    assert torch.equal(ud.load((nothing_hidden, Y), everything, 1)[0][0], torch.tensor(X))


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_what_a_caller_does_to_its_arrays_afterwards_changes_nothing(kind):
    x, y, test = kind(X), kind(Y), (kind(X), kind(Y))
    made = [
        ud.load((x, y), everything, 1, test=test),
        ud.load(Pairs(x, y), everything, 1, test=Pairs(*test)),
        ud.FederatedDataset.from_clients([(x, y)], test=test, server=test, validation=test),
    ]
    before = [data.digests for data in made]
    for array in (x, y, *test):
        array[:] = 1
    for data, digests in zip(made, before, strict=True):
        assert torch.equal(data[0][0], torch.tensor(X)) and torch.equal(data[0][1], torch.tensor(Y))
        assert torch.equal(data.test[0], torch.tensor(X)) and data.digests == digests


@pytest.mark.filterwarnings("error")
def test_arrays_that_may_not_be_written_or_run_backwards():
    fixed = X.copy()
    fixed.flags.writeable = False
    for x in (fixed, np.broadcast_to(X[:1], X.shape)):
        assert torch.equal(ud.load((x, Y), everything, 1)[0][0], torch.tensor(np.array(x)))
        assert torch.equal(ud.FederatedDataset.from_clients([(x, Y)])[0][0], torch.tensor(np.array(x)))
    assert ud.load((X[::-1], Y), everything, 1)[0][0][0].tolist() == X[-1].tolist()


# Numbers beyond what can be computed with.

LABELS = np.repeat(np.arange(10), 200)


@pytest.mark.parametrize("large", [1e300, 1e308, sys.float_info.max, pytest.param(10**400, id="10**400")])
def test_concentrations_so_large_that_sums_overflow_give_equal_shares(large):
    for partition in (ud.Dirichlet(large), ud.QuantitySkew(large), ud.DirichletPrior(large)):
        owner = partition(LABELS, 20, np.random.default_rng(0), None)
        counts = np.bincount(owner, minlength=20)
        assert counts.min() == counts.max() == 100, partition
    table = np.zeros((20, 10), int)
    np.add.at(table, (ud.Dirichlet(large)(LABELS, 20, np.random.default_rng(0), None), LABELS), 1)
    assert (table == 10).all()


@pytest.mark.parametrize("small", [1e-300, 1e-308, 5e-324])
def test_concentrations_so_small_that_they_underflow_give_all_to_one(small):
    takers = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        owner = ud.Dirichlet(small)(LABELS, 5, rng, None)
        by_class = [np.unique(owner[LABELS == c]) for c in range(10)]
        assert all(len(who) == 1 for who in by_class), "a class has one holder"
        takers += [int(who[0]) for who in by_class]
        assert len(np.unique(ud.QuantitySkew(small)(LABELS, 5, rng, None))) == 1
        ud.DirichletPrior(small)(LABELS, 5, rng, None)
    assert np.bincount(takers, minlength=5).min() > 40, "and each client is as likely to be that"


def test_sizes_that_nobody_means():
    digits = lambda *arguments: lambda: ud.load("digits", *arguments)  # noqa: E731
    assert "clients must be at most 100,000,000" in sentence(digits(ud.IID(), 10**9))
    assert "clients must be" in sentence(digits(ud.IID(), 10**5000))
    assert "cuts 1438 samples into 20000000000 shards; ask for fewer" in sentence(digits(ud.SortedShards(10**9), 20))
    assert "asks for 1000000000 classes" in sentence(digits(ud.Shards(10**9), 20))
    assert "SortedShards(per_client) must be" in sentence(lambda: ud.SortedShards(-(10**5000)))


def test_padding_as_large_as_the_picture():
    local = ud.Local(steps=1, lr=0.1)
    for padding in (8, 100):
        data = ud.load("digits", ud.IID(), 2, augment=ud.CropFlip(padding=padding))
        expected = f"larger than its padding of {padding}, not samples of shape (1, 8, 8)"
        assert expected in sentence(lambda d=data: ud.train("mlp", d, rounds=1, local=local))


def large_png(width: int, height: int) -> bytes:
    """A picture of one colour, a bit per pixel: small as a file, large once it is decoded."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compress(bytes((width + 7) // 8 + 1) * height)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [(10_000, 8_000), (10_000, 12_000), (20_000, 20_000)])
def test_a_picture_of_too_many_pixels_is_not_decoded(tmp_path, size):
    png(tmp_path / "pets" / "cat" / "0.png")
    (tmp_path / "pets" / "cat" / "1.png").write_bytes(large_png(*size))
    message = sentence(lambda: ud.load(tmp_path / "pets", ud.IID(), 1))
    assert str(tmp_path / "pets" / "cat" / "1.png") in message and "pixels" in message


def test_many_large_pictures_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    from undrift.data import images

    for i in range(10):
        png(tmp_path / "pets" / "cat" / f"{i}.png", 10 * i)
    whole = ud.load(tmp_path / "pets", everything, 1)
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(images, "MOST_BYTES", 3 * 16)
    few = ud.load(tmp_path / "pets", everything, 1)
    assert torch.equal(few.store["x"], whole.store["x"]) and torch.allclose(few.store["std"], whole.store["std"])


def test_formats_for_which_other_programs_are_run_are_no_pictures():
    with pytest.raises(OSError, match="cannot identify"):
        picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n")


def test_a_sound_that_claims_a_rate_that_none_has():
    sound = bytearray(hub.tone(300)["bytes"])
    sound[24:28] = struct.pack("<I", 4_000_000_000)
    with pytest.raises(ValueError, match="samples per second"):
        spectrogram(bytes(sound))


# Tables.


def calls_to_load(folder: Path, columns: int) -> int:
    """How many Python functions are called: unlike a time, the same on every machine."""
    frame = pd.DataFrame(np.ones((6, columns)), columns=[f"c{i}" for i in range(columns)]).assign(label=[0, 1] * 3)
    frame.to_csv(folder / f"{columns}.csv", index=False)
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        ud.load(folder / f"{columns}.csv", ud.IID(), 1)
    finally:
        sys.setprofile(None)
    return calls


def test_tables_are_linear_in_their_columns(tmp_path):
    calls_to_load(tmp_path, 10)  # imports
    few, many = calls_to_load(tmp_path, 100), calls_to_load(tmp_path, 400)
    assert many < 6 * few, (few, many)


def test_a_table_of_three_thousand_columns(tmp_path, no_hang):
    frame = pd.DataFrame(np.ones((4, 3000)), columns=[f"c{i}" for i in range(3000)]).assign(label=[0, 1] * 2)
    frame.to_csv(tmp_path / "genes.csv", index=False)
    assert ud.load(tmp_path / "genes.csv", everything, 1)[0][0].shape == (4, 3000)


def text_file(folder: Path, text: str | bytes) -> Path:
    (folder / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / "t.csv"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a,label\n", {}, "t.csv has no rows to train on"),
        ("", {}, "t.csv cannot be read"),
        ("a,label\n1,\xe9t\xe9\n2,b\n".encode("latin-1"), {}, "'label' of .* holds text that is not UTF-8; save the"),
        ("a,label\n\xe9t\xe9,0\n2,1\n".encode("latin-1"), {}, "'a' of .* holds text that is not UTF-8"),
        (
            "a,site,label\n1,\xe9,0\n2,b,1\n".encode("latin-1"),
            {"client": "site"},
            "'site' of .* holds text that is not UTF-8",
        ),
        ("a,label\n1e308,0\n2,1\n", {}, r"Row 0 .* has no finite 'a' \(it is 1e\+308, too large for 32 bits\); clean"),
        ("a,label\n1,1e308\n2,1.5\n", {}, "Row 0 .* has no finite 'label'"),
        ("a,a,label\n1,2,0\n2,1,1\n", {}, "has the column 'a' more than once"),
        ("a,label\n,0\n,1\n", {}, "The column 'a' of .* holds nothing, not numbers"),
    ],
)
def test_confusing_tables(tmp_path, text, options, expected):
    import re

    assert re.search(expected, sentence(lambda: ud.load(text_file(tmp_path, text), ud.IID(), 1, **options)))


def test_clients_that_are_not_a_number_are_not_one_client_each(tmp_path):
    frame = pd.DataFrame({"a": [1, 2, 3], "label": [0, 1, 0], "client": [1.0, float("nan"), float("nan")]})
    frame.to_parquet(tmp_path / "t.parquet", index=False)
    assert "those rows belong to no client" in sentence(lambda: ud.load(tmp_path / "t.parquet", ud.ByKey()))
    frame["client"] = [[1], [2], [1]]
    frame.to_parquet(tmp_path / "u.parquet", index=False)
    assert "several values per row" in sentence(lambda: ud.load(tmp_path / "u.parquet", ud.ByKey()))


def test_messages_do_not_repeat_all_that_was_given(tmp_path):
    long = "x" * 200_000
    table = text_file(tmp_path, "a,label\n1,0\n2,1\n")
    columns = ",".join(f"{i}{'x' * 500}" for i in range(300))
    wide = tmp_path / "wide.csv"
    wide.write_text(f"{columns},kind\n{'1,' * 300}0\n{'2,' * 300}1\n")
    words = tmp_path / "words.csv"
    words.write_text(f"{long},label\nwords,0\n")
    for call in (
        lambda: ud.load(long, ud.IID(), 2),
        lambda: ud.load(long + ".csv", ud.IID(), 2),
        lambda: ud.load(table, ud.IID(), 2, label=long),
        lambda: ud.load(table, ud.ByKey(), client=long),
        lambda: ud.load(table, ud.IID(), long),
        lambda: ud.load(table, ud.IID(), 2, test_size=long),
        lambda: ud.load(table, ud.IID(), 2, test_fraction=long),
        lambda: ud.load(table, ud.IID(), 2, augment=[long]),
        lambda: ud.load(table, [long], 2),
        lambda: ud.load("cifar10", ud.IID(), 2, data_dir=long),
        lambda: ud.load(wide, ud.IID(), 2),
        lambda: ud.load(words, ud.IID(), 2),
        lambda: ud.Dirichlet(long),
        lambda: ud.Shards(long),
        lambda: ud.CropFlip(padding=long),
    ):
        sentence(call)


# Pictures that a table's cells name.


def named(folder: Path, path: str) -> Path:
    """A table whose only cell names a file."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = datasets.Features(image=datasets.Image(), label=hub.Value("int64")).arrow_schema
    cells = {"image": [{"bytes": None, "path": path}], "label": [0]}
    pq.write_table(pa.Table.from_pydict(cells, schema), folder / "t.parquet")
    return folder / "t.parquet"


def test_a_cell_names_a_file_beside_the_table(tmp_path, monkeypatch):
    png(tmp_path / "set" / "pictures" / "one.png", 51)
    (tmp_path / "set" / "link.png").symlink_to("pictures/one.png")
    monkeypatch.chdir("/")
    for path in ("pictures/one.png", "link.png"):
        assert ud.load(named(tmp_path / "set", path), everything, 1)[0][0].unique().item() == pytest.approx(0.2)


def test_a_cell_reads_nothing_outside_of_the_table_s_folder(tmp_path, no_hang, monkeypatch):
    secret = png(tmp_path / "secret.png", 51)
    inside = tmp_path / "set"
    inside.mkdir()
    png(inside / "own.png")
    (inside / "out.png").symlink_to(secret)
    (inside / "around").symlink_to(tmp_path)
    (inside / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(inside / "pipe.png")
    (inside / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    hostile = {
        str(secret): "is not relative to the table's folder",
        str(inside / "own.png"): "is not relative to the table's folder",
        "/dev/zero": "is not relative to the table's folder",
        "../secret.png": "is not relative to the table's folder",
        "secret.png": "there is no file 'secret.png' in the table's folder",
        "out.png": "its path 'out.png' leads out of the table's folder",
        "around/secret.png": "its path 'around/secret.png' leads out of the table's folder",
        "zero.png": "its path 'zero.png' leads out of the table's folder",
        "pipe.png": "is not a regular file",
        "folder.png": "is not a regular file",
        "hf://datasets/x/y/z.png": "there is no file",
        "": "it has neither an image's bytes nor the path of one",
        "\0": "embedded null byte",
    }
    for path, expected in hostile.items():
        message = sentence(lambda path=path: ud.load(named(inside, path), ud.IID(), 1))
        assert message.startswith("Row 0 of the train split of ") and expected in message, (path, message)


def test_a_cell_of_a_data_set_of_the_hub_names_what_the_library_keeps(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "kept")
    monkeypatch.setattr(datasets.config, "EXTRACTED_DATASETS_PATH", tmp_path / "kept" / "extracted")
    kept, other = png(tmp_path / "kept" / "extracted" / "1.png"), png(tmp_path / "secret.png")
    place = tables.Place("some/set")
    assert place.beside(str(kept)) == kept
    with pytest.raises(ValueError, match="leads out of"):
        place.beside(str(other))


def test_pipes_and_dead_links_in_a_folder_of_pictures(tmp_path, no_hang):
    png(tmp_path / "pets" / "cat" / "0.png")
    os.mkfifo(tmp_path / "pets" / "cat" / "1.png")
    assert "1.png is not a regular file" in sentence(lambda: ud.load(tmp_path / "pets", ud.IID(), 1))
    (tmp_path / "pets" / "cat" / "1.png").unlink()
    (tmp_path / "pets" / "cat" / "1.png").symlink_to("nowhere")
    assert "1.png is not a regular file" in sentence(lambda: ud.load(tmp_path / "pets", ud.IID(), 1))
    (tmp_path / "hub").mkdir()
    os.mkfifo(tmp_path / "hub" / "train.parquet")
    assert "train.parquet is not a regular file" in sentence(lambda: ud.load(tmp_path / "hub", ud.IID(), 1))


# The decoded cache.


def table(folder: Path) -> Path:
    return text_file(folder, "a,b,label\n" + "".join(f"{i},{i * i},{i % 3}\n" for i in range(50)))


def cache_file(tmp_path: Path) -> Path:
    """The one file of the cache, written."""
    ud.load(table(tmp_path), everything, 1)
    (file,) = (tmp_path / "cache").iterdir()
    return file


def same_data(tmp_path: Path) -> bool:
    x, y = ud.load(tmp_path / "t.csv", everything, 1)[0]
    return x.tolist() == [[i, i * i] for i in range(50)] and y.tolist() == [i % 3 for i in range(50)]


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << (place % 8)
    file.write_bytes(data)


def saved(file: Path, arrays: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    save_file(arrays, file, metadata)


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "mine.txt").write_text("mine")


def to_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit of x": lambda f: flip(f, f.stat().st_size - 200),
    "a flipped bit of the last byte": lambda f: flip(f, f.stat().st_size - 1),
    "a flipped bit of the notes": lambda f: flip(f, f.read_bytes().index(b"fractions")),
    "a flipped bit of the length": lambda f: flip(f, 1),
    "truncated": lambda f: os.truncate(f, f.stat().st_size - 1),
    "cut in half": lambda f: os.truncate(f, f.stat().st_size // 2),
    "empty": lambda f: os.truncate(f, 0),
    "more at the end": lambda f: f.write_bytes(f.read_bytes() + b"more"),
    "no metadata": lambda f: saved(f, load_file(f), None),
    "notes that are no JSON": lambda f: saved(f, load_file(f), {"contents": "{", "notes": "{", "sha256": ""}),
    "notes that are null": lambda f: saved(f, load_file(f), {"contents": "null", "notes": "null"}),
    "an array missing": lambda f: saved(f, {"train_x": load_file(f)["train_x"]}, {"notes": "{}"}),
    "other data": lambda f: saved(f, {"train_x": torch.ones(2)}, {"notes": "{}"}),
    "a folder": to_folder,
    "a pipe": to_pipe,
    "not safetensors": lambda f: f.write_bytes(b"PK\x03\x04" * 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_the_cache_is_said_once_and_undone(tmp_path, caplog, no_hang, damage):
    file = cache_file(tmp_path)
    DAMAGE[damage](file)
    caplog.clear()
    assert same_data(tmp_path)
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "is damaged (" in r.getMessage()]
    assert len(told) == 1 and str(file) in told[0]
    caplog.clear()
    assert same_data(tmp_path)
    if damage == "a folder":
        assert [f.name for f in file.iterdir()] == ["mine.txt"], "a folder is not ours to remove"
    else:
        assert not said(caplog), "and written again"
    assert [f.name for f in file.parent.iterdir()] == [file.name], "no leftovers"


def test_every_flipped_bit_is_noticed_or_does_not_matter(tmp_path):
    file = cache_file(tmp_path)
    whole = file.read_bytes()
    for place in np.linspace(0, len(whole) - 1, 120).astype(int):
        flip(file, int(place))
        assert same_data(tmp_path), place
    assert file.read_bytes() == whole


def test_nothing_is_written_through_a_link(tmp_path):
    file = cache_file(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    file.unlink()
    file.symlink_to(victim)
    assert same_data(tmp_path) and victim.read_text() == "mine" and not file.is_symlink()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_cache_has_the_rights_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        file = cache_file(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def test_a_disk_without_room_for_the_cache(tmp_path):
    """A limit on the size of files fails as a full disk does: in the middle of a write."""
    (soft, hard), before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = table(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        message = sentence(lambda: ud.load(file, ud.IID(), 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "cannot be written to" in message and "set UNDRIFT_CACHE to a folder with more space" in message
    assert not list((tmp_path / "cache").iterdir()), "nothing half-written"


def test_a_long_name_of_a_file_is_no_name_too_long_in_the_cache(tmp_path):
    file = tmp_path / ("ü" * 120 + ".csv")
    table(tmp_path).rename(file)
    assert ud.load(file, ud.IID(), 1).sizes.tolist() == [50]


# Anything at all.

fuzz = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
numbers = st.one_of(
    st.floats(), st.integers(-2, 40), st.sampled_from([1e308, 1e-308, 10**9, 10**400, float("nan"), True, "x", None])
)


def partition(make: Callable[..., Any], number: Any) -> Any:
    return make(number) if make not in (ud.IID, ud.LabelSplit) else make()


@fuzz
@given(
    st.sampled_from(
        [
            ud.IID,
            ud.Dirichlet,
            ud.DirichletPrior,
            ud.Shards,
            ud.ClassesPerClient,
            ud.SortedShards,
            ud.LabelSplit,
            ud.QuantitySkew,
        ]
    ),
    numbers,
    st.one_of(st.integers(-1, 40), st.sampled_from([10**9, 10**30, None, 2.0])),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=40),
    st.tuples(*[st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.99]) for _ in range(4)]),
    st.integers(0, 2**64 - 1),
)
def test_every_row_goes_to_one_place_or_it_is_refused(make, number, clients, labels, fractions, seed):
    n = len(labels)
    x, y = np.arange(n, dtype=np.float64)[:, None], np.array(labels)
    names = ("server_fraction", "validation_fraction", "client_test_fraction", "test_fraction")
    try:
        data = ud.load((x, y), partition(make, number), clients, seed, **dict(zip(names, fractions, strict=True)))
    except ud.UndriftError:
        return
    parts = [data[client][0] for client in range(min(len(data), 100))]
    parts += [held[0] for held in (data.test, data.validation, data.server) if held is not None]
    parts += [data.client_test[client][0] for client in range(len(data))] if data.client_test else []
    assert torch.cat(parts).flatten().sort().values.tolist() == list(range(n))
    assert len(data) == clients and data.sizes.sum() + sum(map(len, parts[len(data) :])) == n


cells = st.one_of(
    st.integers(), st.floats(), st.text(max_size=5), st.just(""), st.sampled_from(["label", "client", "1e308"])
)
rows = st.lists(st.lists(cells, min_size=1, max_size=4), max_size=6)
almost_csv = rows.map(lambda table: "\n".join(",".join(map(str, row)) for row in table).encode("utf-8", "replace"))


@fuzz
@given(st.one_of(st.binary(max_size=200), almost_csv, almost_csv.map(lambda text: b"a,label\n" + text)))
def test_any_bytes_as_csv(tmp_path, content):
    with contextlib.suppress(ud.UndriftError):
        ud.load(text_file(tmp_path, content), ud.IID(), 2)


@fuzz
@given(st.one_of(st.binary(max_size=200), st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=8))))
def test_any_bytes_as_parquet(tmp_path, content):
    file = tmp_path / "t.parquet"
    pd.DataFrame({"a": [1.0, 2, 3], "label": [0, 1, 0], "client": list("xyx")}).to_parquet(file, index=False)
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:  # some bytes of a good file replaced
        data = bytearray(file.read_bytes())
        place = content[0] % len(data)
        data[place : place + len(content[1])] = content[1]
        file.write_bytes(data)
    with contextlib.suppress(ud.UndriftError):
        ud.load(file, ud.ByKey())


@fuzz
@given(st.one_of(st.binary(max_size=200), st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=8))))
def test_any_bytes_as_a_cache_file(tmp_path_factory, content):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    os.environ["UNDRIFT_CACHE"] = str(tmp_path / "cache")
    file = cache_file(tmp_path)
    data = bytearray(file.read_bytes())
    if isinstance(content, tuple):
        place = content[0] % len(data)
        data[place : place + len(content[1])] = content[1]
    file.write_bytes(content if isinstance(content, bytes) else data)
    assert same_data(tmp_path)
