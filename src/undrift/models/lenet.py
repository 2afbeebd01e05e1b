"""LeNet-5 (LeCun et al., 1998), as it is used today."""

from __future__ import annotations

from torch import nn

from undrift.models.cnn import two_convolutions


def lenet5(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """5×5 convolutions of 6 and 16 channels, hidden layers of 120 and 84, with ReLU and max-pooling.

    It was designed for 32×32 pixels; only images of 28×28 are padded to that size, by the first convolution.
    """
    padding = 2 if shape[1:] == (28, 28) else 0
    return two_convolutions("lenet5", classes, shape, (6, 16), 5, (padding, 0), [120, 84])
