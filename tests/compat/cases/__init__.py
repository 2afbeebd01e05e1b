"""All cases there are."""

from __future__ import annotations

from tests.compat.case import GROUPS, Case
from tests.compat.cases import (
    adapters,
    buffers,
    calls,
    control,
    data,
    dense,
    kinds,
    language,
    odd,
    sequences,
    timm,
    vision,
    weights,
)

MODULES = (vision, timm, language, adapters, sequences, dense, buffers, control, odd, weights, calls, kinds, data)


def collect() -> list[Case]:
    found = [case for module in MODULES for case in module.CASES]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    assert {case.group for case in found} == set(GROUPS)
    return found
