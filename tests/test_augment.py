"""Augmentation inside the step, against a reference that pads, cuts and mirrors picture by picture."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import undrift as ud
from tests.problems import distance, same_bits
from undrift.engine.gradients import AUGMENT
from undrift.random import Key, bits, derive


def key(seed: int = 1, step: int = 0) -> Key:
    return Key(torch.tensor(derive(seed, "test", 0, 0)), torch.tensor(step))


def reference(x: torch.Tensor, drawn: torch.Tensor, padding: int, flip: bool, mode: str) -> torch.Tensor:
    height, width = x.shape[2:]
    rows = []
    for picture, (down, right, coin) in zip(x, drawn.reshape(-1, 3).tolist(), strict=True):
        padded = F.pad(picture[None], [padding] * 4, mode=mode)[0]
        top, left = down % (2 * padding + 1), right % (2 * padding + 1)
        cut = padded[:, top : top + height, left : left + width]
        rows.append(cut.flip(-1) if flip and coin % 2 else cut)
    return torch.stack(rows)


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("padding", [0, 2, 4])
def test_crops_and_flips_are_pads_and_cuts(padding, mode, flip):
    x = torch.rand(64, 3, 7, 9)
    found = ud.CropFlip(padding, flip, reflect=mode == "reflect")(x, key())
    assert torch.equal(found, reference(x, bits(key(), 3 * len(x)), padding, flip, mode))


@pytest.mark.parametrize("reflect", [True, False])
def test_rotations_are_pillows_after_the_crop(reflect):
    # Smooth pictures: where the nearest pixel is a close call, the next one is almost the same.
    waves = torch.sin(torch.arange(40 * 24 * 20).reshape(40, 1, 24, 20) / 7)
    x = F.avg_pool2d(F.pad(waves, [2] * 4, mode="reflect"), 5, 1)
    drawn = bits(key(), 4 * len(x)).reshape(-1, 4)
    cropped = reference(x, drawn[:, :3].flatten(), 2, True, "reflect" if reflect else "constant")
    found = ud.CropFlip(2, reflect=reflect, rotate=30)(x, key())
    away = []
    for picture, before, turn in zip(found, cropped, drawn[:, 3].tolist(), strict=True):
        image = Image.fromarray(before[0].numpy(), mode="F").rotate(30 * (turn / 2**31 - 1), Image.Resampling.NEAREST)
        away.append((picture[0] - torch.tensor(np.array(image))).abs())
    assert (torch.stack(away) < 1e-6).double().mean() > 0.99
    assert (found == 0).double().mean() > 0.02 and not torch.equal(found, cropped)
    assert torch.equal(ud.CropFlip(2, reflect=reflect, rotate=1e-6)(x, key())[0], cropped[0])


def test_all_moves_are_drawn_and_padding_rows_change_none():
    x = torch.arange(1.0, 82).reshape(1, 1, 9, 9).repeat(3000, 1, 1, 1)
    moved = ud.CropFlip(1)(x, key())
    assert len({tuple(picture.flatten().tolist()) for picture in moved}) == 18
    assert torch.equal(ud.CropFlip(1)(x[:10], key()), moved[:10])
    assert not torch.equal(ud.CropFlip(1)(x, key(step=1)), moved)


def pictures(sizes: tuple[int, ...] = (9, 4, 14), **rest: object) -> ud.FederatedDataset:
    rng = np.random.default_rng(0)
    pairs = [(torch.tensor(rng.random((n, 1, 6, 6))), torch.tensor(rng.integers(0, 3, n))) for n in sizes]
    data = ud.FederatedDataset.from_clients(pairs, test=pairs[0], server=pairs[-1])
    for name, value in rest.items():
        setattr(data, name, value)
    return data


def net() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.2), torch.nn.Linear(36, 3)).double()


LOCAL = ud.Local(steps=5, batch_size=4, lr=0.3)


@pytest.mark.parametrize("rotate", [0, 20])
@pytest.mark.parametrize(
    "method", [ud.FedAvg(), ud.FedCurv(0.1), ud.FedNLR() + ud.ServerTraining(lr=0.1, batch_size=2)]
)
def test_engines_augment_alike(method, rotate):
    data = pictures(augment=ud.CropFlip(2, rotate=rotate))
    runs = [
        ud.train(net(), data, method, rounds=3, local=LOCAL, engine=e, lanes=n)
        for e, n in [("plain", None), ("lanes", 1), ("lanes", 3)]
    ]
    assert distance(runs[1].params, runs[0].params) < 1e-10 and distance(runs[2].params, runs[0].params) < 1e-10
    plain = ud.train(net(), pictures(), method, rounds=3, local=LOCAL)
    assert distance(plain.params, runs[0].params) > 1e-3


def test_a_round_is_sgd_on_augmented_batches():
    """One client, written out: batch, augment by (seed, round, client, step), gradient, step."""
    data, augment = pictures((11,)), ud.CropFlip(2)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3)).double()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    x, y = data[0]
    w = {n: p.clone() for n, p in start.items()}
    for k, rows in enumerate(ud.batches(data, LOCAL, client=0, round=0, seed=5)):
        words = torch.tensor([int(word) for word in derive(5, "client", 0, 0)])
        batch = augment(x[rows], Key(words, torch.tensor(k)).stream_at(AUGMENT))
        leaves = {n: p.clone().requires_grad_() for n, p in w.items()}
        loss = F.cross_entropy(torch.func.functional_call(model, leaves, (batch,)), y[rows])
        w = {n: w[n] - 0.3 * g for n, g in zip(w, torch.autograd.grad(loss, list(leaves.values())), strict=True)}
    data.augment = augment
    assert distance(ud.train(model, data, rounds=1, local=LOCAL, seed=5).params, w) < 1e-12


def test_evaluation_and_measures_see_pictures_as_they_are():
    seen: list[torch.Tensor] = []

    def spy(x: torch.Tensor, key: Key) -> torch.Tensor:
        seen.append(x)
        return x

    data = pictures(augment=spy)
    options = {"rounds": 2, "local": LOCAL, "engine": "plain", "rehearse": False}
    runs = [ud.train(net(), each, ud.FedNLR(), **options) for each in (data, pictures())]
    assert same_bits(runs[0].params, runs[1].params)
    assert len(seen) == 1 + 2 * 3 * 5  # the check before the run, then every step of every client, and nothing else


@pytest.mark.parametrize(
    ("augment", "sentence"),
    [
        (lambda x, key: x[:, :, 1:], "must keep the shape and type of a batch"),
        (lambda x, key: x.float(), "must keep the shape and type of a batch"),
        (lambda x: x, "The augmentation does not take samples of shape"),
    ],
)
def test_wrong_augmentations_are_one_sentence(augment, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.train(net(), pictures(augment=augment), rounds=1, local=LOCAL)


def test_crop_and_flip_refuse_what_is_no_picture():
    data = ud.load("digits", ud.IID(), 2, augment="CropFlip(padding=1)")
    assert data.augment == ud.CropFlip(1)
    data = ud.FederatedDataset.from_clients([(torch.zeros(4, 3), torch.zeros(4).long())])
    data.augment = ud.CropFlip()
    with pytest.raises(ud.UndriftError, match="CropFlip needs images"):
        ud.train("mlp", data, rounds=1, local=LOCAL)
    with pytest.raises(ud.UndriftError, match="padding"):
        ud.CropFlip(-1)
