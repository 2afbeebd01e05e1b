"""Segmentation, several outputs, autoencoders, distillation, and models that draw."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.compat.case import Cases, Made
from tests.compat.cases.buffers import mlp
from tests.compat.cases.language import token_loss
from tests.compat.cases.vision import pixels
from tests.compat.samples import images, next_tokens, numbers, pictures, themselves, two_inputs, vectors

CASES = Cases("dense", "monai")
add = CASES.add


# Segmentation.
def unet(dims: int = 2) -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(dims, 1, 3, channels=(4, 8), strides=(2,), num_res_units=1)


def dice() -> Any:
    from monai.losses import DiceLoss

    loss = DiceLoss(reduction="none", softmax=True, to_onehot_y=True)
    return lambda output, y: loss(output, y[:, None]).flatten(1).mean(1)


def by_dice(output: Tensor, y: Tensor) -> Tensor:
    return dice()(output, y)


add("monai UNet, 2-d", unet, pictures(), loss=pixels)
add("monai UNet, 3-d", partial(unet, 3), pictures(size=8, dims=3), loss=pixels)
add("monai UNet, Scaffold", unet, pictures(), loss=pixels, method="Scaffold()")
add("monai UNet, FedCurv", unet, pictures(), loss=pixels, method="FedCurv(weight=0.1)")
add("monai UNet, DiceLoss", unet, pictures(), loss=by_dice)
add("monai UNet, the default loss", unet, pictures())

CASES.needs = ("segmentation_models_pytorch",)


def pspnet() -> nn.Module:
    import segmentation_models_pytorch as smp

    return smp.PSPNet("resnet18", encoder_weights=None, psp_out_channels=16, psp_dropout=0.0, in_channels=1, classes=3)


def smp_unet() -> nn.Module:
    import segmentation_models_pytorch as smp

    return smp.Unet("timm-mobilenetv3_small_minimal_100", encoder_weights=None, encoder_depth=3,
                    decoder_channels=(16, 8, 8), in_channels=1, classes=3)  # fmt: skip


NORMED = {"sizes": (12, 7, 7), "local": {"lr": 0.005}}
add("smp.Unet", smp_unet, pictures(size=32), loss=pixels, **NORMED)
add("smp.PSPNet, a ResNet encoder, no dropout", pspnet, pictures(size=32), loss=pixels, **NORMED)
add("smp.Unet, the default loss", smp_unet, pictures(size=32), **NORMED)

CASES.needs = ()


def small_segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 3, 1))


def small_lm() -> nn.Module:
    return nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 40))


def classes_last(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


add("classes per pixel, the default loss", small_segmenter, pictures(size=8), quick=True)
add("classes per token, the default loss", small_lm, next_tokens(), batch_loss=classes_last, quick=True)
add("classes per token, an own loss", small_lm, next_tokens(), loss=token_loss)


# Several outputs.
def detector(joined: bool) -> Any:
    def forward(m: Made, x: Tensor) -> Any:
        h = torch.relu(m.conv(x)).mean((2, 3))
        found = {"boxes": m.boxes(h), "scores": m.scores(h)}
        return torch.cat([*found.values()], 1) if joined else found

    return lambda: Made(forward, conv=nn.Conv2d(3, 8, 3), boxes=nn.Linear(8, 4), scores=nn.Linear(8, 1))


def detection_loss(output: Any, y: Tensor) -> Tensor:
    joined = isinstance(output, Tensor)
    boxes, scores = (output[:, :4], output[:, 4:]) if joined else (output["boxes"], output["scores"])
    regression = (boxes - y[:, :4]).abs().mean(1)
    return regression + F.binary_cross_entropy_with_logits(scores[:, 0], y[:, 4], reduction="none")


def boxed(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 8, 8, generator=g), torch.rand(n, 5, generator=g)


def two_heads(m: Made, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(m.body(x))
    return m.a(h), m.b(h)


def both_heads(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    a, b = output
    return F.cross_entropy(a, y, reduction="none") + b.square().mean(1)


TWO_HEADS = partial(lambda: Made(two_heads, body=nn.Linear(8, 8), a=nn.Linear(8, 3), b=nn.Linear(8, 2)))
add("a detector's dict of outputs", detector(False), boxed, loss=detection_loss, output="all", quick=True)
add("a detector's outputs in one tensor", detector(True), boxed, loss=detection_loss)
add("two heads as a tuple, both in the loss", TWO_HEADS, vectors(8), loss=both_heads)
add('two heads as a tuple, output="0"', TWO_HEADS, vectors(8), output="0")


# Autoencoders, distillation, pairs.
def code() -> dict[str, nn.Module]:
    return {"encode": nn.Linear(12, 8), "decode": nn.Linear(4, 12)}


def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 12))


def distils(m: Made, x: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = m.teacher(x)
    return torch.cat([m.student(x), wanted], 1)


def distillation(output: Tensor, y: Tensor) -> Tensor:
    student, teacher = output.chunk(2, 1)
    close = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="none").sum(1)
    return F.cross_entropy(student, y, reduction="none") + close


def compare(m: Made, a: Tensor, b: Tensor) -> Tensor:
    return m.head((m.body(a) - m.body(b)).abs())


add("an autoencoder", autoencoder, themselves(12), loss="mse")
add("distillation from a frozen teacher", lambda: Made(
    distils, student=mlp(), teacher=mlp(32).requires_grad_(False)
), vectors(8), loss=distillation)  # fmt: skip
add("a siamese network (two inputs)", lambda: Made(
    compare, body=mlp(), head=nn.Linear(3, 3)
), two_inputs((8,), (8,)), quick=True)  # fmt: skip


class Byol(nn.Module):
    """Online and target networks; the target follows the online one by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.predict = mlp(), mlp().requires_grad_(False), nn.Linear(3, 3)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for t, o in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    t.lerp_(o, 0.1)
        with torch.no_grad():
            wanted = F.normalize(self.target(two), dim=1)
        return 2 - 2 * (F.normalize(self.predict(self.online(one)), dim=1) * wanted).sum(1)


add("BYOL", Byol, two_inputs((8,), (8,)), loss=lambda output, y: output, review=("S4",))


# Variational autoencoders, with every way to draw.
def variational(draw: Any, always: bool = False) -> Any:
    def forward(m: Made, x: Tensor) -> Tensor:
        mean, spread = m.encode(x).chunk(2, 1)
        z = draw(mean, spread) if always or m.training else mean
        return m.decode(z)

    return lambda: Made(forward, **code())


def into(mean: Tensor, spread: Tensor) -> Tensor:
    return mean + spread.exp() * torch.empty_like(mean).normal_()


WAYS = {
    "randn_like": lambda mean, spread: mean + spread.exp() * torch.randn_like(mean),
    "normal_": into,
    "torch.normal": lambda mean, spread: mean + spread.exp() * torch.normal(torch.zeros_like(mean), 1.0),
    "torch.distributions": lambda mean, spread: torch.distributions.Normal(mean, spread.exp()).rsample(),
}
for name, draw in WAYS.items():
    add(f"a VAE, {name}", variational(draw), themselves(12), loss="mse", draws=True, quick=name == "randn_like")
add("a VAE, randn_like in evaluation too", variational(
    WAYS["randn_like"], always=True
), themselves(12), loss="mse", draws=True)  # fmt: skip


def drawing(change: Any, **parts: Any) -> Any:
    """An MLP whose hidden layer is changed at random in training."""

    def forward(m: Made, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        return m.b(change(h) if m.training else h)

    return lambda: Made(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 3), **parts)


def mixup(h: Tensor) -> Tensor:
    return 0.7 * h + 0.3 * h[torch.randperm(len(h))]


def shifted(h: Tensor) -> Tensor:
    return h * torch.randint(1, 4, (16,))


def noisy_steps(h: Tensor) -> Tensor:
    """As diffusion models do: a random time for each sample, and noise to match."""
    t = torch.randint(0, 10, (len(h),))[:, None] / 10
    return (1 - t) * h + t * torch.randn_like(h)


CHANGES = {
    "F.gumbel_softmax": lambda h: F.gumbel_softmax(h, dim=1),
    "torch.bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.7)),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.7),
    "torch.randint": shifted,
    "torch.randperm (mixup)": mixup,
    "exponential_": lambda h: h + 0.1 * torch.empty_like(h).exponential_(),
    "torch.multinomial": lambda h: h + 0.1 * h.gather(1, torch.multinomial(h.softmax(1), 1)),
    "a diffusion step": noisy_steps,
    "F.rrelu": lambda h: F.rrelu(h, 0.1, 0.9, training=True),
    "F.feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h, 0.3, training=True),
    "torch.poisson": lambda h: h + 0.1 * torch.poisson(torch.full_like(h, 2.0)),
}
for name, change in CHANGES.items():
    add(f"draws by {name}", drawing(change), vectors(8), draws=True, quick=name == "bernoulli_")
add("nn.FractionalMaxPool2d", lambda: nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.FractionalMaxPool2d(2, output_size=4), nn.Flatten(), nn.Linear(128, 4)
), images(size=12), draws=True)  # fmt: skip
for layer in (nn.Dropout, nn.AlphaDropout, nn.Dropout1d, nn.FeatureAlphaDropout, nn.RReLU):
    add(f"nn.{layer.__name__}", lambda layer=layer: nn.Sequential(
        nn.Conv1d(8, 6, 1), layer(0.3), nn.Flatten(), nn.Linear(18, 3)
    ), vectors(8, 3), draws=True)  # fmt: skip
add("a GAN's generator loss on a frozen critic", lambda: Made(
    lambda m, x: m.critic(torch.sigmoid(m.make(x))), make=nn.Linear(6, 12),
    critic=nn.Linear(12, 1).requires_grad_(False)
), numbers(6, targets=(1,)), loss=lambda z, y: F.softplus(-z).squeeze(1), local={"lr": 0.5})  # fmt: skip
