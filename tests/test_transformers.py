"""Hugging Face's models and PEFT's adapters as they are; skipped where the libraries are not installed."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import undrift as ud
from tests.handloop import hand_loop

transformers = pytest.importorskip("transformers")
# torch warns that attention has no batching rule on a CPU, and transformers of what it will rename.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

WORDS, LENGTH, CLASSES, PADDING, END = 40, 10, 3, 0, 1
LOCAL = ud.Local(epochs=1, batch_size=4, lr=0.05)


def texts(masked=True, sizes=(11, 5, 1), whole=4):
    """Uneven clients, one with one sample, and a short last batch; the first `whole` texts are without padding."""
    generator, n = torch.Generator().manual_seed(0), sum(sizes)
    ids = torch.randint(3, WORDS, (n, LENGTH), generator=generator)
    ids[:, 1] = END  # which T5 reads its answer from
    lengths = torch.randint(4, LENGTH + 1, (n, 1), generator=generator)
    lengths[:whole] = LENGTH
    mask = (torch.arange(LENGTH) < lengths).long()
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    index, offsets = torch.arange(n), np.cumsum([0, *sizes])
    if not masked:
        return ud.FederatedDataset({"x": ids, "y": y}, index, offsets)

    def take(store, rows):
        return {"input_ids": store["ids"][rows], "attention_mask": store["mask"][rows]}, store["y"][rows]

    return ud.FederatedDataset({"ids": ids, "mask": mask, "y": y}, index, offsets, take=take)


CONFIGS = {
    "bert": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "distilbert": {
        "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32,
        "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 32,
    },
    "qwen3": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 32, "head_dim": 8,
    },
    "t5": {
        "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
        "classifier_dropout": 0.0, "decoder_start_token_id": PADDING,
    },
}  # fmt: skip


def make(name, attention="sdpa", **options):
    torch.manual_seed(0)
    common = {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": PADDING, "eos_token_id": END}
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name] | common | options)
    config._attn_implementation = attention
    return transformers.AutoModelForSequenceClassification.from_config(config)


def agree(run, model, data, rounds=1):
    wanted = hand_loop(model, data, LOCAL, rounds, lambda out, y: nn.functional.cross_entropy(out.logits, y))
    assert run.params
    for name, w in run.params.items():
        torch.testing.assert_close(w, wanted[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "llama", "qwen3"])
def test_models_train_in_lanes_as_they_are(name, masked, attention):
    model, data = make(name, attention), texts(masked)
    run = ud.train(model, data, rounds=1, local=LOCAL)
    assert run.choices["engine"] == "lanes", run.choices["why"]
    agree(run, model, data)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_without_a_cache_too(name):
    """Then transformers look for several texts in one sequence, by positions that all lanes share."""
    model, data = make(name, use_cache=False), texts()
    run = ud.train(model, data, rounds=1, local=LOCAL)
    assert run.choices["engine"] == "lanes", run.choices["why"]
    agree(run, model, data)


def test_t5_trains_client_by_client_for_a_shape_that_depends_on_values():
    model, data = make("t5"), texts()
    run = ud.train(model, data, rounds=1, local=LOCAL)
    assert run.choices["engine"] == "plain" and "dynamic shape" in run.choices["why"]
    agree(run, model, data)


def adapted(model, **options):
    peft = pytest.importorskip("peft")
    options = {"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def stored(file):
    """How many numbers a file holds."""
    return sum(t.numel() for t in safetensors.torch.load_file(file).values())


@pytest.mark.parametrize("method", [ud.FedAvg(), ud.Scaffold(), ud.FedNLR()], ids=lambda m: type(m).__name__)
def test_adapters_alone_are_trained_sent_kept_and_stored(method, tmp_path):
    model, data = adapted(make("bert")), texts()
    own = trained(model)
    numbers, everything = (sum(p.numel() for p in tree) for tree in (own.values(), model.parameters()))
    run = ud.train(model, data, method, rounds=2, local=LOCAL, out=tmp_path, checkpoint_every=1)
    assert run.choices["engine"] == "lanes" and run.params.keys() == own.keys()
    assert all("lora_" in name or "classifier" in name for name in run.params)
    # Scaffold also sends by how much control variates change and keeps one per client; FedNLR has its statistics.
    trees = 2 if isinstance(method, ud.Scaffold) else 1
    more = 4 * numbers if isinstance(method, ud.FedNLR) else 16
    assert everything > trees * numbers + more, "the backbone must be larger than what these bounds allow"
    assert numbers * trees <= run.history[-1]["bytes_up"] / len(data) / 4 <= numbers * trees + more
    checkpoint = tmp_path / "checkpoint"
    assert numbers <= stored(checkpoint / "round-2.safetensors") <= numbers * trees + more
    if isinstance(method, ud.Scaffold):
        assert stored(checkpoint / "clients-2.safetensors") <= len(data) * (numbers + 16)
    if isinstance(method, ud.FedAvg):
        agree(run, model, data, 2)


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_a_backbone_in_bfloat16_is_shared_and_its_adapters_train_in_float32(engine):
    model, data = adapted(make("bert").to(torch.bfloat16), task_type=None), texts()
    own, before = trained(model), {name: p.clone() for name, p in model.named_parameters()}
    run = ud.train(model, data, rounds=2, local=LOCAL, engine=engine)
    assert {w.dtype for w in run.params.values()} == {torch.float32} and run.params.keys() == own.keys()
    after = dict(run.model.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), "the caller's model has changed"
        assert (after[name].data_ptr() == p.data_ptr()) is (name not in own), "the backbone is held twice"
    other = ud.train(model, data, rounds=2, local=LOCAL, engine="plain")
    for name, w in run.params.items():
        torch.testing.assert_close(w, other.params[name], rtol=0, atol=2e-3)


def test_what_was_trained_is_saved_by_peft(tmp_path):
    peft = pytest.importorskip("peft")
    run = ud.train(adapted(make("bert")), texts(), rounds=1, local=LOCAL)
    run.model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make("bert"), tmp_path)
    x = {name: t[:3] for name, t in texts()[0][0].items()}
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**x).logits, run.model(**x).logits)
