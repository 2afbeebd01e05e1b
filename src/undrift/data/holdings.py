"""A summary of each client's data, for the run folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from undrift.data.dataset import FederatedDataset
from undrift.data.pieces import median

MOST = 200
"""At most this many clients and classes are listed. Of more clients, this many at evenly spaced ranks by size."""


def holdings(data: FederatedDataset) -> dict[str, Any]:
    """Return a summary of all clients' sizes, and class counts of those listed. Cheap with a million clients."""
    sizes, counts = data.size_counts
    listed = np.arange(len(data)) if len(data) <= MOST else _spread(data)
    found: dict[str, Any] = {
        "clients": len(data),
        "empty": len(data) - data.population,
        "samples": int((sizes * counts).sum()),
        "smallest": int(sizes.min()),
        "median": median(sizes, counts),
        "largest": int(sizes.max()),
        "listed": listed.tolist(),
        "sizes": data.sizes_of(listed).tolist(),
    }
    if data.client_names:
        found["names"] = [data.client_names[c] for c in listed.tolist()]
    if 0 < data.classes <= MOST:
        found["classes"] = data.names or [str(c) for c in range(data.classes)]
        found["counts"] = data.label_counts(listed).tolist()
    return found


def _spread(data: FederatedDataset) -> np.ndarray:
    """Return `MOST` clients at evenly spaced ranks by size, the largest first; ties go to the lower id."""
    ranks = np.linspace(0, data.population - 1, MOST).round().astype(np.int64)
    sizes, counts = (array[::-1] for array in data.size_counts)
    which = np.searchsorted(np.cumsum(counts), ranks, side="right")
    within = ranks - (np.cumsum(counts) - counts)[which]
    listed = np.empty(len(ranks), np.int64)
    for size in np.unique(which):  # one pass over all clients for each, since sorting them would double the memory
        mine = which == size
        listed[mine] = np.flatnonzero(data.offsets[1:] - data.offsets[:-1] == sizes[size])[within[mine]]
    return listed
