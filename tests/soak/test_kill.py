"""Twenty SIGKILLs at random moments, for each of five methods: the resumed run ends with the bits of an unbroken one.

make soak
"""

from __future__ import annotations

import pytest

from tests.killing import kill_and_resume

KILLS = 20


@pytest.mark.parametrize(
    "method", ["FedAvg()", "Scaffold()", "FedDyn(0.1) + FedNLR()", "TwoDLRD(5)", "ServerAdam(0.01)"]
)
def test_twenty_kills(tmp_path, method):
    met = kill_and_resume(tmp_path, method, rounds=400, kills=KILLS, seed=len(method))
    print(f"{method}: {met} of {KILLS} kills met it in its rounds")
    assert met >= KILLS // 2
