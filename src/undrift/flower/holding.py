"""The data of one node: its own, from a path in its config, or its share of the experiment's clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from undrift.data.dataset import FederatedDataset
from undrift.errors import UndriftError, quoted, require
from undrift.flower.agreement import Report, fitted
from undrift.flower.outline import forms, placed, report, share
from undrift.tools.config import Experiment
from undrift.tools.experiment import loaded

OWN = {"label": "label", "client": "client", "test-fraction": "test_fraction"}
OWN |= {"client-test-fraction": "client_test_fraction", "data-dir": "data_dir"}
"""Keys of a node's config, and the keys of `[data]` that they set."""
KNOWN = {"partition-id", "num-partitions", "data", "state", "name", *OWN}


@dataclass(frozen=True)
class Holding:
    """A node's data."""

    data: FederatedDataset
    """The data. If nodes share the experiment's clients, those of all nodes, of which a node takes its own."""
    clients: list[int]
    """The node's clients, by their position in the data."""
    shared: bool
    """Whether these positions are their ids, since nodes share the experiment's data."""

    def report(self) -> Report:
        places = list(range(len(self.clients)))
        common = {"outputs": self.data.outputs, "vocabulary": self.data.task.vocabulary}
        own = placed(self.data, self.clients, places, len(places), common)
        return report(own) | {"ids": self.clients if self.shared else None, "total": len(self.data)}

    def among(self, ids: list[int], total: int, common: Report) -> FederatedDataset:
        """Return the data in the form that the nodes agreed on, under the ids that the server has given the clients."""
        if len(ids) != len(self.clients) or (self.shared and ids != self.clients):
            raise UndriftError(
                f"The server takes this node for one of {len(ids)} clients, but it has {len(self.clients)}. Its data "
                "may not change while a run is under way."
            )
        data = fitted(self.data, common)
        for what, form in forms(data).items():
            require(
                form == common[what],
                f"Its samples differ from those of the federation in {what}: {form} and {common[what]}. Its data may "
                "not change while a run is under way.",
            )
        return placed(data, self.clients, ids, total, common)


def holding(experiment: Experiment, config: Mapping[str, Any]) -> Holding:
    """Return the data that a node's config speaks of."""
    if strange := config.keys() - KNOWN:
        raise UndriftError(f"The node's config has {quoted(min(strange))}; it may have {', '.join(sorted(KNOWN))}.")
    if "data" in config:
        return _own(experiment, config)
    try:
        part, parts = int(config["partition-id"]), int(config["num-partitions"])
    except (KeyError, TypeError, ValueError):
        raise UndriftError(
            "The node's config must name its data (data=\"/path/to/file.parquet\"), or which share of the experiment's "
            "clients it has (partition-id=0 num-partitions=3)."
        ) from None
    if not 0 <= part < parts:
        raise UndriftError(f"The node's config has partition-id={part} of num-partitions={parts}; count from 0.")
    data = loaded(experiment)
    own = [c for c in range(len(data)) if c % parts == part]
    if not data.sizes[own].any():
        raise UndriftError(f"Of {len(data)} clients in {parts} shares, the share {part} has none with data.")
    rows: dict[str, Any] = {
        f"{name}_rows": share(getattr(data, f"{name}_rows"), part, parts) for name in ("test", "validation")
    }
    return Holding(replace(data, server_rows=None, **rows), own, shared=True)


def _own(experiment: Experiment, config: Mapping[str, Any]) -> Holding:
    path = Path(str(config["data"])).expanduser()
    if not path.exists():
        raise UndriftError(f"The node's data {path} do not exist.")
    require(
        experiment.data.missing != "mean",
        'missing = "mean" under [data] would fill gaps with each node\'s own means; fill them in the files, or write '
        'missing = "drop".',
    )
    other = {key: config[name] for name, key in OWN.items() if name in config}
    natural = {"partition": "ByKey()", "clients": None} if "client" in config else {"partition": "IID()", "clients": 1}
    data = loaded(experiment, name=str(path), server_fraction=0.0, **natural, **other)
    return Holding(replace(data, server_rows=None), list(range(len(data))), shared=False)


def state_folder(config: Mapping[str, Any]) -> Path:
    """Return the folder of what the node's clients keep: from its config, or next to its data."""
    if "state" in config:
        return Path(str(config["state"])).expanduser()
    if "data" in config:
        data = Path(str(config["data"])).expanduser().resolve()
        return data.with_name(f"{data.name}.undrift")
    raise UndriftError("The node's config must say where its clients' state lies: state=\"/path/to/folder\".")
