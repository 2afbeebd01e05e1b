"""Questions that transformers ask about attention masks, in lanes; with a stand-in for the library."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import undrift as ud
from tests.handloop import hand_loop
from undrift.functional.masks import KeepMasks, masks

ASKING = """
def may_be_left_out(mask):
    return bool(mask.all())
"""


@pytest.fixture(params=["transformers.masking_utils", "transformers.modeling_attn_mask_utils"])
def asking(request, monkeypatch):
    module = types.ModuleType(request.param)
    exec(ASKING, module.__dict__)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


class Pooling(nn.Module):
    """The mean over the words of a text that are not padding."""

    def __init__(self, asked) -> None:
        super().__init__()
        self.asked, self.embedding, self.head = (asked,), nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask):
        h = self.embedding(input_ids)
        if not self.asked[0](attention_mask):
            h = h * attention_mask[..., None]
        return self.head(h.mean(1))


def texts(sizes=(6, 3, 1), length=5):
    """Clients' ids and masks; the first client's texts have no padding, so its answer differs from the others'."""
    generator, n = torch.Generator().manual_seed(0), sum(sizes)
    lengths = torch.randint(1, length, (n, 1), generator=generator)
    lengths[: sizes[0]] = length
    store = {
        "ids": torch.randint(0, 9, (n, length), generator=generator),
        "mask": (torch.arange(length) < lengths).long(),
        "y": torch.randint(0, 3, (n,), generator=generator),
    }

    def take(store, indices):
        return {"input_ids": store["ids"][indices], "attention_mask": store["mask"][indices]}, store["y"][indices]

    return ud.FederatedDataset(store, torch.arange(n), np.cumsum([0, *sizes]), take=take)


def test_masks_are_kept_in_lanes_whatever_each_lane_s_own_says(asking):
    torch.manual_seed(0)
    model, local = Pooling(asking.may_be_left_out), ud.Local(epochs=2, batch_size=4, lr=0.5)
    run = ud.train(model, texts(), rounds=2, local=local, lanes=3, engine="lanes")
    wanted = hand_loop(model, texts(), local, 2)
    for name, w in run.params.items():
        torch.testing.assert_close(w, wanted[name], rtol=0, atol=1e-6)


def test_the_same_question_of_anyone_else_has_no_answer_in_lanes():
    """It may decide something that is wrong for other lanes."""
    model = Pooling(lambda mask: bool(mask.all()))
    run = ud.train(model, texts(), rounds=1, local=ud.Local(steps=1, batch_size=2, lr=0.1))
    assert run.choices["engine"] == "plain" and "vmap" in run.choices["why"]


def test_outside_of_lanes_questions_are_answered(asking):
    assert not isinstance(masks(), KeepMasks)
    with masks():
        assert asking.may_be_left_out(torch.ones(3)) and not asking.may_be_left_out(torch.zeros(3))
    inside = torch.func.vmap(lambda mask: torch.tensor(isinstance(masks(), KeepMasks)) | (mask > 1))
    assert inside(torch.zeros(2)).all()
