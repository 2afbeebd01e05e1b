"""All checks there are."""

from __future__ import annotations

from tests.gpu import beside, bits, draws, engines, equations, field, gradients, host, late, norms, pytests, ranks, real
from tests.gpu.checks import Check

GROUPS = {
    "a": "every method against the equations' reference, through captured graphs",
    "b": "lanes against plain, for uneven cohorts",
    "c": "tf32 and bfloat16 against float64",
    "d": "lanes against plain, for random cohorts",
    "e": "identical bits in two processes",
    "f": "real training against stored runs of the plain engine",
    "g": "methods of the field, written with every hook, against their reference",
    "h": "data on the host against data on the device, to the bit",
    "i": "several processes against one",
    "j": "a history that is read late, with evaluation and drift, against the plain engine's",
    "k": "runs side by side, with their evaluations, against each run alone",
    "t": "the tests that need a GPU",
}


def collect() -> list[Check]:
    modules = (equations, engines, norms, gradients, draws, bits, host, real, field, ranks, late, beside, pytests)
    found = [check for module in modules for check in module.checks()]
    assert len({check.key for check in found}) == len(found), "two checks have the same name"
    return found
