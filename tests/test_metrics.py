"""Metrics by name against scikit-learn, objects against torchmetrics, and both in runs."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn

import undrift as ud
from undrift.columns import directions, lower_is_better
from undrift.errors import UndriftError
from undrift.losses import cross_entropy
from undrift.metrics import METRICS, get_metrics, measure, summed
from undrift.metrics.base import Tally, fresh
from undrift.tools.run_folders import RunFolder
from undrift.training.identity import describe
from undrift.training.track import scalars

LOCAL = ud.Local(steps=2, batch_size=8, lr=0.1)


def draw(seed: int, n: int = 60, classes: int = 4, shape: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs with ties, and labels."""
    rng = np.random.default_rng(seed)
    z = rng.integers(-3, 4, (n, *shape, classes)) / 2
    return torch.tensor(z), torch.tensor(rng.integers(0, max(2, classes), (n, *shape)))


def found(name: str, z, y, pieces: int = 3, owner=None, owners: int | None = None):
    """A metric's value, or values by client, from several batches."""
    tally = Tally({name: measure(METRICS[name])}, owners)
    for part in np.array_split(np.arange(len(y)), pieces):
        tally.add(z[part], y[part], None if owner is None else owner[part])
    value = tally.figures()[name] if owner is None else tally.by_client()[name]
    return np.array(value) if isinstance(value, list) else value


def by_sklearn(name: str, z, y):
    """The same by scikit-learn, of N×C outputs and N labels."""
    z, y = z.double().numpy(), y.numpy()
    logs = torch.log_softmax(torch.tensor(z), 1).numpy()  # exp would round differently, and so change ties
    p = np.exp(logs)
    guess = z.argmax(1) if z.shape[1] > 1 else (z[:, 0] > 0).astype(int)
    one = logs[:, 1] if z.shape[1] == 2 else z[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match name:
            case "f1":
                return sk.f1_score(y, guess, average="macro", zero_division=0)
            case "f1_weighted":
                return sk.f1_score(y, guess, average="weighted", zero_division=0)
            case "accuracy":
                return sk.accuracy_score(y, guess)
            case "balanced_accuracy":
                return sk.balanced_accuracy_score(y, guess)
            case "confusion_matrix":
                return sk.confusion_matrix(y, guess, labels=range(max(2, z.shape[1])))
            case "perplexity":
                return math.exp(sk.log_loss(y, p, labels=range(z.shape[1])))
            case "auroc" if z.shape[1] <= 2:
                return sk.roc_auc_score(y, one)
            case "auroc":
                there = [c for c in range(z.shape[1]) if 0 < (y == c).sum() < len(y)]
                return np.mean([sk.roc_auc_score(y == c, logs[:, c]) for c in there])
            case "average_precision" if z.shape[1] <= 2:
                return sk.average_precision_score(y, one)
            case "average_precision":
                there = [c for c in range(z.shape[1]) if (y == c).any()]
                return np.mean([sk.average_precision_score(y == c, logs[:, c]) for c in there])


OF_CLASSES = ["accuracy", "f1", "f1_weighted", "balanced_accuracy", "confusion_matrix", "auroc", "average_precision"]


@pytest.mark.parametrize("name", [*OF_CLASSES, "perplexity"])
@pytest.mark.parametrize("classes", [1, 2, 3, 7])
def test_classes_as_scikit_learn(name, classes):
    if name == "perplexity" and classes == 1:
        pytest.skip("it needs one output per class")
    for seed in range(5):
        z, y = draw(seed, classes=classes)
        assert found(name, z, y) == pytest.approx(by_sklearn(name, z, y), rel=1e-12)


def test_multi_class_auroc_is_scikit_learns_own():
    z, y = draw(0, 200, 5)
    z = z + torch.rand(z.shape, generator=torch.Generator().manual_seed(0))
    p = torch.softmax(z, 1)
    whole = sk.roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert found("auroc", z, y) == pytest.approx(whole, rel=1e-12)
    names = range(5)
    marked = np.array([[int(label == c) for c in names] for label in y])
    assert found("average_precision", z, y) == pytest.approx(sk.average_precision_score(marked, p), rel=1e-12)


@pytest.mark.parametrize("name", OF_CLASSES)
def test_absent_classes(name):
    """Of seven classes, labels have three; predictions have others."""
    z, y = draw(1, 40, 7)
    y = y % 3 + 1
    assert found(name, z, y) == pytest.approx(by_sklearn(name, z, y), rel=1e-12)
    z[:, 6] = -9  # never predicted either
    assert found(name, z, y) == pytest.approx(by_sklearn(name, z, y), rel=1e-12)


@pytest.mark.parametrize("name", [*OF_CLASSES, "perplexity"])
def test_sequences_and_labels_that_are_ignored(name):
    z, y = draw(2, 12, 4, (5,))
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.3] = -100
    y[3] = -100  # a sample without any label
    known = y != -100
    wanted = by_sklearn(name, z[known], y[known])
    assert found(name, z, y) == pytest.approx(wanted, rel=1e-12)
    assert found(name, z.movedim(-1, 1), y) == pytest.approx(wanted, rel=1e-12)  # N×C×T


@pytest.mark.parametrize("name", OF_CLASSES)
@pytest.mark.parametrize("form", ["N,1 for N", "N,1 for N,1", "N for N", "N,T,1 for N,T"])
def test_binary_with_one_output(name, form):
    z, y = draw(3, 30, 1)
    wanted = by_sklearn(name, z, y)
    z, y = {
        "N,1 for N": (z, y), "N,1 for N,1": (z, y[:, None].float()), "N for N": (z[:, 0], y.float()),
        "N,T,1 for N,T": (z.view(6, 5, 1), y.view(6, 5)),
    }[form]  # fmt: skip
    assert found(name, z, y) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("absent", [False, True])
def test_several_labels_per_sample(absent):
    z, _ = draw(4, 50, 6)
    y = (torch.rand(50, 6, generator=torch.Generator().manual_seed(1)) < 0.3).float()
    if absent:
        z[:, 0], y[:, 0] = -1, 0  # neither there nor predicted
    true, guess = y.numpy(), (z > 0).numpy()
    for name, average in (("f1", "macro"), ("f1_weighted", "weighted")):
        assert found(name, z, y) == pytest.approx(sk.f1_score(true, guess, average=average, zero_division=0), rel=1e-12)
    there = slice(1, None) if absent else slice(None)
    wanted = sk.roc_auc_score(true[:, there], z.numpy()[:, there])
    assert found("auroc", z, y) == pytest.approx(wanted, rel=1e-12)
    wanted = sk.average_precision_score(true[:, there], z.numpy()[:, there])
    assert found("average_precision", z, y) == pytest.approx(wanted, rel=1e-12)
    for name in ("balanced_accuracy", "confusion_matrix"):
        with pytest.raises(ValueError, match="one class per sample"):
            found(name, z, y)


@pytest.mark.parametrize("targets", [None, 1, 3])
def test_numbers_as_scikit_learn(targets):
    rng = np.random.default_rng(0)
    shape = (40,) if targets is None else (40, targets)
    for scale, shift in ((1, 0), (1e-3, 5), (10, 2000)):
        y = torch.tensor(rng.normal(size=shape) * scale + shift)
        z = y + torch.tensor(rng.normal(size=shape)) * scale
        assert found("mae", z, y) == pytest.approx(sk.mean_absolute_error(y, z), rel=1e-12)
        assert found("r2", z, y) == pytest.approx(sk.r2_score(y, z), rel=1e-6)
    column = z.reshape(40, -1)
    assert found("mae", column, y) == found("mae", z, y)  # N×1 outputs for N targets


def test_r2_of_constant_targets_and_of_one_sample():
    for shift in (0.0, 0.5, 1e4):
        y = torch.full((20,), shift, dtype=torch.float64)
        assert found("r2", y, y) == sk.r2_score(y, y) == 1
        assert found("r2", y + 0.1, y) == sk.r2_score(y, y + 0.1) == 0
    assert math.isnan(found("r2", torch.ones(1), torch.ones(1), 1))
    two = torch.tensor([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]])
    assert found("r2", two * 0.9, two) == pytest.approx(sk.r2_score(two, two * 0.9), rel=1e-6)


def test_what_is_undefined_is_nan():
    z, y = torch.zeros(3, 4), torch.full((3,), -100)
    for name in ("f1", "f1_weighted", "balanced_accuracy", "auroc", "average_precision", "accuracy", "perplexity"):
        assert math.isnan(found(name, z, y)), name
    assert found("confusion_matrix", z, y).tolist() == [[0] * 4] * 4
    assert math.isnan(found("auroc", z, torch.ones(3, dtype=torch.int64)))  # one class alone
    assert math.isnan(found("auroc", z * math.nan, torch.arange(3)))  # a model that diverged


@pytest.mark.parametrize("name", [n for n in METRICS if n not in ("confusion_matrix", "recall_at_5")])
def test_by_client(name):
    """Each client's value is that of its own samples; a client without any has none."""
    z, y = draw(5, 90, 1 if name in ("mae", "r2") else 4)
    if name in ("mae", "r2"):
        y = y.double()
    owner = torch.tensor(np.sort(np.random.default_rng(2).integers(0, 6, 90)))
    owner[owner == 3] = 4
    values = found(name, z, y, owner=owner, owners=6)
    for client in range(6):
        mine = owner == client
        if not mine.any():
            assert client == 3 and values[client].isnan()
        else:
            assert float(values[client]) == pytest.approx(found(name, z[mine], y[mine], 1), rel=1e-9)


def test_a_confusion_matrix_has_a_limit_and_no_mean_over_clients():
    z, y = draw(0, 10, 201)
    with pytest.raises(ValueError, match="the limit is 200 classes"):
        found("confusion_matrix", z, y)
    z, y = draw(0, 10, 3)
    tally = Tally({"confusion_matrix": METRICS["confusion_matrix"]}, 2)
    tally.add(z, y, torch.arange(10) % 2)
    assert tally.by_client() == {} and tally.sums["confusion_matrix"].sum(0).tolist() == [5, 5]


def test_names_and_what_is_refused():
    loss = cross_entropy
    assert get_metrics("f1", loss) == {"f1": METRICS["f1"]} and list(get_metrics(["mae", "r2"], loss)) == ["mae", "r2"]
    assert get_metrics({"macro": "f1"}, loss) == {"macro": METRICS["f1"]}
    assert list(get_metrics([METRICS["accuracy"], "f1"], loss)) == ["accuracy", "f1"]
    assert summed(get_metrics(["f1", "mae"], loss)) and not summed(get_metrics("auroc", loss))
    with pytest.raises(UndriftError, match=r"Known: .* f1, f1_weighted"):
        get_metrics("f1_macro", loss)
    with pytest.raises(UndriftError, match="column of the history"):
        get_metrics({"client_f1": "f1"}, loss)
    with pytest.raises(UndriftError, match="give an object of it"):
        get_metrics({"own": type(METRICS["auroc"])}, loss)


def test_which_way_is_better():
    lower = ["loss", "validation_loss", "mae", "client_mae_worst", "tuned_perplexity", "client_accuracy_std", "my_mse"]
    assert all(map(lower_is_better, [*lower, "train_loss_first"]))
    assert not any(map(lower_is_better, ["accuracy", "f1", "validation_r2", "client_auroc_worst", "recall_at_5"]))
    said = directions({"surprise": METRICS["perplexity"], "error": METRICS["f1"], "accuracy": METRICS["accuracy"]})
    assert said == {"surprise": True, "error": False}
    assert lower_is_better("client_surprise_worst", said) and not lower_is_better("validation_error", said)
    assert lower_is_better("error_worst", {"error": False, "error_worst": True})
    rows = [{"round": t, "validation_mae": value} for t, value in enumerate((3.0, 2.0, 1.0), 1)]
    assert ud.EarlyStopping("validation_mae", patience=1)(rows) is None
    assert ud.EarlyStopping("validation_r2", patience=1)([{**r, "validation_r2": r["validation_mae"]} for r in rows])


# ---- in runs ---------------------------------------------------------------------------------------------------


def digits(**more):
    return ud.load("digits", ud.Dirichlet(0.5), clients=5, validation_fraction=0.1, client_test_fraction=0.3, **more)


def outputs(result, x):
    model = ud.models.get("logistic", classes=10, shape=(1, 8, 8))
    return torch.func.functional_call(model, result.params, (x,)).detach()


def test_a_run_with_all_metrics_of_classes(tmp_path):
    names = [*OF_CLASSES, "perplexity"]
    data = digits()
    result = ud.train("logistic", data, rounds=2, local=LOCAL, metrics=names, out=tmp_path / "run")
    row = result.history[-1]
    for prefix, (x, y) in (("", data.test), ("validation_", data.validation)):
        for name in names:
            wanted = by_sklearn(name, outputs(result, x), y)
            assert np.array(row[f"{prefix}{name}"]) == pytest.approx(wanted, rel=1e-6), name
    own = [data.client_test[c] for c in range(5)]
    for name in ("f1", "balanced_accuracy", "auroc"):
        values = [by_sklearn(name, outputs(result, x), y) for x, y in own]
        assert row["by_client"][name] == pytest.approx(values, rel=1e-6)
        assert row[f"client_{name}"] == pytest.approx(np.mean(values), rel=1e-6)
        assert row[f"client_{name}_worst"] == pytest.approx(min(values), rel=1e-6)
        assert f"tuned_{name}" in row
    assert "client_confusion_matrix" not in row
    # In the run's folder, as a table that survives; trackers skip it.
    written = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert written[-1]["confusion_matrix"] == row["confusion_matrix"] and len(row["confusion_matrix"]) == 10
    assert not any("confusion" in name for name in scalars(row)) and scalars(row)["f1"] == row["f1"]
    read = RunFolder.read(tmp_path / "run")
    assert read.final("f1") == row["f1"] and math.isnan(read.final("confusion_matrix"))
    assert 'metrics = ["accuracy", "f1"' in (tmp_path / "run/config.toml").read_text()
    from undrift.tools.report.gather import gather

    assert "f1" in gather([tmp_path / "run"])["metrics"]


def test_of_the_same_run_existing_columns_are_the_same_bits():
    alone = ud.train("logistic", digits(), rounds=1, local=LOCAL)
    more = ud.train("logistic", digits(), rounds=1, local=LOCAL, metrics=["accuracy", "f1", "auroc"])
    for name, value in alone.history[0].items():
        if name not in ("seconds", "by_client"):
            assert more.history[0][name] == value, name


def test_regression_and_wrong_metrics_for_it():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3)).astype("float32")
    y = (x @ np.array([[1.0, 2.0], [0.5, 0.0], [0.0, 1.0]])).astype("float32")
    data = ud.load((x, y), ud.IID(), clients=4, test_fraction=0.25)
    result = ud.train(nn.Linear(3, 2), data, rounds=3, local=LOCAL, loss="mse", metrics=["mae", "r2"])
    tx, ty = data.test
    z = torch.func.functional_call(nn.Linear(3, 2), result.params, (tx,)).detach()
    assert result.history[-1]["mae"] == pytest.approx(sk.mean_absolute_error(ty, z), rel=1e-6)
    assert result.history[-1]["r2"] == pytest.approx(sk.r2_score(ty, z), rel=1e-5)
    with pytest.raises(UndriftError, match="The confusion_matrix does not take outputs"):
        ud.train(nn.Linear(3, 2), data, rounds=1, local=LOCAL, loss="mse", metrics="confusion_matrix")


class Counter:
    """An own metric with the interface of torchmetrics: how many samples it was shown, and in how many batches."""

    def __init__(self, scale=1):
        self.scale = scale
        self.reset()

    def reset(self):
        self.seen = 0

    def update(self, output, target):
        self.seen += len(target)

    def compute(self):
        return self.seen * self.scale


def test_an_object_with_update_and_compute():
    data = digits()
    mine = Counter()
    mine.seen = 7  # used elsewhere before
    result = ud.train("logistic", data, rounds=2, local=LOCAL, metrics={"seen": mine, "accuracy": "accuracy"})
    assert [row["seen"] for row in result.history] == [len(data.test[1])] * 2 and mine.seen == 7
    assert result.history[-1]["by_client"]["seen"] == data.client_test.sizes.tolist()
    assert describe(Counter()) == describe(fresh(mine)) != describe(Counter(2))

    class Wrong(Counter):
        def compute(self):
            return {"a": 1}

    with pytest.raises(UndriftError, match=r"compute\(\) must return a number or a tensor, not dict"):
        ud.train("logistic", data, rounds=1, local=LOCAL, metrics={"wrong": Wrong()})


def test_torchmetrics_objects():
    tm = pytest.importorskip("torchmetrics")
    data = digits()
    kinds = {"task": "multiclass", "num_classes": 10}
    own = {
        "f": tm.F1Score(**kinds, average="weighted"), "area": tm.AUROC(**kinds), "table": tm.ConfusionMatrix(**kinds),
        "f1_weighted": "f1_weighted", "confusion_matrix": "confusion_matrix",
    }  # fmt: skip
    result = ud.train("logistic", data, rounds=1, local=LOCAL, metrics=own)
    row, (x, y) = result.history[0], data.test
    z = outputs(result, x)
    for name in ("f", "area"):
        assert row[name] == pytest.approx(float(own[name](z, y)), rel=1e-6)
        own[name].reset()
    assert row["table"] == row["confusion_matrix"] and row["f"] == pytest.approx(row["f1_weighted"], rel=1e-5)
    assert row["client_f"] == pytest.approx(row["client_f1_weighted"], rel=1e-5)
    assert "client_table" not in row
    macro = tm.F1Score(**kinds, average="macro")
    assert describe([macro], deep=True) != describe([own["f"]], deep=True)
    assert describe([macro], deep=True) == describe([tm.F1Score(**kinds, average="macro")], deep=True)
    numbers = ud.load((np.arange(20.0)[:, None], np.arange(20.0)), ud.IID(), clients=2, test_fraction=0.5)
    options = {"loss": "mse", "metrics": {"worst": tm.MeanAbsoluteError()}}
    one = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0)).double()
    assert ud.train(one, numbers, rounds=1, local=ud.Local(steps=1, lr=1e-4), **options).history[0]["worst"] > 0


@dataclass(frozen=True)
class OwnBias(ud.Part):
    personal = ("*bias",)


def test_a_models_own_weights_are_evaluated_with_any_metric():
    data = digits()
    names = ["f1", "auroc", "confusion_matrix"]
    result = ud.train("logistic", data, OwnBias(), rounds=1, local=LOCAL, metrics=names)
    row = result.history[0]
    for c in range(5):
        x, y = data.client_test[c]
        model = ud.models.get("logistic", classes=10, shape=(1, 8, 8))
        z = torch.func.functional_call(model, result.own_params(c), (x,)).detach()
        for name in ("f1", "auroc"):
            assert row["by_client"][name][c] == pytest.approx(by_sklearn(name, z, y), rel=1e-6)
