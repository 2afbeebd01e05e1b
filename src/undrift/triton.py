"""What the Triton kernels have in common: where they run, and how they are launched.

Kernels exist where torch has no good one. What each computes is written in plain torch in the operation that calls it.
Triton comes with torch's GPU builds. The modules that import it are imported only if `available` is true.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this device: a GPU from Ampere on, with Triton from 3.4. None of them takes float64.

    Before Triton 3.4 (torch 2.8) a kernel cannot be given a named tuple of constants; torch's own operations run then.
    """
    return dtype != torch.float64 and _supported(device)


@cache
def _supported(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0) or not find_spec("triton"):
        return False
    from triton import __version__

    return tuple(int(number) for number in __version__.split(".")[:2]) >= (3, 4)


def dot_precision() -> str:
    """Return the `input_precision` of float32 products, by torch's global setting for matrix products."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory, in KiB, that one program may use."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024  # type: ignore[attr-defined]


def pipeline_stages(wanted: int, *runs: int) -> int:
    """Return the `num_stages` of a loop that reads contiguous runs of this many bytes.

    Triton 3.6 pipelines loads incorrectly if a run is shorter than what a thread reads at once, so such loops are not
    pipelined.
    """
    return 1 if any(run % 16 for run in runs) else wanted
