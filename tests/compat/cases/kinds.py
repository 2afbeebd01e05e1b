"""Tensors and modules of kinds that are rare in networks, and libraries that make them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compat.case import Cases, Made
from tests.compat.cases.buffers import mlp
from tests.compat.cases.language import LLAMA, of_transformers, token_loss
from tests.compat.cases.weights import Net
from tests.compat.samples import images, next_tokens, pictures, vectors

CASES = Cases("idioms")
add = CASES.add
ROWS = vectors(8)


# ---- what is saved -------------------------------------------------------------------------------------------------
class Versioned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra: Any = {"version": 3, "names": ["a", None, 0.5], "scale": torch.arange(2.0)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Slices(Net):
    """Two parameters that are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 16).double()
        self.scale, self.shift = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale * self.hidden(x) + self.shift)


class Expanded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.register_buffer("scale", torch.full((1, 1), 1.5).double().expand(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x) @ self.scale)


class Rotary(Net):
    """Complex rotations, as Llama's reference code keeps them (`freqs_cis`)."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.register_buffer("freqs_cis", torch.polar(torch.ones(8).double(), torch.arange(8.0).double()))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.hidden(x).unflatten(1, (8, 2)).contiguous())
        return self.last(torch.view_as_real(pairs * self.freqs_cis).flatten(1))


SAVED = {"dtype": None, "samples_dtype": torch.float64, "saved": True, "review": ("MT",)}
add("get_extra_state, saved", lambda: Versioned().double(), ROWS, quick=True, **SAVED)
add("parameters that are slices of one tensor, saved", Slices, ROWS, **SAVED)
add("a buffer made by expand, saved", Expanded, ROWS, **SAVED)
add("a complex buffer (freqs_cis), saved", Rotary, ROWS, **SAVED)


# ---- what ended in a traceback -------------------------------------------------------------------------------------
def by_jacobian(m: Made, x: Tensor) -> Tensor:
    """An energy's gradient, as networks for physics take it by torch.func."""
    force = torch.func.vmap(torch.func.jacrev(lambda row: m.energy(row).sum()))(x)
    return m.head(torch.tanh(m.stem(x)) + force)


class LooksUp(nn.Module):
    """Whose `__getattr__` returns None for what it does not have, as some configurable modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.adapter is None else self.adapter(x)


add("torch.func.jacrev in forward", lambda: Made(
    by_jacobian, energy=mlp(), stem=nn.Linear(8, 8), head=nn.Linear(8, 3)
), ROWS, review=("MT",))  # fmt: skip
add("__getattr__ returns None", LooksUp, ROWS, review=("MT",), quick=True)


# ---- what was refused ----------------------------------------------------------------------------------------------
class OnAGraph(nn.Module):
    """A graph convolution on one fixed graph; a sample is a signal on its nodes."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 4).double(), nn.Linear(24, 3).double()
        ring = torch.eye(6).roll(1, 0).double()
        adjacency = (ring + ring.T + torch.eye(6)) / 3
        self.register_buffer("adjacency", getattr(adjacency, layout)())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x[:, :, None]))  # samples × nodes × 4
        mixed = torch.sparse.mm(self.adjacency, h.transpose(0, 1).flatten(1))
        return self.head(mixed.unflatten(1, (len(x), 4)).transpose(0, 1).flatten(1))


LAZY = {"hand": False, "review": ("MR",)}
add("LazyBatchNorm1d", lambda: nn.Sequential(
    nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(3)
), ROWS, quick=True, **LAZY)  # fmt: skip
add("LazyConv2d and LazyBatchNorm2d", lambda: nn.Sequential(
    nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(4)
), images(size=8), **LAZY)  # fmt: skip
for layout in ("to_sparse", "to_sparse_csr"):
    add(f"an adjacency matrix in a sparse buffer, {layout}()", partial(OnAGraph, layout), vectors(6), dtype=None,
        samples_dtype=torch.float64, review=("MR",), quick=layout == "to_sparse")  # fmt: skip


# Complex weights and spikes.
CASES.needs = ("neuralop",)


def fourier() -> nn.Module:
    from neuralop.models import FNO

    return Made(lambda m, x: m.head(m.body(x).mean((2, 3))), body=FNO(
        n_modes=(4, 4), in_channels=1, out_channels=4, hidden_channels=8, n_layers=2
    ), head=nn.Linear(4, 4))  # fmt: skip


add("neuralop FNO", fourier, images(1, 8), dtype=None, review=("MR",), refused="complex",
    note="Weights and what is sent are real numbers.")  # fmt: skip

CASES.needs = ("snntorch",)
FOUR = 4
"""Steps in time."""


def spiking(forward: Any, **options: Any) -> Any:
    def build() -> nn.Module:
        import snntorch as snn

        parts = [snn.Leaky(0.8, init_hidden=forward is not passed, **options) for _ in range(2)]
        return Made(forward, a=nn.Linear(8, 16), one=parts[0], b=nn.Linear(16, 3), two=parts[1])

    return build


def passed(m: Made, x: Tensor) -> Tensor:
    """The membrane's potential passes from step to step, as in snnTorch's tutorials."""
    one, two, total = m.one.init_leaky(), m.two.init_leaky(), 0.0
    for _ in range(FOUR):
        spikes, one = m.one(m.a(x), one)
        spikes, two = m.two(m.b(spikes), two)
        total = total + two
    return total


def kept(m: Made, x: Tensor) -> Tensor:
    """The layers keep their potentials, and forget them at each call."""
    forget(m)
    return kept_from_before(m, x)


def forget(m: nn.Module) -> None:
    from snntorch import utils

    utils.reset(m)


def kept_from_before(m: Made, x: Tensor) -> Tensor:
    return sum(m.two(m.b(m.one(m.a(x)))) for _ in range(FOUR))


SNN = {"dtype": torch.float32, "local": {"lr": 0.2}, "review": ("MR",)}
add("snnTorch, potentials passed on", spiking(passed), ROWS, **SNN)
add("snnTorch, learn_beta, learn_threshold", spiking(passed, learn_beta=True, learn_threshold=True), ROWS, **SNN)
add("snnTorch, init_hidden=True", spiking(kept), ROWS, **SNN, refused="gives different outputs",
    note="utils.reset knows the layers that were constructed, not their copies. A function that makes the model is a "
    "way out.")  # fmt: skip
add("snnTorch, init_hidden=True, model=function", spiking(kept), ROWS, factory=True, **SNN)
add("snnTorch, init_hidden=True, reset outside of forward", spiking(kept_from_before), ROWS, **SNN,
    refused="gives different outputs", note="undrift's loop does not call utils.reset between steps.")  # fmt: skip

CASES.needs = ("spikingjelly",)


def in_steps(m: Made, x: Tensor) -> Tensor:
    reset_net(m)
    return never_reset(m, x)


def reset_net(m: nn.Module) -> None:
    from spikingjelly.activation_based import functional

    functional.reset_net(m)


def never_reset(m: Made, x: Tensor) -> Tensor:
    return sum(m.net(x) for _ in range(FOUR)) / FOUR


def jelly(kind: str = "LIFNode", forward: Any = in_steps) -> Any:
    def build() -> nn.Module:
        from spikingjelly.activation_based import neuron, surrogate

        def node() -> nn.Module:
            return getattr(neuron, kind)(surrogate_function=surrogate.ATan())

        return Made(forward, net=nn.Sequential(nn.Linear(8, 16), node(), nn.Linear(16, 3)))

    return build


add("spikingjelly, LIFNode", jelly(), ROWS, review=("MR",))
add("spikingjelly, ParametricLIFNode", jelly("ParametricLIFNode"), ROWS, review=("MR",))
add("spikingjelly, LIFNode, reset outside of forward", jelly(forward=never_reset), ROWS, review=("MR",),
    refused="Reset it in forward", note="undrift's loop does not call reset_net between steps.")  # fmt: skip

CASES.needs = ("kan",)


def kan() -> nn.Module:
    from kan import KAN

    module = KAN([8, 4, 3], grid=3, k=3, seed=0, auto_save=False, symbolic_enabled=False, save_act=False)
    with torch.no_grad():
        for p in module.parameters():  # least squares do not repeat to the last digit
            p.copy_((1024 * p).round() / 1024)
    return module


add("pykan", kan, ROWS, dtype=torch.float32, review=("MR",))
add("pykan, model=function", kan, ROWS, dtype=torch.float32, factory=True, review=("MR",))


# Outputs of several depths.
CASES.needs = ("monai",)


def deep(supervised: bool) -> Any:
    def build() -> nn.Module:
        from monai.networks.nets import DynUNet

        return DynUNet(
            2, 1, 3, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 8],
            deep_supervision=supervised, deep_supr_num=1,
        )  # fmt: skip

    return build


def by_pixel(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy averaged over a sample's pixels."""
    return F.cross_entropy(z, y, reduction="none").flatten(1).mean(1)


def at_all_depths(z: Tensor, y: Tensor) -> Tensor:
    """MONAI stacks the outputs in training, along the second axis, and gives the last alone in evaluation."""
    depths = z.unbind(1) if z.dim() == 5 else [z]
    return sum(0.5**i * by_pixel(each, y) for i, each in enumerate(depths))


add("monai DynUNet", deep(False), pictures(), loss=by_pixel, local={"lr": 0.5})
add("monai DynUNet, deep_supervision=True", deep(True), pictures(), loss=at_all_depths, review=("MR",),
    local={"lr": 0.5})  # fmt: skip

# Mixtures of experts.
CASES.needs = ("transformers",)
SIZES = {**LLAMA, "num_key_value_heads": 2, "use_cache": False}
EXPERTS = {
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "rope_scaling": None,
    }),
    "GptOssForCausalLM": ("GptOssConfig", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4,
    }),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    }),
}  # fmt: skip
for name, (config, options) in EXPERTS.items():
    for kind, more in {
        "": {"dtype": torch.float32},
        ", float64": {"refused": "Expected mat_a to be Float32", "note": "torch has no grouped products of float64."},
        ', float64, experts_implementation="eager"': {},
        ', float64, experts_implementation="batched_mm"': {},
    }.items():  # fmt: skip
        choice = {"experts_implementation": kind.split('"')[1]} if '"' in kind else {}
        add(name + kind, of_transformers(name, config, **SIZES, **options, **choice), next_tokens(), loss=token_loss,
            review=("MR",), local={"lr": 0.5}, **more)  # fmt: skip
