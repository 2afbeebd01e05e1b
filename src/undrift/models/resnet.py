"""ResNet-20 without batch norm: Fixup initialisation (Zhang, Dauphin and Ma, 2019).

With L residual blocks of m = 2 convolutions each, the first convolution of a block has He's initialisation times
L^(−1/(2m−2)) = L^(−1/2); its last one and the classifier start at zero. One multiplier per block and a scalar bias
before every convolution and activation replace those of batch norm.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.models.cnn import image_shape

BLOCKS = 9


class Block(nn.Module):
    """`relu(scale·conv2(relu(conv1(x + b₁ₐ) + b₁ᵦ) + b₂ₐ) + b₂ᵦ + x)`.

    Where a block halves the resolution and doubles the channels, its shortcut takes every second pixel of x and pads
    the channels with zeros, as in the authors' networks for CIFAR.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.bias1a, self.bias1b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.bias2a, self.bias2b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.stride = stride
        nn.init.normal_(self.conv1.weight, std=math.sqrt(2 / (9 * after)) * BLOCKS**-0.5)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + self.bias1a
        out = F.relu(self.conv1(shifted) + self.bias1b)
        out = self.conv2(out + self.bias2a) * self.scale + self.bias2b
        if self.stride > 1:
            x = F.avg_pool2d(shifted, 1, self.stride)
            x = torch.cat([x, torch.zeros_like(x)], 1)
        return F.relu(out + x)


class ResNet20(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        widths = [16] * 4 + [32] * 3 + [64] * 3
        self.blocks = nn.Sequential(*(Block(a, b, b // a) for a, b in itertools.pairwise(widths)))
        self.fc = nn.Linear(64, classes)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks(F.relu(self.conv1(x) + self.bias1))
        return self.fc(out.mean((2, 3)) + self.bias2)


def resnet20(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The residual network for CIFAR (He et al., 2016) of three stages with 16, 32 and 64 channels, with Fixup."""
    channels, _, _ = image_shape("resnet20", shape, 1)
    return ResNet20(channels, classes)
