"""What a test registers by name, and how it is forgotten again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from undrift import losses, metrics, models
from undrift.data import partition, sources


@contextmanager
def as_before() -> Iterator[None]:
    """A context after which the registries are as before it."""
    registries = [losses.LOSSES, metrics.METRICS, models.MODELS, sources.FUNCTIONS, partition.PARTITIONS]
    before = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, known in zip(registries, before, strict=True):
            registry.clear()
            registry.update(known)
