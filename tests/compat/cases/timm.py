"""Networks of timm for images."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tests.compat.case import Cases
from tests.compat.cases.vision import NORMED
from tests.compat.samples import images

CASES = Cases("vision", "timm", "torchvision")
add = CASES.add
SMALL, LARGER, LARGEST = images(), images(size=32), images(size=64)


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A network by its name, with four classes and random weights."""

    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=4, **options)

    return build


def tiny(where: str, **options: Any) -> Callable[[], nn.Module]:
    """A class of timm's models, `module.Class`, with a size of our own."""

    def build() -> nn.Module:
        file, _, name = where.partition(".")
        return getattr(importlib.import_module(f"timm.models.{file}"), name)(num_classes=4, **options)

    return build


def group_norm(channels: int, **options: Any) -> nn.Module:
    return nn.GroupNorm(8, channels)


# Batch norm.
add("timm resnet10t", of_timm("resnet10t"), LARGEST, **NORMED)
add("timm mobilenetv4_conv_small_050", of_timm("mobilenetv4_conv_small_050"), LARGEST, bound=1e-5, **NORMED)
add("timm efficientnet_b0", of_timm("efficientnet_b0"), LARGEST, **NORMED)
LEVIT = {"img_size": 64, "embed_dim": (16, 24, 32), "key_dim": 8, "depth": (1, 1, 1), "num_heads": (2, 2, 2)}
add("timm Levit", tiny("levit.Levit", **LEVIT), images(size=64))
add("timm Xcit", tiny("xcit.Xcit", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, eta=0.1), LARGER)
add("timm ghostnet_050", of_timm("ghostnet_050", drop_rate=0.0), LARGEST, **NORMED)

# No batch norm.
NARROW = {"channels": (16, 24, 32, 64), "stem_width": 16}
add("timm resnet18 (narrow), GroupNorm", of_timm("resnet18", norm_layer=group_norm, **NARROW), LARGER)
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
add("timm ViT", tiny("vision_transformer.VisionTransformer", **VIT), SMALL)
add("timm ViT, Scaffold", tiny("vision_transformer.VisionTransformer", **VIT), SMALL, method="Scaffold()")
add("timm ViT, FedCurv", tiny("vision_transformer.VisionTransformer", **VIT), SMALL, method="FedCurv(weight=0.1)")
add("timm ViT, FedNLR", tiny("vision_transformer.VisionTransformer", **VIT), SMALL, method="FedNLR()")
for option in ("drop_path_rate", "attn_drop_rate", "proj_drop_rate", "patch_drop_rate"):
    build = tiny("vision_transformer.VisionTransformer", **VIT, **{option: 0.3})
    add(f"timm ViT, {option}=0.3", build, SMALL, draws=True)
STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
add("timm ConvNeXt", tiny("convnext.ConvNeXt", **STAGES, ls_init_value=0.1), LARGER)
add("timm ConvNeXt V2 (GRN)", tiny("convnext.ConvNeXt", **STAGES, use_grn=True, ls_init_value=None), LARGER)
EVA = {**VIT, "swiglu_mlp": True, "use_rot_pos_emb": True, "head_init_scale": 1.0, "ref_feat_shape": (4, 4)}
add("timm EVA-02", tiny("eva.Eva", **EVA), SMALL)
add("timm PoolFormer", tiny("metaformer.MetaFormer", **STAGES), LARGER)
add("timm MLP-Mixer", tiny("mlp_mixer.MlpMixer", img_size=16, patch_size=4, num_blocks=2, embed_dim=24), SMALL)
add("timm CaiT", tiny("cait.Cait", **VIT, init_values=0.1), SMALL)


def norm_free() -> nn.Module:
    from timm.models.nfnet import NfCfg, NormFreeNet

    return NormFreeNet(NfCfg(depths=(1, 1, 1, 1), channels=(16, 24, 32, 40), stem_chs=16), num_classes=4)


def big_transfer() -> nn.Module:
    from timm.layers import GroupNormAct
    from timm.models.resnetv2 import ResNetV2

    norm = partial(GroupNormAct, num_groups=4)
    return ResNetV2([1, 1], (16, 32), num_classes=4, stem_chs=8, stem_type="fixed", norm_layer=norm)


add("timm NF-ResNet", norm_free, LARGER)
add("timm BiT (weight standardisation)", big_transfer, SMALL)
