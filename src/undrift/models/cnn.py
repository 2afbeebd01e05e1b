"""Small convolutional networks: two convolutions, each with ReLU and 2×2 max-pooling, and hidden layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from undrift.errors import UndriftError


def image_shape(model: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width of images; raises if `shape` is not an image's, or too small for `model`."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UndriftError(
            f'The model "{model}" needs images of channels × height × width, at least {least}×{least}, '
            f"not samples of shape {shape}."
        )
    channels, height, width = shape
    return channels, height, width


def two_convolutions(
    name: str,
    classes: int,
    shape: tuple[int, ...],
    widths: tuple[int, int],
    kernel: int,
    paddings: tuple[int, int],
    hidden: Sequence[int],
) -> nn.Module:
    """Two convolutions with ReLU and max-pooling, then linear layers: all networks of this file, and LeNet-5."""

    def left(side: int) -> int:
        """The height or width after all convolutions and poolings."""
        for padding in paddings:
            side = (side + 2 * padding - kernel + 1) // 2
        return side

    channels, height, width = image_shape(name, shape, next(side for side in itertools.count(1) if left(side) >= 1))
    layers: list[nn.Module] = []
    for before, after, padding in zip((channels, widths[0]), widths, paddings, strict=True):
        layers += [nn.Conv2d(before, after, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    sizes = [widths[1] * left(height) * left(width), *hidden]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def cnn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """3×3 convolutions of 16 and 32 channels, and a hidden layer of 64: small enough for a laptop."""
    return two_convolutions("cnn", classes, shape, (16, 32), 3, (1, 1), [64])


def cnn_fedavg(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """5×5 convolutions of 32 and 64 channels with same padding, hidden layer 512 (McMahan et al., 2017).

    Also used for the CNN of 2D-LRD, whose sizes the paper does not give.
    """
    return two_convolutions("cnn_fedavg", classes, shape, (32, 64), 5, (2, 2), [512])


def cnn_femnist(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The CNN for FEMNIST in the paper on decaying K: 3×3, 32 and 64 channels, no padding, hidden layer 512."""
    return two_convolutions("cnn_femnist", classes, shape, (32, 64), 3, (0, 0), [512])


def cnn_temporal(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The CNN of the paper on temporal targets: 5×5, 16 and 32 channels, no padding, hidden layer 512."""
    return two_convolutions("cnn_temporal", classes, shape, (16, 32), 5, (0, 0), [512])
