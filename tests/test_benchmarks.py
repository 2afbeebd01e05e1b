"""The benchmarks' checks: a side that is not finite, or that computed something else, has no row."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import undrift as ud
from benchmarks import agree, cifar10, cohort, convolutions, cpu, gpu_all, record, report
from benchmarks.scale import report as scale_report

LANES = {"engine": "lanes", "lanes": 2}


def problem(**options):
    generator = torch.Generator().manual_seed(0)
    sizes = (7, 12, 5)  # uneven, so that batches are padded and lanes change clients
    shares = [(torch.rand(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    local = ud.Local(epochs=1, batch_size=4, lr=0.1)
    return agree.Problem(model, ud.FederatedDataset.from_clients(shares), local, **options)


def test_a_side_that_agrees_passes_and_says_how_well():
    run, apart = problem().train("lanes", 3, **LANES)
    assert len(run.history) == 3 and apart < 1e-5


def test_the_reference_is_the_plain_engine_after_as_many_rounds():
    given = problem(method=ud.Scaffold(), rounds=2)
    run = ud.train(given.model, given.data, given.method, rounds=2, local=given.local, engine="plain")
    start = dict(given.model.named_parameters())
    assert agree.distance(given.reference, agree.change(run.params, start)) == 0
    assert given.train("lanes", 4, **LANES)[1] < 1e-5


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_a_side_beyond_the_bound_is_refused_with_its_name_the_figure_and_the_bound(precision):
    reference = {"w": torch.tensor([3.0, 4.0])}
    bound = agree.BOUNDS[precision]
    near, far = ({"w": reference["w"] * (1 + factor * bound)} for factor in (0.9, 1.2))
    assert agree.check("a side", near, reference, precision) == pytest.approx(0.9 * bound, rel=1e-3)
    with pytest.raises(SystemExit, match=rf"a side disagrees .* {1.2 * bound:.2g}, bound {bound:.2g} for {precision}"):
        agree.check("a side", far, reference, precision)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_side_that_is_not_finite_is_refused(bad):
    with pytest.raises(SystemExit, match=r"a side ended with weights that are not finite \(w\)"):
        agree.check("a side", {"w": torch.tensor([bad])}, {"w": torch.ones(1)}, "bfloat16")
    with pytest.raises(SystemExit, match="reference"):
        agree.check("a side", {"w": torch.ones(1)}, {"w": torch.tensor([bad])}, "bfloat16")


def test_a_run_that_diverges_after_the_compared_rounds_is_refused():
    given = problem()
    given.local = dataclasses.replace(given.local, lr=lambda t: 0.1 if t < 1 else 1e30)
    with pytest.raises(SystemExit, match=r"lanes (ended with weights that are not finite|stopped after 1 of 6 rounds)"):
        given.train("lanes", 6, **LANES)


def test_a_side_that_trains_on_other_batches_is_refused():
    given = problem()
    with pytest.raises(SystemExit, match="lanes disagrees with the plain engine"):
        given.train("lanes", 1, seed=1, **LANES)


def test_a_row_of_the_cpu_benchmark_goes_through_the_check():
    case = dataclasses.replace(cpu.CASES["digits MLP"], clients=3, rounds=2)
    given = cpu.make_problem(case)
    for seconds, apart, *_ in (cpu.loop(case, given), cpu.ours("all lanes", case, given)):
        assert seconds > 0 and apart < 1e-4


def test_steps_written_by_hand_are_compared_with_eager_float32(monkeypatch):
    case = dataclasses.replace(cohort.CASES["LeNet-5, 12 × 100"], clients=2, batch=4, steps=2)
    monkeypatch.setattr(cohort, "DEVICE", "cpu")
    seconds, apart = cohort.by_hand("loop", case, "bfloat16", case.batch, graph=False, repeats=2)
    assert seconds > 0 and 0 < apart < agree.BOUNDS["bfloat16"]
    wrong = {name: -w for name, w in cohort.eager(case, case.batch).items()}
    monkeypatch.setattr(cohort, "eager", lambda case, batch: wrong)
    with pytest.raises(SystemExit, match="loop disagrees with eager float32"):
        cohort.by_hand("loop", case, "bfloat16", case.batch, graph=False, repeats=1)


def test_convolutions_are_compared_with_float64(monkeypatch):
    monkeypatch.setattr(convolutions, "DEVICE", "cpu")
    layer = (2, 3, 8, 4, 5, 3, 1)
    found = convolutions.row("a layer", layer, "tf32", lambda call: 1.0)
    assert set(found["agrees"]) == set(convolutions.WAYS) and max(found["agrees"].values()) < 1e-5
    right = convolutions.conv2d_weight_grad
    monkeypatch.setattr(convolutions, "conv2d_weight_grad", lambda *args: right(*args) * 1.01)
    with pytest.raises(SystemExit, match="a layer, tf32, ours disagrees with float64"):
        convolutions.row("a layer", layer, "tf32", lambda call: 1.0)


def test_pfls_network_has_its_dropouts_and_starts_glorot_uniform():
    model, without = cifar10.CNN(), cifar10.CNN(dropout=False)
    kinds = [type(layer).__name__ for layer in model]
    assert [(kinds[i - 1], layer.p) for i, layer in enumerate(model) if isinstance(layer, nn.Dropout)] == [
        ("MaxPool2d", 0.25),
        ("ReLU", 0.5),
    ]
    assert not any(isinstance(layer, nn.Dropout) for layer in without)
    for (name, w), (other, v) in zip(model.named_parameters(), without.named_parameters(), strict=True):
        assert name == other and torch.equal(w, v)
    assert sum(w.numel() for w in model.parameters()) == 1_626_442
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(layer.weight)
            limit = math.sqrt(6 / (fan_in + fan_out))
            assert 0.98 * limit < layer.weight.abs().max() <= limit


def test_a_table_keeps_rows_of_the_same_source_and_leaves_out_what_was_refused(tmp_path):
    file = tmp_path / "results" / "some.json"
    head = record.head("some")
    table = record.Table(file, head, "case")
    table.add({"case": "a", "ms": 1})
    with table.attempt():
        raise SystemExit("b disagrees")
    table.add({"case": "c", "ms": 3})
    with pytest.raises(SystemExit, match="b disagrees"):
        table.end()
    again = record.Table(file, head, "case")
    again.add({"case": "a", "ms": 2})
    again.end()
    assert [(row["case"], row["ms"]) for row in json.loads(file.read_text())["rows"]] == [("a", 2), ("c", 3)]
    assert record.Table(file, {**head, "source": "another"}, "case").rows == []


def test_gpu_figures_of_different_sources_make_no_report():
    one = {"gpu": "NVIDIA H200", "source": "1", "commit": "abc"}
    cpu = {"gpu": "2 threads of a CPU", "source": "2", "commit": "def"}
    assert report.version({"pfl": one, "cohort": one, "cpu": cpu}) == "abc"
    for other in ({**one, "source": "2"}, {"gpu": "NVIDIA H200", "commit": "abc"}):
        with pytest.raises(SystemExit, match="not all of one version"):
            report.version({"pfl": one, "cohort": other})


def test_every_gpu_step_is_a_benchmark_that_writes_a_section():
    steps = gpu_all.steps(Path("cifar10.npz"), Path("out"))
    names = {Path(step.command[step.command.index("--json") + 1]).stem for step in steps.values()}
    assert names == {"pfl", "pfl_accuracy", "cohort", "methods", "convolutions"}
    assert all((Path(report.__file__).parent / f"{name}.py").exists() for name in names)


def test_the_page_on_scale_is_what_the_results_say():
    assert (Path(report.__file__).parent / "SCALE.md").read_text(encoding="utf-8") == scale_report.page()
