"""undrift: federated learning that holds its course when clients' data differ."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Every public name and the module it lives in. Imported when first used: torch alone takes over a second.
METHODS = {
    "FedAvg": "undrift.methods.fedavg",
    "FedProx": "undrift.methods.fedprox",
    "Scaffold": "undrift.methods.scaffold",
    "FedNova": "undrift.methods.fednova",
    "FedDyn": "undrift.methods.feddyn",
    "FedRS": "undrift.methods.logits",
    "FedLC": "undrift.methods.logits",
    "FedNLR": "undrift.methods.fednlr",
    "CCVR": "undrift.methods.ccvr",
    "TwoDLRD": "undrift.methods.decay",
    "AllDecreasing": "undrift.methods.decay",
    "AdditiveTuning": "undrift.methods.decay",
    "FirstStepOnly": "undrift.methods.decay",
    "FedCurv": "undrift.methods.curvature",
    "FedCL": "undrift.methods.curvature",
    "SignAgreement": "undrift.methods.techniques",
    "Projection": "undrift.methods.techniques",
    "GradientNoise": "undrift.methods.techniques",
    "ServerTraining": "undrift.methods.techniques",
    "ServerSGD": "undrift.methods.server",
    "ServerAdam": "undrift.methods.server",
    "ServerYogi": "undrift.methods.server",
    "ServerAdagrad": "undrift.methods.server",
}
PARTITIONS = dict.fromkeys(
    ("IID", "Dirichlet", "DirichletPrior", "Shards", "SortedShards", "LabelSplit", "QuantitySkew", "ByKey"),
    "undrift.data.partition",
)
_PUBLIC = (
    METHODS
    | PARTITIONS
    | {
        "TemporalEnsemble": "undrift.methods.temporal",
        "bound_neurons": "undrift.methods.fednlr",
        "train": "undrift.train",
        "Result": "undrift.result",
        "FederatedDataset": "undrift.data.dataset",
        "Task": "undrift.data.dataset",
        "load": "undrift.data.load",
        "CropFlip": "undrift.data.augment",
        "Faults": "undrift.faults",
        "Local": "undrift.local",
        "batches": "undrift.local",
        "decay": "undrift.schedule",
        "inverse": "undrift.schedule",
        "Number": "undrift.schedule",
        "Part": "undrift.method",
        "Method": "undrift.method",
        "Plan": "undrift.roles",
        "Batch": "undrift.roles",
        "Client": "undrift.roles",
        "Server": "undrift.roles",
        "Totals": "undrift.roles",
        "tree_map": "undrift.tree",
        "register_data": "undrift.registry",
        "register_model": "undrift.registry",
        "UndriftError": "undrift.errors",
    }
)
__all__ = ["models", "random", *_PUBLIC]  # noqa: PLE0604 - names, collected above

if TYPE_CHECKING:
    from undrift import models, random
    from undrift.data.augment import CropFlip
    from undrift.data.dataset import FederatedDataset, Task
    from undrift.data.load import load
    from undrift.data.partition import (
        IID,
        ByKey,
        Dirichlet,
        DirichletPrior,
        LabelSplit,
        QuantitySkew,
        Shards,
        SortedShards,
    )
    from undrift.errors import UndriftError
    from undrift.faults import Faults
    from undrift.local import Local, batches
    from undrift.method import Method, Part
    from undrift.methods.ccvr import CCVR
    from undrift.methods.curvature import FedCL, FedCurv
    from undrift.methods.decay import AdditiveTuning, AllDecreasing, FirstStepOnly, TwoDLRD
    from undrift.methods.fedavg import FedAvg
    from undrift.methods.feddyn import FedDyn
    from undrift.methods.fednlr import FedNLR, bound_neurons
    from undrift.methods.fednova import FedNova
    from undrift.methods.fedprox import FedProx
    from undrift.methods.logits import FedLC, FedRS
    from undrift.methods.scaffold import Scaffold
    from undrift.methods.server import ServerAdagrad, ServerAdam, ServerSGD, ServerYogi
    from undrift.methods.techniques import GradientNoise, Projection, ServerTraining, SignAgreement
    from undrift.methods.temporal import TemporalEnsemble
    from undrift.registry import register_data, register_model
    from undrift.result import Result
    from undrift.roles import Batch, Client, Plan, Server, Totals
    from undrift.schedule import Number, decay, inverse
    from undrift.train import train
    from undrift.tree import tree_map


class _Package(types.ModuleType):
    """A package that has a function `train` and a module `train`: importing the module must not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in ("models", "random"):
        return importlib.import_module(f"undrift.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'undrift' has no attribute {name!r}")
    found = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
