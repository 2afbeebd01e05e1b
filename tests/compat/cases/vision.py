"""Networks of torchvision and monai for images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.compat.case import Cases
from tests.compat.samples import images, pictures

CASES = Cases("vision", "torchvision")
add = CASES.add
SMALL, LARGER, LARGEST = images(), images(size=32), images(size=64)
NORMED = {"sizes": (12, 7, 7), "local": {"lr": 0.005}}
"""For deep networks with batch norm: over few values, it magnifies rounding as it does everything else."""


def of_torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A network by its name, with four classes and random weights."""

    def build() -> nn.Module:
        from torchvision import models

        return getattr(models, name)(num_classes=4, **options)

    return build


def swin(**options: Any) -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 16, [1, 1], [2, 2], [4, 4], num_classes=4, **options)


def convnext(**options: Any) -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)]
    return ConvNeXt(stages, layer_scale=0.1, num_classes=4, **options)


def vit(**options: Any) -> nn.Module:
    from torchvision.models import VisionTransformer

    module = VisionTransformer(16, 4, 2, 2, 24, 48, num_classes=4, **options)
    nn.init.normal_(module.heads.head.weight, std=0.1)  # zeros would leave all other gradients at zero
    return module


def groups(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(8, channels)


# Batch norm and its replacements.
add("torchvision resnet18", of_torchvision("resnet18"), images(size=48), **NORMED)
add("torchvision resnet18, GroupNorm", of_torchvision("resnet18", norm_layer=groups), LARGER)
add("torchvision mobilenet_v3_small", of_torchvision("mobilenet_v3_small"), LARGEST, draws=True, **NORMED)
add("torchvision mobilenet_v3_small, no dropout", of_torchvision("mobilenet_v3_small", dropout=0.0), LARGEST, **NORMED)
add("torchvision mobilenet_v2, no dropout", of_torchvision("mobilenet_v2", dropout=0.0, width_mult=0.35), LARGEST,
    bound=1e-6, note="Images of 32 pixels end in one place per channel, whose batch norm over two to four values makes "
    "rounding as large as the weights, in PyTorch alone too.", **NORMED)  # fmt: skip
add("torchvision shufflenet_v2_x0_5", of_torchvision("shufflenet_v2_x0_5"), LARGEST, **NORMED)
add("torchvision squeezenet1_1, no dropout", of_torchvision("squeezenet1_1", dropout=0.0), LARGER)
add("torchvision efficientnet_b0", of_torchvision("efficientnet_b0"), LARGEST, draws=True, **NORMED)
add(
    "torchvision efficientnet_b0, no stochastic depth",
    of_torchvision("efficientnet_b0", stochastic_depth_prob=0.0, dropout=0.0), LARGEST,
    **NORMED,
)  # fmt: skip


def densenet(**options: Any) -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=4, **options)


def frozen_norm() -> nn.Module:
    from torchvision.ops import FrozenBatchNorm2d

    return nn.Sequential(
        nn.Conv2d(3, 8, 3), FrozenBatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    )


add("torchvision DenseNet", densenet, LARGER)
add("torchvision DenseNet, memory_efficient", partial(densenet, memory_efficient=True), LARGER, review=("S1",))
add("torchvision FrozenBatchNorm2d", frozen_norm, SMALL)


# Stochastic depth and attention.
def maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, stochastic_depth_prob=0.0, num_classes=4)


add("torchvision MaxVit, no stochastic depth", maxvit, images(size=32))
add("torchvision Swin", swin, SMALL, draws=True)
add("torchvision Swin, no stochastic depth", partial(swin, stochastic_depth_prob=0.0), SMALL)
add(
    "torchvision Swin, FedDyn + FedNLR", partial(swin, stochastic_depth_prob=0.0), SMALL,
    method="FedDyn(0.1) + FedNLR()",
)  # fmt: skip
add("torchvision ConvNeXt", partial(convnext, stochastic_depth_prob=0.3), SMALL, draws=True)
add("torchvision ConvNeXt, no stochastic depth", convnext, SMALL)
add("torchvision ViT", vit, SMALL)
add("torchvision ViT, attention_dropout=0.1", partial(vit, attention_dropout=0.1), SMALL, draws=True)
add("torchvision ViT, momentum and weight decay", vit, SMALL, local={"momentum": 0.9, "weight_decay": 0.01})
add("torchvision ViT, Scaffold", vit, SMALL, method="Scaffold()")
add("torchvision ViT, FedDyn + FedNLR", vit, SMALL, method="FedDyn(0.1) + FedNLR()")
add("torchvision ViT, FedCurv", vit, SMALL, method="FedCurv(weight=0.1)")
add("torchvision ViT, CCVR", vit, SMALL, method="CCVR()")


# Batch norm with other methods.
def small_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    module = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4)
    module.layer3, module.layer4, module.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 4)
    return module


for name in ("Scaffold()", "FedDyn(0.1) + FedNLR()", "FedCurv(weight=0.1)", "CCVR()"):
    add(f"torchvision ResNet, {name.replace('()', '')}", small_resnet, SMALL, method=name)


# Several outputs.
def with_auxiliary(outputs: Any, y: Tensor) -> Tensor:
    """GoogLeNet's loss, which in evaluation mode has one output."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, y, reduction="none")
    named = outputs._asdict() if hasattr(outputs, "_asdict") else outputs
    main, *aux = (F.cross_entropy(named[key], y, reduction="none") for key in ("logits", "aux_logits2", "aux_logits1"))
    return main + 0.3 * sum(aux)


GOOGLENET = {"init_weights": False, "dropout": 0.0, "dropout_aux": 0.0}
add("torchvision googlenet, its logits", of_torchvision("googlenet", **GOOGLENET), LARGEST, **NORMED)
add(
    "torchvision googlenet, auxiliary outputs in the loss", of_torchvision("googlenet", **GOOGLENET), LARGEST,
    loss=with_auxiliary, output="all", **NORMED,
)  # fmt: skip


def lraspp() -> nn.Module:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    return lraspp_mobilenet_v3_large(num_classes=3, weights=None, weights_backbone=None)


def pixels(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy averaged over a sample's pixels."""
    return F.cross_entropy(output, y, reduction="none").flatten(1).mean(1)


add('torchvision lraspp, output="out"', lraspp, pictures(3, 64), loss=pixels, output="out", **NORMED)

CASES.needs = ("monai",)


def monai_vit() -> nn.Module:
    from monai.networks.nets import ViT

    return ViT(3, 16, 4, hidden_size=24, mlp_dim=48, num_layers=2, num_heads=2, classification=True, num_classes=4,
               spatial_dims=2, post_activation="none")  # fmt: skip


def monai_densenet() -> nn.Module:
    from monai.networks.nets import DenseNet

    return DenseNet(2, 3, 4, init_features=8, growth_rate=4, block_config=(2, 2))


add('monai ViT (a tuple), output="0"', monai_vit, SMALL, output="0")
add("monai DenseNet", monai_densenet, SMALL)
