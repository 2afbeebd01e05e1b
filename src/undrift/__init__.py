"""undrift: federated learning that holds its course when clients' data differ."""

from __future__ import annotations

import importlib
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
    "FedAvgM": "undrift.methods.server",
    "FedAdam": "undrift.methods.server",
    "FedYogi": "undrift.methods.server",
    "FedAdagrad": "undrift.methods.server",
    "ServerSGD": "undrift.methods.server",
    "ServerAdam": "undrift.methods.server",
    "ServerYogi": "undrift.methods.server",
    "ServerAdagrad": "undrift.methods.server",
}
IN_THE_LITERATURE = {
    "FedOpt": "one of FedAvgM, FedAdam, FedYogi and FedAdagrad",
    "FedProxTE": "FedProx(mu=0.1, target=TemporalEnsemble(beta=0.5))",
    "FedCLTE": "FedCL(weight=0.1, target=TemporalEnsemble(beta=0.5))",
}
"""Names of the literature, and what to write for them."""
SPELLINGS = {"SCAFFOLD": "undrift.methods.scaffold"}
"""Other spellings of methods, as papers write them."""
PARTS = {"BalancedLoss": "undrift.methods.balanced"}
"""Parts that expressions know like methods, but that are changes to a loss rather than methods of a paper."""
PARTITIONS = dict.fromkeys(
    (
        "IID", "Dirichlet", "DirichletPrior", "Shards", "ClassesPerClient", "SortedShards", "LabelSplit",
        "QuantitySkew", "ByKey",
    ),
    "undrift.data.partition",
)  # fmt: skip
OPTIMIZERS = dict.fromkeys(("SGD", "Adam", "AdamW"), "undrift.method.optimizers")
_PUBLIC = (
    METHODS
    | SPELLINGS
    | PARTS
    | PARTITIONS
    | {
        "TemporalEnsemble": "undrift.methods.temporal",
        "bound_neurons": "undrift.methods.fednlr",
        "train": "undrift.training.loop",
        "Result": "undrift.training.result",
        "EarlyStopping": "undrift.training.early_stopping",
        "Callback": "undrift.training.callbacks",
        "RoundRecord": "undrift.training.callbacks",
        "side_by_side": "undrift.training.side_by_side",
        "FederatedDataset": "undrift.data.dataset",
        "Task": "undrift.data.dataset",
        "load": "undrift.data.load",
        "CropFlip": "undrift.data.augment",
        "Faults": "undrift.method.faults",
        "Local": "undrift.method.local",
        "batches": "undrift.method.local",
        "Group": "undrift.method.groups",
        "Optimizer": "undrift.method.optimizers",
        **OPTIMIZERS,
        "decay": "undrift.schedule",
        "inverse": "undrift.schedule",
        "warmup": "undrift.schedule",
        "cosine": "undrift.schedule",
        "Number": "undrift.schedule",
        "Part": "undrift.method.part",
        "Method": "undrift.method.part",
        "Plan": "undrift.method.context",
        "Batch": "undrift.method.context",
        "Client": "undrift.method.context",
        "Server": "undrift.method.context",
        "Totals": "undrift.method.context",
        "tree_map": "undrift.tree",
        "register_data": "undrift.data.sources",
        "register_loss": "undrift.losses",
        "register_metric": "undrift.metrics",
        "register_model": "undrift.models",
        "register_partition": "undrift.data.partition",
        "UndriftError": "undrift.errors",
    }
)
__all__ = ["models", "random", *_PUBLIC]  # noqa: PLE0604 - names, collected above

if TYPE_CHECKING:  # "X as X" is how a package says to type checkers that X is its own
    from undrift import models as models
    from undrift import random as random
    from undrift.data.augment import CropFlip as CropFlip
    from undrift.data.dataset import FederatedDataset as FederatedDataset
    from undrift.data.dataset import Task as Task
    from undrift.data.load import load as load
    from undrift.data.partition import IID as IID
    from undrift.data.partition import ByKey as ByKey
    from undrift.data.partition import ClassesPerClient as ClassesPerClient
    from undrift.data.partition import Dirichlet as Dirichlet
    from undrift.data.partition import DirichletPrior as DirichletPrior
    from undrift.data.partition import LabelSplit as LabelSplit
    from undrift.data.partition import QuantitySkew as QuantitySkew
    from undrift.data.partition import Shards as Shards
    from undrift.data.partition import SortedShards as SortedShards
    from undrift.data.partition import register_partition as register_partition
    from undrift.data.sources import register_data as register_data
    from undrift.errors import UndriftError as UndriftError
    from undrift.losses import register_loss as register_loss
    from undrift.method.context import Batch as Batch
    from undrift.method.context import Client as Client
    from undrift.method.context import Plan as Plan
    from undrift.method.context import Server as Server
    from undrift.method.context import Totals as Totals
    from undrift.method.faults import Faults as Faults
    from undrift.method.groups import Group as Group
    from undrift.method.local import Local as Local
    from undrift.method.local import batches as batches
    from undrift.method.optimizers import SGD as SGD
    from undrift.method.optimizers import Adam as Adam
    from undrift.method.optimizers import AdamW as AdamW
    from undrift.method.optimizers import Optimizer as Optimizer
    from undrift.method.part import Method as Method
    from undrift.method.part import Part as Part
    from undrift.methods.balanced import BalancedLoss as BalancedLoss
    from undrift.methods.ccvr import CCVR as CCVR
    from undrift.methods.curvature import FedCL as FedCL
    from undrift.methods.curvature import FedCurv as FedCurv
    from undrift.methods.decay import AdditiveTuning as AdditiveTuning
    from undrift.methods.decay import AllDecreasing as AllDecreasing
    from undrift.methods.decay import FirstStepOnly as FirstStepOnly
    from undrift.methods.decay import TwoDLRD as TwoDLRD
    from undrift.methods.fedavg import FedAvg as FedAvg
    from undrift.methods.feddyn import FedDyn as FedDyn
    from undrift.methods.fednlr import FedNLR as FedNLR
    from undrift.methods.fednlr import bound_neurons as bound_neurons
    from undrift.methods.fednova import FedNova as FedNova
    from undrift.methods.fedprox import FedProx as FedProx
    from undrift.methods.logits import FedLC as FedLC
    from undrift.methods.logits import FedRS as FedRS
    from undrift.methods.scaffold import SCAFFOLD as SCAFFOLD
    from undrift.methods.scaffold import Scaffold as Scaffold
    from undrift.methods.server import FedAdagrad as FedAdagrad
    from undrift.methods.server import FedAdam as FedAdam
    from undrift.methods.server import FedAvgM as FedAvgM
    from undrift.methods.server import FedYogi as FedYogi
    from undrift.methods.server import ServerAdagrad as ServerAdagrad
    from undrift.methods.server import ServerAdam as ServerAdam
    from undrift.methods.server import ServerSGD as ServerSGD
    from undrift.methods.server import ServerYogi as ServerYogi
    from undrift.methods.techniques import GradientNoise as GradientNoise
    from undrift.methods.techniques import Projection as Projection
    from undrift.methods.techniques import ServerTraining as ServerTraining
    from undrift.methods.techniques import SignAgreement as SignAgreement
    from undrift.methods.temporal import TemporalEnsemble as TemporalEnsemble
    from undrift.metrics import register_metric as register_metric
    from undrift.models import register_model as register_model
    from undrift.schedule import Number as Number
    from undrift.schedule import cosine as cosine
    from undrift.schedule import decay as decay
    from undrift.schedule import inverse as inverse
    from undrift.schedule import warmup as warmup
    from undrift.training.callbacks import Callback as Callback
    from undrift.training.callbacks import RoundRecord as RoundRecord
    from undrift.training.early_stopping import EarlyStopping as EarlyStopping
    from undrift.training.loop import train as train
    from undrift.training.result import Result as Result
    from undrift.training.side_by_side import side_by_side as side_by_side
    from undrift.tree import tree_map as tree_map


def __getattr__(name: str) -> Any:
    if name in ("models", "random"):
        return importlib.import_module(f"undrift.{name}")
    if name not in _PUBLIC:
        known = f"; here it is {IN_THE_LITERATURE[name]}" if name in IN_THE_LITERATURE else ""
        raise AttributeError(f"module 'undrift' has no attribute {name!r}{known}")
    found = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
