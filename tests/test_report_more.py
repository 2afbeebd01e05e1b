"""The report's names, targets and tables, and its section on drift, whose columns are made up here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import undrift as ud
from benchmarks.report_page import make_run
from tests.test_report import Reader
from undrift.tools.report.curves import longest_updates, records
from undrift.tools.report.gather import gather
from undrift.tools.report.page import write
from undrift.tools.report.summary import name_groups
from undrift.tools.run_folders import LABELS, Label, RunFolder, find_runs, write_labels

PLOT = "document.querySelector('.chart[data-key=\"{}\"] .plot')"


def group(folder: str, *seeds: int, **settings) -> list[RunFolder]:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return [RunFolder(Path(f"{folder}-{seed}" if seeds[1:] else folder), keys | {"seed": seed}, []) for seed in seeds]


def names(*groups: list[RunFolder]) -> list[str]:
    return list(name_groups({str(i): own for i, own in enumerate(groups)}))


def test_a_name_has_the_method_first_and_only_what_differs():
    avg = group("a", 0, 1, method="FedAvg()", data__name="digits", local__lr=0.1)
    prox = group("b", 0, method="FedProx(0.1)", data__name="digits", local__lr=0.5)
    assert names(avg, prox) == ["FedAvg(), lr=0.1", "FedProx(mu=0.1), lr=0.5"]
    assert names(avg) == ["FedAvg()"]
    other = group("c", 0, method="FedAvg()", data__name="digits", local__lr=0.2)
    assert names(avg, other) == ["lr=0.1", "lr=0.2"]
    skewed = group("d", 0, method="FedAvg()", data__name="digits", local__lr=0.1, data__partition="Shards(2)")
    assert names(avg, skewed) == ["FedAvg()", "Shards(2)"], "what a run does not have is not said"


def test_many_settings_give_way_to_folders_names():
    """As in a review: runs of two versions of a file, whose keys differ all over."""
    many = {f"data__key{i}": 0.2 * i for i in range(12)}
    one = group("skewed-run", 0, method="FedProx(mu=0.1)", **many)
    seeds = group("even-run-seed", 0, 1, method="FedAvg()", data__key3=1)
    assert names(one, seeds) == ["FedProx(mu=0.1) · skewed-run", "FedAvg(), key3=1"]
    more = group("even-run-seed", 0, 1, method="FedAvg()", **{**many, "data__key3": 1})
    assert names(one, more) == ["FedProx(mu=0.1), key3=0.6000000000000001", "FedAvg(), key3=1"]
    assert names(one, group("even-run-seed", 0, 1, method="FedAvg()", data__text="long " * 20)) == [
        "FedProx(mu=0.1) · skewed-run", "FedAvg() · even-run"
    ]  # fmt: skip
    same = group("x", 0, method="FedAvg()", **many), group("x", 1, method="FedAvg()", **{**many, "data__key1": 9})
    assert len(set(names(*same))) == 2, "two folders of one name keep the long names"


def test_runs_of_a_study_have_its_labels(tmp_path):
    def own(label: tuple[str, str], name: str, *seeds: int, **settings) -> list[RunFolder]:
        runs = group(str(tmp_path / name), *seeds, **settings)
        write_labels(tmp_path, {run.folder.name: Label(*label) for run in runs})
        return runs

    momentum = own(("IID", "FedAvgM"), "a", 0, 1, method="ServerSGD(momentum=0.5)", local__lr=0.1)
    avg = own(("IID", "FedAvg"), "b", 0, 1, method="FedAvg()", local__lr=0.2)
    assert names(momentum, avg) == ["FedAvgM", "FedAvg"]
    skewed = own(("label skew", "FedAvg"), "c", 0, method="FedAvg()", local__lr=0.2, data__partition="Shards(2)")
    assert names(momentum, avg, skewed) == ["FedAvgM, IID", "FedAvg, IID", "FedAvg, label skew"]
    tried = own(("IID", "FedAvg"), "d", 0, 1, method="FedAvg()", local__lr=0.4)
    assert names(momentum, avg, tried) == ["FedAvgM", "FedAvg, lr=0.2", "FedAvg, lr=0.4"]
    elsewhere = group(str(tmp_path / "x" / "run"), 0, method="FedProx(0.1)", local__lr=0.2)
    assert names(momentum, elsewhere) == ["FedAvgM", "FedProx(mu=0.1), lr=0.2"]
    for damaged in ("[", "[]", '{"a-0": 3}', '{"a-0": {"partition": 1, "method": "x"}}', '{"a-0": {"other": "x"}}'):
        (tmp_path / LABELS).write_text(damaged)
        assert names(momentum, avg) == ["ServerSGD(momentum=0.5), lr=0.1", "FedAvg(), lr=0.2"]


def rows_of(accuracies: list[float | None]) -> list[dict]:
    costs = {"clients": [0], "seconds": 0.5}
    rows = [{"round": t, "total_steps": 10 * t, "total_bytes": 100 * t, **costs} for t in range(1, len(accuracies) + 1)]
    return [
        row | ({"accuracy": a, "loss": 1 - a} if a is not None else {}) for row, a in zip(rows, accuracies, strict=True)
    ]


def test_the_first_round_that_meets_any_target_is_kept():
    rng = np.random.default_rng(3)
    curve = [
        None if t % 4 == 3 else round(float(x), 3) for t, x in enumerate(rng.random(60) * np.linspace(0.3, 0.9, 60))
    ]
    run = RunFolder(Path("r"), {}, rows_of([*curve, float("nan")]))
    found = records(run, ["accuracy", "loss"])
    for target in np.linspace(0, 0.9, 181):
        row = run.until("accuracy", float(target))
        own = found["test.accuracy"]
        at = next((i for i, value in enumerate(own["value"]) if value >= target), None)
        assert (row is None) == (at is None)
        if row:
            spent = [own[axis][at] for axis in ("round", "steps", "bytes", "seconds")]
            assert spent == [row["round"], row["total_steps"], row["total_bytes"], 0.5 * row["round"]]
    assert found["test.loss"]["round"] == found["test.accuracy"]["round"] and "client.accuracy" not in found


@pytest.fixture(scope="module")
def drifting(tmp_path_factory) -> Path:
    """Two seeds of two methods, with the columns of drift, and clients that have names."""
    where = tmp_path_factory.mktemp("runs")
    for i, method in enumerate(("FedAvg()", "Scaffold()")):
        for seed in (0, 1):
            folder = where / f"{i}-{seed}"
            data = ud.load("digits", "Dirichlet(0.5)", 4, seed, client_test_fraction=0.2)
            ud.train(
                "logistic",
                data,
                method,
                rounds=5,
                local=ud.Local(steps=2, lr=0.005),
                seed=seed,
                out=folder,
                engine="plain",
                drift=True,
            )
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for t, row in enumerate(rows):
                own = {str(c): 1.0 + c + t for c in row["clients"]}
                row |= {"update_norm": float(np.mean(list(own.values()))), "update_norm_max": max(own.values())}
                row |= {"agreement": 0.9 - 0.1 * t + 0.01 * seed - 0.1 * i, "cosine": 0.5, "server_step": 1.0}
                row |= {"mean_update_norm": 0.4, "client_norms": own}
                row |= {"layer_agreement": {f"layer {k}": 0.1 * k for k in range(70)}}
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
            partition = json.loads((folder / "partition.json").read_text())
            (folder / "partition.json").write_text(json.dumps(partition | {"names": [f"H{c}" for c in range(4)]}))
    return where


def test_the_clients_with_the_longest_updates():
    rows = [
        {"client_norms": {"3": 1.0, "10": 5.0}},
        {"client_norms": {"3": 9.0, "7": None}},
        {"client_norms": None},
        {},
    ]
    found = longest_updates(RunFolder(Path("r"), {}, rows), {"10": "Ghent"})
    assert found == {"of": 2, "who": ["3", "Ghent"], "mean": [5, 5], "most": [9, 5], "rounds": [2, 1]}
    assert longest_updates(RunFolder(Path("r"), {}, [{}]), {}) is None


def test_the_page_of_runs_that_record_drift(browser, drifting, tmp_path):
    write(tmp_path / "report.html", gather(find_runs([drifting])))
    with Reader(browser, (tmp_path / "report.html").as_uri()) as reader:
        keys = reader.read_on()
        assert [key for key in keys if key.startswith("drift ")] == [
            "drift agreement", "drift cosine", "drift update_norm", "drift update_norm_max", "drift mean_update_norm",
            "drift server_step", "drift train_loss_first", "drift train_loss", "drift layers", "drift clients",
        ]  # fmt: skip
        assert not [key for key in keys if key.startswith("other ")], "and nothing of it twice"
        assert reader.curves("drift agreement") == ["FedAvg()", "Scaffold()"]
        plot = PLOT.format("drift layers")
        assert reader.see(f"[{plot}.data[0].z.length, {plot}.data[0].z[0].length]") == [70, 5]
        who = PLOT.format("drift clients")
        assert reader.see(f"{who}.layout.xaxis.ticktext") == ["H3", "H2", "H1", "H0"]
        assert reader.see(f"{who}.data[0].y") == [6, 5, 4, 3], "1 + c + t over five rounds"
        held = PLOT.format("partition")
        assert reader.see(f"{held}.layout.xaxis.ticktext") == ["H0", "H1", "H2", "H3"], "clients by name"
        assert reader.see(f"{PLOT.format('lr')}.layout.yaxis.range") == [0, 0.01], "a constant rate is not drawn as 0"
        low = reader.see(f"{PLOT.format('metric accuracy')}.data.flatMap((trace) => trace.y)")
        assert min(low) >= 0 and max(low) <= 1
        assert reader.complaints == [] and len(reader.asked) == 1


def test_no_drift_no_section(tmp_path):
    make_run(tmp_path / "r", 0.1, 0, 5)
    payload = gather([tmp_path / "r"])
    assert "norms" not in payload["runs"][0] and "agreement" not in payload["groups"][0]["schedules"]


@dataclass(frozen=True)
class OwnStep(ud.Part):
    """A part with a column that has the name of one of drift's."""

    def history(self, state):
        return {"server_step": 2.0}


def test_a_parts_column_is_not_taken_for_drift(browser, tmp_path):
    data, local = ud.load("digits", "IID()", 3), ud.Local(steps=1, lr=0.1)
    ud.train("logistic", data, OwnStep(), rounds=3, local=local, out=tmp_path / "r", metrics=["perplexity", "accuracy"])
    payload = gather([tmp_path / "r"])
    lower = {name: own["lower"] for name, own in payload["runs"][0]["records"].items()}
    assert not payload["drift"]
    assert lower == {"test.accuracy": False, "test.perplexity": True, "test.loss": True}
    write(tmp_path / "report.html", payload)
    with Reader(browser, (tmp_path / "report.html").as_uri()) as reader:
        keys = reader.read_on()
        assert "other server_step" in keys and not [key for key in keys if key.startswith("drift ")]
        assert reader.complaints == []


def test_the_table_follows_the_data_and_the_target(browser, drifting, tmp_path):
    write(tmp_path / "report.html", gather(find_runs([drifting])))
    runs = [RunFolder.read(folder) for folder in find_runs([drifting])][:2]
    table = (
        "[...document.querySelectorAll('#summary tr')].map((row) => [...row.children].map((cell) => cell.innerText))"
    )
    with Reader(browser, (tmp_path / "report.html").as_uri()) as reader:
        head, first, *_ = reader.see(table)
        assert "sent, down + up" in head and f"{np.mean([r.rows[-1]['accuracy'] for r in runs]):.4f}" in first[2]
        reader.page.select_option("#source", "client_worst")
        head, first, *_ = reader.see(table)
        worst = [run.rows[-1]["client_accuracy_worst"] for run in runs]
        assert first[head.index("last accuracy")] == f"{np.mean(worst):.4f} ± {np.std(worst, ddof=1):.4f}"
        assert "worst tenth" in reader.see("document.querySelector('#summary p').innerText")
        reader.page.select_option("#source", "test")
        best = sorted(max(row["accuracy"] for row in run.rows) for run in runs)
        target = (best[0] + best[1]) / 2  # which one of the two seeds reaches
        reader.page.fill("#target", str(target))
        reader.page.press("#target", "Enter")
        reader.page.click("[data-axis=steps]")
        head, first, *_ = reader.see(table)
        reached = [row["total_steps"] for run in runs if (row := run.until("accuracy", target))]
        assert len(reached) == 1 and first[head.index(f"SGD steps to {target}")] == f"{reached[0]} (1 of 2)"
        reader.page.fill("#target", "1.5")
        reader.page.press("#target", "Enter")
        head, first, *_ = reader.see(table)
        assert first[head.index("SGD steps to 1.5")] == "–"
        assert reader.complaints == []


def test_local_steps_of_several_seeds_are_the_fewest_and_the_most_of_any(tmp_path):
    for seed, most in ((0, 11), (1, 12)):
        make_run(tmp_path / f"{seed}", 0.1, seed, 3)
        file = tmp_path / f"{seed}" / "metrics.jsonl"
        file.write_text(
            re.sub(
                r'"local_steps": {.*?}',
                f'"local_steps": {{"fewest": {seed + 2}, "mean": {seed + 5}, "most": {most}}}',
                file.read_text(),
            )
        )
    (own,) = gather(find_runs([tmp_path]))["groups"]
    assert own["schedules"]["local_steps"] == {"mean": [5.5] * 3, "low": [2] * 3, "high": [12] * 3}
