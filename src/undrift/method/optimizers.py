"""Local optimizers: how a client turns the gradient of a local step into the direction of that step.

The optimizer comes last in a local step: it sees the gradient after all parts' `gradient` hooks and after clipping. The
engine multiplies the direction by the learning rate and subtracts it from the weights.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor

from undrift.errors import UndriftError, quoted, require
from undrift.method.context import Client
from undrift.method.numbers import check_numbers
from undrift.schedule import Number, number_fields
from undrift.tree import Tree, tree_zeros


class Optimizer:
    """Base class of local optimizers: subclass it as a frozen dataclass and override `step` (and `carry` for state).

    Fields annotated `Number` may be values or schedules. Inside `carry` and `step`, they are that round's value, as a
    scalar tensor. Both must be pure tensor functions that work under `torch.func.vmap`, without an `if` on the value of
    a tensor.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> import undrift as ud
        >>> @dataclass(frozen=True)
        ... class SignSGD(ud.Optimizer):
        ...     def step(self, g, carry, params, client):
        ...         return ud.tree_map(torch.sign, g), carry
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.001, optimizer=SignSGD())
    """

    ranges: ClassVar[dict[str, str]] = {}
    """The interval of each number, such as "[0, 1)". The default is "[0, inf)"."""
    _off: ClassVar[frozenset[str]] = frozenset()
    """The names of numbers that are 0, found at construction since inside hooks they are tensors."""

    @property
    def stateful(self) -> bool:
        """Whether there is state that a client could keep from one round to the next."""
        return type(self).carry is not Optimizer.carry

    def carry(self, params: Tree, client: Client) -> Tree:
        """Return the state before the first local step, a tree of tensors.

        Args:
            params: The weights that the client starts from.
            client: The client; None if the state outlives the round (`optimizer_state="keep"` or `"average"`).

        Returns:
            The state.
        """
        return ()

    def step(self, g: Tree, carry: Tree, params: Tree, client: Client) -> tuple[Tree, Tree]:
        """Return the direction of a local step and the state after it. The step is `w ← w − lr · direction`.

        Args:
            g: The gradient, after the `gradient` hooks and clipping.
            carry: The state before the step.
            params: The weights before the step.
            client: The client. `client.decay` has the weight decay factor of each parameter in a group, by name; other
                parameters have the factor 1.

        Returns:
            The direction, with the names, shapes and dtypes of `params`; and the state, with the structure, shapes and
            dtypes of `carry`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD` without dampening.

    With `g ← g + λ·w`, the velocity is `v ← μ·v + g`, from `v = 0`. The direction is v, or `g + μ·v` with Nesterov's
    momentum. This weight decay comes after the `gradient` hooks and clipping; that of `Local(weight_decay)` comes
    before them.

    Example:
        >>> import undrift as ud
        >>> optimizer = ud.SGD(momentum=0.9, nesterov=True, weight_decay=1e-4)
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.1, optimizer=optimizer)

    Args:
        momentum: The momentum μ.
        nesterov: Whether to use Nesterov's momentum.
        weight_decay: The weight decay λ.

    Raises:
        UndriftError: If `nesterov` is set without momentum. `ud.train` checks the numbers.
    """

    momentum: Number = 0.0
    nesterov: bool = False
    weight_decay: Number = 0.0

    ranges: ClassVar[dict[str, str]] = {"momentum": "[0, 1)"}

    def __post_init__(self) -> None:
        _find_zeros(self)
        fine = isinstance(self.nesterov, bool)
        require(fine, f"SGD(nesterov) must be True or False, not {quoted(self.nesterov)}.")
        require(self.stateful or not self.nesterov, "SGD(nesterov=True) needs momentum; set SGD(momentum=0.9), say.")

    @property
    def stateful(self) -> bool:
        return "momentum" not in self._off

    def carry(self, params: Tree, client: Client) -> Tree:
        return tree_zeros(params) if self.stateful else ()

    def step(self, g: Tree, carry: Tree, params: Tree, client: Client) -> tuple[Tree, Tree]:
        g = _add_decay(self, g, params, client)
        if not self.stateful:
            return g, carry
        v = {n: (self.momentum * carry[n] + g[n]).to(w.dtype) for n, w in params.items()}
        if self.nesterov:
            return {n: (g[n] + self.momentum * v[n]).to(w.dtype) for n, w in params.items()}, v
        return v, v


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as `torch.optim.Adam`: weight decay is added to the gradient.

    Kingma and Ba, *Adam: A Method for Stochastic Optimization* (2015). With `g ← g + λ·w`: `m ← β₁·m + (1−β₁)·g`,
    `v ← β₂·v + (1−β₂)·g²`, from `m = v = 0`. The direction of step t, counted from 1, is
    `m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + ε)`. t is part of the state: if the state is kept, t goes on in the next round.

    Example:
        >>> import undrift as ud
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.001, optimizer=ud.Adam(beta2=0.99))

    Args:
        beta1: The decay rate β₁ of the first moment.
        beta2: The decay rate β₂ of the second moment.
        eps: The constant ε in the denominator.
        weight_decay: The weight decay λ.
    """

    beta1: Number = 0.9
    beta2: Number = 0.999
    eps: Number = 1e-8
    weight_decay: Number = 0.0

    ranges: ClassVar[dict[str, str]] = {"beta1": "[0, 1)", "beta2": "[0, 1)"}

    def __post_init__(self) -> None:
        _find_zeros(self)

    def carry(self, params: Tree, client: Client) -> Tree:
        return _moments(params)

    def step(self, g: Tree, carry: Tree, params: Tree, client: Client) -> tuple[Tree, Tree]:
        return _adam(self, _add_decay(self, g, params, client), carry, params)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`.

    Loshchilov and Hutter, *Decoupled Weight Decay Regularization* (2019). The direction is that of `ud.Adam` without
    weight decay, plus `λ·w`.

    Example:
        >>> import undrift as ud
        >>> groups = {"*.bias": ud.Group(weight_decay=0.0)}
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.001, optimizer=ud.AdamW(), groups=groups)

    Args:
        beta1: The decay rate β₁ of the first moment.
        beta2: The decay rate β₂ of the second moment.
        eps: The constant ε in the denominator.
        weight_decay: The weight decay λ.
    """

    weight_decay: Number = 0.01

    def step(self, g: Tree, carry: Tree, params: Tree, client: Client) -> tuple[Tree, Tree]:
        direction, after = _adam(self, g, carry, params)
        return _add_decay(self, direction, params, client), after


def is_sgd(optimizer: Any) -> TypeGuard[SGD]:
    """Return whether its steps are those of `SGD`, which a subclass may have changed."""
    return isinstance(optimizer, SGD) and type(optimizer).step is SGD.step


def _moments(params: Tree) -> Tree:
    """Return Adam's initial state. The powers `β₁ᵗ` and `β₂ᵗ` stand for the step count t, in float64 for precision.

    Averaged over clients, they still correct the bias of averaged moments. And a compiler that computes them per weight
    spends nothing on a product, but as much on `pow` as on everything else.
    """
    device = next(iter(params.values())).device
    powers = {name: torch.ones((), dtype=torch.float64, device=device) for name in ("beta1_power", "beta2_power")}
    return {"m": tree_zeros(params), "v": tree_zeros(params), **powers}


def _adam(optimizer: Adam, g: Tree, carry: Tree, params: Tree) -> tuple[Tree, Tree]:
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    power1, power2 = carry["beta1_power"] * beta1, carry["beta2_power"] * beta2
    # Scalars are float64. They do not promote other tensors, except for parameters that are scalars too.
    m = {n: (beta1 * carry["m"][n] + (1 - beta1) * g[n]).to(w.dtype) for n, w in params.items()}
    v = {n: (beta2 * carry["v"][n] + (1 - beta2) * g[n] * g[n]).to(w.dtype) for n, w in params.items()}

    def direction(m: Tensor, v: Tensor) -> Tensor:
        first, second = (1 - power1).to(m.dtype), (1 - power2).to(m.dtype).sqrt()
        return (m / first / (v.sqrt() / second + optimizer.eps)).to(m.dtype)

    directions = {n: direction(m[n], v[n]) for n in params}
    return directions, {"m": m, "v": v, "beta1_power": power1, "beta2_power": power2}


def _add_decay(optimizer: SGD | Adam, g: Tree, params: Tree, client: Client) -> Tree:
    """Return `g + λ·w`, with each parameter's λ from its group."""
    if "weight_decay" in optimizer._off:
        return g
    factors = client.decay

    def decayed(g: Tensor, w: Tensor, factor: float) -> Tensor:
        if factor == 0:
            return g
        rate = optimizer.weight_decay if factor == 1 else optimizer.weight_decay * factor
        return (g + rate * w).to(w.dtype)

    return {n: decayed(g[n], w, factors.get(n, 1.0)) for n, w in params.items()}


def _find_zeros(optimizer: Optimizer) -> None:
    values = {name: getattr(optimizer, name) for name in number_fields(optimizer)}
    off = frozenset(name for name, x in values.items() if isinstance(x, numbers.Real) and x == 0)
    object.__setattr__(optimizer, "_off", off)


def clip_by_norm(g: Tree, max_norm: Tensor | float) -> Tree:
    """Scale the gradient to a norm of at most `max_norm` over all parameters, as `torch.nn.utils.clip_grad_norm_`."""
    norm = torch.stack([torch.linalg.vector_norm(leaf) for leaf in g.values()]).norm()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return {n: (leaf * factor).to(leaf.dtype) for n, leaf in g.items()}


def check_optimizer(optimizer: Any, rounds: int) -> None:
    """Raise `UndriftError` if the class is incomplete, or a number is out of range in some round of the run."""
    name = type(optimizer).__name__
    require(is_dataclass(optimizer), f"{name} must be a dataclass: put @dataclass(frozen=True) above it.")
    if type(optimizer).step is Optimizer.step:
        raise UndriftError(f"{name} must define step(self, g, carry, params, client), which returns a direction.")
    check_numbers(optimizer, rounds, name)
