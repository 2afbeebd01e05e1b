"""What one client does in a round, written once for all engines.

A local step is, in this order: the gradient of the loss (with the `logits` and `objective` hooks); weight decay; the
`gradient` and `step` hooks in the order of `+`, of which clipping and the local optimizer are the last; the learning
rate; the step; the `project` hooks.

The lanes engine maps these functions over a lane axis, the plain engine calls them directly. `given` has what the
client is given: one client's entries of `RoundInputs`, both trees merged by `Program.given`. `state` has what training
changes: `params`; `statistics`, the buffers that the forward pass changes; `carry`, per part; `measured`, of the parts
that measure in "training"; and `rate_sum`, `work` and `momentum_sum`, if a part reads the rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.engine.gradients import Differentiate, StepGradients
from undrift.errors import UndriftError, first_line, listed
from undrift.functional.draws import Row
from undrift.functional.loss_draws import in_step, repeating
from undrift.functional.model import Model, Params
from undrift.losses import Loss
from undrift.method.calls import HookError, aligned, call, pair, unchanged_form
from undrift.method.context import Batch, Client
from undrift.method.part import Method, Part, by_stage, part_stream
from undrift.method.rules import overrides
from undrift.method.work import PersonalState, momentum_of
from undrift.random import Key
from undrift.tree import Tree, tree_leaves, tree_map, tree_structure, tree_sub, tree_where, tree_zeros

# The step in the key of hooks outside a local step. Hooks with the same step have the same key.
PREPARE, CONCLUDE, BEGIN, OWN, KEEP = (2**31 + i for i in range(5))
PASSES = ("before", "after", "finish", "cohort", "sent")
"""When parts may measure in a pass of its own over the client's data."""
MEASURE = {when: 2**31 + (i << 28) for i, when in enumerate(PASSES, start=1)}

MAKERS = {"received": "broadcast", "prepared": "prepare"}
"""Fields of a client that are None for parts without this hook."""

Clients = list[tuple[Part, Client]]
"""Every part, with this round's numbers, paired with the client as the part sees it."""


class Sent(NamedTuple):
    """What a client that has trained sends and keeps."""

    sums: Tree
    """Its share of the sums: the weighted update, each part's sums, the weighted statistics."""
    kept: list[Tree]
    """Per part: the client's new state."""
    finite: Tree
    """Whether all of these are finite; () if that is not checked."""
    update: Tree
    """Its own update, unweighted; () unless a part aggregates."""


@dataclass(frozen=True)
class Program:
    """The functions of one client's round, fixed for the whole run. All of them are pure."""

    model: Model
    method: Method
    """The method, with the parts for local training (`method/work.py`)."""
    loss: Loss
    weight_decay: bool
    """Whether any round has the weight decay of `Local`, which comes before the parts' hooks."""
    augment: Callable[[Tensor, Key], Tensor] | None = None
    """Changes a batch before a step."""
    personal: frozenset[str] = frozenset()
    """The names of the parameters and buffers that are each client's own."""
    decay: Mapping[str, float] = field(default_factory=dict)
    """By parameter: the factor of its group for the weight decay."""
    sums: dict[int, Tree] = field(default_factory=dict, compare=False)
    """By position of the parts that measure in "training": zeros like their sums, found in a trial before the run."""

    @cached_property
    def reads_rates(self) -> bool:
        """Whether a part reads `rate_sum` or `work`, in `update` or `upload`; otherwise they are not computed."""
        return any(part.reads_rates for _, part in self.method.overriding("update", "upload"))

    @cached_property
    def using(self) -> dict[str, list[int]]:
        """By hook: the positions of the parts that override it, in the order in which they apply."""
        hooks = "begin prepare carry step logits objective gradient rate project update upload own aggregate"
        return {hook: [i for i, _ in self.method.overriding(hook)] for hook in hooks.split()}

    @cached_property
    def measuring(self) -> list[int]:
        """The positions of the parts that measure in "training"."""
        return [i for i, _ in self.method.measuring("training")]

    @cached_property
    def personal_state(self) -> int:
        """The position of the part that keeps personal values."""
        return next(i for i, part in enumerate(self.method.parts) if isinstance(part, PersonalState))

    def given(self, shared: Tree, own: Tree) -> dict[str, Tree]:
        """Return what a client is given: shared and own entries, with its own values of personal parameters."""
        given = {**shared, **own}
        if self.personal and "kept" in given:
            mine = given["kept"][self.personal_state]
            for name in ("start", "tracked"):
                given[name] = {n: mine.get(n, t) for n, t in given[name].items()}
        return given

    def clients(self, given: Tree, step: Tensor | int, local: bool = False) -> Clients:
        """Return every part with the client as it sees it. Outside of a local step, `step` only separates draws."""
        step = torch.full_like(given["id"], step) if isinstance(step, int) else step
        base = Client(
            id=given["id"],
            round=given["round"],
            n=given["n"],
            weight=given["weight"],
            label_counts=given["label_counts"],
            steps=given["steps"],
            lr=given["lr"],
            start=given["start"],
            begun=self.starting(given),
            key=Key(given["key"], step),
            model=self.model.at(given["tracked"]),
            loss=repeating(self.model, self.loss),
            step=step if local else None,
            buffers=given["tracked"],
            tuning=given.get("tuning"),
            personal=self.personal,
            decay=self.decay,
        )
        own = {name: given[name] for name in ("received", "kept", "measured", "prepared") if name in given}
        views = []
        for i, part in enumerate(self.method.bind(given["numbers"]).parts):
            mine: dict[str, Any] = {name: trees[i] for name, trees in own.items()}
            mine |= {name: None for name, maker in MAKERS.items() if name in mine and not overrides(part, maker)}
            if isinstance(mine.get("measured"), tuple) and not mine["measured"]:  # it has not been measured yet
                mine["measured"] = None
            views.append((part, replace(base, key=base.key.stream_at(part_stream(part)), **mine)))
        return views

    # ---- before the first step -------------------------------------------------------------------------------
    def begin(self, given: Tree) -> Params:
        """Return the weights that local training starts from, by the parts' `begin` hooks."""
        params, clients = given["start"], self.clients(given, BEGIN)
        for part, client in (clients[i] for i in self.using["begin"]):
            params = aligned(call(part, "begin", params, client), params, part, "begin")
        return params

    def starting(self, given: Tree) -> Params:
        """Return the weights that local training starts from, after `begin` has been called if a part has it."""
        found: Params = given.get("begun", given["start"])
        return found

    def measure(self, params: Params, given: Tree, batch: Batch, when: str, number: Tensor) -> Tree:
        """Return each measuring part's sums over batch `number` of a pass over the client's data."""
        found: list[Tree] = [() for _ in self.method.parts]
        for i, (part, client) in enumerate(self.clients(given, MEASURE[when] + number)):
            if part.measures == when:
                own = call(part, "measure", params, batch, client)
                own = self.without_personal(own) if when in ("cohort", "finish") else own  # others stay with the client
                found[i] = tree_map(lambda t: _summable(t, given), own)
        return found

    def prepare(self, given: Tree) -> Tree:
        found: list[Tree] = [() for _ in self.method.parts]
        clients = self.clients(given, PREPARE) if self.using["prepare"] else []
        for i in self.using["prepare"]:
            part, client = clients[i]
            found[i] = tree_map(lambda t: as_tensor(t, given), call(part, "prepare", client))
        return found

    def initial(self, given: Tree) -> Tree:
        """Training state before the first step."""
        params = self.starting(given)
        state: dict[str, Any] = {"params": tree_map(torch.clone, params)}
        if given["tracked"]:
            state["statistics"] = tree_map(torch.clone, given["tracked"])
        carries: list[Tree] = []
        if self.using["step"]:
            clients = self.clients(given, PREPARE)
            carries = [() for _ in clients]
            for i in self.using["carry"]:
                part, client = clients[i]
                carries[i] = call(part, "carry", params, client)
            carries = tree_map(lambda t: as_tensor(t, given).clone(), carries)
            state["carry"] = carries
        if self.reads_rates:
            k = torch.zeros_like(given["id"])
            clients = with_carries(self.clients(given, k, local=True), carries)
            zeros = tree_map(torch.zeros_like, self.multiplier(k, clients, params))
            state |= {"rate_sum": zeros, "work": zeros, "momentum_sum": torch.zeros_like(given["lr"])}
        if self.measuring:
            state["measured"] = tree_map(torch.zeros_like, [self.sums[i] for i in self.measuring])
        return state

    # ---- a local step ----------------------------------------------------------------------------------------
    def step(
        self,
        state: Tree,
        given: Tree,
        batches: list[Batch],
        k: Tensor,
        differentiate: Differentiate,
    ) -> Tree:
        """Take one local step, on the first of its batches.

        Args:
            state: The training state.
            given: What the client is given.
            batches: The batches of this step: one, unless a part asks for more.
            k: The step's index.
            differentiate: The engine's gradient of a function of the weights.
        """
        params, after, clients = state["params"], dict(state), self.clients(given, k, local=True)
        buffers = state.get("statistics", {})
        clients = [(part, replace(client, buffers=buffers)) for part, client in clients]
        gradients = StepGradients(self, given, batches, k, differentiate, clients)
        g, statistics, measured = gradients.first(params, buffers)
        if statistics:
            after["statistics"] = statistics
        if measured:
            after["measured"] = tree_map(torch.add, state["measured"], measured)
        if self.weight_decay:
            g = {n: t if self.decay.get(n) == 0 else t + self._decay(n, given) * params[n] for n, t in g.items()}
        carries = list(state.get("carry", ()))

        def rates_before() -> Tree:
            return self.rates(k, with_carries(clients, list(state.get("carry", ()))), params, given)[2]

        for i in sorted({*self.using["gradient"], *self.using["step"]}):
            part, client = clients[i][0], replace(clients[i][1], gradients_of=gradients, find_rates=rates_before)
            if i in self.using["gradient"]:
                g = self.changed_gradient(part, client, g, params)
            else:
                g, carries[i] = self.taken_step(part, client, g, carries[i], params)
        if carries:
            after["carry"] = carries
        clients = with_carries(clients, carries)
        multiplier, rate, rates = self.rates(k, clients, params, given)
        params = {n: torch.addcmul(w, rates[n].to(w.dtype), g[n], value=-1) for n, w in params.items()}
        for part, client in (clients[i] for i in self.using["project"]):
            found = call(part, "project", params, replace(client, find_rates=lambda: rates))
            params = aligned(found, params, part, "project")
        after["params"] = params
        if self.reads_rates:
            rho = momentum_of([part for part, _ in clients], given["momentum"])
            after["momentum_sum"] = rho * state["momentum_sum"] + 1
            after["rate_sum"] = tree_map(torch.add, state["rate_sum"], rate)
            after["work"] = tree_map(lambda a, m: a + m * after["momentum_sum"], state["work"], multiplier)
        return after

    def changed_gradient(self, part: Part, client: Client, g: Params, params: Params) -> Params:
        """Return the gradient after this part's `gradient` hook."""
        return aligned(call(part, "gradient", g, params, client), params, part, "gradient")

    def taken_step(self, part: Part, client: Client, g: Params, carry: Tree, params: Params) -> tuple[Params, Tree]:
        """Return the gradient and the carry after this part's `step` hook."""
        changed, new = pair(call(part, "step", g, carry, params, client), part, "step", "g", "carry")
        return aligned(changed, params, part, "step"), unchanged_form(new, carry, part, "step", "carry", "carry")

    def rates(self, k: Tensor, clients: Clients, params: Params, given: Tree) -> tuple[Tree, Tree, Tree]:
        """Return the product of the parts' factors in step k, the learning rate with it, and that by parameter.

        The first two are a number or a tree.
        """
        multiplier = self.multiplier(k, clients, params)
        rate = tree_map(lambda m: m * given["lr"], multiplier)
        return multiplier, rate, rate if isinstance(rate, dict) else dict.fromkeys(params, rate)

    def _decay(self, name: str, given: Tree) -> Tensor:
        factor = self.decay.get(name, 1.0)
        return given["weight_decay"] if factor == 1 else given["weight_decay"] * factor

    def objective(
        self,
        params: Params,
        batch: Batch,
        key: Key,
        clients: Clients,
        statistics: Params | None = None,
        row: Row | None = None,
        measured: list[Tree] | None = None,
    ) -> Tensor:
        """Return the loss of each sample of a batch, through the parts' `logits` and `objective` hooks.

        With `row`, the batch is that row of a larger one, whose draws it has. `measured` gets the sums of the parts
        that measure in "training".
        """
        terms, watch = self.using["objective"], bool(self.using["objective"] or self.measuring)
        z, features = self.model.train_features(params, batch.x, key, statistics, watch, row, batch.mask)
        for part, client in (clients[i] for i in self.using["logits"]):
            z = call(part, "logits", z, client)
        with in_step(self.model, key, row):
            losses = self._losses(z, batch.y, [type(clients[i][0]).__name__ for i in self.using["logits"]])
        batch = replace(batch, find_features=features)
        for part, client in (clients[i] for i in terms):
            losses = self.changed_losses(part, client, losses, z, batch, params)
        if measured is not None:
            measured += self._in_training(params, batch, z, losses, clients)
        return losses

    def changed_losses(
        self, part: Part, client: Client, losses: Tensor, z: Tensor, batch: Batch, params: Params
    ) -> Tensor:
        """Return the losses after this part's `objective` hook."""
        found = call(part, "objective", losses, z, batch, params, client)
        if getattr(found, "shape", None) != losses.shape:
            raise UndriftError(
                f"{type(part).__name__}.objective must return one loss per sample, of shape {tuple(losses.shape)}, "
                f"not {tuple(getattr(found, 'shape', ()))}."
            )
        return found

    def _in_training(self, params: Params, batch: Batch, z: Tensor, losses: Tensor, clients: Clients) -> list[Tree]:
        """Return the sums of parts that measure in "training", of which no gradient is taken."""
        find = batch.find_features
        assert find is not None
        seen = replace(
            batch,
            output=tree_map(torch.Tensor.detach, z),
            losses=losses.detach(),
            find_features=lambda: find().detach(),
        )
        detached, given = tree_map(torch.Tensor.detach, params), {"id": clients[0][1].id}
        sums = [call(part, "measure", detached, seen, client) for part, client in (clients[i] for i in self.measuring)]
        found: list[Tree] = tree_map(lambda t: _summable(t, given).detach(), sums)
        for i, own in zip(self.measuring, found, strict=True):
            if i in self.sums and form_of(own) != form_of(self.sums[i]):
                raise HookError(
                    f"{type(clients[i][0]).__name__}.measure must return sums over the batch, but their shapes depend "
                    "on how many samples it has; they are added up over local steps."
                )
        return found

    def _losses(self, z: Tensor, y: Tensor, changed: list[str]) -> Tensor:
        """Return the loss of each sample. If the loss function fails, `logits` hooks may be the cause."""
        try:
            return self.loss(z, y)
        except (RuntimeError, IndexError, ValueError) as error:
            if not changed or isinstance(error, UndriftError):
                raise
            raise UndriftError(
                f"The loss failed on what {changed[-1]}.logits returned, of shape {tuple(z.shape)}: {first_line(error)}"
            ) from error

    def multiplier(self, k: Tensor, clients: Clients, params: Params) -> Tree:
        """Return the product of the parts' rates in step k: a float64 number, or a tree if one of them is."""
        product: Tree = torch.ones((), dtype=torch.float64, device=k.device)
        for part, client in (clients[i] for i in self.using["rate"]):
            rate = call(part, "rate", k.to(self.model.accum_dtype), client)
            if isinstance(rate, dict):
                rate = aligned(rate, params, part, "rate", spread=True)
                product = product if isinstance(product, dict) else dict.fromkeys(params, product)
                product = {n: r * product[n] for n, r in rate.items()}
            elif isinstance(rate, list | tuple) or getattr(rate, "shape", ()) != ():
                kind = f"a tensor of shape {tuple(rate.shape)}" if isinstance(rate, Tensor) else type(rate).__name__
                raise UndriftError(
                    f"{type(part).__name__}.rate must return one number, or a dict with the parameters' own names, not "
                    f"{kind}."
                )
            else:
                product = tree_map(lambda p, rate=rate: p * rate, product)
        return product

    def latest(self, before: list[Tree], now: list[Tree], when: str) -> list[Tree]:
        """Return each part's measurements, with those that have been made `now` in place of none."""
        return [
            new if part.measures == when else b for part, b, new in zip(self.method.parts, before, now, strict=True)
        ]

    # ---- after the last step ---------------------------------------------------------------------------------
    def conclude(self, state: Tree, given: Tree, skip: bool = False) -> Sent:
        """Return what a client sends and keeps (`Sent`). With `skip`, a client with non-finite values sends zeros."""
        final, start, begun = state["params"], given["start"], self.starting(given)
        trained = self.without_personal(tree_sub(final, begun))
        update = trained if begun is start else self.without_personal(tree_sub(final, start))
        delta, statistics = update, state.get("statistics", {})
        sums: list[Tree] = [() for _ in self.method.parts]
        kept: list[Tree] = list(given["kept"])
        after: dict[str, Any] = {"final": final, "buffers": statistics}
        for name in ("rate_sum", "work") if self.reads_rates else ():
            after[name] = state[name] if isinstance(state[name], dict) else dict.fromkeys(delta, state[name])
        carries = state.get("carry", [None] * len(sums))
        measured = dict(zip(self.measuring, state.get("measured", ()), strict=True))
        views = self.clients(given, CONCLUDE)
        for i, part in by_stage([(i, part) for i, (part, _) in enumerate(views)]):
            client = replace(views[i][1], carry=carries[i], **after)
            client = replace(client, measured=measured[i]) if i in measured else client
            if i in self.using["update"]:
                update, handed = self.changed_update(part, client, update)
                client = replace(client, from_update=handed)
            if i in self.using["upload"]:
                own, new = self.uploaded(part, client, trained)
                sums[i] = tree_map(lambda t: _summable(t, given), self.without_personal(own))
                kept[i] = unchanged_form(new, kept[i], part, "upload", "kept state", "keep")
        update = self.without_personal(update)
        # In at least float32: a half-precision update times a client's samples would overflow.
        dtype = self.model.accum_dtype
        shared = {n: t for n, t in statistics.items() if n not in self.personal}
        weighted = [tree_map(lambda t: t.to(dtype) * given["weight"], tree) for tree in (update, shared)]
        sent = (weighted[0], sums, weighted[1])
        gathered = update if self.using["aggregate"] else ()
        if "real" in given:  # an empty lane sends nothing
            sent = tree_where(given["real"], sent, tree_zeros(sent))
        if not skip:
            return Sent(sent, kept, (), gathered)
        numbers = [t for t in tree_leaves((sent, kept)) if t.is_floating_point()]
        finite = torch.stack([t.isfinite().all() for t in numbers]).all()
        sent = tree_where(finite, sent, tree_zeros(sent))
        return Sent(sent, tree_where(finite, kept, given["kept"]), finite, gathered)

    def changed_update(self, part: Part, client: Client, update: Params) -> tuple[Params, Tree]:
        """Return the update after this part's `update` hook, and what that hands on to `upload`."""
        found, handed = call(part, "update", update, client), None
        if isinstance(found, tuple):
            found, handed = pair(found, part, "update", "update", "what upload finds in client.from_update")
        return aligned(found, update, part, "update"), handed

    def uploaded(self, part: Part, client: Client, delta: Params) -> tuple[Tree, Tree]:
        """Return what this part's `upload` hook sums, and what the client keeps."""
        return pair(call(part, "upload", delta, client), part, "upload", "sums", "kept")

    def without_personal(self, tree: Tree, drop: bool = False) -> Tree:
        """Return the tree without personal entries, or with zeros there, in every dict by parameter or buffer."""
        if not self.personal:
            return tree
        if isinstance(tree, dict):
            whole = tree.keys() in (self.model.start.keys(), self.model.tracked.keys())
            mine = self.personal if whole else frozenset()
            rest = {n: t for n, t in tree.items() if not (drop and n in mine)}
            return {n: tree_zeros(t) if n in mine else self.without_personal(t, drop) for n, t in rest.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self.without_personal(t, drop) for t in tree)
        return tree

    def own(self, given: Tree) -> Params:
        """Return the weights and the running statistics that this client would use."""
        params, buffers, clients = given["start"], given["tracked"], self.clients(given, OWN)
        for part, client in (clients[i] for i in self.using["own"]):
            found = call(part, "own", params, replace(client, buffers=buffers))
            if buffers and isinstance(found, dict) and not buffers.keys() <= found.keys():
                raise HookError(
                    f"{type(part).__name__}.own returns weights without the running statistics that they are used with "
                    f"({listed(list(buffers))}); return {{**weights, **client.buffers}}, or those that these weights "
                    "were trained with (client.gradient_and_buffers)."
                )
            found = aligned(found, {**params, **buffers}, part, "own")
            params, buffers = ({n: found[n] for n in names} for names in (params, buffers))
        return {**params, **buffers}


def with_carries(clients: Clients, carries: list[Tree]) -> Clients:
    """Return the clients with each part's carry, if there are any."""
    if not carries:
        return clients
    return [(part, replace(client, carry=carry)) for (part, client), carry in zip(clients, carries, strict=True)]


def as_tensor(leaf: Any, given: Tree) -> Tensor:
    """Return a tensor unchanged, and a Python number as a tensor on the device, in full precision."""
    exact = torch.float64 if isinstance(leaf, float) else None
    return leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf, dtype=exact, device=given["id"].device)


def form_of(tree: Tree) -> Any:
    """Return the structure of a tree and the shapes of its tensors."""
    return tree_structure(tree), [t.shape for t in tree_leaves(tree)]


def _summable(leaf: Any, given: Tree) -> Tensor:
    """Return votes and counts as integers: bytes would overflow when summed, and True + True is True."""
    leaf = as_tensor(leaf, given)
    return leaf if leaf.is_floating_point() else leaf.long()
