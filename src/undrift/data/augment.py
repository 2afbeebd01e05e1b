"""Augmentations of a batch before each local step, drawn from the client's key, on the device and inside lanes.

An augmentation is a function of `(x, key)` that returns a tensor of the shape of x, or a tuple or dict of tensors if x
is one. Draws follow the order of the batch, and padding comes last, so that padding does not change a sample's draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from undrift.data.samples import sample_shape
from undrift.errors import UndriftError, quoted
from undrift.expressions import parse
from undrift.random import Key, bits


@dataclass(frozen=True)
class CropFlip:
    """Shift each image by up to `padding` pixels in both directions, flip it with probability 1/2, and rotate it.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.IID(), clients=2, augment=ud.CropFlip(padding=1, flip=False))
        >>> data.augment
        CropFlip(padding=1, flip=False, reflect=False)

    Args:
        padding: The largest shift, in pixels. All shifts from `-padding` to `padding` are equally likely.
        flip: Whether to flip horizontally.
        reflect: Whether to pad images with their reflection, but not the corners that a rotation leaves empty. By
            default, they are padded with 0, which is the mean colour of normalized images.
        rotate: The largest angle, in degrees, by which the result is turned about its centre, in either direction. Each
            pixel gets the value of the nearest one, and 0 where there is none. By default, images are not rotated.

    Raises:
        UndriftError: If `padding` is not an integer from 0, or `rotate` is not an angle from 0 to 180. When called, if
            the samples are not images larger than the padding.
    """

    padding: int = 4
    flip: bool = True
    reflect: bool = False
    rotate: float = field(default=0.0, metadata={"added": True})

    def __post_init__(self) -> None:
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 0:
            raise UndriftError(f"CropFlip(padding) must be a whole number from 0, not {quoted(self.padding)}.")
        if isinstance(self.rotate, bool) or not isinstance(self.rotate, int | float) or not 0 <= self.rotate <= 180:
            raise UndriftError(f"CropFlip(rotate) must be an angle from 0 to 180 degrees, not {quoted(self.rotate)}.")

    def __repr__(self) -> str:
        # As it was before there were rotations: run folders hold this text, and are compared by it.
        rotate = f", rotate={self.rotate}" if self.rotate else ""
        return f"CropFlip(padding={self.padding}, flip={self.flip}, reflect={self.reflect}{rotate})"

    def __call__(self, x: Tensor, key: Key) -> Tensor:
        # A shift by the full size would leave an empty image.
        if not isinstance(x, Tensor) or x.dim() != 4 or self.padding >= min(x.shape[2:]):
            raise UndriftError(
                f"CropFlip needs images of channels × height × width that are larger than its padding of "
                f"{self.padding}, not samples of shape {sample_shape(x)}."
            )
        n, channels, height, width = x.shape
        row, column = torch.arange(height, device=x.device)[:, None], torch.arange(width, device=x.device)
        inside = torch.ones((), dtype=torch.bool, device=x.device)
        if self.rotate:
            down, right, coin, turn = bits(key, 4 * n).reshape(n, 4, 1, 1).unbind(1)
            angle = math.radians(self.rotate) * (turn / 2**31 - 1)
            row, column = _turned(row, column, angle, height, width)
            inside = _inside(row, height) & _inside(column, width)
        else:
            down, right, coin = bits(key, 3 * n).reshape(n, 3, 1, 1).unbind(1)
        moves = 2 * self.padding + 1
        if self.flip:
            column = torch.where(coin % 2 == 1, width - 1 - column, column)
        column = column + right % moves - self.padding
        row = row + down % moves - self.padding
        place = _reflected(row, height) * width + _reflected(column, width)
        moved = x.flatten(2).gather(2, place.reshape(n, 1, -1).expand(-1, channels, -1)).reshape(x.shape)
        if not self.reflect:
            inside = inside & _inside(row, height) & _inside(column, width)
        return torch.where(inside.reshape(-1, 1, *inside.shape[1:]) if inside.dim() else inside, moved, 0.0)


def _turned(row: Tensor, column: Tensor, angle: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which pixel a rotation by this angle, counterclockwise, moves to each place."""
    y, x = row + (0.5 - height / 2), column + (0.5 - width / 2)
    cos, sin = angle.cos(), angle.sin()
    return (sin * x + cos * y + height / 2).floor().long(), (cos * x - sin * y + width / 2).floor().long()


def _inside(position: Tensor, size: int) -> Tensor:
    return (position >= 0) & (position < size)


def _reflected(position: Tensor, size: int) -> Tensor:
    """Reflect positions outside the image into it, without repeating the border."""
    return (size - 1 - (size - 1 - position.abs()).abs()).clamp(0, size - 1)


def parse_augmentation(text: str) -> CropFlip:
    """Return the augmentation that a string such as `"CropFlip(padding=4)"` describes."""
    augmentation: CropFlip = parse(text, "augmentation", {"CropFlip": CropFlip}, "CropFlip(padding=4)")
    return augmentation
