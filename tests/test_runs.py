"""A run's folder: it repeats, it resumes with the same bits, and it is never left half-written."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import undrift as ud
from tests import experiments
from tests.experiments import StopError, stop_after
from tests.killing import EXPERIMENT, Dead, DiesAtWrite, count, finish, kill_and_resume, undrift, what_it_left
from tests.problems import make_clients, net, same_bits
from undrift.files import unseal
from undrift.tools import config, experiment
from undrift.training.checkpoint import pack, parse_interval, unpack

LOCAL = ud.Local(epochs=2, batch_size=8, lr=0.1)
METHODS = {
    "FedAvg": ud.FedAvg(),
    "FedProx": ud.FedProx(0.1, target=ud.TemporalEnsemble(0.5)),
    "Scaffold": ud.Scaffold(),
    "FedNova": ud.FedNova(),
    "FedDyn": ud.FedDyn(0.1) + ud.FedNLR(),
    "FedRS": ud.FedRS(0.5),
    "FedLC": ud.FedLC(1.0),
    "CCVR": ud.CCVR(samples_per_class=10),
    "TwoDLRD": ud.TwoDLRD(2),
    "AllDecreasing": ud.AllDecreasing(2),
    "AdditiveTuning": ud.AdditiveTuning(2),
    "FirstStepOnly": ud.FirstStepOnly(2),
    "FedCurv": ud.FedCurv(0.1),
    "FedCL": ud.FedCL(0.1, target=ud.TemporalEnsemble(0.5)),
    "SignAgreement": ud.SignAgreement(2),
    "Projection": ud.Projection(3.0) + ud.GradientNoise(0.01),
    "ServerTraining": ud.ServerTraining(lr=0.1),
    "FedAvgM": ud.FedAvgM(),
    "FedAdam": ud.FedAdam(0.01),
    "FedYogi": ud.FedYogi(0.01),
    "FedAdagrad": ud.FedAdagrad(0.01),
    "ServerSGD": ud.ServerSGD(momentum=0.9),
    "ServerAdam": ud.ServerAdam(0.01),
    "ServerYogi": ud.ServerYogi(0.01),
    "ServerAdagrad": ud.ServerAdagrad(0.01),
}


def test_every_method_is_tried_here():
    tried = {
        type(part).__name__
        for method in METHODS.values()
        for part in ud.Method(*getattr(method, "parts", (method,))).parts
    }
    assert tried == set(ud.METHODS)


@pytest.mark.parametrize(
    ("method", "engine"),
    [*((method, "plain") for method in METHODS.values()), (METHODS["FedDyn"], "lanes")],
    ids=[*METHODS, "lanes"],
)
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path, method, engine):
    """Stopped after rounds 2 and 4, so that what round 2's checkpoint has is checkpointed again in part."""
    data = make_clients([23, 5, 0, 41, 10, 17, 4])
    options = {"rounds": 5, "local": LOCAL, "participation": 3, "seed": 2, "engine": engine}
    whole = ud.train(net(dropout=0.2), data, method, **options)
    for resume, rounds in ((False, 2), (True, 4)):
        with pytest.raises(StopError):
            ud.train(
                net(dropout=0.2),
                data,
                method,
                out=tmp_path / "r",
                resume=resume,
                on_round=stop_after(rounds),
                **options,
            )
    result = ud.train(net(dropout=0.2), data, method, out=tmp_path / "r", resume=True, **options)
    assert same_bits(result.params, whole.params)
    plain = [
        json.loads(json.dumps([{k: v for k, v in row.items() if k != "seconds"} for row in r.history]))
        for r in (result, whole)
    ]
    assert plain[0] == plain[1]
    assert count(tmp_path / "r") == 5


class WithNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_running_statistics_are_in_the_checkpoint(tmp_path):
    torch.manual_seed(0)
    model, data = WithNorm().double(), make_clients([16, 24, 8])
    options = {"rounds": 4, "local": ud.Local(steps=3, batch_size=8, lr=0.1)}
    whole = ud.train(model, data, **options)
    with pytest.raises(StopError):
        ud.train(model, data, out=tmp_path / "r", on_round=stop_after(2), **options)
    result = ud.train(model, data, out=tmp_path / "r", resume=True, **options)
    assert same_bits(result.model.state_dict(), whole.model.state_dict())


def test_the_last_two_checkpoints_are_kept_and_what_they_need(tmp_path):
    data = make_clients([10] * 40)
    options = {"local": ud.Local(steps=1, lr=0.1), "participation": 2}
    ud.train(net(), data, ud.Scaffold(), rounds=40, out=tmp_path / "r", checkpoint_every=1, **options)
    files = {file.name for file in (tmp_path / "r" / "checkpoint").iterdir()}
    assert {name for name in files if name.startswith("round")} == {
        f"round-{n}.{e}" for n in (39, 40) for e in ("json", "safetensors")
    }
    newest, before = (unseal(tmp_path / "r" / "checkpoint" / f"round-{r}.json")["files"] for r in (40, 39))
    assert files == {*newest, *before, "round-39.json", "round-40.json"} and not newest.keys() & before.keys()
    assert len(files) <= 2 * (2 + 2 * 16), "gathered when they would be too many"


def test_a_broken_checkpoint_falls_back_to_the_one_before(tmp_path):
    data, options = make_clients([10, 20]), {"rounds": 6, "local": LOCAL}
    whole = ud.train(net(), data, **options)
    with pytest.raises(StopError):
        ud.train(net(), data, out=tmp_path / "r", checkpoint_every=2, on_round=stop_after(5), **options)
    newest = tmp_path / "r" / "checkpoint" / "round-5.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    result = ud.train(net(), data, out=tmp_path / "r", resume=True, **options)
    assert same_bits(result.params, whole.params) and count(tmp_path / "r") == 6


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_death_at_any_moment_between_two_files(tmp_path, monkeypatch, before):
    """Die at the k-th file that is written, just before its rename or just after, for every k; then go on."""
    data = make_clients([10, 20, 8, 12, 9])
    options = {"rounds": 4, "local": ud.Local(steps=1, lr=0.1), "participation": 2, "engine": "plain"}
    whole = ud.train(net(), data, ud.Scaffold(), **options)
    dying, moments = DiesAtWrite(monkeypatch, before), 0
    for k in range(1, 100):
        folder, dying.left = tmp_path / f"{before}-{k}", k
        try:
            found = ud.train(net(), data, ud.Scaffold(), out=folder, checkpoint_every=1, **options)
        except Dead:
            moments, dying.left = moments + 1, 0
            resume = (folder / "config.toml").exists()
            found = ud.train(net(), data, ud.Scaffold(), out=folder, checkpoint_every=1, resume=resume, **options)
        assert same_bits(found.params, whole.params), k
        assert count(folder) == 4 and not list(folder.glob("*.partial"))
        if dying.left > 0:  # it lived
            break
    assert moments >= 12


def test_two_processes_do_not_share_a_folder(tmp_path):
    data, options = make_clients([10, 20]), {"rounds": 2, "local": LOCAL}

    def meddle(row):
        with pytest.raises(ud.UndriftError, match="Another process uses"):
            ud.train(net(), data, out=tmp_path / "r", resume=True, **options)

    ud.train(net(), data, out=tmp_path / "r", on_round=meddle, **options)


def test_a_finished_run_is_given_back_and_a_restarted_one_is_not_finished(tmp_path):
    data, options = make_clients([10, 20]), {"rounds": 3, "local": LOCAL}
    first = ud.train(net(), data, out=tmp_path / "r", checkpoint_every=2, **options)
    again = ud.train(net(), data, out=tmp_path / "r", resume=True, on_round=stop_after(1), **options)
    assert same_bits(again.params, first.params) and len(again.history) == 3, "no round was trained again"
    with pytest.raises(ud.UndriftError, match="has already trained 3 rounds, but rounds is 2"):
        ud.train(net(), data, out=tmp_path / "r", resume=True, **{**options, "rounds": 2})


def test_checkpoints_that_cannot_be_read_are_not_passed_over(tmp_path):
    data, options = make_clients([10, 20]), {"rounds": 4, "local": LOCAL}
    with pytest.raises(StopError):
        ud.train(net(), data, out=tmp_path / "r", on_round=stop_after(2), **options)
    for file in (tmp_path / "r" / "checkpoint").glob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(ud.UndriftError, match=r"None of the checkpoints in .* can be read"):
        ud.train(net(), data, out=tmp_path / "r", resume=True, **options)
    assert count(tmp_path / "r") == 2, "nothing is lost"


def test_other_data_of_the_same_shape_are_refused(tmp_path):
    data, options = make_clients([10, 20]), {"rounds": 4, "local": LOCAL}
    with pytest.raises(StopError):
        ud.train(net(), data, out=tmp_path / "r", on_round=stop_after(2), **options)
    data.store["x"] = data.store["x"] * 3
    with pytest.raises(ud.UndriftError, match="with training data"):
        ud.train(net(), data, out=tmp_path / "r", resume=True, **options)


def test_what_does_not_belong_together_is_refused(tmp_path):
    data, options = make_clients([10, 20]), {"rounds": 4, "local": LOCAL}
    with pytest.raises(StopError):
        ud.train(net(), data, out=tmp_path / "r", on_round=stop_after(2), **options)
    wrong = {
        "with seed 0, not 1": {"seed": 1},
        "with method FedAvg.*, not Scaffold": {"method": ud.Scaffold()},
        "with local Local.*, not Local": {"local": ud.Local(steps=1, lr=0.1)},
        "was started with clients a round 2, not 1": {"participation": 1},
    }
    for sentence, changed in wrong.items():
        with pytest.raises(ud.UndriftError, match=sentence):
            ud.train(net(), data, out=tmp_path / "r", resume=True, **{**options, **changed})
    with pytest.raises(ud.UndriftError, match="with training data"):
        ud.train(net(), make_clients([11, 20]), out=tmp_path / "r", resume=True, **options)
    with pytest.raises(ud.UndriftError, match="already contains a run"):
        ud.train(net(), data, out=tmp_path / "r", **options)
    with pytest.raises(ud.UndriftError, match="contains no run to resume"):
        ud.train(net(), data, out=tmp_path / "other", resume=True, **options)
    with pytest.raises(ud.UndriftError, match="resume=True needs the folder"):
        ud.train(net(), data, resume=True, **options)
    with pytest.raises(ud.UndriftError, match="checkpoint_every needs a folder"):
        ud.train(net(), data, checkpoint_every=2, **options)


def test_intervals():
    assert (
        parse_interval(3) == (3, None)
        and parse_interval("2.5s") == (None, 2.5)
        and parse_interval(None) == (None, None)
    )
    for wrong in (0, -1, True, 1.5, "soon", "s", "5m", "-3s"):
        with pytest.raises(ud.UndriftError, match="checkpoint_every must be"):
            parse_interval(wrong)


def test_trees_go_to_json_and_back():
    tensors: dict[str, torch.Tensor] = {}
    tree = {"b": [torch.ones(2), (torch.tensor(3), {})], "a": (), "half": torch.ones(1, dtype=torch.bfloat16)}
    back = unpack(json.loads(json.dumps(pack(tree, "t", tensors))), tensors)
    twins = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert unpack(pack(twins, "t", tensors), tensors)["a.b"] == 0
    assert list(back) == ["b", "a", "half"] and isinstance(back["b"][1], tuple) and back["a"] == ()
    assert torch.equal(back["b"][0], torch.ones(2)) and back["half"].dtype == torch.bfloat16


def test_the_config_repeats_the_run(tmp_path):
    data = ud.load("digits", ud.Dirichlet(0.3), 10, seed=4, validation_fraction=0.1, augment=ud.CropFlip(1))
    options = {"rounds": 3, "local": ud.Local(epochs=1, batch_size=16, lr=ud.decay(0.1, 0.9)), "participation": 4}
    first = ud.train(
        "cnn", data, ud.FedProx(ud.inverse(0.1, 3)) + ud.ServerSGD(momentum=0.5), out=tmp_path / "a", seed=7, **options
    )
    again = experiment.run(config.checked(config.read(tmp_path / "a"), "a"), tmp_path / "b")
    assert same_bits(first.params, again.params)
    texts = [(tmp_path / name / "config.toml").read_text() for name in "ab"]
    bodies = [text.partition("\nmodel")[2] for text in texts]
    assert bodies[0].replace("# checkpoint_every: not set", 'checkpoint_every = "30s"') == bodies[1]
    for chosen in (
        'engine = "auto"',
        "lanes = ",
        'device = "cpu"',
        "compile = false",
        "threads = ",
        'loss = "cross_entropy"',
    ):
        assert chosen in texts[0]


def test_what_a_file_cannot_hold_is_said(tmp_path):
    options = {"rounds": 1, "local": ud.Local(steps=1, lr=lambda t: 0.1)}
    ud.train(net(), make_clients([5, 6]), loss=lambda z, y: z.square().mean(1), out=tmp_path / "r", **options)
    text = (tmp_path / "r" / "config.toml").read_text()
    for what in ("model", "loss", "lr", "data"):
        assert any(line.startswith(f"# {what}:") and "does not repeat the run" in line for line in text.splitlines()), (
            what
        )


def test_bytes_are_those_of_what_travels():
    """By hand: 92 float64 weights both ways, a weight up, and SCAFFOLD's control variates down and up beside them."""
    data, options = make_clients([10, 20, 30]), {"rounds": 3, "local": LOCAL, "participation": 2}
    weights = sum(p.numel() for p in net().parameters()) * 8
    plain, scaffold = (ud.train(net(), data, method, **options).history for method in (ud.FedAvg(), ud.Scaffold()))
    assert [row["bytes_down"] for row in plain] == [2 * weights] * 3
    assert [row["bytes_up"] for row in plain] == [2 * (weights + 8)] * 3
    assert [row["total_bytes"] for row in plain] == [(4 * weights + 16) * t for t in (1, 2, 3)]
    assert [row["bytes_down"] for row in scaffold] == [2 * 2 * weights] * 3
    assert [row["bytes_up"] for row in scaffold] == [2 * (2 * weights + 8)] * 3


@pytest.mark.long  # tests/soak/test_kill.py has a hundred
def test_a_kill(tmp_path):
    """One here; `make soak` has ten for each of five methods."""
    kill_and_resume(tmp_path, "Scaffold()", rounds=30, kills=1, seed=0)


def test_ctrl_c_leaves_a_run_that_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.toml").write_text(
        EXPERIMENT.format(method="FedAvg()", rounds=30).replace("= 2\n\n[data]", '= "1000s"\n\n[data]')
    )
    experiments.undrift("run", "e.toml", "--out", "whole")
    process = undrift("run", "e.toml", "--out", "broken", cwd=tmp_path)
    while process.poll() is None and count(tmp_path / "broken") < 3:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and err.endswith("stopped; resume with: undrift resume broken\n")
    assert 3 <= count(tmp_path / "broken") < 30
    assert "30 rounds" in finish(undrift("resume", "broken", cwd=tmp_path))
    assert what_it_left(tmp_path / "broken") == what_it_left(tmp_path / "whole")
    assert (
        experiments.undrift("resume", "broken")
        == "broken is finished; to train it further, ask for more rounds with --rounds.\n"
    )


def test_checkpoints_by_the_clock(tmp_path):
    data, options = make_clients([10, 20]), {"rounds": 5, "local": LOCAL}
    ud.train(net(), data, out=tmp_path / "often", checkpoint_every="0s", **options)
    ud.train(net(), data, out=tmp_path / "never", checkpoint_every="1000s", **options)
    assert (tmp_path / "often" / "checkpoint" / "round-5.json").exists()
    left = {name.partition(".")[0] for name in os.listdir(tmp_path / "never" / "checkpoint")}
    assert left == {"round-5", "rows-5"}, "only what a longer run would go on from"
    assert Path(tmp_path / "never" / "model.safetensors").exists()
