"""VGG-9, the network of FedNLR's experiments."""

from __future__ import annotations

from torch import nn

from undrift.models.cnn import image_shape


def vgg9(classes: int, shape: tuple[int, ...], dropout: bool = True) -> nn.Module:
    """3×3 convolutions 32-64-pool-128-128-pool-256-256-pool and linear layers 512-512-classes.

    Its dropout is that of NIID-Bench (Li et al., 2022), which the paper cites; the paper itself mentions none. Weights
    start Kaiming-uniform in convolutions and Xavier-normal in linear layers, biases at zero.
    """
    channels, height, width = image_shape("vgg9", shape, 8)
    layers: list[nn.Module] = []
    for i, (first, second) in enumerate([(32, 64), (128, 128), (256, 256)]):
        layers += [nn.Conv2d(channels, first, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        if i == 1:
            layers.append(_drop(nn.Dropout2d(0.05), dropout))
        channels = second
    layers += [nn.Flatten(), _drop(nn.Dropout(0.1), dropout)]
    layers += [nn.Linear(channels * (height // 8) * (width // 8), 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = nn.Sequential(*layers, _drop(nn.Dropout(0.1), dropout), nn.Linear(512, classes))
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return model


def _drop(layer: nn.Module, wanted: bool) -> nn.Module:
    """The layer, or an `Identity` in its place: parameters then have the same names with and without dropout."""
    return layer if wanted else nn.Identity()
