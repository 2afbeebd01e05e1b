"""Models of timm by name. Most tests need timm, and are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import undrift as ud
from undrift.models import parse_model
from undrift.tools.config import checked
from undrift.tools.experiment import understood

SHAPE = (1, 32, 32)
TINY = "timm:vit_tiny_patch16_224(depth=1, embed_dim=24, num_heads=2)"

needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


def make(text, seed=0, classes=3):
    name, options = parse_model(text)
    return ud.models.get(name, classes=classes, shape=SHAPE, seed=seed, **options)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def pictures(sizes=(5, 3, 1)):
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.rand(n, *SHAPE, generator=generator), torch.arange(n) % 3) for n in sizes]
    return ud.FederatedDataset.from_clients(clients)


def test_without_timm_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    for text in (TINY, "timm:resnet18"):
        with pytest.raises(ud.UndriftError, match=r'pip install "undrift\[vision\]"'):
            make(text)


def test_a_torchvision_for_another_torch_is_named(monkeypatch, tmp_path):
    """timm imports it, and it raises as it registers operators."""
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ud.UndriftError, match=r"nms does not exist\). Perhaps torchvision was built for"):
        make("timm:resnet18")


def test_an_unknown_tag_is_named(monkeypatch):
    def config(name):
        raise RuntimeError("Invalid pretrained tag (nope) for resnet10t.")

    fake = SimpleNamespace(is_model=lambda name: name == "resnet10t", get_pretrained_cfg=config)
    monkeypatch.setitem(sys.modules, "timm", fake)
    with pytest.raises(ud.UndriftError, match=r'no weights "nope" of this model .*list_pretrained\("resnet10t"\)'):
        make("timm:resnet10t.nope")


@needs_timm
def test_a_model_has_the_data_s_classes_channels_and_size_and_the_run_s_seed():
    state = torch.get_rng_state()
    model = make(TINY)
    assert model(torch.zeros(2, *SHAPE)).shape == (2, 3) and len(model.blocks) == 1
    assert same(model, make(TINY)) and not same(model, make(TINY, seed=1))
    assert torch.equal(state, torch.get_rng_state())


@needs_timm
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # attention in lanes on a CPU
def test_a_name_trains_as_its_module_does():
    local = ud.Local(epochs=1, batch_size=2, lr=0.1)
    by_name = ud.train(TINY, pictures(), rounds=1, local=local)
    given = ud.train(make(TINY), pictures(), rounds=1, local=local)
    assert by_name.choices["engine"] == "lanes"
    for name, w in by_name.params.items():
        assert torch.equal(w, given.params[name])


@needs_timm
def test_an_experiment_file_knows_the_names():
    settings = {"method": "FedAvg()", "rounds": 1, "local": {"steps": 1, "lr": 0.1}}
    settings["data"] = {"name": "digits", "partition": "IID()", "clients": 3}
    understood(checked({**settings, "model": "timm:resnet10t(drop_rate=0.1)"}, "a test"))
    with pytest.raises(ud.UndriftError, match="timm has no model 'resnet10x'"):
        understood(checked({**settings, "model": "timm:resnet10x"}, "a test"))


@needs_timm
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("timm:vit_tiny_patch16_225", 'did you mean "timm:vit_'),
        ("timm:hf-hub:someone/theirs", "timm has no model"),
        ("timm:local-dir:folder", "timm has no model"),
        ("timm:resnet18(num_classes=5)", "from the data; leave it out"),
        ("timm:resnet18(checkpoint_path='x.pth')", "not supported"),
        ("timm:resnet18(pretrained='yes')", "must be True or False"),
        ("timm:resnet18(3)", "need their names"),
        ("timm:resnet18(nonsense=1)", "timm cannot make"),
        ("timm:resnet18(img_size=64)", "timm cannot make"),
    ],
)
def test_what_is_refused(text, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        make(text)


@needs_timm
def test_the_pictures_own_size_may_be_given():
    for text in ("timm:resnet10t(img_size=32, drop_path_rate=0.1)", "timm:resnet10t(img_size=(32, 32))"):
        assert make(text)(torch.zeros(2, *SHAPE)).shape == (2, 3)


@needs_timm
def test_samples_that_are_no_pictures_are_refused():
    with pytest.raises(ud.UndriftError, match="needs pictures"):
        ud.models.get("timm:resnet18", classes=3, shape=(8,))


@pytest.fixture
def no_pickle(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a pickled checkpoint was loaded")

    monkeypatch.setattr(torch, "load", refuse)


@needs_timm
def test_pretrained_weights_come_from_safetensors(tmp_path, monkeypatch, no_pickle):
    import huggingface_hub
    import timm

    torch.manual_seed(7)
    theirs = timm.create_model("resnet10t", num_classes=1000)
    file, asked = tmp_path / "model.safetensors", []
    safetensors.torch.save_file(theirs.state_dict(), file)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *where: asked.append(where) or str(file))
    model = ud.models.get("timm:resnet10t", classes=3, shape=(3, 32, 32), pretrained=True)
    assert [name for _, name in asked] == ["model.safetensors"]
    assert torch.equal(model.layer1[0].conv1.weight, theirs.layer1[0].conv1.weight)
    assert model.fc.weight.shape[0] == 3


@needs_timm
def test_weights_that_exist_only_as_pickle_are_refused(monkeypatch, no_pickle):
    import huggingface_hub
    import timm

    def missing(*where):
        raise OSError("Entry not found.")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    with pytest.raises(ud.UndriftError, match=r"Entry not found\. Pickled checkpoints are not loaded"):
        make("timm:resnet10t(pretrained=True)")
    config = timm.get_pretrained_cfg("resnet10t")
    config.hf_hub_id = None
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: config)
    with pytest.raises(ud.UndriftError, match="only a pickled checkpoint"):
        make("timm:resnet10t(pretrained=True)")
