"""Small convolutional networks."""

from __future__ import annotations

from torch import nn

from undrift.errors import UndriftError


def cnn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Two 3×3 convolutions (16 and 32 channels, each with ReLU and 2×2 max-pooling) and a hidden layer of 64."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise UndriftError(
            f'The model "cnn" needs pictures of channels × height × width, at least 4×4, not samples of shape {shape}.'
        )
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
