"""Ten SIGKILLs at random moments, for each of five methods: the resumed run ends with the bits of an unbroken one.

make soak
"""

from __future__ import annotations

import pytest

from tests.killing import kill_and_resume


@pytest.mark.parametrize(
    "method", ["FedAvg()", "Scaffold()", "FedDyn(0.1) + FedNLR()", "TwoDLRD(5)", "ServerAdam(0.01)"]
)
def test_ten_kills(tmp_path, method):
    met = kill_and_resume(tmp_path, method, rounds=200, kills=10, seed=len(method))
    print(f"{method}: {met} of 10 kills met it in its rounds")
    assert met >= 5
