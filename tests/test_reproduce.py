"""`undrift reproduce`: the papers' files, the queue, budgets, parts, processes, prepared data and archives."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import undrift as ud
from papers import archive, arrays, catalogue, problems, queue, work
from papers.__main__ import duration, experiment_file, main
from papers.archive import Archive, pack, unpack
from papers.catalogue import Table
from papers.results import CLONE, Results
from papers.runner import Process, Runner, how, siblings
from tests import hub
from tests.experiments import undrift
from tests.problems import same_bits
from undrift import files
from undrift.errors import UndriftError
from undrift.tools import config, experiment
from undrift.training.build import prepare
from undrift.training.checkpoint import read_verified
from undrift.training.run_folder import history
from undrift.training.settings import Settings
from undrift.training.side_by_side import signature

EVERY = list(catalogue.cells(catalogue.select()))
FEDERATED = [cell for cell in EVERY if cell.options.get("kind", "train") in ("train", "coordinates", "path")]


def table_of(*cells: catalogue.Cell) -> Table:
    first = cells[0]
    columns, rows = list(dict.fromkeys(c.column for c in cells)), list(dict.fromkeys(c.row for c in cells))
    return Table(first.paper, first.table, "a table", columns, rows, [0], [], list(cells), {})


def quick_cell(rounds: int = 6, seed: int = 0, **more) -> catalogue.Cell:
    """A federated run on digits that takes a second."""
    cell = catalogue.cell("fednlr/table-1/cifar-10-dirichlet-0.1/scaffold/0", quick=True)
    return dataclasses.replace(cell, settings={**cell.settings, "rounds": rounds, "seed": seed}, **more)


# ---- the papers' files -------------------------------------------------------------------------------------------


def test_five_papers():
    assert [paper.number for paper in catalogue.papers().values()] == [1, 2, 3, 4, 5]


def test_cells_have_names_of_their_own():
    assert len({cell.key for cell in EVERY}) == len(EVERY)
    for table in catalogue.select():
        assert len({cell.digest for cell in table.cells}) == len(table.cells), table.name


def test_settings_are_those_of_experiment_files():
    distinct = {json.dumps({**c.settings, "seed": 0}, sort_keys=True): c for c in FEDERATED}
    for cell in distinct.values():
        experiment.understood(config.checked(tomllib.loads(experiment_file(cell)), cell.key))


def test_published_numbers_can_be_read_and_have_a_column():
    for table in catalogue.select():
        for figure in table.figures:
            assert set(figure.published) <= set(table.rows), (table.name, figure.name)
            for row, entries in figure.published.items():
                assert len(entries) == len(table.columns), (table.name, row)
                assert all(entry == "" or catalogue.value_of(entry) for entry in entries), (table.name, row)


def test_published_figures_spot_checked():
    """Against the papers themselves."""
    table = catalogue.papers()["fednlr"].tables["table-1"]
    published = table.figures[0].published
    assert published["FedAvg"][table.columns.index("CIFAR-10 Dirichlet(0.1)")] == "72.66 (0.20)"
    assert published["FedDyn + FedNLR"][table.columns.index("CIFAR-100 Shards(20)")] == "35.03 (0.15)"
    techniques = catalogue.papers()["four-techniques"].tables["tables-1-to-5"].figures[0].published
    assert techniques["NIID(5)"] == ["73.0 (2.6)"]


def test_the_queue_names_what_exists(tmp_path):
    for entry in queue._first():
        assert any(queue._fits(cell, entry) for cell in EVERY), entry
    order = list(queue.ordered(catalogue.select(), Results(tmp_path)))
    assert order[0].table == "steps" and len({cell.digest for cell in order}) == len(order)
    first = [cell for cell in order if cell.table == "table-1" and cell.paper == "fednlr"]
    assert [cell.row for cell in first[:4]] == ["FedAvg"] * 4, "each paper's FedAvg comes first"


def test_open_settings_are_calibrated_before_anything_else_is_run(tmp_path):
    table = catalogue.papers()["four-techniques"].tables["tables-1-to-5"]
    results = Results(tmp_path)

    def finish(variant: str, accuracy: float) -> None:
        for cell in table.at("", "centralised", variant):
            results.add(cell, {"curve": {"round": [100], "accuracy": [accuracy]}, "seed": cell.seed, "seconds": 1.0})

    waiting = list(queue.ordered([table], results))
    assert {(cell.row, cell.variant) for cell in waiting} == {("centralised", "plain")}
    finish("plain", 0.85)
    waiting = list(queue.ordered([table], results))
    assert {(cell.row, cell.variant) for cell in waiting} == {("centralised", "crop and flip")}
    finish("crop and flip", 0.91)
    waiting = list(queue.ordered([table], results))
    assert {cell.variant for cell in waiting} == {"crop and flip"} and len(waiting) == 3 * 11


def test_a_table_may_have_the_rows_of_another():
    tables = catalogue.papers()["four-techniques"].tables
    one, other = tables["tables-1-to-5"], tables["clipped"]
    assert (other.rows, other.seeds, other.figures) == (one.rows, one.seeds, one.figures) and not other.variants
    assert other.at("", "IID")[0].settings["local"]["clip_norm"] == 1.0


def test_a_word_in_a_setting_is_filled_in():
    cell = catalogue.cell("fednlr/figure-4/ratio-1.75/layer-1/0")
    assert cell.settings["method"] == "FedNLR(ratio={'0': 1.75})"
    assert not any("<" in str(cell.settings) for cell in EVERY)


# ---- one cell ----------------------------------------------------------------------------------------------------


def test_everything_scaled_down(tmp_path, capsys):
    """`undrift reproduce all --quick`."""
    where = ["--out", str(tmp_path / "results"), "--parts", str(tmp_path / "parts")]
    assert main(["all", "--quick", *where]) == 0
    printed = capsys.readouterr().out
    assert "0 paused, 0 failed" in printed and "QUICK: scaled down" in printed
    results = Results(tmp_path / "results")
    for cell in catalogue.cells(catalogue.select(quick=True)):
        found = results.get(cell)
        assert found is not None and found["quick"] and not found.get("stopped"), cell.key
    assert main(["all", "--quick", *where]) == 0
    assert "0 cells finished" in capsys.readouterr().out, "finished cells are not repeated"
    assert main(["all", "--quick", *where, "--page", str(tmp_path / "papers.md")]) == 0
    assert "QUICK" in (tmp_path / "papers.md").read_text()


def test_a_cell_in_parts_is_the_unbroken_one(tmp_path):
    cell = quick_cell()
    whole = work.run(cell, tmp_path / "whole")
    pauses = 0
    while True:
        try:
            (tmp_path / "parts").mkdir(exist_ok=True)
            parts = work.run(cell, tmp_path / "parts", late=lambda t: True)
            break
        except work.Paused:
            pauses += 1
            assert work.share_done(tmp_path / "parts", cell) == pytest.approx(pauses / 6)
    assert pauses == 5 and parts["parts"] == 6 and parts["curve"] == whole["curve"]


def test_a_cell_stops_when_it_has_had_its_samples(tmp_path):
    cell = quick_cell(rounds=50, options={"samples": 2000})
    found = work.run(cell, tmp_path)
    steps = [64 * step for step in _total_steps(tmp_path)]
    assert found["rounds"] < 50 and steps[found["rounds"] - 1] >= 2000 > steps[found["rounds"] - 2]
    assert work.run(cell, tmp_path)["curve"] == found["curve"], "also if it is interrupted right then"


def test_a_cell_may_have_as_many_samples_as_the_longest_of_others(tmp_path):
    tables = [catalogue.papers(quick=True)["2d-lrd"].tables[name] for name in ("table-3-patience", "table-3-converged")]
    results, parts = Results(tmp_path / "results"), tmp_path / "parts"
    first, then = (table.cells for table in tables)
    assert list(queue.ordered(tables, results)) == first, "those that decide come first"
    runner = Runner(results, parts, time.monotonic(), "cpu", say=lambda line: None)
    runner.one(then[0])
    assert first[0].key in runner.failed[then[0].key] and not results.by_digest
    runner = Runner(results, parts, time.monotonic(), "cpu", say=lambda line: None)
    runner.run(tables)
    assert not runner.failed and len(runner.finished) == len(first) + len(then)
    used = max(results.get(cell)["processed"] for cell in first)
    assert used == 3 * 12 * 2 * 100 and all(results.get(cell)["options"]["samples"] == used for cell in then)
    assert all(results.get(cell)["processed"] >= used for cell in then)


def _total_steps(folder: Path) -> list[int]:
    return [json.loads(line)["total_steps"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_the_training_loss_is_that_of_the_cohort(tmp_path):
    cell = quick_cell(rounds=2, options={"training_loss": True})
    found = work.run(cell, tmp_path)["curve"]["training_loss"]
    given = work.arguments(cell.settings)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    model = ud.models.get("mlp", classes=10, shape=(1, 8, 8), hidden=16, seed=0)
    x, y = (torch.cat(parts) for parts in zip(*(given["data"][i] for i in row["clients"]), strict=True))
    with torch.no_grad():
        assert found[0] == pytest.approx(float(torch.nn.functional.cross_entropy(model(x), y)), rel=1e-4)


def test_opposite_moves_are_counted(tmp_path):
    cell = quick_cell(rounds=3, options={"kind": "coordinates"})
    cell = dataclasses.replace(cell, settings={**cell.settings, "model": "logistic", "method": "FedAvg()"})
    curve = work.run(cell, tmp_path)["curve"]
    settings = {**cell.settings}
    given = work.arguments(settings)
    path = [ud.train(**{**given, "rounds": t}).params for t in (1, 2, 3)]
    start = {n: w.detach() for n, w in ud.models.get("logistic", classes=10, shape=(1, 8, 8)).named_parameters()}
    moves = [{n: b[n] - a[n] for n in b} for a, b in zip([start, *path], path, strict=False)]
    first = moves[0]["1.weight"].flatten()
    places = first.abs().topk(2).indices
    signs = torch.cat([(torch.sign(moves[1][n]) * torch.sign(moves[0][n])).flatten() for n in moves[0]])
    assert curve["opposite"][1] == pytest.approx(float((signs < 0).sum() / (signs != 0).sum()), rel=1e-3)
    assert curve["first"] == pytest.approx([float(m["1.weight"].flatten()[places[0]]) for m in moves], rel=1e-3)


def test_a_cell_that_diverges_is_finished_and_says_so(tmp_path):
    cell = quick_cell()
    cell = dataclasses.replace(cell, settings={**cell.settings, "local": {**cell.settings["local"], "lr": 1e30}})
    assert "non-finite values" in work.run(cell, tmp_path)["stopped"]


def test_example_1_of_paper_4():
    assert problems.example("FedAvg()")["probability"][0] == pytest.approx(0.367, abs=5e-4)


def test_the_quadratic_goes_where_it_is_expected(tmp_path, monkeypatch):
    """With ten clients, all of which train in every round, nothing is left to chance."""
    monkeypatch.setattr(problems, "CLIENTS", 10)
    cell = catalogue.cell("k-decay/quadratic/k-decays-by-0.995/0")
    short = dataclasses.replace(cell, settings={**cell.settings, "rounds": 20, "engine": "plain"})
    found = work.run(short, tmp_path)["curve"]["x"][-1]
    wanted = problems.expected(cell.settings["local"], 0.01, 20)[-1]
    assert wanted > 0.405 and found == pytest.approx(wanted, abs=1e-5)


def test_step_fractions_are_the_papers():
    """Its Table 1, and against a sum of the schedule itself."""
    for start, factor, published in ((3, 0.9996, 0.65), (10, 0.9996, 0.55), (33, 0.999, 0.26), (100, 0.9996, 0.50)):
        found = problems.step_fractions(f"decay({start}, {factor})", 4000)["steps_fraction"][-1]
        taken = sum(max(1, -int(-start * factor**t // 1)) for t in range(4000))
        assert round(found, 2) == published and found == pytest.approx(taken / (4000 * start), rel=1e-3)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeesValues(ud.Part):
    """Cannot be traced from round 2 on, when clients receive something of another shape."""

    def broadcast(self, params, state, server):
        return torch.ones(1 if server.round < 2 else 2)

    def gradient(self, g, params, client):
        return g if len(client.received) == 1 or client.received.sum() > client.n else {n: 2 * t for n, t in g.items()}


class Branches(torch.nn.Module):
    """Looks at values, which lanes cannot."""

    def __init__(self, shape):
        super().__init__()
        self.inner = torch.nn.Linear(shape[-1] * shape[-2], 10)

    def forward(self, x):
        return self.inner(x.flatten(1)) if x.sum() > 0 else self.inner(-x.flatten(1))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A CPU that cells take for a GPU."""
    monkeypatch.setattr(work, "_on_gpu", lambda device: True)
    monkeypatch.setitem(ud.models.MODELS, "branches", lambda classes, shape: Branches(shape))


@pytest.mark.parametrize(
    ("changed", "why", "rounds"),
    [({"model": "branches"}, "data-dependent", 0), ({"method": "SeesValues()"}, "SeesValues.gradient", 2)],
)
def test_a_cell_that_lanes_cannot_train_is_refused_on_a_gpu(tmp_path, on_a_gpu, changed, why, rounds):
    cell, spoken = with_settings(quick_cell(), **changed), []
    found = runner(tmp_path)
    found.say = spoken.append
    found.several([cell])
    assert len(spoken) == 1 and spoken[0].startswith("FAILED")
    assert why in spoken[0] and 'unless fednlr.toml has engine = "plain"' in spoken[0]
    history = tmp_path / "parts" / cell.digest / "run/metrics.jsonl"
    assert (len(history.read_text().splitlines()) if history.exists() else 0) == rounds, "no round on the plain engine"


def test_a_cell_may_ask_for_the_plain_engine_and_a_cpu_chooses_it(tmp_path, on_a_gpu, monkeypatch):
    for changed in ({"model": "branches"}, {"method": "SeesValues()"}):
        cell = with_settings(quick_cell(), engine="plain", **changed)
        assert work.run(cell, tmp_path / cell.digest)["choices"]["engine"] == "plain"
    monkeypatch.setattr(work, "_on_gpu", lambda device: False)
    cell = with_settings(quick_cell(), model="branches")
    found = work.run(cell, tmp_path / cell.digest)
    assert found["choices"]["engine"] == "plain" and found["settings"] == cell.settings


def test_on_a_gpu_lanes_are_what_is_chosen_anyway(tmp_path, on_a_gpu):
    cell = with_settings(quick_cell())
    given = {**work.arguments(cell.settings), "precision": "tf32"}
    wanted, found = ud.train(**given), work.run(cell, tmp_path / "parts")
    assert found["choices"]["engine"] == "lanes" and found["settings"] == cell.settings
    assert found["choices"]["lanes"] == wanted.choices["lanes"]
    assert found["curve"]["accuracy"][-1] == pytest.approx(wanted.history[-1]["accuracy"], abs=1e-5)


# ---- many cells --------------------------------------------------------------------------------------------------


class Clock:
    """Time that cells take by the runner's count."""

    def __init__(self, monkeypatch, seconds: dict[str, float]) -> None:
        self.now, self.seconds, self.ran = 0.0, seconds, list[str]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(queue.Costs, "seconds", lambda _, cell: self.seconds[cell.row])
        monkeypatch.setattr(work, "run", self.run)

    def run(self, cell, folder, late, device, beside=1):
        """A round a second."""
        self.ran.append(cell.row)
        needed = self.seconds[cell.row]
        for t in range(1, needed + 1):
            self.now += 1
            if late(t):
                raise work.Paused
        return {"curve": {"round": [1]}, "seconds": needed, "seed": 0, "hardware": "a clock"}


def rows_of(*names: str) -> list[Table]:
    return [table_of(*(quick_cell(row=name, options={"name": name}) for name in names))]


def runner(tmp_path: Path, budget: float | None = None) -> Runner:
    return Runner(
        Results(tmp_path / "results"), tmp_path / "parts", time.monotonic(), "cpu", budget, say=lambda line: None
    )


def test_what_does_not_fit_into_the_budget_is_not_started(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, {"a": 100, "b": 300, "c": 100, "d": 90})
    first = runner(tmp_path, 400)
    first.run(rows_of("a", "b", "c", "d"))
    assert clock.ran == ["a", "c", "d"] and len(first.finished) == 3
    clock.ran.clear()
    second = runner(tmp_path, 400)
    second.run(rows_of("a", "b", "c", "d"))
    assert clock.ran == ["b"], "what is finished is not repeated"


def test_what_is_longer_than_the_budget_runs_in_parts(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, {"long": 1000, "short": 10})
    found = runner(tmp_path, 400)
    found.run(rows_of("long", "short"))
    assert clock.ran == ["short", "long"], "first what can be finished"
    assert len(found.paused) == 1 and clock.now <= 400


def test_what_is_too_long_does_not_take_the_room_of_what_can_be_finished(tmp_path, monkeypatch):
    Clock(monkeypatch, {"large": 100, "long": 1000})
    large, long = (quick_cell(row=name, options={"name": name}) for name in ("large", "long"))
    tables = [table_of(dataclasses.replace(large, share=1.0), dataclasses.replace(long, share=0.5))]
    found = runner(tmp_path, 400)
    found.whole = found.left
    costs = queue.Costs(found.results, "a clock")
    assert found.next(tables, costs, room=0.5) is None, "it waits for the room"
    assert found.next(tables, costs, room=1.0).row == "large"
    assert found.next(tables, costs, room=0.5, busy=[large.key]).row == "long"


def test_a_cell_that_fails_does_not_end_the_queue(tmp_path, monkeypatch):
    cells = [quick_cell(row="bad"), quick_cell(2, row="good")]
    cells[0] = dataclasses.replace(cells[0], settings={**cells[0].settings, "method": "FedProx(mu=-1)"})
    found = runner(tmp_path)
    found.run([table_of(*cells)])
    assert "mu" in next(iter(found.failed.values())) and len(found.finished) == 1


def with_settings(cell: catalogue.Cell, **changed) -> catalogue.Cell:
    return dataclasses.replace(cell, settings=catalogue.merge({**cell.settings, "engine": "auto"}, changed))


def signature_of(cell: catalogue.Cell) -> str:
    given = Settings(**work.arguments(cell.settings), device="cpu")
    return signature(prepare(given), given)


LOCAL = (
    [{"lr": 0.1}, {"lr": "decay(0.2, 0.99)"}, {"clip_norm": 1.0}, {"clip_norm": 10}, {"step_schedule": "cosine()"}]
    + [{"momentum": x} for x in (0.0, 0.5, 0.9)]
    + [{"weight_decay": x} for x in (0.0, 0.1, "decay(0.1, 0.5)")]
    + [{"optimizer": f"SGD({x})"} for x in ("", "0.9", "0.5", "0.9, nesterov=True")]
    + [{"optimizer": "Adam()"}, {"optimizer": "Adam(beta2=0.9)"}, {"optimizer": "AdamW()"}, {"batch_size": 16}]
)
METHODS = [
    "FedAvg()", "FedAvg(weighting='uniform')", "FedProx(0.1)", "FedProx(decay(1.0, 0.9))", "FedNLR(0.45, 0.3)",
    "FedNLR(1, 1)", "FedNLR(ratio=1.5)", "FedNLR(ratio={'1': 2.0})", "FedDyn(0.1)", "FedDyn(0.2) + FedNLR()",
    "FedDyn(0.1) + FedNLR(depth=0.45)", "FedAvg() + ServerSGD(lr=0.5)", "FedAvg() + ServerSGD(lr=decay(1.0, 0.9))",
    "FedProx(0.1, target=TemporalEnsemble(0.2))", "FedProx(0.2, target=TemporalEnsemble(0.5))", "TwoDLRD(window=1)",
    "TwoDLRD(window=2)", "FedCL(1.0, fisher='sum')", "Scaffold()",
]  # fmt: skip


def alike_as_trained(cells):
    """Check that cells are siblings if and only if `side_by_side` takes their runs for one program."""
    shapes, together = [signature_of(cell) for cell in cells], 0
    for i, one in enumerate(cells):
        for j, other in enumerate(cells[:i]):
            assert siblings(one, other) == (shapes[i] == shapes[j] != ""), (one.settings, other.settings)
            together += siblings(one, other)
    return together


def test_cells_that_differ_in_numbers_train_in_one_program():
    base = with_settings(quick_cell(), method="FedAvg()", data={"partition": "IID()", "server_fraction": 0.1})
    assert alike_as_trained([with_settings(base, local=local) for local in LOCAL]) == 11
    assert alike_as_trained([with_settings(base, method=method) for method in METHODS]) == 6
    seeds = [with_settings(base, seed=seed, local={"lr": 0.1 * seed}) for seed in (1, 2)]
    assert siblings(*seeds) and signature_of(seeds[0]) == signature_of(seeds[1])


@pytest.mark.parametrize(
    "changed",
    [{"rounds": 7}, {"local": {"epochs": 2}}, {"data": {"clients": 6}}, {"data": {"partition": "IID()"}},
     {"model": "logistic"}, {"participation": 2}, {"engine": "plain"}, {"lanes": 2}, {"precision": "bfloat16"}],
)  # fmt: skip
def test_cells_that_differ_in_anything_else_do_not(changed):
    cell = with_settings(quick_cell())
    other = dataclasses.replace(cell, settings=catalogue.merge(cell.settings, changed))
    assert siblings(cell, cell) and not siblings(cell, other) and not siblings(other, cell)
    assert not siblings(cell, dataclasses.replace(cell, options={"training_loss": True}))


@pytest.mark.parametrize("changed", [{"engine": "plain"}, {"lanes": 2}, {"method": "FedProx("}])
def test_a_cell_that_trains_alone_or_not_at_all_has_no_siblings(changed):
    cell, other = (with_settings(quick_cell(seed=seed), **changed) for seed in range(2))
    assert not siblings(cell, other)


def test_the_papers_rows_that_train_in_one_program():
    """Scaled down, and on the same samples for all clients: of an uneven partition a CPU trains no lanes."""
    count = 0
    for table in catalogue.select(quick=True):
        cells = [cell for cell in table.cells if cell.options.get("kind", "train") == "train"]
        cells = [with_settings(cell, data={"partition": "IID()", "clients": 4}) for cell in cells]
        by_steps: dict[object, dict[str, catalogue.Cell]] = {}
        for cell in cells:
            by_steps.setdefault(cell.settings["local"].get("steps"), {})[cell.digest] = cell
        count += sum(alike_as_trained(list(own.values())) for own in by_steps.values())
    assert count > 3


def test_seeds_of_one_setting_train_in_one_program(tmp_path, monkeypatch):
    cells = [with_settings(quick_cell(seed=seed)) for seed in range(3)] + [quick_cell(rounds=9, row="longer")]
    tables = [table_of(*cells)]
    found = runner(tmp_path, budget=100.0)
    costs = SimpleNamespace(seconds=lambda cell: 10.0)
    beside = partial(found.beside, cells[0], tables)
    assert [c.seed for c in beside(costs, 3.0, [])] == [0, 1, 2]
    assert [c.seed for c in beside(costs, 3.0, [cells[1].key])] == [0, 2]
    with monkeypatch.context() as patch:
        rounds = {cells[0].digest: {2, 4}, cells[1].digest: {4}, cells[2].digest: {3}}
        patch.setattr(work, "saved", lambda folder: rounds.get(folder.name, set()))
        assert [c.seed for c in beside(costs, 3.0, [])] == [0, 1], "those that have a round in common"
        rounds.pop(cells[1].digest)
        assert [c.seed for c in beside(costs, 3.0, [])] == [0], "the others would begin"
    found.budget = 28.0
    assert [c.seed for c in beside(costs, 3.0, [])] == [0, 1], "three take 20 s, and the margins"
    found.budget = None
    found.several(cells[:3])
    assert [found.results.get(cell)["beside"] for cell in cells[:3]] == [3, 3, 3]


def test_cells_in_one_program_stop_after_the_same_round(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, {})
    found = runner(tmp_path, budget=100.0)
    assert not found.late(1)
    clock.now = 99.0
    assert not found.late(1), "another cell's first round: the one before goes on, so this one does"
    assert found.late(2) and found.late(2) and found.late(7)
    clock.now = 0.0
    assert found.late(3), "once cells have begun to stop, all do"


class Child:
    """A process that takes 130 seconds."""

    stdin = None

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def poll(self) -> int | None:
        return 1 if self.clock.now > 130 else None

    def wait(self) -> None:
        pass


def test_every_minute_there_is_a_line_for_each_process(tmp_path, monkeypatch):
    clock, spoken = Clock(monkeypatch, {"a": 100, "b": 100}), []
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(clock, "now", clock.now + 1))
    found = runner(tmp_path, 1000)
    found.say, found.processes = spoken.append, 2
    found.start = lambda cells: Process(cells, Child(clock), io.StringIO(), clock.now)
    found.ended = lambda cell, code, first: found.fail(cell, "over")
    tables = rows_of("a", "b")
    tables[0].cells[:] = [dataclasses.replace(cell, share=0.5) for cell in tables[0].cells]
    found.run(tables)
    lines = [line for line in spoken if line.startswith("running")]
    assert len(lines) == 4 and lines[0] == f"running      60 s  {tables[0].cells[0].key}: 0 of 6 rounds, starting"
    assert "120 s" in lines[2]


def test_the_line_says_how_cells_train(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "forget", lambda folder: None)
    monkeypatch.setattr(time, "monotonic", lambda: 70.0)
    cells = [with_settings(quick_cell(seed=seed), data={"partition": "IID()"}) for seed in range(2)]
    found = runner(tmp_path)
    found.several(cells)
    process = Process(cells, Child(None), io.StringIO(), 20.0)
    line = f"running      50 s  {cells[0].key} + 1: 12 of 12 rounds, 2 × 3 lanes, 2 runs as one"
    assert found.report(process) == line
    on_gpu = {"engine": "lanes", "lanes": 64, "device": "cuda:0", "compile": True}
    assert how(on_gpu) == "64 lanes, CUDA graphs, compiled"
    assert how({"engine": "plain", "why": "asked for", "lanes": 1}) == "plain engine (asked for)"


def test_side_by_side_in_processes(tmp_path, capsys):
    where = ["--out", str(tmp_path / "results"), "--parts", str(tmp_path / "parts")]
    assert main(["fednlr", "--table", "example-1", "--quick", "--processes", "2", *where]) == 0
    assert "3 cells finished, 0 paused, 0 failed" in capsys.readouterr().out
    assert len(Results(tmp_path / "results").by_digest) == 3 and not list((tmp_path / "parts").iterdir())


def test_ctrl_c_leaves_a_checkpoint_and_ends_the_processes(tmp_path):
    """A real one, with a process per cell: the parent gets it, the cell stops after its round and can go on."""
    cell = catalogue.cell("k-decay/quadratic/k=10/0")
    command = [sys.executable, "-m", "papers", "k-decay", "--table", "quadratic", "--processes", "1"]
    command += ["--out", str(tmp_path / "results"), "--parts", str(tmp_path / "parts")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    begun = tmp_path / "parts" / catalogue.cell("k-decay/quadratic/k=1/0").digest / "run" / "metrics.jsonl"
    try:
        until(lambda: begun.exists() and len(begun.read_text().splitlines()) > 3)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert "paused" in printed and "0 cells finished, 1 paused, 0 failed" in printed, printed
    assert not (tmp_path / "parts" / cell.digest).exists(), "no further cell was begun"
    assert list((begun.parent / "checkpoint").glob("*.json"))


def test_processes_end_with_their_parent(tmp_path):
    command = [sys.executable, "-m", "papers", "k-decay", "--table", "quadratic", "--processes", "1"]
    command += ["--out", str(tmp_path / "results"), "--parts", str(tmp_path / "parts")]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    begun = tmp_path / "parts" / catalogue.cell("k-decay/quadratic/k=1/0").digest / "run" / "metrics.jsonl"
    try:
        until(lambda: begun.exists() and len(begun.read_text().splitlines()) > 1)
    finally:
        parent.kill()
        parent.wait()
    time.sleep(1)
    rounds = len(begun.read_text().splitlines())
    time.sleep(1)
    assert len(begun.read_text().splitlines()) == rounds


def until(condition, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_estimates_come_from_cells_that_were_run(tmp_path):
    results = Results(tmp_path)
    cell, other = (catalogue.cell(f"fednlr/table-1/cifar-10-shards-2/{row}/0") for row in ("fedavg", "feddyn"))
    assert queue.Costs(results, "NVIDIA H200").seconds(cell) == 60 * cell.minutes
    assert queue.Costs(results, "another GPU").seconds(cell) is None
    results.add(cell, {"curve": {}, "seconds": 50.0, "seed": 0, "hardware": "another GPU"})
    costs = queue.Costs(results, "another GPU")
    assert costs.seconds(cell) == 50 and costs.seconds(other) == 20, "per round: FedDyn has 200 of 500"


# ---- data and results that travel --------------------------------------------------------------------------------


def test_prepared_data_are_the_same_data(tmp_path, monkeypatch):
    hub.pictures(tmp_path / "hub", "uoft-cs/cifar10", {"train": 40, "test": 20}, (32, 32, 3), 10, image="img")
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path / "hub"))
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    original = ud.load("cifar10", ud.Dirichlet(0.5), 3, normalize=True)
    files = arrays.prepare(["cifar10"], tmp_path / "prepared", piece=2**14)
    assert len(files) > 3 and all(file.stat().st_size < 2**14 + 2**12 for file in files[1:])
    assert arrays.use(tmp_path / "prepared") == ["cifar10"]
    monkeypatch.delenv("UNDRIFT_DATA")
    again = ud.load("cifar10", ud.Dirichlet(0.5), 3, normalize=True)
    assert again.digests == original.digests
    assert same_bits(dict(enumerate(again[1])), dict(enumerate(original[1])))
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"x")
    with pytest.raises(UndriftError, match="is damaged"):
        ud.load("cifar10", ud.Dirichlet(0.5), 3)
    files[1].unlink()
    with pytest.raises(UndriftError, match="is missing, a piece of cifar10"):
        ud.load("cifar10", ud.Dirichlet(0.5), 3)


BLOCKED = (
    "typer",
    "rich",
    "pydantic",
    "datasets",
    "pyarrow",
    "pandas",
    "matplotlib",
    "plotly",
    "PIL",
    "huggingface_hub",
)
BARE = """
import runpy, sys
sys.modules.update(dict.fromkeys({blocked!r}))  # importing one of them raises ModuleNotFoundError
sys.argv = ["papers", *{arguments!r}]
runpy.run_module("papers", run_name="__main__")
"""


def test_torch_numpy_and_safetensors_are_enough(tmp_path):
    where = ["--out", str(tmp_path / "results"), "--parts", str(tmp_path / "parts")]
    arguments = ["temporal-targets", "--table", "mnist", "--quick", "--archive", str(tmp_path / "a.tar.gz"), *where]
    code = BARE.format(blocked=BLOCKED, arguments=arguments)
    path = {**os.environ, "PYTHONPATH": str(CLONE)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=path
    )
    assert done.returncode == 0, done.stderr
    assert "5 cells finished" in done.stdout
    taken = unpack(tmp_path / "a.tar.gz", tmp_path / "home", tmp_path / "home-parts")
    assert unpack(tmp_path / "parts-a.tar.gz", tmp_path / "home", tmp_path / "home-parts") == []
    assert (
        len(taken) == 5
        and Results(tmp_path / "home").by_digest.keys() == Results(tmp_path / "results").by_digest.keys()
    )


def test_an_archive_does_not_replace_results_or_leave_its_folder(tmp_path):
    pack([("results/a/b.json", io.BytesIO(b'{"digest": "new"}'))], tmp_path / "a.tar.gz")
    (tmp_path / "home" / "a").mkdir(parents=True)
    (tmp_path / "home" / "a" / "b.json").write_text("old")
    assert unpack(tmp_path / "a.tar.gz", tmp_path / "home", tmp_path / "parts") == []
    assert (tmp_path / "home" / "a" / "b.json").read_text() == "old"
    for name in ("../evil.json", "/evil.json", "results/../../evil.json", "other/evil.json"):
        with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as tar:
            member = tarfile.TarInfo(name)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
        with pytest.raises(UndriftError, match="so it is not an archive of results"):
            unpack(tmp_path / "evil.tar.gz", tmp_path / "home", tmp_path / "parts")
    assert not list(tmp_path.rglob("evil.json"))


def archived(folder, files):
    """An archive with these contents by name, written without `pack`."""
    with tarfile.open(folder / "odd.tar.gz", "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return folder / "odd.tar.gz"


@pytest.mark.parametrize(
    "content",
    [b"[1, 2]", b"{", b"3", b"[" * 100_000, b"\xff\xfe", b'{"digest": []}', b'{"digest": "a", "curve": [1]}',
     b'{"digest": "a", "curve": {"round": [1], "accuracy": []}}', b'{"digest": "a", "curve": {"accuracy": [1]}}',
     b'{"digest": "a", "seconds": "long"}'],
)  # fmt: skip
def test_what_is_no_result_is_not_unpacked(tmp_path, content):
    archive = archived(tmp_path, {"results/a.json": b'{"digest": "a"}', "results/b/c.json": content})
    with pytest.raises(
        UndriftError, match=r"odd.tar.gz: results/b/c.json is not a cell's result .*nothing was unpacked"
    ):
        unpack(archive, tmp_path / "home", tmp_path / "parts")
    assert not [file for folder in ("home", "parts") for file in (tmp_path / folder).rglob("*")]
    (tmp_path / "home/c.json").write_bytes(content)
    with pytest.raises(UndriftError, match=r"c.json is not a cell's result .*; remove it, and run the cell again"):
        Results(tmp_path / "home")


@pytest.mark.parametrize("kind", ["text", "empty", "cut", "folder", "missing", "twice"])
def test_what_is_no_archive_is_refused(tmp_path, kind):
    archive = archived(tmp_path, {"results/a.json": b'{"digest": "a"}' + b" " * 5000})
    whole = archive.read_bytes()
    archive.unlink()
    if kind == "folder":
        archive.mkdir()
    elif kind == "twice":
        with tarfile.open(archive, "w:gz") as tar:
            for _ in range(2):
                tar.addfile(tarfile.TarInfo("parts/a/b"))
    elif kind != "missing":
        archive.write_bytes({"text": b"hello" * 500, "empty": b"", "cut": whole[: len(whole) // 2]}[kind])
    with pytest.raises(UndriftError, match=r"odd.tar.gz is not an archive of results, or is damaged \("):
        unpack(archive, tmp_path / "home", tmp_path / "parts")


def test_unfinished_cells_are_taken_over_whole_if_they_have_come_further(tmp_path):
    def cell(seconds, name, rounds):
        files = {"part.json": json.dumps({"seconds": seconds, "parts": 1}).encode(), name: b"x"}
        files |= {f"run/checkpoint/round-{rounds}.json": b"{}"} if rounds else {}
        return {f"parts/abc/{file}": content for file, content in files.items()}

    parts = tmp_path / "parts"
    tries = ((5.0, "a", 0, "a"), (4.0, "b", 0, "a"), (6.0, "c", 0, "c"), (1.0, "d", 9, "d"), (7.0, "e", 8, "d"))
    for seconds, name, rounds, kept in tries:
        unpack(archived(tmp_path, cell(seconds, name, rounds)), tmp_path / "home", parts)
        assert sorted({file.name for file in (parts / "abc").iterdir()} - {"run"}) == [kept, "part.json"]
    assert [file.name for file in parts.iterdir()] == ["abc"]


@pytest.mark.parametrize("name", ["results/a/b.json", "parts/abc/part.json"])
def test_an_archive_is_not_unpacked_through_links(tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "parts").mkdir()
    (tmp_path / "home/a").symlink_to(victim)
    (tmp_path / "parts/abc").symlink_to(victim)
    with pytest.raises(UndriftError, match="link"):
        unpack(archived(tmp_path, {name: b'{"digest": "a"}'}), tmp_path / "home", tmp_path / "parts")
    assert not list(victim.iterdir())


def test_the_command_says_what_is_wrong_with_an_archive(tmp_path, capsys):
    (tmp_path / "a.tar.gz").write_text("hello")
    assert (
        main(["--unpack", str(tmp_path / "a.tar.gz"), "--out", str(tmp_path / "o"), "--parts", str(tmp_path / "p")])
        == 2
    )
    assert capsys.readouterr().err.count("\n") == 1


# ---- archives of calls that are killed -----------------------------------------------------------------------------


def call(tmp_path: Path, *arguments: str, before: str = "") -> subprocess.Popen:
    """`undrift reproduce` in a process of its own, in which `before` is run first."""
    where = ["--out", str(tmp_path / "results"), "--parts", str(tmp_path / "parts")]
    command = [*arguments, *where, "--archive", str(tmp_path / "a.tar.gz")]
    code = f"import runpy, sys\n{before}\nsys.argv = ['papers', *{command!r}]\n"
    code += "runpy.run_module('papers', run_name='__main__')"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)


def unpacked(tmp_path: Path, home: Path) -> list[str]:
    """The names of the results; every archive that is there must be whole."""
    archives = [tmp_path / name for name in ("a.tar.gz", "parts-a.tar.gz") if (tmp_path / name).exists()]
    return [name for archive in archives for name in unpack(archive, home / "results", home / "parts")]


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_killed_call_leaves_the_results_that_it_had(tmp_path, processes):
    """A real kill in the middle. Until then, whoever reads the archives never sees a half of one."""
    process = call(tmp_path, "fednlr", "--table", "table-1", "--quick", "--processes", processes)
    most, seen = 18 if processes == "0" else 1, []

    def enough() -> bool:
        seen.append(len(unpacked(tmp_path, tmp_path / f"home-{len(seen)}")))
        return seen[-1] >= min(most, 3)

    try:
        until(enough)
    finally:
        process.kill()
        process.wait()
    names = unpacked(tmp_path, tmp_path / "home")
    assert seen[-1] <= len(names) < 18
    for name in names:
        assert (tmp_path / "home/results" / name).read_bytes() == (tmp_path / "results" / name).read_bytes()
    assert len(Results(tmp_path / "results").by_digest) - len(names) <= 1, "all but one that was just being archived"


OFTEN = "from papers import archive, work; work.SAVED = archive.OFTEN = 0.0"


def test_a_killed_call_leaves_the_cell_that_it_was_training(tmp_path):
    process = call(tmp_path, "k-decay", "--table", "quadratic", "--processes", "0", before=OFTEN)
    cell = catalogue.cell("k-decay/quadratic/k=1/0")
    try:
        until(lambda: max(work.saved(tmp_path / "parts" / cell.digest), default=0) > 20)
    finally:
        process.kill()
        process.wait()
    unpacked(tmp_path, tmp_path / "home")
    folder = tmp_path / "home/parts" / cell.digest
    rounds, there = work.saved(folder), work.saved(tmp_path / "parts" / cell.digest)
    assert len(rounds) == 2 and max(there) - 1 <= max(rounds) <= max(there)
    with pytest.raises(work.Paused):
        work.run(cell, folder, late=lambda t: t > max(rounds))
    rows, wanted = (history(at / "run") for at in (folder, tmp_path / "parts" / cell.digest))
    assert len(rows) == max(rounds) + 1, "it went on from the checkpoint"
    assert [row["x"] for row in rows[: len(wanted)]] == [row["x"] for row in wanted[: len(rows)]]
    part = json.loads((folder / "part.json").read_text())
    assert part["parts"] == 2 and part["seconds"] > 0, "the time until it was killed counts"


TRAIN = """
import dataclasses, sys
from pathlib import Path
from papers import catalogue, work
work.SAVED = 0.0
cell = catalogue.cell({key!r}, quick=True)
cell = dataclasses.replace(cell, settings=dict(cell.settings, rounds=400))
work.run(cell, Path({folder!r}))
"""


def test_checkpoints_that_are_being_replaced_are_archived_whole(tmp_path):
    """One process saves after every round and is killed; another archives all the while."""
    cell = quick_cell(rounds=400)
    folder = tmp_path / "parts" / cell.digest
    folder.mkdir(parents=True)
    code = TRAIN.format(key=cell.key, folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    kept, count, found = Archive(tmp_path / "a.tar.gz", tmp_path / "results", tmp_path / "parts"), 0, set()
    try:
        until(lambda: bool(work.saved(folder)))
        while len(found) < 8:
            assert process.poll() is None
            kept.write()
            count += 1
            unpacked(tmp_path, tmp_path / f"home-{count}")
            place = tmp_path / f"home-{count}/parts" / cell.digest
            rounds = work.saved(place)
            assert rounds, "there are always two, of which one may be replaced meanwhile"
            for t in rounds:
                read_verified(place / "run/checkpoint", t)
            found |= rounds
    finally:
        process.kill()
        process.wait()
    (tmp_path / "whole").mkdir()
    for at in (place, tmp_path / "whole"):
        with pytest.raises(work.Paused):
            work.run(cell, at, late=lambda t: t == max(rounds) + 2)
    rows, wanted = ([dict(row, seconds=0) for row in history(at / "run")] for at in (place, tmp_path / "whole"))
    assert rows == wanted, "it went on from there as if it had not been killed"


def test_a_cell_that_ends_while_it_is_archived_is_among_the_results(tmp_path, monkeypatch):
    cell, order = quick_cell(), []
    parts, results = tmp_path / "parts", Results(tmp_path / "results")
    with pytest.raises(work.Paused):
        work.run(cell, parts / cell.digest, late=lambda t: t == 3)
    kept = Archive(tmp_path / "a.tar.gz", results.folder, parts)
    look = archive._rounds_in

    def ends(folder):
        found = look(folder)
        results.add(cell, {"curve": {}, "seed": 0, "seconds": 1.0})
        work.forget(parts / cell.digest)
        return found

    replace = files.atomic_replace
    monkeypatch.setattr(files, "atomic_replace", lambda one, other: (order.append(other.name), replace(one, other))[1])
    kept.write()
    unpacked(tmp_path, tmp_path / "before")
    assert work.saved(tmp_path / "before/parts" / cell.digest) == {3}
    monkeypatch.setattr(kept, "_now", lambda: None)
    monkeypatch.setattr(archive, "_rounds_in", ends)
    order.clear()
    assert kept.write() == 1 and [n for n in order if n.endswith("gz")] == ["a.tar.gz", "parts-a.tar.gz"]
    assert unpacked(tmp_path, tmp_path / "home") == [f"{cell.key}.json"]
    assert not list((tmp_path / "home/parts").iterdir())


def test_archives_are_written_when_there_is_something_new(tmp_path, monkeypatch):
    clock, when = Clock(monkeypatch, {}), []
    found = runner(tmp_path, 1000)
    found.archive = kept = Archive(tmp_path / "out/a.tar.gz", tmp_path / "results", tmp_path / "parts")
    write = kept.write
    monkeypatch.setattr(kept, "write", lambda: (when.append(clock.now), write())[1])
    new = {130: tmp_path / "parts/abc/run/checkpoint/round-7.json", 300: tmp_path / "results/a.json"}
    for file in new.values():
        file.parent.mkdir(parents=True, exist_ok=True)
    for clock.now in range(50, 400, 10):
        if file := new.get(clock.now):
            file.write_text("{}")
        assert not found.late(1)
    assert when == [60, 180, 300], "at the first minute, and where something is new"
    monkeypatch.setattr(kept, "write", partial(disk_full, kept.file))
    spoken: list[str] = []
    found.say = spoken.append
    found.keep(new=True)
    assert spoken == [f"not archived: {str(kept.file)!r}: No space left on device."]


def disk_full(file: Path) -> None:
    raise OSError(28, "No space left on device", str(file))


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_list_says_what_remains(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fednlr", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "fednlr/table-1" in listed and "288" in listed and "next:" in listed
    assert main(["k-decay", "--figure", "quadratic"]) == 2
    assert "no table" in capsys.readouterr().err


def test_a_cells_experiment_file_runs(tmp_path, capsys):
    assert main(["--show", quick_cell().key, "--quick"]) == 0
    (tmp_path / "e.toml").write_text(capsys.readouterr().out)
    settings = config.read(tmp_path / "e.toml")
    assert settings["method"] == "Scaffold()" and settings["data"]["name"] == "digits"
    experiment.run(config.checked(settings, "e"), tmp_path / "run")


@pytest.mark.parametrize(("text", "seconds"), [("9m", 540), ("30s", 30), ("1.5h", 5400), ("45", 45)])
def test_durations(text, seconds):
    assert duration(text) == seconds


def test_the_command_line_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDRIFT_DATA", "")
    assert "k-decay/quadratic" in undrift("reproduce", "--list", "2")
