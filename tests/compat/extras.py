"""Makes torchvision importable next to a CPU build of torch."""

from __future__ import annotations

import importlib.util
import sys

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
"""Operations stay declared for as long as this lives."""


def prepare() -> None:
    """Import torchvision, if it is installed; other libraries import it in turn.

    Its compiled operations do not load where torch and torchvision come from different builds, and importing it then
    fails, because it registers shape functions for two of them. With these declared, all but its detection models
    work.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401
