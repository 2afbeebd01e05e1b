"""A module as a function of its parameters: how the engines and every hook call it."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from undrift.errors import UndriftError
from undrift.functional.arguments import arguments, batch_size, floats_to, selected
from undrift.functional.batch_norm import NORMS, LaneNorms, adopt_norms, release_norms
from undrift.functional.convolution.lanes import ConvolutionMode, convolutions
from undrift.functional.copying import copy_of, deep_copy, without_factory
from undrift.functional.draws import KeyedDraws, Row, fixed_key
from undrift.functional.examine import BufferShapeError, examine, find_obstacle, named_tensors, shaped_by_batch
from undrift.functional.generators import seeded
from undrift.functional.gradient import Held
from undrift.functional.gradient import Params as Params
from undrift.functional.in_place import InPlace
from undrift.functional.layers import LastInput, Layer, Watch
from undrift.functional.layouts import overwrite
from undrift.functional.masks import masks
from undrift.functional.norm_trials import refuses_single
from undrift.functional.per_sample import Squares, Uses
from undrift.functional.recurrent.layers import adopt, release
from undrift.functional.writes import FrozenWriteError
from undrift.random import Key, normal_like
from undrift.tree import Tree, tree_leaves, tree_map

log = logging.getLogger("undrift")


class Model:
    """A module as a function: `model(params, x)` in evaluation mode, `model.train(params, x, key)` in training mode.

    Trainable parameters are the function's argument. Frozen ones (`requires_grad=False`) stay in the module, one copy
    for all clients, and are never sent. So do buffers, except for those that training changes, such as a norm's running
    statistics: `tracked` has their values, and `at` returns the same model with others.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, precision: str = "auto", output: str | None = None
    ) -> None:
        """`output` names the output for the loss, if the module returns several."""
        self.switches = _switches(module)
        """Whether the module does something when its mode changes, such as merging weights for evaluation."""
        self.module = copy_of(module, device, whole=self.switches)
        # Submodules that the caller has set to evaluation mode stay there, unless that is the whole module.
        layers = self.module.named_modules() if self.module.training else ()
        self.still = [name for name, layer in layers if not layer.training]
        self.module.eval()  # so that the first training pass calls `train`, which the module may have overridden
        self.start: Params = {n: p.detach().clone() for n, p in self.module.named_parameters() if p.requires_grad}
        if not self.start:
            raise UndriftError("The model has no trainable parameters; set requires_grad=True on those to train.")
        self.dtype = next(iter(self.start.values())).dtype
        self.accum_dtype = torch.float32
        """The precision of numbers about clients, and of sums."""
        for w in self.start.values():
            self.accum_dtype = torch.promote_types(self.accum_dtype, w.dtype)
        self.low = precision == "bfloat16" and self.dtype != torch.bfloat16
        """Whether the model computes in a lower precision than its own."""
        self.input_dtype = next(p.dtype for p in self.module.parameters() if p.is_floating_point())
        """The precision of floating-point inputs of the original module: that of its first weights, frozen or not."""
        self.compute_dtype = torch.bfloat16 if precision == "bfloat16" else self.input_dtype
        self.norms = _of_norms(self.module)
        self.output, self.outputs = output, 0
        self.tracked: Params = {}
        self.scratch: list[str] = []
        """The buffers that take the shape of a batch: every call finds them as they were at first."""
        self.unkeyed = ""
        """Why draws in training cannot come from the client's key but need seeded generators; empty if they can."""
        self.draws_in_evaluation = False
        self.rebinds = ""
        """A weight whose `.data` the forward pass sets."""
        self.loss_draws = False
        """Whether the loss, or a metric, draws."""
        self.sample: Tree = None
        self.held = Held()
        self.owns_frozen = self.switches or not any(not p.requires_grad for p in self.module.parameters())
        """Whether this model has its own copy of frozen parameters, which a forward pass may then change."""
        self.vectorized = False
        """Whether this is the model as lanes train it."""

    def examined(self, x: Tree) -> tuple[Model, Tree]:
        """Return this model with what a run on `x` shows about it (its outputs, buffers that change), and its output.

        Runs a copy a few times, in evaluation and in training mode. Raises `UndriftError` if outputs do not repeat, and
        whatever the module itself raises.
        """
        try:
            found = examine(self, x)
        except FrozenWriteError:  # which the caller may own; from now on they are copies
            return self._unshared().examined(x)
        except BufferShapeError:
            scratch = [] if self.scratch else shaped_by_batch(self, x)
            return (self._unshared()._with(scratch=scratch) if scratch else self._shaped(x)).examined(x)
        if not self.owns_frozen and any(name not in self.norms for name in found.changed):
            # It creates and changes buffers of its own, so it may occasionally write to frozen weights too.
            return self._unshared().examined(x)
        output = found.output
        outputs = output.shape[-1] if isinstance(output, Tensor) and output.dim() > 1 else 0
        tracked = {name: named_tensors(self.module)[name].detach().clone() for name in found.changed}
        rest = found._asdict()
        noted = {name: rest[name] for name in ("unkeyed", "draws_in_evaluation", "rebinds")}
        return self._with(outputs=outputs, tracked=tracked, sample=x, **noted), output

    def _unshared(self) -> Model:
        """Return this model with its own copy of frozen parameters."""
        return self._with(module=deep_copy(self.module, {}), owns_frozen=True)

    def _shaped(self, x: Tree) -> Model:
        """Return this model after a training pass that gives its buffers their shapes."""
        log.warning("The model's buffers get their shapes from the first batch, so it was called once on a sample.")
        other = self._unshared()
        other.set_mode(True)
        args, kwargs = arguments(other.module, floats_to(x, self.input_dtype))
        with torch.no_grad(), seeded(fixed_key(tree_leaves(x)[0].device)):
            other.module(*args, **kwargs)
        return other

    def in_own_precision(self) -> Model:
        """Return this model computing in the precision of its weights, for trials whose outputs are compared."""
        return self._with(low=False, compute_dtype=self.input_dtype)

    def in_lanes(self) -> Model:
        """Return this model with recurrent layers and batch norms that support vmap in place of torch's own."""
        if isinstance(self.held, InPlace):
            return self
        module = deep_copy(self.module, {id(t): t for t in (*self.module.parameters(), *self.module.buffers())})
        adopt(module)
        adopt_norms(module)
        return self._with(module=module, vectorized=True)

    def in_place(self, why: str, module: nn.Module | None = None) -> Model:
        """Return this model as ordinary PyTorch calls it, one client at a time: see `InPlace`.

        `module` is another one to call, such as the caller's own.
        """
        return self.in_own_precision()._with(module=module or self.module, held=InPlace(why), vectorized=False)

    def called(self, module: nn.Module, x: Tree) -> Tree:
        """Return the outputs of a trained module, called as its user calls it."""
        args, kwargs = arguments(module, floats_to(x, self.input_dtype))
        with self._repeating(tree_leaves(x)[0].device):
            return selected(module(*args, **kwargs), self.output)

    def versions(self) -> dict[str, tuple[int, int]]:
        """Return version counters that show whether a forward pass has written to a buffer or a frozen weight."""
        return {
            n: (id(t), t._version)
            for n, t in named_tensors(self.module).items()
            if n not in self.start and n not in self.tracked and n not in self.scratch
        }

    def trial(self) -> Params:
        """Return a copy of the starting weights, since a forward pass may write to them (`Embedding(max_norm=…)`)."""
        return {name: w.clone() for name, w in self.start.items()}

    def perturbed(self) -> Params:
        """Return weights near the starting ones, which may be special: a head of zeros hides what comes before it."""
        device = next(iter(self.start.values())).device
        return tree_map(lambda w, z: w + 0.1 * z, self.start, normal_like(fixed_key(device), self.start))

    def at(self, tracked: Params) -> Model:
        """Return this model with these running statistics."""
        return self._with(tracked=tracked) if self.tracked else self

    def _with(self, **changes: Any) -> Model:
        """Return a copy with these attributes changed, without cached findings about another module or sample."""
        other = copy.copy(self)
        if changes.keys() & {"module", "sample", "unkeyed"}:
            for name in ("layers", "squares", "obstacle", "refuses_single"):
                other.__dict__.pop(name, None)
        other.__dict__ |= changes
        return other

    @cached_property
    def convolves(self) -> bool:
        """Whether the model may have two-dimensional convolutions."""
        return any(p.dim() == 4 for p in self.module.parameters())

    @cached_property
    def layers(self) -> list[Layer]:
        """The model's layers in the order of the forward pass, if they have the samples along their first axis."""
        assert self.sample is not None
        with torch.no_grad():
            seen = self.watch(self.trial(), self.sample)
        return seen.layers(batch_size(self.sample))

    @cached_property
    def squares(self) -> int | None:
        """The most numbers per sample that one backward pass for squared gradients makes; None if it needs several."""
        assert self.sample is not None
        found = [Uses(3), Uses(5)]  # two numbers of rows, one of which differs from the length of another axis
        for uses in found:
            with torch.no_grad():
                rows = tree_map(lambda t, n=uses.rows: t[:1].expand(n, *t.shape[1:]), self.sample)
                self._call(self.trial(), rows, {}, False, uses)
        return found[0].largest if all(uses.fine(self.start) for uses in found) else None

    @cached_property
    def obstacle(self) -> str | None:
        """Why this model cannot run under vmap; None if it can."""
        return self.held.why if isinstance(self.held, InPlace) else find_obstacle(self)

    @cached_property
    def refuses_single(self) -> bool:
        """Whether a batch of one sample cannot train this model: batch norm needs two values per channel."""
        return refuses_single(self)

    def __call__(self, params: Params, x: Tree) -> Tree:
        """Return the outputs in evaluation mode: without dropout, and with fixed running statistics."""
        return self._call(params, x, {}, training=False)

    def train(
        self, params: Params, x: Tree, key: Key, statistics: Params | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the outputs in training mode, with every draw from `key`. Writes tracked buffers into `statistics`."""
        return self.train_features(params, x, key, statistics, watch=False, mask=mask)[0]

    def train_features(
        self,
        params: Params,
        x: Tree,
        key: Key,
        statistics: Params | None = None,
        watch: bool = True,
        row: Row | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """`train`, and a function that returns the input of the last layer in that pass; None without `watch`.

        With `row`, `x` is one sample that has the draws of that row of a larger batch. `mask` says which samples are
        real; norms leave the others out. Values in `statistics` are written in place or, in lanes, replaced.
        """
        if statistics is None:
            statistics = {name: value.clone() for name, value in self.tracked.items()}
        seen = LastInput() if watch else None
        norms = LaneNorms(statistics, mask) if self.vectorized else None
        draws = self.seeding(key, row) if self.unkeyed else KeyedDraws(key, row)
        with draws, norms or contextlib.nullcontext():
            output = self._call(params, x, statistics, training=True, watch=seen)
        statistics |= norms.changed if norms else {}
        return output, (lambda: seen.features().to(self.dtype)) if seen else None

    @contextlib.contextmanager
    def seeding(self, key: Key, row: Row | None = None) -> Iterator[None]:
        """A context for a pass and its gradient that seeds the global generators, if the model's draws need them."""
        if not self.unkeyed:
            yield
            return
        # The dropout of cuDNN's recurrent layers draws from a state that cannot be seeded again.
        theirs = any(isinstance(layer, nn.RNNBase) and layer.dropout for layer in self.module.modules())
        with _without_cudnn() if theirs else contextlib.nullcontext(), seeded(key, row[0] if row else None):
            yield

    def _repeating(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """A context for a pass in evaluation mode with fixed draws, if the model draws there at all."""
        if not self.draws_in_evaluation:
            return contextlib.nullcontext()
        key = fixed_key(device)
        return seeded(key) if self.unkeyed else KeyedDraws(key)

    def squared(self, params: Params, x: Tree) -> Tensor:
        """Outputs in evaluation mode whose gradient is, per parameter, the sum over samples of squared gradients.

        Only where `squares` is not None.
        """
        return self._call(params, x, {}, False, Squares())

    def activations(self, params: Params, x: Tree) -> dict[str, Tensor]:
        """Return the activations of each layer's neurons in evaluation mode: by layer, samples × neurons."""
        return self.watch(params, x).activations(batch_size(x))

    def features(self, params: Params, x: Tree) -> Tensor:
        """Return the input of the last layer in evaluation mode: samples × features."""
        return self.watch(params, x).calls[-1].input

    def watch(self, params: Params, x: Tree) -> Watch:
        """Run a forward pass in evaluation mode, and record what it does."""
        seen = Watch()
        self._call(params, x, {}, training=False, watch=seen)
        return seen

    def gradient(self, loss: Callable[[Params], Tensor], params: Params) -> Params:
        """Return the gradient of a loss that calls this model, by ordinary autograd."""
        return self.gradient_and_buffers(lambda w: (loss(w), {}), params)[0]

    def gradient_and_buffers(
        self, loss: Callable[[Params], tuple[Tensor, Params]], params: Params
    ) -> tuple[Params, Params]:
        """Return the same for a `loss` that also returns the buffers it changed."""
        return self.held.gradient(loss, params)

    def _call(
        self,
        params: Params,
        x: Tree,
        statistics: Params,
        training: bool,
        watch: Watch | LastInput | Uses | Squares | None = None,
    ) -> Tree:
        x = floats_to(x, self.compute_dtype)
        tracked = self.tracked if training else {name: t.clone() for name, t in self.tracked.items()}
        tensors = {**dict(self.module.named_parameters()), **tracked, **params} if watch else tracked | params
        if self.low:  # activations in low precision
            rest = dict(self.module.named_parameters()) | dict(self.module.named_buffers()) | tracked | params
            whole = {n: t for n, t in rest.items() if n in self.norms or not t.is_floating_point()}
            tensors = {n: t.to(self.compute_dtype) for n, t in rest.items() if n not in whole} | whole
        if self.scratch and not isinstance(self.held, InPlace):
            own = dict(self.module.named_buffers())
            tensors = tensors | {name: own[name].clone() for name in self.scratch}
        if isinstance(watch, Watch | LastInput | Uses):
            own = dict(self.module.named_parameters())
            called = own if isinstance(self.held, InPlace) else tensors
            watch.names = {id(tensor): name for name, tensor in called.items() if name in own}
        # Not where it has nothing to do: while a mode is active, torch's transformers are evaluated in another way.
        none = contextlib.nullcontext()
        mode = convolutions(params, tree_leaves(x)[0], self.compute_dtype) if self.convolves else none
        draws = contextlib.nullcontext() if training else self._repeating(next(iter(params.values())).device)
        seen = watch or contextlib.nullcontext()
        # Which the end of the forward pass's own autocast does not do within that of the run, so that casts of earlier
        # weights would serve again.
        torch.clear_autocast_cache()
        with self._mode(training), draws, masks(), mode, seen, self._differentiable(training):
            switch = self._evaluating() if self.switches and not training else none
            output = self.held.call(self.module, tensors, statistics, *arguments(self.module, x), switch)
        output = selected(output, self.output)
        if isinstance(mode, ConvolutionMode):  # its outputs may have unexpected strides
            output = tree_map(lambda t: t.contiguous() if isinstance(t, Tensor) else t, output)
        return floats_to(output, self.dtype) if self.low else output

    @contextlib.contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        """The module in training or evaluation mode, and after a call within another as that needs it."""
        before, within = self.module.training, self.held.taken
        self.set_mode(training or self.switches)
        yield
        if within:
            self.set_mode(before)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The module in evaluation mode for one call, with the weights of that call when its mode changes."""
        self.set_mode(False)
        try:
            yield
        finally:
            self.set_mode(True)

    def set_mode(self, training: bool) -> None:
        if self.module.training != training:
            self.module.train() if training else self.module.eval()  # which the module may have overridden
            for name in self.still if training else ():
                self.module.get_submodule(name).training = False

    def _differentiable(self, training: bool) -> contextlib.AbstractContextManager[Any]:
        """A context without cuDNN for recurrent layers in evaluation mode, whose gradient (for FedCurv) cuDNN lacks."""
        theirs = any(isinstance(layer, nn.RNNBase) for layer in self.module.modules())
        if training or not theirs or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return _without_cudnn()

    def track(self, statistics: Params) -> None:
        """Make these this model's running statistics. The server's model is a copy for one round, which keeps them."""
        if statistics:
            new = {name: as_buffer(value, self.tracked[name]) for name, value in statistics.items()}
            self.tracked = self.tracked | new

    def load(self, params: Params) -> nn.Module:
        """Return the module with these weights and the running statistics in it, in evaluation mode."""
        for name, p in self.module.named_parameters():
            if name in params:
                p.copy_(params[name])
        for name, value in self.tracked.items():
            overwrite(named_tensors(self.module)[name], value)
        return self.released()

    def released(self) -> nn.Module:
        """Return the module with torch's own layers, in evaluation mode, for the user."""
        release(self.module)
        release_norms(self.module)
        return without_factory(self.module).eval()


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before, cudnn.enabled = cudnn.enabled, False  # cudnn.flags also reads the precision, which may raise
    try:
        yield
    finally:
        cudnn.enabled = before


def _switches(module: nn.Module) -> bool:
    """Return whether some layer has a `train` or an `eval` of its own."""
    own = [(type(layer), vars(layer)) for layer in module.modules()]
    torchs = nn.Module.train, nn.Module.eval
    return any((kind.train, kind.eval) != torchs or {"train", "eval"} & held.keys() for kind, held in own)


def as_buffer(value: Tensor, like: Tensor) -> Tensor:
    """Return a mean over clients as a buffer's value: a counter of batches stays an integer."""
    return (value if like.is_floating_point() else value.round()).to(like.dtype)


def _of_norms(module: nn.Module) -> set[str]:
    """Return the parameters and buffers of batch and instance norms, which keep their precision."""
    layers = {prefix: layer for prefix, layer in module.named_modules() if isinstance(layer, NORMS)}
    return {f"{prefix}.{n}".lstrip(".") for prefix, layer in layers.items() for n in layer.state_dict()}
