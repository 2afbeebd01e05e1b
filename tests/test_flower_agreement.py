"""Nodes whose classes, columns and scales differ: what they agree on before the first round, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image

import undrift as ud
from tests.federated import Near, experiment, here, near
from tests.hospitals import CLASSES, COLUMNS, edited, hospitals
from tests.problems import distance
from undrift.errors import UndriftError
from undrift.flower.agreement import agreed_scale, fitted
from undrift.flower.federation import FILE, Federation, founded, read
from undrift.flower.holding import Holding, holding
from undrift.flower.messages import RefusedError, decode, encode
from undrift.flower.outline import check_report
from undrift.flower.server import settings

pytestmark = pytest.mark.usefixtures("flower_problem")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))


def held(changes, own) -> dict[str, Holding]:
    """What nodes with these configs hold, by name."""
    return {f"n{i}": holding(experiment(changes), config) for i, config in enumerate(own)}


def federation(holdings: dict[str, Holding]) -> Federation:
    reports = {}
    for name, node in holdings.items():
        found = json.loads(json.dumps(node.report()))  # as a message has it
        check_report(found)
        reports[name] = (name, found)
    return founded(reports)


def among(holdings: dict[str, Holding]) -> dict[str, ud.FederatedDataset]:
    """The nodes' data in the form agreed on."""
    made = federation(holdings)
    return {
        name: node.among(made.members[name].ids, made.total, json.loads(json.dumps(made.common)))
        for name, node in holdings.items()
    }


METHODS = {"FedAvg()": 1e-12, "Scaffold() + FedRS(0.5)": 1e-12, "FedLC(1.0)": 1e-12}
METHODS |= {"CCVR(samples_per_class=20, epochs=2)": 1e-10}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_federation_gives_the_parameters_of_a_run_with_all_rows_in_one_table(tmp_path, first, normalize, method):
    """One node lacks a class, has its columns in another order, and other types of numbers in them."""
    changes, own = hospitals(tmp_path, first, normalize)
    changes |= {"method": method, "metrics": ["accuracy", "f1", "confusion_matrix"]}
    local, remote = here(changes), near(tmp_path, changes, Near(tmp_path, changes, 2, own=own))
    assert distance(remote.params, local.params) < METHODS[method]
    one, other = local.history[-1], remote.history[-1]
    assert other["missing"] == other["refused"] == []
    assert one["confusion_matrix"] == other["confusion_matrix"] and len(one["confusion_matrix"]) == 3
    assert other["f1"] == pytest.approx(one["f1"], rel=1e-9) and other["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_classes_and_columns_are_matched_by_name(tmp_path):
    changes, own = hospitals(tmp_path, normalize=False)
    nodes = held(changes, own)
    assert [node.data.names for node in nodes.values()] == [CLASSES, CLASSES[1:]]
    common, found = federation(nodes).common, among(nodes)
    assert common["names"] == CLASSES and common["columns"] == COLUMNS and common["classes"] == 3
    assert not common.keys() & {"sizes", "counts", "tested", "ids"}  # they are of one node, and sent to all
    for node, config in zip(found.values(), own, strict=True):
        for split, rows in (("train", (node.store, node.index)), ("test", (node.test_rows.store, slice(None)))):
            table = pd.read_parquet(Path(config["data"]) / f"{split}.parquet")
            table = table.sort_values("site", kind="stable") if split == "train" else table
            store, index = rows
            assert [CLASSES[c] for c in store["y"][index]] == table["outcome"].tolist()
            assert np.array_equal(store["x"][index], table[COLUMNS].to_numpy("float32"))
        assert node.names == CLASSES and node.outputs == 3


def test_clients_own_test_data_are_matched_by_name(tmp_path):
    changes, own = hospitals(tmp_path)
    nodes = held(changes, [config | {"client-test-fraction": 0.3} for config in own])
    before, after = nodes["n1"].data.client_test, among(nodes)["n1"].client_test
    assert before.names == CLASSES[1:] and after.names == CLASSES
    assert len(after.index) == len(before.index) > 0
    for one, client in enumerate((1, 2)):
        (x, y), (old_x, old_y) = after[client], before[one]
        assert torch.equal(y, old_y + 1)
        x, old_x = (z * d.store["std"] + d.store["mean"] for z, d in ((x, after), (old_x, before)))
        order = [nodes["n1"].data.scales.columns.index(column) for column in COLUMNS]
        assert torch.allclose(x, old_x[:, order], rtol=1e-4, atol=1e-4)


def test_the_servers_counts_are_by_name(tmp_path):
    changes, own = hospitals(tmp_path)
    whole = ud.load(**changes["data"])
    made = federation(held(changes, own)).data()
    assert torch.equal(made.label_counts(), whole.label_counts()) and made.names == whole.names == CLASSES
    assert (made.label_counts() == 0).any()


# ---- scales --------------------------------------------------------------------------------------------------
def test_pooled_statistics_are_those_of_all_rows(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal([1e6, -3, 0, 5], [1, 1e-3, 1e4, 1], (500, 4)).astype("float32")
    x[:, 3] = 0.1  # constant, and not a sum of powers of two
    x[:170, 2] = 7.25  # constant at the first node alone
    table = pd.DataFrame(x, columns=list("abcd")).assign(label=rng.integers(0, 2, 500))
    own = []
    for i, rows in enumerate((slice(0, 170), slice(170, 173), slice(173, 500))):
        table[rows][["d", "c", "b", "a", "label"]].to_csv(tmp_path / f"{i}.csv", index=False)
        own.append({"data": str(tmp_path / f"{i}.csv")})
    table[["d", "c", "b", "a", "label"]].to_csv(tmp_path / "all.csv", index=False)
    data = {"name": "nodes have their own", "normalize": True}
    nodes = held({"data": data}, own)
    scale = federation(nodes).common["scale"]
    exact = table[["d", "c", "b", "a"]].to_numpy("float64")
    assert np.allclose(scale["mean"], exact.mean(0), rtol=1e-12, atol=0)
    assert np.allclose(scale["std"][1:], exact.std(0)[1:], rtol=1e-12, atol=0) and scale["std"][0] == 0
    assert scale["count"] == 500
    whole = ud.load(str(tmp_path / "all.csv"), ud.IID(), 1, normalize=True)
    for node in among(nodes).values():
        for name in ("mean", "std"):
            assert torch.equal(node.store[name], whole.store[name])


def folder_of(place: Path, counts: dict[str, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for name, count in counts.items():
        (place / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 100 + 50 * seed, (6, 5, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(place / name / f"{seed}-{i}.png")


@pytest.mark.parametrize("lazy", [False, True])
def test_folders_of_images_without_one_class(tmp_path, lazy):
    counts = [{"cat": 5, "dog": 4, "owl": 3}, {"dog": 6, "owl": 2}, {"cat": 2, "emu": 3, "owl": 1}]
    for i, each in enumerate(counts):
        folder_of(tmp_path / str(i), each, i)
        shutil.copytree(tmp_path / str(i), tmp_path / "all", dirs_exist_ok=True)
    changes = {"data": {"name": "nodes have their own", "normalize": True, "lazy": lazy}}
    nodes = held(changes, [{"data": str(tmp_path / str(i))} for i in range(3)])
    made, found = federation(nodes), among(nodes)
    whole = ud.load(str(tmp_path / "all"), ud.IID(), 1, normalize=True)
    assert made.common["names"] == whole.names == ["cat", "dog", "emu", "owl"]
    assert made.data().label_counts().tolist() == [[5, 4, 0, 3], [0, 6, 0, 2], [2, 0, 3, 1]]
    for client, node in enumerate(found.values()):
        assert node.label_counts()[client].tolist() == made.data().label_counts()[client].tolist()
        assert torch.allclose(node.store["mean"], whole.store["mean"], rtol=1e-7, atol=0)
        assert torch.allclose(node.store["std"], whole.store["std"], rtol=1e-7, atol=0)


def test_nodes_that_share_the_experiments_data_keep_its_scale(tmp_path):
    changes, _ = hospitals(tmp_path)
    shares = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    link = Near(tmp_path, changes, 2)
    assert distance(near(tmp_path, changes, link).params, here(changes).params) < 1e-12
    nodes = held(changes, shares)
    whole = ud.load(**changes["data"])
    assert torch.equal(among(nodes)["n1"].store["std"], whole.store["std"])
    reports = {name: node.report() for name, node in nodes.items()}
    reports["n1"]["scale"] = reports["n1"]["scale"] | {"mean": [0.0] * 4}
    with pytest.raises(UndriftError, match="n0 and n1 share the experiment's data, but theirs have different means"):
        agreed_scale(reports, COLUMNS)


def test_gaps_are_not_filled_with_each_nodes_own_means(tmp_path):
    changes, own = hospitals(tmp_path)
    with pytest.raises(UndriftError, match=r'missing = "mean" .* each node\'s own means'):
        holding(experiment(changes | {"data": changes["data"] | {"missing": "mean"}}), own[0])


# ---- what is refused before the first round ------------------------------------------------------------------
REFUSED = {
    "renamed": (
        lambda t: t.rename(columns={"age": "Age"}),
        r"columns of the node n1 .* n0: 'age' is missing, and 'Age'",
    ),
    "missing": (lambda t: t.drop(columns="ratio"), r"node n1 are not those of n0: 'ratio' is missing\. Rename"),
    "additional": (
        lambda t: t.assign(patient=1, more=2),
        r"'patient', 'more' are there in addition.*columns = \[\.\.\.\]",
    ),
    "numbers": (lambda t: t.assign(outcome=1), r"n0 and n1 do not mean .* names of classes, those of n1 whole numbers"),
    "fractions": (lambda t: t.assign(outcome=0.5), r"n0 are names of classes, those of n1 numbers to predict"),
    "spelling": (
        lambda t: t.assign(outcome=t.outcome.replace("ill", "Ill ")),
        r"node n1 has a class 'Ill ', and n0 has 'ill'\. If they are one class, write it the same way",
    ),
    "text": (lambda t: t.assign(age="old"), r"node 'n1': data: The column 'age' of .* holds .*string, not numbers"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_can_be_corrected(tmp_path, how):
    change, why = REFUSED[how]
    changes, own = hospitals(tmp_path)
    shutil.copytree(own[1]["data"], tmp_path / "before")
    edited(own[1], change)
    link = Near(tmp_path, changes, 2, own=own)
    with pytest.raises(UndriftError, match=why):
        near(tmp_path, changes, link)
    assert "train" not in dict(link.asked) and not (tmp_path / "out" / FILE).exists()
    shutil.copytree(tmp_path / "before", own[1]["data"], dirs_exist_ok=True)
    assert len(near(tmp_path, changes, link).history) == 2


def reports_of(**changed):
    """The reports of three nodes, of which the last one's has changed."""
    one = {
        "sizes": [4], "counts": [[1, 3]], "x": {"x": [[2], "float32"]}, "y": [[], "int64"], "classes": 2, "outputs": 2,
        "vocabulary": None, "loss": None, "metrics": None, "tested": None, "names": ["a", "b"], "columns": ["u", "v"],
        "codes": {}, "scale": None, "ids": None, "total": 1,
    }  # fmt: skip
    return {name: (name, one | (changed if name == "n2" else {})) for name in ("n0", "n1", "n2")}


SCALE = {"mean": [0.0, 1.0], "std": [1.0, 0.0], "count": 4}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"columns": None}, "The node n0 has a table with named columns, and n2 has none"),
        ({"columns": ["u", "w"]}, "The columns of the node n2 are not those of n0: 'v' is missing, and 'w' is there"),
        ({"codes": {"u": ["f", "m"]}}, "The column 'u' holds numbers of the classes f, m at the node n2, and numbers"),
        ({"scale": SCALE}, "Only n2 normalizes its data"),
        ({"names": None}, "those of n0 are names of classes, those of n2 whole numbers"),
        ({"y": [[3], "int64"]}, "differ in y"),
        ({"names": ["b", "b"]}, "n0 and n2 cannot be matched by name: a, b and b, b"),
        ({"names": ["b", "c"], "counts": None}, "cannot be matched by name"),
        ({"names": ["b", "A"]}, "The node n2 has a class 'A', and n0 has 'a'"),
    ],
)
def test_reports_that_do_not_fit_together_are_refused(changed, why):
    assert founded(reports_of()).common["names"] == ["a", "b"]
    with pytest.raises(UndriftError, match=why):
        _ = founded(reports_of(**changed)).common


def test_columns_that_only_some_nodes_have_can_be_left_out(tmp_path):
    changes, own = hospitals(tmp_path)
    features = ["smoker", "age", "ratio"]
    changes["data"] |= {"columns": features}
    local = here(changes)
    edited(own[1], lambda t: t.assign(patient=np.arange(len(t))).drop(columns="income"))
    link = Near(tmp_path, changes, 2, own=own)
    assert distance(near(tmp_path, changes, link).params, local.params) < 1e-12
    assert read(tmp_path / "out").common["columns"] == features


def test_numbers_of_classes_are_not_compared_by_number(tmp_path):
    """Features that a table declares as classes, with names: their numbers mean nothing without these."""
    own = []
    for i, names in enumerate((["f", "m"], ["f", "m"], ["m", "f"])):
        kinds = Features({"sex": ClassLabel(names=names), "age": Value("int32"), "label": Value("int64")})
        rows = {"sex": [0, 1, 1, 0], "age": [30, 40, 50, 60], "label": [0, 1, 0, 1]}
        Dataset.from_dict(rows, features=kinds).to_parquet(tmp_path / f"{i}.parquet")
        own.append({"data": str(tmp_path / f"{i}.parquet")})
    changes = {"data": {"name": "nodes have their own"}}
    nodes = held(changes, own)
    with pytest.raises(UndriftError, match=r"'sex' holds numbers of the classes m, f at the node n2, .* f, m at n0"):
        _ = federation(nodes).common
    other = nodes.pop("n2")
    assert federation(nodes).common["codes"] == {"sex": ["f", "m"]}
    with pytest.raises(
        UndriftError, match="Its column 'sex' holds numbers of the classes m, f, and that of the others"
    ):
        other.among([0], 1, federation(nodes).common)


def test_the_odd_one_out_is_named_wherever_it_is():
    reports = reports_of()
    reports["n0"] = ("n0", reports["n0"][1] | {"columns": ["u", "w"]})
    with pytest.raises(UndriftError, match="The columns of the node n0 are not those of n1: 'v' is missing"):
        _ = founded(reports).common


def test_names_that_differ_in_case_are_two_classes_if_one_node_has_both():
    assert founded(reports_of(names=["a", "A"])).common["names"] == ["A", "a", "b"]


def test_declared_names_keep_their_order_if_all_nodes_have_them():
    reports = {name: (name, report | {"names": ["b", "a"]}) for name, (_, report) in reports_of().items()}
    assert founded(reports).common["names"] == ["b", "a"]


def test_nodes_of_one_name_are_told_apart():
    reports = {key: ("clinic", report) for key, (_, report) in reports_of(columns=["u", "w"]).items()}
    with pytest.raises(UndriftError, match=r"The columns of the node clinic \(n2\) are not those of clinic \(n0\)"):
        _ = founded(reports).common


@pytest.mark.parametrize(
    "changed",
    [
        {"names": [1, 2]},
        {"columns": ["u"]},
        {"columns": ["u", "u"]},
        {"codes": {"u": "f"}},
        {"scale": SCALE | {"count": 0}},
        {"scale": SCALE | {"std": [1.0, -1.0]}},
        {"scale": SCALE | {"mean": [0.0, float("nan")]}},
        {"scale": SCALE | {"mean": [0.0, 1e300]}},
        {"scale": SCALE | {"mean": [0.0]}},
        {"scale": {}},
        {"scale": SCALE, "columns": None, "x": {"x": [[], "float32"]}},
    ],
)
def test_a_report_of_another_form_is_refused(changed):
    check_report(reports_of(scale=SCALE)["n2"][1])
    with pytest.raises(RefusedError):
        check_report(reports_of(**changed)["n2"][1])


def test_a_node_of_an_earlier_version_is_refused_by_name(tmp_path):
    changes, own = hospitals(tmp_path)
    link = Near(tmp_path, changes, 2, own=own)
    node = link.nodes[f"{1:064x}"]
    answer = type(node).answer

    def before(kind, request):
        reply = answer(node, kind, request)
        tree, notes = decode(reply)
        del notes["report"]["names"]
        return encode(tree, notes)

    node.answer = before
    with pytest.raises(UndriftError, match=r"The node 'n1' cannot take part: its report .* incomplete .*'names'"):
        near(tmp_path, changes, link)


def test_a_federation_of_an_earlier_version_is_refused(tmp_path):
    made = founded(reports_of())
    del made.members["n2"].report["columns"]
    made.save(tmp_path)
    with pytest.raises(UndriftError, match=r"another version of undrift \(n2: .*'columns'.*start a new run"):
        read(tmp_path)


def test_whole_numbers_stay_as_they_are_and_must_suit_the_model(tmp_path):
    own = []
    for i, top in enumerate((2, 4)):
        y = np.arange(20) % top
        pd.DataFrame({"u": np.arange(20) * 0.1, "v": y, "label": y}).to_csv(tmp_path / f"{i}.csv", index=False)
        own.append({"data": str(tmp_path / f"{i}.csv")})
    changes = {"model": "wide64", "data": {"name": "nodes have their own"}, "rounds": 1}
    assert federation(held(changes, own)).common["classes"] == 4
    assert federation(held(changes, own)).data().label_counts().tolist() == [[10, 10, 0, 0], [5, 5, 5, 5]]
    assert list(near(tmp_path, changes, Near(tmp_path, changes, 2, own=own)).params.values())[-1].shape == (4,)
    ud.register_model("two64", lambda classes, shape: torch.nn.Linear(shape[0], 2))
    changes |= {"model": "two64"}
    with pytest.raises(UndriftError, match="labels run from 0 to 3, but the model has 2 outputs"):
        near(tmp_path / "b", changes, Near(tmp_path, changes, 2, own=own))


# ---- later ---------------------------------------------------------------------------------------------------
LATER = {
    "a new class": (lambda t: t.assign(outcome=t.outcome.replace("ill", "well")), "Its class 'well' is none of those"),
    "a renamed column": (lambda t: t.rename(columns={"age": "Age"}), "Its columns are not .* 'age' is missing"),
    "numbers": (lambda t: t.assign(outcome=t.outcome.eq("ill").astype(int)), "Its classes have no names"),
    "fractions": (lambda t: t.assign(outcome=0.5), "Its classes have no names"),
}


@pytest.mark.parametrize("how", LATER)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_node_that_comes_back_with_other_data_does_not_train(tmp_path, how, restarted):
    """In the same life of the server, and in its next one, which knows the federation from its file."""
    change, why = LATER[how]
    changes, own = hospitals(tmp_path)
    changes |= {"rounds": 3, "evaluate_every": 10}
    link = Near(tmp_path, changes, 2, own=own)

    def after_one_round(kind, node, request, reply):
        if kind == "train" and node == 1 and decode(request)[1]["round"] == 0:
            edited(own[1], change)
        return reply

    link.spoil = after_one_round
    if restarted:
        near(tmp_path, changes | {"rounds": 1}, link)
    found = near(tmp_path, changes, link)
    assert [row["missing"] for row in found.history] == [[], [1, 2], [1, 2]]
    assert all(re.search(why, row["nodes"]["n1"]) for row in found.history[1:])


def test_a_node_compares_what_the_server_says_with_its_data(tmp_path):
    """Also what the server would not have agreed to with the data as they are."""
    changes, own = hospitals(tmp_path)
    node, common = held(changes, own)["n0"], federation(held(changes, own)).common
    assert node.among([0], 3, common).names == CLASSES
    for changed, why in (
        ({"scale": None}, "Its data are normalized, unlike those of the federation"),
        ({"x": {"x": [[4], "float64"]}}, "Its samples differ from those of the federation in x"),
        ({"names": None}, "Its classes have names, and those of the federation no names"),
        ({"columns": None}, "Its data have named columns, unlike those of the others"),
        ({"classes": 2}, "Its labels go up to 2, and those of the federation to 1"),
    ):
        with pytest.raises(UndriftError, match=why):
            node.among([0], 3, common | changed)
    several = ud.load((np.zeros((4, 2), "float32"), np.eye(4, dtype="float32")[:, :2]), ud.IID(), 1)
    several.names = ["a", "b"]
    with pytest.raises(UndriftError, match="Its classes are in another order"):
        fitted(several, common | {"names": ["b", "a"], "columns": None, "scale": None})


def test_a_node_that_changes_the_order_of_its_columns_goes_on(tmp_path):
    """Nothing depends on the order, since columns and classes go by name."""
    changes, own = hospitals(tmp_path)
    link = Near(tmp_path, changes, 2, own=own)
    near(tmp_path, changes | {"rounds": 1}, link)
    edited(own[1], lambda t: t[sorted(t.columns)])
    assert distance(near(tmp_path, changes, link).params, here(changes).params) < 1e-12


def test_the_servers_own_data_are_matched_by_name_too(tmp_path):
    changes, own = hospitals(tmp_path)
    made = federation(held(changes, own))
    whole = pd.read_parquet(tmp_path / "all" / "train.parquet")
    for split in ("train", "test"):
        table = pd.read_parquet(tmp_path / "all" / f"{split}.parquet")
        table[table.outcome != "healthy"].iloc[:, ::-1].to_parquet(tmp_path / "all" / f"{split}.parquet", index=False)
    changes["data"] |= {"server_fraction": 0.3}
    rows = settings(experiment(changes), made, tmp_path / "run").data.server_rows
    x, y = rows.all()
    exact = whole[COLUMNS].to_numpy("float64")
    x = x * rows.store["std"] + rows.store["mean"]
    there = whole[whole.outcome != "healthy"].iloc[rows.index.numpy()]
    assert [CLASSES[c] for c in y] == there["outcome"].tolist()
    assert np.allclose(x, there[COLUMNS].to_numpy("float64"), rtol=1e-4, atol=1e-4)
    assert np.allclose(rows.store["mean"], exact.mean(0), rtol=1e-6)
    edited({"data": str(tmp_path / "all")}, lambda t: t.assign(outcome=t.outcome.replace("ill", "well")))
    with pytest.raises(UndriftError, match="The server's own data do not suit those of the nodes: Its class 'well'"):
        settings(experiment(changes), made, tmp_path / "run")


def test_data_that_fit_already_are_left_alone(tmp_path):
    changes, own = hospitals(tmp_path, normalize=False)
    nodes = held(changes, own)
    assert fitted(nodes["n0"].data, federation(nodes).common) is nodes["n0"].data
