"""The arithmetic of comparisons, against scipy and by hand, and the tables made of it."""

from __future__ import annotations

import csv
import io
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest

from undrift.errors import UndriftError
from undrift.files import seal
from undrift.tools import tables
from undrift.tools.compare import Comparison, choose_metric, find_mismatches, group_by_label, measure
from undrift.tools.run_folders import RunFolder
from undrift.tools.statistics import deviation, mean, paired, t_quantile

stats = pytest.importorskip("scipy.stats")


# ---- against scipy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 9, 30, 31, 200, 999])
@pytest.mark.parametrize("p", [0.75, 0.9, 0.95, 0.975, 0.995, 0.9995])
def test_quantiles_are_scipys(p, degrees):
    assert t_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), rel=1e-11)


def test_the_median_is_zero_and_what_has_no_quantile_is_refused():
    assert t_quantile(0.5, 3) == pytest.approx(0, abs=1e-12)
    for p, degrees in ((0.4, 3), (1.0, 3), (0.9, 0)):
        with pytest.raises(ValueError, match="degrees of freedom"):
            t_quantile(p, degrees)


@pytest.mark.parametrize("count", [2, 3, 5, 20])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_paired_intervals_are_scipys(count, level):
    chance = random.Random(count)
    a = {seed: chance.gauss(0.8, 0.1) for seed in range(count)}
    b = {seed: chance.gauss(0.7, 0.1) for seed in reversed(range(count))}  # paired by seed, not by position
    found = paired(a, b, level)
    reference = stats.ttest_rel([a[seed] for seed in range(count)], [b[seed] for seed in range(count)])
    interval = reference.confidence_interval(level)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert found.pairs == count and found.mean == pytest.approx((found.low + found.high) / 2)


def test_means_and_deviations_are_numpys_and_skip_what_is_not_finite():
    values = [0.1, 0.4, math.nan, 0.9, math.inf]
    assert mean(values) == pytest.approx(np.mean([0.1, 0.4, 0.9]))
    assert deviation(values) == pytest.approx(np.std([0.1, 0.4, 0.9], ddof=1))
    assert math.isnan(mean([])) and math.isnan(deviation([0.5])) and math.isnan(deviation([0.5, math.nan]))


def test_pairs_need_common_seeds_with_finite_figures():
    assert paired({0: 1.0, 1: 2.0}, {2: 1.0}).pairs == 0
    one = paired({0: 1.0, 1: 2.0, 2: math.nan}, {1: 0.5, 2: 0.1})
    assert (one.mean, one.pairs) == (1.5, 1) and math.isnan(one.low) and math.isnan(one.high)
    equal = paired({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.5})
    assert (equal.low, equal.mean, equal.high) == (0.5, 0.5, 0.5)


# ---- groups of runs, by hand -------------------------------------------------------------------------------------


def run(name: str, seed: int, *accuracies: float | None, stopped: str | None = None, **settings: object) -> RunFolder:
    rows = [
        {"round": t + 1, "accuracy": a, "loss": 1.0 if a is not None else None, "total_steps": 10 * (t + 1)}
        | {
            "total_bytes": 2e6 * (t + 1),
            "seconds": 0.5,
            "client_accuracy_worst": 0.1 * seed,
            "client_accuracy_std": 0.2,
        }
        for t, a in enumerate(accuracies)
    ]
    given = {"method": name, "seed": seed, "data.partition": "IID()", "data.seed": seed, **settings}
    return RunFolder(Path(f"{name}-{seed}"), given, rows, stopped)


AVG = [run("FedAvg()", 0, 0.2, 0.5, 0.7), run("FedAvg()", 1, 0.1, 0.3, 0.4), run("FedAvg()", 2, 0.3, 0.6, 0.8)]
PROX = [run("FedProx()", 0, 0.2, 0.6, 0.8), run("FedProx()", 1, 0.4, 0.5, 0.6), run("FedProx()", 2, 0.3, 0.9, 0.7)]


def test_figures_by_hand():
    avg, prox = measure({"FedAvg": AVG, "FedProx": PROX}, Comparison("accuracy", 2, 0.6, "FedAvg"))
    assert avg["values"] == pytest.approx([0.6, 0.35, 0.7]) and "difference" not in avg
    assert avg["mean"] == pytest.approx(0.55) and avg["std"] == pytest.approx(np.std([0.6, 0.35, 0.7], ddof=1))
    assert avg["best_on_test_data"]["mean"] == pytest.approx((0.7 + 0.4 + 0.8) / 3)
    assert avg["reached"] == 2 and avg["rounds_to_target"]["mean"] == 2.5  # in rounds 3 and 2
    assert avg["steps_to_target"]["mean"] == 25 and avg["bytes_to_target"]["mean"] == 5e6
    assert avg["seconds_to_target"]["mean"] == 1.25
    assert avg["client_worst"]["mean"] == pytest.approx(0.1) and avg["client_std"]["mean"] == pytest.approx(0.2)
    differences = [0.7 - 0.6, 0.55 - 0.35, 0.8 - 0.7]
    half = stats.t.ppf(0.975, 2) * np.std(differences, ddof=1) / math.sqrt(3)
    assert prox["difference"]["mean"] == pytest.approx(np.mean(differences))
    assert prox["difference"]["low"] == pytest.approx(np.mean(differences) - half)


def test_a_run_that_was_lost_has_no_figure_and_no_pair():
    lost = [AVG[0], run("FedAvg()", 1, 0.5, None), run("FedAvg()", 2, 0.9, stopped="Round 2: …")]
    prox, avg = measure({"FedProx": PROX, "FedAvg": lost}, Comparison("accuracy", baseline="FedProx"))
    assert avg["values"] == [0.7, None, None] and avg["lost"] == 2 and avg["counted"] == "3 (1 diverged, 1 stopped)"
    assert avg["difference"]["pairs"] == 1 and avg["difference"]["low"] is None
    blocks = {"": [prox, avg]}
    said = tables.markdown(blocks, Comparison("accuracy", baseline="FedProx"))
    assert "| 3 (1 diverged, 1 stopped) | 0.7000 (1 of 3) | -0.1000 (one common seed) |" in said
    assert tables.best([prox, avg], lower=False) is prox


def test_differences_say_when_there_is_no_common_seed():
    other = [run("FedProx()", 7, 0.5)]
    _, row = measure({"FedAvg": AVG, "FedProx": other}, Comparison("accuracy", baseline="FedAvg"))
    assert tables.difference(row) == "no common seed"


def test_metrics_and_baselines_that_nobody_has_are_refused():
    with pytest.raises(UndriftError, match=r"'acuracy'; did you mean 'accuracy'\?"):
        choose_metric(AVG, "acuracy")
    assert choose_metric(AVG, None) == "accuracy" and choose_metric(AVG, "client_accuracy_std") == "client_accuracy_std"
    with pytest.raises(UndriftError, match="There is no group 'FedAvgg' to use as the baseline; did you mean 'FedAvg'"):
        measure({"FedAvg": AVG}, Comparison("accuracy", baseline="FedAvgg"))


def test_where_lower_is_better():
    runs = [run("A()", 0, 0.5), run("B()", 0, 0.6)]
    low, high = measure({"A": [runs[0]], "B": [runs[1]]}, Comparison("loss"))
    low["mean"], high["mean"] = 0.1, 0.9
    assert tables.best([low, high], lower=True) is low and tables.best([low, high], lower=False) is high


# ---- warnings ----------------------------------------------------------------------------------------------------


def test_other_seeds_other_data_and_seeds_that_occur_twice_are_mentioned():
    assert find_mismatches({"FedAvg": AVG, "FedProx": PROX}) == []
    (said,) = find_mismatches({"FedAvg": AVG, "FedProx": PROX[:1]})
    assert "different seeds (FedAvg: 0, 1, 2; FedProx: 0)" in said
    (said,) = find_mismatches({"FedAvg": [*AVG, AVG[0]], "FedProx": PROX})
    assert "FedAvg: a seed occurs twice" in said
    (said,) = find_mismatches(
        {"FedAvg": AVG, "FedProx": [run("FedProx()", s, 0.5, **{"data.seed": 9}) for s in range(3)]}
    )
    assert "differ in data.seed" in said


def test_data_that_differ_although_no_setting_does_are_mentioned(tmp_path):
    runs = []
    for name, digest in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        seal(tmp_path / name / "run.json", {"identity": {"training data": "0", "test data": digest}})
        runs.append(RunFolder(tmp_path / name, {"method": name, "seed": 0}, []))
    (said,) = find_mismatches({"a": runs[:1], "b": runs[1:]})
    assert "trained or tested on different data" in said
    assert find_mismatches({"a": runs[:1], "b": [RunFolder(tmp_path / "c", {"method": "b", "seed": 0}, [])]}) == []


def test_labels_make_groups_and_runs_of_one_label_differ_in_seeds_alone():
    labels: dict[Path, str | None] = {one.folder: "ours" for one in PROX}
    assert list(group_by_label([*AVG, *PROX], labels)) == ["ours", "FedAvg()"]
    with pytest.raises(UndriftError, match="labelled 'x' differ in more than their seeds"):
        group_by_label([AVG[0], PROX[0]], {AVG[0].folder: "x", PROX[0].folder: "x"})


# ---- tables ------------------------------------------------------------------------------------------------------


def test_what_is_selected_on_test_data_says_so():
    asked = Comparison("accuracy", target=0.6)
    blocks = {"": measure({"FedAvg": AVG}, asked)}
    headers = [column.header for column in tables.columns(blocks, asked)]
    assert "best accuracy (on test data)" in headers and "last accuracy" in headers
    assert "| 2 ± 1 (2 of 3) |" in tables.markdown(blocks, asked)  # the rounds 3 and 2
    assert "best accuracy" not in tables.latex(blocks, asked)


def test_latex_is_escaped_and_bold_where_it_is_best():
    rows = measure({"100% of_it & more": AVG, "Prox {x}": PROX}, Comparison("accuracy", baseline="100% of_it & more"))
    text = tables.latex({"a_b": rows}, Comparison("accuracy", baseline="100% of_it & more"))
    assert r"100\% of\_it \& more & \textbf{0.6333 $\pm$ 0.2082}" in text and r"\emph{a\_b}" in text
    half = stats.t.ppf(0.975, 2) * np.std([0.1, 0.2, -0.1], ddof=1) / math.sqrt(3)
    interval = rf"$+$0.0667 [$-${half - 1 / 15:.4f}, $+${half + 1 / 15:.4f}]"
    assert rf"Prox \{{x\}} & \textbf{{0.7000 $\pm$ 0.1000}} & {interval}" in text
    assert r"\\[" not in text, "a bracket after a line break would be its length"
    body = [line for line in text.splitlines() if " & " in line and "tabular" not in line]
    assert {line.count(" & ") for line in body} == {4}


def test_bold_is_every_mean_that_the_runs_do_not_show_to_be_worse():
    far = [run("Far()", seed, 0.1 + 0.001 * seed) for seed in range(3)]
    steady = [run("Steady()", seed, x) for seed, x in enumerate((0.69, 0.39, 0.79))]  # less than AVG by 0.01 each time
    asked = Comparison("accuracy", baseline="FedAvg")
    rows = measure({"FedAvg": AVG, "FedProx": PROX, "Far": far, "Steady": steady}, asked)
    assert [row["name"] for row in tables.leaders(rows, lower=False)] == ["FedAvg", "FedProx", "Steady"]
    assert [row["name"] for row in tables.leaders([rows[0], rows[3]], lower=False)] == ["FedAvg"]
    for text, bold in ((tables.latex({"": rows}, asked), "textbf{"), (tables.markdown({"": rows}, asked), "| **")):
        lines = [line for line in text.splitlines() if bold in line]
        assert [name for name in ("FedAvg", "FedProx", "Far", "Steady") if any(name in line for line in lines)] == [
            "FedAvg", "FedProx", "Steady",
        ]  # fmt: skip
    one = measure({"FedAvg": AVG[:1], "FedProx": PROX[:1]}, asked)  # of one seed there is no interval
    assert [row["name"] for row in tables.leaders(one, lower=False)] == ["FedProx"]
    lost = measure({"FedAvg": [*AVG[:2], run("FedAvg()", 2, 0.9, stopped="Round 2: …")], "FedProx": PROX}, asked)
    assert [row["name"] for row in tables.leaders(lost, lower=False)] == ["FedProx"]
    assert tables.leaders(rows[:1], lower=False) == []


def test_no_row_begins_with_an_argument_of_the_line_before():
    names = ["[2em]", "*", " [x]", "plain"]
    text = tables.latex({"": measure(dict.fromkeys(names, AVG), Comparison("accuracy"))}, Comparison("accuracy"))
    assert not re.search(r"(\\\\|midrule)\n\s*[\[*]", text)
    for name in names:
        assert f"{name} & " in text


def test_names_stay_in_their_cells_and_comments():
    name = "a\n\\input{x} & b\n| c"
    row = measure({name: AVG}, Comparison("accuracy"))[0] | {"remark": "of\n\\input{x}"}
    text = tables.latex({"": [row]}, Comparison("accuracy"))
    assert not re.search(r"(?m)^\\input", text) and "% " + "a \\input{x} & b | c: of \\input{x}\n" in text
    assert len(tables.markdown({"": [row]}, Comparison("accuracy")).splitlines()) == 5


def test_no_cell_of_a_csv_file_is_a_formula():
    names = ["=1+1", "@x", "+cmd|' /C calc'!A0", "-x", "\t=1", "＝1", "-1.5", "1 -2 nan"]
    blocks = {"=a": measure(dict.fromkeys(names, AVG), Comparison("accuracy"))}
    found = list(csv.DictReader(io.StringIO(tables.csv_text(blocks))))
    assert [row["name"] for row in found] == [*(f"'{name}" for name in names[:6]), *names[6:]]
    assert {row["partition"] for row in found} == {"'=a"}
    lower = measure({"A": [run("A()", 0, -0.5)], "B": [run("B()", 0, -0.7)]}, Comparison("accuracy", baseline="A"))
    (_, worse) = csv.DictReader(io.StringIO(tables.csv_text({"": lower})))
    assert worse["mean"] == worse["values"] == "-0.7" and float(worse["difference_mean"]) == pytest.approx(-0.2)


def test_csv_has_every_number():
    asked = Comparison("accuracy", 2, 0.6, "FedAvg")
    blocks = {"IID": measure({"FedAvg": AVG, "FedProx": PROX}, asked)}
    avg, prox = csv.DictReader(io.StringIO(tables.csv_text(blocks)))
    assert avg["partition"] == "IID" and float(avg["mean"]) == pytest.approx(0.55) and avg["difference_low"] == ""
    assert [float(x) for x in prox["values"].split()] == pytest.approx([0.7, 0.55, 0.8]) and prox["seeds"] == "0 1 2"
    assert prox["reached"] == "3" and float(prox["rounds_to_target_mean"]) == pytest.approx(7 / 3)
