"""The verdicts on papers' claims, and the page that is written from results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from papers import catalogue, comparison, page, readings, verdict
from papers.catalogue import Paper, Table
from papers.queue import ordered
from papers.readings import chosen_variant
from papers.results import DEFAULT, Results
from papers.verdict import judge
from undrift.errors import UndriftError

ROOT = Path(__file__).parent.parent

TOML = """
number = 7
title = "A paper of tests"

[experiment]
rounds = 3
data = {name = "digits"}

[quick]
rounds = 1

[tables.main]
title = "Table 1: accuracy in percent"
seeds = [0, 1]
note = "A note."
drawing = {kind = "curves", column = "accuracy", percent = true}

[tables.main.columns]
"easy" = {data = {partition = "IID()"}}
"hard|er" = {data = {partition = "Shards(2)"}, standin = "Digits for MNIST"}
"third" = {data = {partition = "Shards(3)"}}

[tables.main.rows]
"old" = {method = "FedAvg()"}
"new" = {method = "FedProx(0.1)"}

[[tables.main.figures]]
name = "accuracy"
column = "accuracy"
take = "last"
percent = true
digits = 2
published = {"old" = ["70.00 (0.50)", "60.00", ""], "new" = ["74.00 (1.00)", "61.00", ""]}

[[tables.main.figures]]
name = "loss"
column = "loss"
take = "last"
lower = true
digits = 3
published = {"old" = ["2.000", "", ""], "new" = ["1.000", "", ""]}

[[tables.main.figures]]
name = "peak"
column = "accuracy"
take = "peak"
percent = true

[[tables.main.figures]]
name = "rounds to 50"
column = "accuracy"
take = "reach"
target = 50.0
percent = true
lower = true
digits = 0

[tables.open]
title = "Table 2: settings that are left open"
seeds = [0, 1]
variants = {"first" = {rounds = 4}, "second" = {rounds = 5}, "third" = {rounds = 6}}
calibration = {row = "old", figure = "accuracy", reaches = 80.0}

[tables.open.rows]
"old" = {method = "FedAvg()"}
"new" = {method = "FedProx(0.1)"}

[[tables.open.figures]]
name = "accuracy"
column = "accuracy"
take = "last"
percent = true

[tables.single]
title = "Figure 1: bars and arithmetic"
seeds = [0]
experiment = {rounds = 9}
drawing = {kind = "layers", column = "bars", label = "bar"}

[tables.single.rows]
"old" = {method = "FedAvg()"}

[[tables.single.figures]]
name = "number"
column = "accuracy"
take = "last"
digits = 3
published = {"old" = ["0.733"]}

[tables.untouched]
title = "Table 3: of which nothing was run"
seeds = [0, 1, 2]
experiment = {rounds = 77}

[tables.untouched.rows]
"old" = {method = "FedAvg()"}
"new" = {method = "FedProx(0.1)"}

[[claims]]
text = "New is more accurate than old"
headline = true
table = "main"
figure = "accuracy"
better = "new"
than = "old"
columns = ["easy", "hard|er"]

[[claims]]
text = "Old comes out as published"
table = "main"
figure = "accuracy"
matches = "old"
"""

CLAIM = {"text": "", "table": "main", "figure": "accuracy", "better": "new", "than": "old", "columns": ["easy"]}


@pytest.fixture
def paper(tmp_path: Path) -> Paper:
    file = tmp_path / "tests.toml"
    file.write_text(TOML, encoding="utf-8")
    return catalogue.read(file)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "papers" / "results")


def add(results: Results, table: Table, column: str, row: str, curves: list[Any], **more: Any) -> None:
    """A result per seed: a last accuracy, or a list of them, or a whole curve."""
    cells = table.at(column, row, more.pop("variant", None))
    for cell, told in zip(cells, curves, strict=False):
        values = told if isinstance(told, list) else [told]
        curve = told if isinstance(told, dict) else {"accuracy": values}
        rounds = list(range(1, len(next(iter(curve.values()))) + 1))
        result = {"seed": cell.seed, "quick": cell.quick, "curve": {"round": rounds, **curve}, "stopped": None}
        results.add(cell, {**result, "seconds": 90.0, "hardware": "NVIDIA H200", "precision": "tf32", **more})


def judged(results: Results, paper: Paper, old: list[Any], new: list[Any], **claim: Any) -> verdict.Verdict:
    table = paper.tables["main"]
    add(results, table, "easy", "old", old)
    add(results, table, "easy", "new", new)
    return judge({**CLAIM, **claim}, table, results)


# ------------------------------------------------------------------------------------------------- A is better than B


@pytest.mark.parametrize(
    ("old", "new", "state", "words"),
    [
        ([0.70, 0.71], [0.72, 0.74], "holds", "held"),  # +2 and +3, of +4 published
        ([0.70, 0.71], [0.72, 0.73], "holds", "held"),  # +2 exactly, half of it
        ([0.70, 0.71], [0.71, 0.73], "partly", "partly held"),  # +1.5
        ([0.70, 0.71], [0.69, 0.80], "partly", "partly held"),  # one seed has the wrong sign
        ([0.70, 0.71], [0.70, 0.80], "partly", "partly held"),  # or none
        ([0.70, 0.71], [0.70, 0.71], "fails", "did not hold here"),
        ([0.70, 0.71], [0.72, 0.60], "fails", "did not hold here"),
    ],
)
def test_sign_and_size_of_the_paired_difference(
    results: Results, paper: Paper, old: list[float], new: list[float], state: str, words: str
) -> None:
    found = judged(results, paper, old, new)
    assert (found.columns[0].state, found.words, found.seeds) == (state, words, "2")
    assert found.columns[0].published == pytest.approx(4.0)
    assert found.columns[0].difference == pytest.approx(50 * (sum(new) - sum(old)))
    assert found.columns[0].each == pytest.approx([100 * (new[i] - old[i]) for i in range(2)])


def test_amount_has_mean_range_and_published_difference(results: Results, paper: Paper) -> None:
    table = paper.tables["main"]
    for column, new in (("easy", [0.72, 0.74]), ("hard|er", [0.705, 0.715])):
        add(results, table, column, "old", [0.70, 0.71])
        add(results, table, column, "new", new)
    found = judge({**CLAIM, "columns": ["easy", "hard|er"]}, table, results)
    assert found.words == "held"  # +0.5 of +1 in the harder column
    assert found.amount == "+1.50 points (+0.50 to +2.50); published +2.50; holds in 2 of 2 columns"


def test_seeds_are_paired(results: Results, paper: Paper) -> None:
    """Of three runs, only the seed that both rows have counts."""
    found = judged(results, paper, [0.70, 0.71], [0.74])
    assert (found.words, found.judged, found.total, found.amount) == ("not run yet", 0, 1, "")
    assert found.columns[0].seeds == 1


def test_half_of_the_published_difference_counts_only_if_positive(results: Results, paper: Paper) -> None:
    assert judged(results, paper, [0.70, 0.71], [0.701, 0.711], published=-3.0).words == "held"
    assert judged(results, paper, [0.70, 0.71], [0.701, 0.711], published=0.3).words == "partly held"
    assert judged(results, paper, [0.70, 0.71], [0.701, 0.711], published={"easy": 0.1}).words == "held"
    assert judged(results, paper, [0.70, 0.71], [0.701, 0.711], published={"third": 9.0}).words == "held"


def test_lower_is_better(results: Results, paper: Paper) -> None:
    old, new = [{"loss": [2.0]}, {"loss": [2.2]}], [{"loss": [1.0]}, {"loss": [1.0]}]
    found = judged(results, paper, old, new, figure="loss")
    assert (found.words, found.columns[0].published) == ("held", 1.0)
    assert found.amount.startswith("+1.100; published +1.000")
    assert judge({**CLAIM, "figure": "loss", "better": "old", "than": "new"}, paper.tables["main"], results).words == (
        "did not hold here"
    )


def test_relative_differences(results: Results, paper: Paper) -> None:
    old, new = [{"loss": [2.0]}, {"loss": [4.0]}], [{"loss": [1.0]}, {"loss": [3.0]}]
    found = judged(results, paper, old, new, figure="loss", relative=True)
    assert found.columns[0].each == pytest.approx([0.5, 0.25])
    assert found.columns[0].published == pytest.approx(0.5)
    assert found.amount.startswith("+37.5%; published +50.0%")


def test_peak_is_of_the_mean_curve(results: Results, paper: Paper) -> None:
    """Each seed peaks at 0.9, but at another round; the mean curve peaks at 0.6."""
    found = judged(results, paper, [[0.5, 0.5], [0.5, 0.5]], [[0.9, 0.3], [0.3, 0.9]], figure="peak")
    assert found.columns[0].difference == pytest.approx(10.0)
    assert found.columns[0].each == pytest.approx([40.0, 40.0])
    table = paper.tables["main"]
    assert readings.measured(table.figures[2], table.at("easy", "new"), results).mean == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("row", "state"),
    [("new", "fails"), ("old", "partly")],
)
def test_a_diverged_run_is_worse_than_any(results: Results, paper: Paper, row: str, state: str) -> None:
    table = paper.tables["main"]
    judged(results, paper, [0.70, 0.71], [0.80, 0.81])
    add(results, table, "easy", row, [0.99], stopped="the loss is not finite")
    column = judge(CLAIM, table, results).columns[0]
    assert (column.state, column.difference, column.seeds) == (state, None, 2)
    assert "1 of 2 seeds" in column.note


def test_both_diverged_is_not_better(results: Results, paper: Paper) -> None:
    table = paper.tables["main"]
    add(results, table, "easy", "old", [0.5, 0.5], stopped="the loss is not finite")
    add(results, table, "easy", "new", [0.9, 0.9], stopped="the loss is not finite")
    assert judge(CLAIM, table, results).words == "did not hold here"


def test_where_only_the_other_diverged_the_rest_decides(results: Results, paper: Paper) -> None:
    table = paper.tables["main"]
    judged(results, paper, [0.70, 0.71], [0.80, 0.61])
    add(results, table, "easy", "old", [0.70], stopped="the loss is not finite")
    assert judge(CLAIM, table, results).columns[0].state == "fails"
    add(results, table, "easy", "old", [0.70, 0.71], stopped="the loss is not finite")
    found = judge(CLAIM, table, results)
    assert (found.columns[0].state, found.words) == ("partly", "partly held")
    assert found.amount == "published +4.00; effect size undefined (the baseline diverged); partly in 1 of 1 column"


def test_a_figure_that_is_no_number_counts_as_diverged(results: Results, paper: Paper) -> None:
    assert judged(results, paper, [0.70, 0.71], [float("nan"), 0.9]).words == "did not hold here"


def test_a_target_that_is_never_reached_is_worse_than_any(results: Results, paper: Paper) -> None:
    found = judged(results, paper, [[0.1, 0.6], [0.1, 0.6]], [[0.6, 0.6], [0.1, 0.4]], figure="rounds to 50")
    assert found.words == "did not hold here"
    table = paper.tables["main"]
    value = readings.measured(table.figures[3], table.at("easy", "new"), results)
    assert (value.mean, value.missed, value.diverged, value.whole) == (1.0, 1, 0, False)


def test_claim_over_columns(results: Results, paper: Paper) -> None:
    table = paper.tables["main"]
    claim: dict[str, Any] = {key: value for key, value in CLAIM.items() if key != "columns"}
    assert judge(claim, table, results).words == "not run yet"

    def fill(column: str, better: bool) -> str:
        add(results, table, column, "old", [0.5, 0.5])
        add(results, table, column, "new", [0.9, 0.9] if better else [0.1, 0.1])
        return judge(claim, table, results).words

    assert fill("easy", True) == "held so far, 1 of 3 columns"
    assert fill("hard|er", False) == "partly held so far, 2 of 3 columns"  # half is not more than half
    assert fill("third", True) == "partly held"
    assert fill("third", False) == "did not hold here"
    assert judge({**claim, "but": ["hard|er", "third"]}, table, results).words == "held"
    assert fill("hard|er", True) == "partly held"
    assert fill("third", True) == "held"


def test_one_seed_is_enough_only_where_there_is_one(results: Results, paper: Paper) -> None:
    table = paper.tables["single"]
    claim = {"text": "", "table": "single", "equal": ["number"]}
    assert judge(claim, table, results).words == "not run yet"
    add(results, table, "", "old", [0.7334])
    assert judge(claim, table, results).words == "held"


@pytest.mark.parametrize("wrong", [{"better": "newer"}, {"columns": ["easier"]}, {"but": ["x"]}, {"figure": "accurac"}])
def test_a_claim_about_nothing_is_refused(results: Results, paper: Paper, wrong: dict[str, Any]) -> None:
    with pytest.raises(UndriftError, match="There is no"):
        judge({**CLAIM, **wrong}, paper.tables["main"], results)


# -------------------------------------------------------------------------------------------------- matches and equal


@pytest.mark.parametrize(
    ("old", "state"),
    [
        ([0.710, 0.710], "holds"),  # one point, within 2 × 0.5
        ([0.7101, 0.7101], "fails"),
        ([0.690, 0.690], "holds"),
        ([0.700, 0.740], "holds"),  # two points, within 2·√(0.5² + 2.83²)
    ],
)
def test_matches_within_two_deviations(results: Results, paper: Paper, old: list[float], state: str) -> None:
    table = paper.tables["main"]
    add(results, table, "easy", "old", old)
    claim = {"text": "", "table": "main", "figure": "accuracy", "matches": "old", "columns": ["easy"]}
    assert [column.state for column in judge(claim, table, results).columns] == [state]


def test_matches_without_deviations(tmp_path: Path, results: Results) -> None:
    """One seed, and no published deviation: one point of percentages, or the printed digits."""
    text = TOML.replace("seeds = [0, 1]\nnote", "seeds = [0]\nnote")
    file = tmp_path / "tests.toml"
    file.write_text(text, encoding="utf-8")
    table = catalogue.read(file).tables["main"]
    claim = {"text": "", "table": "main", "figure": "accuracy", "matches": "old", "columns": ["hard|er"]}
    for value, state in ((0.61, "holds"), (0.589, "fails")):
        add(results, table, "hard|er", "old", [value])
        assert judge(claim, table, results).columns[0].state == state
    claim = {"text": "", "table": "main", "figure": "loss", "matches": "old"}  # printed: 2.000
    for value, state in ((2.0004, "holds"), (2.0006, "fails")):
        add(results, table, "easy", "old", [{"loss": [value]}])
        found = judge(claim, table, results)
        assert (found.columns[0].state, found.total) == (state, 1)  # other columns have no published number


def test_matches_to_the_printed_digits_where_seeds_agree(results: Results, paper: Paper) -> None:
    """Two equal runs have no deviation, and a published number is known to its last digit."""
    table = paper.tables["main"]
    claim = {"text": "", "table": "main", "figure": "loss", "matches": "old"}
    for value, state in ((2.0004, "holds"), (2.0006, "fails")):
        add(results, table, "easy", "old", [{"loss": [value]}] * 2)
        assert judge(claim, table, results).columns[0].state == state


def test_a_calculated_number_is_not_a_published_one(tmp_path: Path, results: Results) -> None:
    """It is marked, counts where a row comes out as expected, and is none of the paper's printed numbers."""
    text = TOML.replace('published = {"old" = ["0.733"]}', 'calculated = {"old" = ["0.733 (0.002)"]}')
    (tmp_path / "tests.toml").write_text(text, encoding="utf-8")
    table = catalogue.read(tmp_path / "tests.toml").tables["single"]
    add(results, table, "", "old", [0.7311])
    (shown,) = comparison.lines_of(table, results)
    assert (shown.published, shown.difference) == ("0.733 ± 0.002 (calculated)", "−0.002")
    claim = {"text": "", "table": "single"}
    found = judge({**claim, "figure": "number", "matches": "old"}, table, results)
    assert (found.words, found.amount) == ("held", "ours − calculated −0.002; holds in 1 of 1 column")
    assert judge({**claim, "equal": ["number"]}, table, results).words == "nothing to compare with"


def test_a_diverged_run_does_not_match(results: Results, paper: Paper) -> None:
    table = paper.tables["main"]
    add(results, table, "easy", "old", [0.70, 0.70])
    add(results, table, "easy", "old", [0.70], stopped="the loss is not finite")
    claim = {"text": "", "table": "main", "figure": "accuracy", "matches": "old"}
    found = judge(claim, table, results)
    assert (found.columns[0].state, found.columns[0].note) == ("fails", "diverged (1 of 2 seeds)")
    assert found.words == "did not hold here so far, 1 of 2 columns"


@pytest.mark.parametrize(("value", "words"), [(0.7333, "held"), (0.73349, "held"), (0.7336, "did not hold here")])
def test_equal_to_the_printed_digits(results: Results, paper: Paper, value: float, words: str) -> None:
    table = paper.tables["single"]
    add(results, table, "", "old", [value])
    found = judge({"text": "", "table": "single", "equal": ["number"]}, table, results)
    assert (found.words, found.unit, found.seeds) == (words, "number", "1")


# ---------------------------------------------------------------------------------------------------------- variants


def test_first_variant_that_reaches_the_value_is_used(results: Results, paper: Paper) -> None:
    table = paper.tables["open"]
    assert chosen_variant(paper.tables["main"], results) == ""
    assert chosen_variant(table, results) is None
    add(results, table, "", "old", [0.85, 0.85], variant="second")
    assert chosen_variant(table, results) is None  # the first comes first
    add(results, table, "", "old", [0.90], variant="first")
    assert chosen_variant(table, results) is None  # a seed is missing
    add(results, table, "", "old", [0.90, 0.69], variant="first")
    assert chosen_variant(table, results) == "second"
    add(results, table, "", "old", [0.90, 0.70], variant="first")
    assert chosen_variant(table, results) == "first"


def test_best_variant_is_used_where_none_reaches_the_value(results: Results, paper: Paper) -> None:
    table = paper.tables["open"]
    add(results, table, "", "old", [0.60, 0.60], variant="first")
    add(results, table, "", "old", [0.70, 0.70], variant="second")
    assert chosen_variant(table, results) is None
    add(results, table, "", "old", [0.65, 0.65], variant="third")
    assert chosen_variant(table, results) == "second"
    add(results, table, "", "old", [0.99, 0.99], variant="third", stopped="the loss is not finite")
    assert chosen_variant(table, results) == "second"


def test_one_diverged_seed_rules_a_variant_out(results: Results, paper: Paper) -> None:
    table = paper.tables["open"]
    add(results, table, "", "old", [0.90], variant="first", stopped="the loss is not finite")
    assert [(cell.variant, cell.seed) for cell in ordered([table], results)] == [("second", 0), ("second", 1)]
    add(results, table, "", "old", [0.70], variant="second")
    assert chosen_variant(table, results) is None  # the other seed may still raise its mean, or diverge
    add(results, table, "", "old", [0.70, 0.70], variant="second")
    add(results, table, "", "old", [0.60, 0.60], variant="third")
    assert chosen_variant(table, results) == "second"


def test_claims_are_judged_in_the_variant_in_use(results: Results, paper: Paper) -> None:
    table = paper.tables["open"]
    claim = {"text": "", "table": "open", "figure": "accuracy", "better": "new", "than": "old"}
    add(results, table, "", "old", [0.60, 0.60], variant="first")
    add(results, table, "", "new", [0.70, 0.70], variant="first")
    assert judge(claim, table, results).words == "not run yet"
    add(results, table, "", "old", [0.80, 0.80], variant="second")
    add(results, table, "", "new", [0.75, 0.75], variant="second")
    assert judge(claim, table, results).words == "did not hold here"


# ---------------------------------------------------------------------------------------------------------- the page


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, paper: Paper, tmp_path: Path) -> Paper:
    """The catalogue has this paper alone."""
    small = catalogue.read(tmp_path / "tests.toml", quick=True)
    monkeypatch.setattr(catalogue, "papers", lambda quick=False: {"tests": small if quick else paper})
    monkeypatch.setattr(catalogue, "FOLDER", tmp_path)
    return paper


def some_results(results: Results, paper: Paper) -> None:
    table = paper.tables["main"]
    curves = [{"accuracy": [0.2, 0.6, x], "loss": [3.0, 2.5, 2.0]} for x in (0.70, 0.71)]
    add(results, table, "easy", "old", curves)
    add(results, table, "easy", "new", [0.72, 0.74])
    add(results, table, "hard|er", "old", [0.5, 0.6])
    add(results, table, "hard|er", "old", [0.5], stopped="the loss is not finite")
    add(results, table, "hard|er", "new", [0.6])
    add(results, paper.tables["open"], "", "old", [0.60, 0.62], variant="first")
    add(results, paper.tables["open"], "", "old", [0.80, 0.82], variant="second")
    add(results, paper.tables["open"], "", "new", [0.99], variant="first")
    bars = {"accuracy": [0.7331], "bars": [{"a": 1.0, "b": 2.0}]}
    add(results, paper.tables["single"], "", "old", [bars])


def line(text: str, *words: str) -> list[str]:
    """The cells of the one line of a Markdown table that has these words."""
    found = [x for x in text.splitlines() if x.startswith("|") and all(word in x for word in words)]
    assert len(found) == 1, found
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", found[0])[1:-1]]


def text_of(results: Results, quick: bool = False) -> str:
    """The overview, and the paper's page."""
    return "\n\n".join(page.pages(results.folder, quick).values())


def test_page_shows_published_beside_ours(results: Results, known: Paper) -> None:
    some_results(results, known)
    text = text_of(results)
    cells = line(text, "| easy | old | accuracy |")
    assert cells[:8] == ["easy", "old", "accuracy", "digits", "70.00 ± 0.50", "70.50 ± 0.71", "+0.50", "2"]
    assert cells[8] == (
        "[seed 0](../../papers/results/tests/main/easy/old/0.json) "
        "[seed 1](../../papers/results/tests/main/easy/old/1.json)"
    )
    assert "tests/main/easy/old/0.json" in {file.relative_to(results.folder).as_posix() for file in files(results)}
    assert line(text, "| hard\\|er | old | accuracy |")[5:8] == ["diverged (1 of 2 seeds); 60.00 otherwise", "", "2"]
    assert line(text, "| new | accuracy |", "61.00")[3:8] == ["digits, stand-in", "61.00", "60.00", "−1.00", "1 of 2"]
    assert "**Stand-in for the paper's data** (hard\\|er): Digits for MNIST." in text
    assert line(text, "| third | all 2 |")[4:8] == ["", "not run", "", "0 of 4 runs"]
    assert "Not run: none of the 6 runs has finished." in text
    assert "<code>undrift reproduce tests --table main</code>" in text


def files(results: Results) -> list[Path]:
    return list(results.folder.rglob("*.json"))


def test_page_opens_with_the_claims_and_the_rule(results: Results, known: Paper) -> None:
    some_results(results, known)
    text = text_of(results)
    opening = text[: text.index("## The rule")]
    assert line(opening, "New is more accurate than old") == [
        "[A paper of tests](papers/tests.md)",
        "New is more accurate than old",
        "**held so far, 1 of 2 columns**",
        "+2.50 points; published +4.00; holds in 1 of 1 column",
        "+2.50 ± 0.50",
        "2",
        "[Table 1](papers/tests.md#tests-main)",
    ]
    assert "Old comes out as published" not in opening and "Old comes out as published" in text
    assert verdict.__doc__ is not None and verdict.__doc__.split("\n\n")[2] in text
    anchors = set(re.findall(r"\]\((?:papers/tests.md)?#([^)]+)\)", text))
    assert "tests-main" in anchors and all(f'<a id="{anchor}">' in text for anchor in anchors)


def test_page_sums_up_what_was_run(results: Results, known: Paper) -> None:
    some_results(results, known)
    text = text_of(results)
    assert line(text, "[Table 1](papers/tests.md#tests-main)", "7 of 12")[3:] == ["10.5 (NVIDIA H200)", "tf32"]
    assert line(text, "| all |", "H200")[2:4] == ["13 of 26", "19.5 (NVIDIA H200)"]


def test_a_shared_run_costs_once(results: Results, known: Paper, tmp_path: Path) -> None:
    shared = TOML.replace("experiment = {rounds = 77}", 'experiment = {data = {partition = "IID()"}}')
    (tmp_path / "tests.toml").write_text(shared, encoding="utf-8")
    both = catalogue.read(tmp_path / "tests.toml")
    add(results, both.tables["main"], "easy", "old", [0.7, 0.7])
    lines = "\n\n".join(page._cost([both], results, page.Place()))
    assert line(lines, "[Table 3]")[2:4] == ["2 of 6", ""]
    assert line(lines, "| all |")[2:4] == ["4 of 23", "3.0 (NVIDIA H200)"]


def test_page_explains_the_variant(results: Results, known: Paper) -> None:
    some_results(results, known)
    text = text_of(results)
    assert line(text, "| first |")[1:3] == ["61.0 ± 1.4", "2"]
    assert line(text, "| second |")[1:3] == ["81.0 ± 1.4", "2"]
    assert line(text, "| third | not run |")[2] == "0 of 2"
    assert "**second** is used: the first that reaches 80.0." in text
    assert "[tests/open/first/new/0](../../papers/results/tests/open/first/new/0.json)" in text  # none disappears
    section = text[text.index('id="tests-open"') : text.index('id="tests-single"')]
    assert line(section, "| old |")[2] == "81.0 ± 1.4"
    add(results, known.tables["open"], "", "old", [0.70, 0.72], variant="second")
    assert "No variant is chosen yet" in text_of(results)
    add(results, known.tables["open"], "", "old", [0.60, 0.60], variant="third")
    assert "**second** is used: none reaches 80.0, and it comes nearest." in text_of(results)


def test_page_without_results(results: Results, known: Paper) -> None:
    text = text_of(results)
    assert line(text[: text.index("## The rule")], "New is more")[2] == "not run yet"
    assert text.count("Not run") == 4 and ".svg" not in text


def test_page_is_the_same_every_time(results: Results, known: Paper, tmp_path: Path) -> None:
    some_results(results, known)
    written = page.write(results.folder, tmp_path / "docs" / "papers.md")
    assert [file.relative_to(tmp_path).as_posix() for file in written] == [
        "docs/papers.md",
        "docs/papers/tests.md",
        "docs/papers/findings.md",
        "docs/papers/tests-main.svg",
        "docs/papers/tests-single.svg",
    ]
    before = [file.read_bytes() for file in written]
    page.write(results.folder, tmp_path / "docs" / "papers.md")
    assert [file.read_bytes() for file in written] == before
    assert [text.decode() for text in before[:3]] == list(page.pages(results.folder).values())
    assert "](tests-main.svg)" in before[1].decode()
    assert b"<dc:date>" not in before[3] and b"1 of 2 diverged" in before[3]


def test_links_lead_from_wherever_the_page_is(results: Results, known: Paper, tmp_path: Path) -> None:
    some_results(results, known)
    page.write(results.folder, tmp_path / "a" / "b" / "mine.md")
    for file, least in (("mine.md", 1), ("mine/tests.md", 10)):
        whole = tmp_path / "a" / "b" / file
        links = set(re.findall(r"\]\(([^)#]+)[^)]*\)", whole.read_text(encoding="utf-8")))
        assert len(links) >= least
        assert all((whole.parent / link).exists() for link in links)


def test_the_reading_is_inserted(results: Results, known: Paper, tmp_path: Path) -> None:
    (tmp_path / "tests.md").write_text("An honest reading.\n", encoding="utf-8")
    assert "the rule for claims](../papers.md).\n\nAn honest reading.\n\n|" in text_of(results)


def test_results_of_cells_that_are_gone_are_shown(results: Results, known: Paper, tmp_path: Path) -> None:
    (tmp_path / "gone.toml").write_text(TOML.replace("rounds = 3", "rounds = 30"), encoding="utf-8")
    assert "belong to no table" not in text_of(results)
    add(results, catalogue.read(tmp_path / "gone.toml").tables["main"], "easy", "old", [0.7])
    text = text_of(results)
    assert "[gone/main/easy/old/0](../papers/results/gone/main/easy/old/0.json)" in text


def test_quick_results_are_labelled_and_kept_apart(results: Results, known: Paper) -> None:
    small = catalogue.papers(True)["tests"]
    for row, value in (("old", 0.5), ("new", 0.6)):
        add(results, small.tables["main"], "easy", row, [value])
    text = text_of(results, quick=True)
    assert text.count(comparison.QUICK) == 1 + len(small.tables)
    assert line(text[: text.index("## The rule")], "New is more")[2] == "QUICK: **held**"
    assert "70.00" not in text  # the paper has nothing to compare a scaled-down run with
    assert "--quick" in text
    assert comparison.QUICK in comparison.text_table(small.tables["main"], results)
    with pytest.raises(UndriftError, match="has scaled-down results"):
        text_of(results)
    add(results, known.tables["main"], "easy", "old", [0.7])
    for quick in (False, True):
        with pytest.raises(UndriftError, match="both scaled-down and full results"):
            text_of(results, quick)


def test_full_results_are_not_shown_as_quick(results: Results, known: Paper) -> None:
    add(results, known.tables["main"], "easy", "old", [0.7])
    with pytest.raises(UndriftError, match="has full results"):
        text_of(results, quick=True)


def test_table_for_terminals(results: Results, known: Paper) -> None:
    some_results(results, known)
    lines = comparison.text_table(known.tables["main"], results).splitlines()
    assert lines[0] == "tests main. Table 1: accuracy in percent"
    found = [x.split("  ") for x in lines if x.startswith("easy") and " accuracy " in x]
    assert [[word.strip() for word in x if word.strip()] for x in found] == [
        ["easy", "old", "accuracy", "70.00 ± 0.50", "70.50 ± 0.71", "+0.50", "2"],
        ["easy", "new", "accuracy", "74.00 ± 1.00", "73.00 ± 1.41", "−1.00", "2"],
    ]
    assert sum("not run" in x for x in lines) == 2 * 4
    assert "Variant: second" in comparison.text_table(known.tables["open"], results)


def test_a_curve_without_the_column_has_no_value(results: Results, known: Paper) -> None:
    add(results, known.tables["main"], "easy", "old", [0.7, 0.7])
    assert line(text_of(results), "| loss |", "2.000")[4:7] == ["2.000", "no value", ""]


def test_page_and_verdict_need_no_libraries() -> None:
    """The page is also written where nothing is installed."""
    heavy = "{'torch', 'numpy', 'matplotlib', 'pandas', 'rich'}"
    code = f"import sys, papers.page; print(*{heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ""


# ------------------------------------------------------------------------------------------------------ drawings


@pytest.mark.parametrize(
    ("drawing", "curve"),
    [
        ("{kind = 'layers', column = 'x'}", {"x": [None, [1.0, 2.0]]}),
        ("{kind = 'path', column = 'x'}", {"x": [[1.0, 2.0], [2.0, 3.0], [3.0, 1.0]]}),
        ("{kind = 'path', label = 'axis'}", {"model": [[1.0, 2.0], [2.0, 3.0]], "target": [[1.0, 2.0], None]}),
        ("{kind = 'curves', column = 'x'}", {"x": [[1.0, 2.0], None, [2.0, 3.0]]}),
        ("{kind = 'curves', column = 'x', log = true}", {"x": [1.0, None, 0.1]}),
    ],
)
def test_every_kind_is_drawn(
    results: Results, known: Paper, tmp_path: Path, drawing: str, curve: dict[str, Any]
) -> None:
    from papers import drawings

    text = TOML.replace('{kind = "layers", column = "bars", label = "bar"}', drawing)
    (tmp_path / "tests.toml").write_text(text, encoding="utf-8")
    table = catalogue.read(tmp_path / "tests.toml").tables["single"]
    assert not drawings.drawable(table, results)
    add(results, table, "", "old", [curve])
    assert drawings.drawable(table, results)
    drawings.draw(table, results, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_an_unknown_kind_is_refused(results: Results, known: Paper, tmp_path: Path) -> None:
    from papers import drawings

    (tmp_path / "tests.toml").write_text(TOML.replace('kind = "layers"', 'kind = "layer"'), encoding="utf-8")
    table = catalogue.read(tmp_path / "tests.toml").tables["single"]
    add(results, table, "", "old", [{"bars": [[1.0]]}])
    with pytest.raises(UndriftError, match="Did you mean 'layers'"):
        drawings.draw(table, results, tmp_path / "a.svg")


# ------------------------------------------------------------------------------------------- this repository's own


@pytest.mark.skipif(not (ROOT / "docs" / "papers.md").exists(), reason="docs/papers.md is not written yet")
def test_the_page_is_what_the_results_generate(tmp_path: Path) -> None:
    """If this fails: undrift reproduce --page docs/papers.md."""
    for name, text in page.pages(ROOT / DEFAULT).items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text


def test_every_result_belongs_to_a_cell() -> None:
    """A cell whose settings were changed after it ran would leave a result behind that nothing shows."""
    if not (ROOT / DEFAULT).exists():
        return
    cells = {cell.key: cell for cell in catalogue.cells(catalogue.select())}
    for file in sorted((ROOT / DEFAULT).rglob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert file.relative_to(ROOT / DEFAULT).with_suffix("").as_posix() == result["cell"]
        assert result["cell"] in cells, f"{file} belongs to no cell"
        assert result["digest"] == cells[result["cell"]].digest, f"{file} has other settings than its cell"


def test_every_claim_can_be_judged(tmp_path: Path) -> None:
    """Tables, figures, rows and columns that the papers' claims name are there."""
    nothing = Results(tmp_path)
    for paper in catalogue.papers().values():
        for claim in paper.claims:
            found = judge(claim, page._claimed(paper, claim), nothing)
            assert (found.words, found.total > 0) == ("not run yet", True), claim["text"]
