from __future__ import annotations

import pytest
import torch

import undrift as ud
from tests.problems import make_clients

torch.set_num_threads(1)  # tests run two at a time on two cores


@pytest.fixture
def uneven() -> ud.FederatedDataset:
    """Seven clients, one of them empty, no two with the same number of samples."""
    return make_clients([23, 5, 0, 41, 10, 17, 1])
