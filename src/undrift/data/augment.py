"""Changes of a batch before each local step, drawn from the client's key: on the device, inside the lanes.

An augmentation is a function of (x, key) that gives x of the same shape. A sample's draws come first in the batch's
order, so rows of padding change none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.errors import UndriftError, quoted
from undrift.expressions import parse
from undrift.random import Key, bits


@dataclass(frozen=True)
class CropFlip:
    """A picture moved by up to `padding` pixels each way and, by a coin, mirrored left to right.

    What comes in from outside is 0 (the mean colour, where pictures are normalised), or the picture's own reflection.
    """

    padding: int = 4
    flip: bool = True
    reflect: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 0:
            raise UndriftError(f"CropFlip(padding) must be a whole number from 0, not {quoted(self.padding)}.")

    def __call__(self, x: Tensor, key: Key) -> Tensor:
        if x.dim() != 4 or self.padding >= min(x.shape[2:]):  # a picture moved by its own size is gone
            raise UndriftError(
                f"CropFlip needs pictures of channels × height × width that are larger than its padding of "
                f"{self.padding}, not samples of shape {tuple(x.shape[1:])}."
            )
        n, channels, height, width = x.shape
        down, right, coin = bits(key, 3 * n).reshape(n, 3, 1).unbind(1)
        moves = 2 * self.padding + 1
        column = torch.arange(width, device=x.device)
        if self.flip:
            column = torch.where(coin % 2 == 1, width - 1 - column, column)
        column = column + right % moves - self.padding
        row = torch.arange(height, device=x.device) + down % moves - self.padding
        inside = _inside(row, height)[:, :, None] & _inside(column, width)[:, None, :]
        place = _reflected(row, height)[:, :, None] * width + _reflected(column, width)[:, None, :]
        moved = x.flatten(2).gather(2, place.reshape(n, 1, -1).expand(-1, channels, -1)).reshape(x.shape)
        return moved if self.reflect else torch.where(inside[:, None], moved, 0.0)


def _inside(position: Tensor, size: int) -> Tensor:
    return (position >= 0) & (position < size)


def _reflected(position: Tensor, size: int) -> Tensor:
    """Positions outside as their mirror image inside; the border itself is not repeated."""
    return (size - 1 - (size - 1 - position.abs()).abs()).clamp(0, size - 1)


def parse_augmentation(text: str) -> CropFlip:
    """`"CropFlip(padding=4)"` as an augmentation."""
    found: CropFlip = parse(text, "augmentation", {"CropFlip": CropFlip}, "CropFlip(padding=4)")
    return found
