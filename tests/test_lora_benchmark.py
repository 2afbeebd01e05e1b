"""The LoRA benchmark: both sides train the same adapters, and a side that does something else has no row."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from torch import nn

from benchmarks import lora

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_row_has_the_speed_of_both_sides_which_agree_on_adapters_alone(precision):
    found = lora.row(lora.TINY, precision, "eager")
    speed = found["samples_per_second"]
    assert found["trained"] == 512  # 2 layers × 2 targets × 2 thin matrices of 2 × 32
    assert speed["bytes_up_per_client"] == 4 * 512 + 4  # and the loss
    assert speed["agrees"] < 1e-4 and speed["loop"] > 0 and speed["lanes"] > 0


def test_a_loop_with_another_rate_is_refused(monkeypatch):
    work = lora.work
    monkeypatch.setattr(lora, "work", lambda sizes: work(dataclasses.replace(sizes, lr=2e-3)))
    with pytest.raises(SystemExit, match="lanes disagrees with the loop"):
        lora.row(lora.TINY, "float32", "eager")


def test_our_own_adapter_is_peft_s():
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(6, 5)).requires_grad_(False)
    ours = lora.Adapted(base[0], 2)
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=lora.ALPHA, target_modules=["0"]))
    values = [torch.randn(2, 6), torch.randn(5, 2)]
    with torch.no_grad():
        for adapted in (ours, theirs):
            for p, value in zip([p for p in adapted.parameters() if p.requires_grad], values, strict=True):
                p.copy_(value)
    x = torch.randn(3, 6)
    torch.testing.assert_close(ours(x), theirs(x))


def test_memory_beyond_the_limit_fails_for_a_float32_backbone_alone():
    for precision, ratio, failed in (("float32", 1.6, True), ("float32", 1.4, False), ("bfloat16", 1.6, False)):
        memory = {"ratio": ratio, "within_limit": ratio <= lora.MEMORY_LIMIT}
        assert lora.failed({"precision": precision, "memory": memory}) is failed
    assert lora.failed({"precision": "bfloat16", "refused": "…"})


def test_one_line_of_json_also_where_a_row_fails(monkeypatch, capsys):
    monkeypatch.setattr(lora, "ROWS", (("float32", "eager"), ("float32", "no such attention")))
    monkeypatch.setattr(sys, "argv", ["lora", "--tiny"])
    with pytest.raises(SystemExit) as ended:
        lora.main()
    (line,) = capsys.readouterr().out.splitlines()
    first, second = json.loads(line)["rows"]
    assert ended.value.code and "refused" not in first and "no such attention" in second["refused"]
