"""A process that carries out checks, one at a time: names come in by stdin, findings go out as lines of JSON."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict

import torch

from tests.gpu.checks import Absent, Check, Finding


def load(source: str) -> list[Check]:
    """What `module:function` returns."""
    module, function = source.split(":")
    return getattr(importlib.import_module(module), function)()


def carry_out(check: Check, device: str) -> list[Finding]:
    """Its findings; whatever it raises is one, too."""
    try:
        found = check.run(device)
    except Absent as reason:
        return [Finding("absent", str(reason))]
    except Exception as error:  # whatever goes wrong, the next check must run
        first = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        return [Finding("FAIL", first, detail=traceback.format_exc())]
    return found if isinstance(found, list) else [found]


def serve(source: str, device: str) -> None:
    # Whatever checks print goes to stderr, or it would get between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)  # there are as many workers as cores
    checks = {check.key: check for check in load(source)}
    if device.startswith("cuda"):
        torch.cuda.synchronize()  # starts CUDA, which takes seconds that are no check's
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        began = time.perf_counter()
        found = carry_out(checks[line.rstrip("\n")], device)
        seconds, usable = time.perf_counter() - began, _clear(device)
        answer = {"seconds": seconds, "usable": usable, "findings": [asdict(f) for f in found]}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _clear(device: str) -> bool:
    """Give memory back. Returns whether this process can still use the device, as it cannot after a failed kernel."""
    gc.collect()
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    try:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
