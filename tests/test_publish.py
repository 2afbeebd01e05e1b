"""`undrift publish`: what is written loads again, as the card says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import undrift as ud
from tests.experiments import reseal, undrift
from tests.problems import make_clients, net, same_bits
from undrift.tools import config
from undrift.tools import publish as publishing
from undrift.tools.publish import publish, upload

LOCAL = ud.Local(steps=2, batch_size=16, lr=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, ud.Result]:
    folder = tmp_path_factory.mktemp("runs") / "mine"
    data = ud.load("digits", "Dirichlet(0.5)", 5, client_test_fraction=0.2)
    options = {"rounds": 2, "local": LOCAL, "participation": 2}
    return folder, ud.train("mlp(hidden=12)", data, "FedProx(0.1)", out=folder, **options)


@pytest.fixture
def undrawn(monkeypatch):
    """Without figures, which take seconds."""
    monkeypatch.setattr(publishing, "draw", lambda payload, folder: [])


def code(card: str) -> str:
    return re.search(r"```python\n(.*?)```", card, re.S)[1]


def test_the_folder_loads_as_its_card_says(run, tmp_path, monkeypatch):
    folder, result = run
    files = publish(folder, tmp_path / "out", license="apache-2.0")
    assert {"README.md", "config.json", "config.toml", "metrics.jsonl", "model.safetensors"} <= {*files}
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path / "out")
    names: dict = {}
    exec(code(card), names)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(names["model"](x), result.model.eval()(x)) and not names["model"].training

    _, head, body = card.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["license"] == "apache-2.0" and fields["library_name"] == "undrift"
    ((measured,),) = [entry["results"] for entry in fields["model-index"]]
    last = result.history[-1]
    assert {m["type"]: m["value"] for m in measured["metrics"]} == {
        "accuracy": pytest.approx(last["accuracy"], abs=1e-6), "loss": pytest.approx(last["loss"], abs=1e-6)
    }  # fmt: skip
    assert f"| test set | accuracy | {last['accuracy']:.4f} |" in body
    assert f"| clients' own data, worst tenth | accuracy | {last['client_accuracy_worst']:.4f} |" in body
    for word in ("`FedProx(mu=0.1)`", "Dirichlet(alpha=0.5)", "2 in the last round", "@software{undrift"):
        assert word in body, word
    for picture in re.findall(r"\]\((figures/.*?)\)", body):
        assert (tmp_path / "out" / picture).stat().st_size > 1000
    assert "figures/accuracy.png" in body
    again = config.checked(config.read(tmp_path / "out"), "out")
    assert again.model == "mlp(hidden=12)" and again.rounds == 2, "the settings repeat the run"


def test_the_machines_paths_are_not_published(run, tmp_path, undrawn):
    folder = tmp_path / "run"
    folder.mkdir()
    for file in run[0].iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("# data_dir: not set", f'data_dir = "{tmp_path}"'))
    publish(folder, tmp_path / "out")
    for name in ("README.md", "config.toml", "config.json"):
        assert str(tmp_path) not in (tmp_path / "out" / name).read_text()


def test_a_module_of_python_is_published_without_a_recipe(tmp_path, undrawn):
    data = make_clients([9, 8])
    ud.train(net(), data, rounds=1, local=LOCAL, out=tmp_path / "r")
    publish(tmp_path / "r", tmp_path / "out", repo="me/mine")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "built as it was for the run" in code(card) and card.count("# mine\n") == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text()).keys() == {"undrift"}
    from safetensors.torch import load_model

    model = net()
    load_model(model, tmp_path / "out" / "model.safetensors")
    assert not same_bits(model.state_dict(), net().state_dict())


def test_what_is_refused(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(ud.UndriftError, match="is not empty; choose a new folder"):
        publish(run[0], tmp_path / "full")
    with pytest.raises(ud.UndriftError, match="is not a run"):
        publish(tmp_path, tmp_path / "out")
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.toml", "metrics.jsonl", "partition.json", "model.safetensors", "run.json"):
        (broken / name).write_bytes((run[0] / name).read_bytes())
    text = (broken / "config.toml").read_text()
    (broken / "config.toml").write_text(text.replace("hidden=12", "hidden=13"))
    with pytest.raises(ud.UndriftError, match=r"model was 'mlp\(hidden=12\)', and is 'mlp\(hidden=13\)' now"):
        publish(broken, tmp_path / "out")
    reseal(broken)
    with pytest.raises(ud.UndriftError, match=r"The weights in .* cannot be loaded"):
        publish(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_sends_nothing_unless_it_is_asked_to(run, tmp_path, monkeypatch, undrawn):
    sent = []
    hub = SimpleNamespace(
        create_repo=lambda repo, exist_ok: f"https://hub/{repo}",
        upload_folder=lambda repo_id, folder_path: sent.append((repo_id, folder_path)),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=lambda: hub))
    monkeypatch.chdir(tmp_path)
    said = undrift("publish", str(run[0]), "--to", "out", "--repo", "me/digits")
    assert said.endswith("files, in out\n") and not sent
    assert 'snapshot_download("me/digits")' in (tmp_path / "out" / "README.md").read_text()
    said = undrift("publish", str(run[0]), "--to", "two", "--repo", "me/digits", "--upload")
    assert sent == [("me/digits", "two")] and "https://hub/me/digits" in said
    hub.upload_folder = lambda **_: 1 / 0
    with pytest.raises(ud.UndriftError, match=r"was not uploaded to me/x .*the folder is complete"):
        upload(tmp_path / "two", "me/x")
