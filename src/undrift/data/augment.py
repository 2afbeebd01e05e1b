"""Augmentations of a batch before each local step, drawn from the client's key, on the device and inside lanes.

An augmentation is a function of `(x, key)` that returns a tensor of the shape of x, or a tuple or dict of tensors if x
is one. Draws follow the order of the batch, and padding comes last, so that padding does not change a sample's draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.data.samples import sample_shape
from undrift.errors import UndriftError, quoted
from undrift.expressions import parse
from undrift.random import Key, bits


@dataclass(frozen=True)
class CropFlip:
    """Shift each image by up to `padding` pixels in both directions and flip it horizontally with probability 1/2.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.IID(), clients=2, augment=ud.CropFlip(padding=1, flip=False))
        >>> data.augment
        CropFlip(padding=1, flip=False, reflect=False)

    Args:
        padding: The largest shift, in pixels. All shifts from `-padding` to `padding` are equally likely.
        flip: Whether to flip.
        reflect: Whether to pad images with their reflection. By default, they are padded with 0, which is the mean
            colour of normalized images.

    Raises:
        UndriftError: If `padding` is not an integer from 0. When called, if the samples are not images larger than the
            padding.
    """

    padding: int = 4
    flip: bool = True
    reflect: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 0:
            raise UndriftError(f"CropFlip(padding) must be a whole number from 0, not {quoted(self.padding)}.")

    def __call__(self, x: Tensor, key: Key) -> Tensor:
        # A shift by the full size would leave an empty image.
        if not isinstance(x, Tensor) or x.dim() != 4 or self.padding >= min(x.shape[2:]):
            raise UndriftError(
                f"CropFlip needs images of channels × height × width that are larger than its padding of "
                f"{self.padding}, not samples of shape {sample_shape(x)}."
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
    """Reflect positions outside the image into it, without repeating the border."""
    return (size - 1 - (size - 1 - position.abs()).abs()).clamp(0, size - 1)


def parse_augmentation(text: str) -> CropFlip:
    """Return the augmentation that a string such as `"CropFlip(padding=4)"` describes."""
    augmentation: CropFlip = parse(text, "augmentation", {"CropFlip": CropFlip}, "CropFlip(padding=4)")
    return augmentation
