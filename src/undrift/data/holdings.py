"""A summary of each client's data, for the run folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from undrift.data.dataset import FederatedDataset

MOST = 200
"""At most this many clients and classes are listed. Of more clients, this many at evenly spaced ranks by size."""


def holdings(data: FederatedDataset) -> dict[str, Any]:
    """A summary of all clients' sizes, and the samples per class of those listed. Cheap with a million clients."""
    sizes, held = data.sizes, data.sizes[data.nonempty]
    listed = np.arange(len(data))
    if len(data) > MOST:
        ranks = np.linspace(0, len(held) - 1, MOST).round().astype(np.int64)
        listed = data.nonempty[np.argsort(-held, kind="stable")[ranks]]
    found: dict[str, Any] = {
        "clients": len(data),
        "empty": len(data) - len(held),
        "samples": int(held.sum()),
        "smallest": int(held.min()),
        "median": float(np.median(held)),
        "largest": int(held.max()),
        "listed": listed.tolist(),
        "sizes": sizes[listed].tolist(),
    }
    if data.client_names:
        found["names"] = [data.client_names[c] for c in listed]
    if 0 < data.classes <= MOST:
        found["classes"] = data.names or [str(c) for c in range(data.classes)]
        found["counts"] = data.label_counts(listed).tolist()
    return found
