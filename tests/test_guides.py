"""Pages that name files, sections of the report and measured figures: what they say is there."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib

import pytest

import undrift as ud
from tests.pages import DOCS, ROOT
from undrift.tools.study.file import read_study

PERFORMANCE = (DOCS / "performance.md").read_text(encoding="utf-8")
CONTRIBUTING = (DOCS / "contributing.md").read_text(encoding="utf-8")


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def row(rows: list[dict], **wanted) -> dict:
    (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return found


def shown() -> dict[str, str]:
    """What the page on performance must say, made from the results, by what it is about."""
    cpu, busy, stacked = results("cpu")["rows"], results("busy")["rows"], results("stacked")["rows"]
    host = row(results("hostdata")["rows"], what="speed")
    methods, ranks = results("methods")["rows"], results("ranks")["rows"]
    found = {}
    for case in ("logistic 784", "MLP 784-200", "LeNet-5", "ResNet-20", "VGG-9"):
        one = row(cpu, case=case)
        speed = one["samples_per_second"]
        found[case] = (
            f"{case} | {speed['loop']:,.0f} | {speed['auto']:,.0f} | {one['lanes']} | {one['auto_over_loop']:.2f} |"
        )
    for side, written in {
        "undrift, tf32": '`precision="tf32"`',
        "undrift, tf32, compiled": '`precision="tf32"`, `compile=True`',
        "undrift, bf16": '`precision="bfloat16"`',
        "undrift, bf16, compiled": '`precision="bfloat16"`, `compile=True`',
    }.items():
        found[side] = f"| {written} | {row(results('pfl')['rows'], side=side)['ms']:.2f} |"
    found["busy"] = f"{busy['16']['median']:.1%} of the time with 16 lanes and {busy['50']['median']:.1%} with 50"
    rule = busy["the rule's"]["median"]
    found["rule"] = f"undrift chooses, {rule:.1%}"
    found["host"] = (
        f"{host['host, samples/s']:,.0f} samples per second from the host, {host['device, samples/s']:,.0f} from"
    )
    times = [row(methods, method=f"FedAvg{rest}")["ms"] for rest in (", deterministic=True", "")]
    found["deterministic"] = f"{times[0]:.1f} instead of {times[1]:.1f} ms per round"
    ratio = 1 / row(stacked, problem="paper5", compile=False)["times as fast"]
    found["side by side"] = f"took {ratio:.2f} of the time that they take one after another"
    found["processes"] = f"thread each took {1 / row(ranks, processes='2')['times']:.2f} of the time"
    return found


@pytest.mark.parametrize("what", shown())
def test_figures_of_the_page_on_performance_are_measured(what):
    assert shown()[what] in " ".join(PERFORMANCE.split())


def test_runs_side_by_side_are_as_far_apart_as_the_page_on_reproducibility_says():
    apart = row(results("stacked")["rows"], problem="paper5", compile=False)["accuracies apart, points"]
    text = " ".join((DOCS / "reproducibility.md").read_text(encoding="utf-8").split())
    assert f"eight runs side by side were up to {apart:.2g} percentage points away" in text


def test_the_page_on_the_report_has_its_sections_in_order():
    source = (ROOT / "src/undrift/tools/report/page.js").read_text(encoding="utf-8")
    listed = source.partition("const SECTIONS = {")[2].partition("\n};")[0]
    sections = re.findall(r'^  \w+: \["([^"]+)"', listed, re.M)
    page = re.findall(r"^## (.+)$", (DOCS / "how-to/report.md").read_text(encoding="utf-8"), re.M)
    assert len(sections) == 8 and [heading for heading in page if heading in sections] == sections
    assert all(f'"{name}"' in source for name in ("over", "measured on", "details of"))


@pytest.mark.parametrize("file", ["examples/study.toml", "docs/how-to/study.md"])
def test_every_method_of_a_study_that_is_shown_has_as_many_settings(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    text = re.search(r'```toml title="study.toml"\n(.*?)```', text, re.DOTALL)[1] if file.endswith(".md") else text
    assert len({cell.combinations for cell in read_study(tomllib.loads(text), file).cells}) == 1


def test_what_the_readmes_commands_leave_is_ignored_by_git():
    assert {"runs/", "/report.html"} <= {*(ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()}


PATHS = [path for path in re.findall(r"`([\w/-]+\.(?:py|md|toml|js))`", CONTRIBUTING) if "/" in path]
PLACES = [
    (name, path)
    for names, path in re.findall(r"((?:`\w+`(?:, | and )?)+) in `([\w/.]+\.py)`", CONTRIBUTING)
    for name in re.findall(r"\w+", names.replace(" and ", " "))
]


def test_files_that_contributors_are_sent_to_are_there():
    assert len(PATHS) > 30
    for path in PATHS:
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "src/undrift")), path


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_what_contributors_are_to_change_is_in_that_file(name, path):
    file = next(folder / path for folder in (ROOT, ROOT / "src/undrift") if (folder / path).exists())
    assert re.search(rf"^(?:def |class )?{name}\b", file.read_text(encoding="utf-8"), re.M), (name, path)


@pytest.mark.parametrize("given", [ud.Client, ud.Server, ud.Totals, ud.Batch, ud.Plan], ids=lambda kind: kind.__name__)
def test_the_page_on_hooks_has_every_field_of_what_hooks_are_given(given):
    text = (DOCS / "hooks.md").read_text(encoding="utf-8").partition("## What hooks are given")[2]
    text = text.partition("\n## ")[0]
    missing = {field.name for field in dataclasses.fields(given) if not re.search(rf"`{field.name}[`(]", text)}
    internal = {"gradients_of", "having_data", "find_features", "find_rates", "fates"}
    assert not missing - internal
