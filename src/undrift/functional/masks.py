"""Attention masks of Hugging Face's transformers in lanes.

Before they build a mask, transformers check whether it masks anything (`if mask.all()`). If not, they leave it out,
since attention without a mask is faster. Under vmap and while a step is traced, this check has no answer, as each lane
has a mask of its own. With the answer "it does", the mask is built, which is correct for every mask.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

ASKING = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""The modules whose only questions about a tensor's values are whether a mask may be left out."""
WARNING = "warn_if_padding_and_no_attention_mask"
"""The method of their models that looks for padding without a mask, to warn of it."""


def masks() -> AbstractContextManager[Any]:
    """Return a context in which transformers keep their attention masks, if values are not available."""
    loaded = any(name in sys.modules for name in ASKING)
    return KeepMasks() if loaded and values_unknown() else nullcontext()


def values_unknown() -> bool:
    """Return whether code runs under `torch.func`, or while `make_fx` traces it."""
    return peek_interpreter_stack() is not None or get_proxy_mode() is not None


class KeepMasks(TorchFunctionMode):
    """Answers False to `bool(tensor)` in the modules `ASKING`, and to `token in tensor` where that is for a warning."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ or func is Tensor.__contains__:
            module, function = _asker()
            if (module in ASKING and func is Tensor.__bool__) or function == WARNING:
                return False
        return func(*args, **(kwargs or {}))


def _asker() -> tuple[str, str]:
    """Return the module and the function of the caller, skipping this module, torch and other modes."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("undrift", "torch"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
