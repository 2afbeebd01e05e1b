"""Mistakes in hooks: each is refused, or reported with the part, the hook, the file and the line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import undrift as ud
from tests.experiments import GOOD, toml, undrift
from tests.problems import make_clients, net, split
from undrift.method.calls import GROWN, place
from undrift.method.part import HOOKS

LOCAL = ud.Local(steps=2, batch_size=8, lr=0.1)
PLAIN, LANES, ONE_LANE = {"engine": "plain"}, {"engine": "lanes", "lanes": 2}, {"engine": "lanes", "lanes": 1}
ON_BOTH = pytest.mark.parametrize("engine", [PLAIN, LANES], ids=["plain", "lanes"])
EVERYWHERE = pytest.mark.parametrize("engine", [PLAIN, LANES, ONE_LANE], ids=["plain", "lanes", "one lane"])
DATA = make_clients([16, 10, 5])


def part(name: str, /, **hooks: Any) -> ud.Part:
    """A part of this name with these hooks and class attributes."""
    return make_dataclass(name, [], bases=(ud.Part,), frozen=True, namespace=hooks)()


def train(method: Any, model: Any = None, data: Any = None, **settings: Any) -> ud.Result:
    given = {"rounds": 2, "local": LOCAL, **settings}
    return ud.train(model or net(), DATA if data is None else data, method, **given)


def refusal(method: Any, *given: Any, **settings: Any) -> str:
    with pytest.raises(ud.UndriftError) as refused:
        train(method, *given, **settings)
    return str(refused.value)


# ---- how a part is written ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OldTransform(ud.Part):
    def transform(self, update, totals, state):
        return update, state


@dataclass(frozen=True)
class OldTransformOtherNames(ud.Part):
    def transform(self, delta, sums, state):
        return delta, state


@dataclass(frozen=True)
class OldPlan(ud.Part):
    def plan(self, plan, state):
        return plan


@dataclass(frozen=True)
class OldAfter(ud.Part):
    def after(self, params, previous, state):
        return state


@dataclass(frozen=True)
class OldRefine(ud.Part):
    def refine(self, params, server):
        return params


@dataclass(frozen=True)
class OldFinish(ud.Part):
    measures = "finish"

    def measure(self, params, batch, client):
        return batch.mask.sum()

    def finish(self, params, totals, server):
        return params


@dataclass(frozen=True)
class OldInherited(ud.ServerSGD):
    """Its base has the new one, and it overrides that with the old."""

    def transform(self, update, totals, state):
        return update, state


class Mixin:
    def transform(self, update, totals, state):
        return update, state


@dataclass(frozen=True)
class OldMixedIn(Mixin, ud.Part):
    pass


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (OldTransform(), "OldTransform.transform does not .* write def transform(self, update, state, server)"),
        (OldTransformOtherNames(), "write def transform(self, update, state, server)"),
        (OldPlan(), "OldPlan.plan does not .* write def plan(self, plan, state, server)"),
        (OldAfter(), "OldAfter.after does not .* write def observe(self, params, state, server)"),
        (OldRefine(), "OldRefine.refine does not .* write def refine(self, params, state, server)"),
        (OldFinish(), "OldFinish.finish does not .* write def finish(self, params, state, server)"),
        (OldInherited(), "OldInherited.transform does not .* write def transform(self, update, state, server)"),
        (OldMixedIn(), "OldMixedIn.transform does not .* write def transform(self, update, state, server)"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_signatures_of_before_are_refused_with_the_new_one(made, wanted):
    found = refusal(made)
    assert re.search(re.escape(wanted).replace(r"\.\*", ".*"), found.replace("\n", " ")), found
    assert "docs/upgrading.md" in found and (Path(__file__).parent.parent / "docs" / "upgrading.md").exists()


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_a_hook_with_too_few_or_too_many_arguments_is_refused(hook):
    names = list(inspect.signature(getattr(ud.Part, hook)).parameters)[1:]
    short = names[: -2 if hook in GROWN else -1]  # these once had one argument fewer, and may still
    for arguments in (short, [*names, "more"]):
        space: dict[str, Any] = {}
        exec(f"def {hook}(self, {', '.join(arguments)}): return None", space)
        more = {"measures": "before"} if hook == "measure" else {}
        more |= {"step": lambda self, g, carry, params, client: (g, carry)} if hook == "carry" else {}
        found = refusal(part("Short", **{hook: space[hook]}, **more))
        assert f"write def {hook}(self, {', '.join(names)})" in found


def test_hooks_with_defaults_and_stars_are_fine():
    train(part("Starred", gradient=lambda self, g, *rest, **more: g))
    train(part("Defaulted", gradient=lambda self, g, params, client, mu=0.1: g))


NEAR = {
    "gradients": "gradient", "updates": "update", "transforms": "transform", "brodcast": "broadcast",
    "Gradient": "gradient", "aggregated": "aggregate", "up_load": "upload", "finished": "finish", "starts": "start",
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_names_that_are_nearly_a_hook_are_refused(name):
    found = refusal(part("Near", **{name: lambda self, *given: given[0], "project": lambda self, w, client: w}))
    assert f"Near.{name} is not a hook; did you mean {NEAR[name]}?" in found


ATTRIBUTES = {
    "mesures": ("before", "measures"), "batch": (2, "batches"), "replace_gradient": (True, "replaces_gradient"),
    "imply_weighting": ("uniform", "implies_weighting"), "contradict": (("FedProx",), "contradicts"),
    "read_rates": (False, "reads_rates"), "personals": (("3.*",), "personal"), "range": ({"mu": "[0, 1]"}, "ranges"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_names_that_are_nearly_a_class_attribute_are_refused(name):
    value, meant = ATTRIBUTES[name]
    found = refusal(part("Near", **{name: value, "project": lambda self, w, client: w}))
    assert f"Near.{name} is not an attribute of parts; did you mean {meant}?" in found


def test_fields_helpers_and_other_attributes_may_have_any_name():
    @dataclass(frozen=True)
    class Fine(ud.Part):
        batch: int = 3
        personals: str = ""
        _range = 4
        colour = "red"

        def _gradients(self):
            return self.batch

        def gradient(self, g, params, client):
            return g

    train(Fine())


def test_parts_that_change_nothing_are_refused():
    assert "Idle overrides no hook, so it would change nothing; docs/hooks.md lists the hooks" in refusal(part("Idle"))
    found = refusal(part("Helper", norm=lambda self, g: g))
    assert "Helper overrides no hook" in found


# ---- what hooks return ----------------------------------------------------------------------------------------------

PAIRS = {
    "plan": (lambda self, plan, state, server: plan, "(plan, state), not Plan"),
    "transform": (lambda self, update, state, server: update, "(update, state), not dict"),
    "refine": (lambda self, params, state, server: (params, state, 1), "(params, state), not a tuple of 3"),
    "aggregate": (
        lambda self, updates, state, server: ud.tree_map(lambda u: u[0], updates),
        "(update, state), not dict",
    ),
    "step": (lambda self, g, carry, params, client: g, "(g, carry), not dict"),
    "upload": (lambda self, delta, client: delta, "(sums, kept), not dict"),
}


@ON_BOTH
@pytest.mark.parametrize("hook", PAIRS)
def test_a_hook_that_returns_no_pair_is_refused(hook, engine):
    function, wanted = PAIRS[hook]
    assert f"Alone.{hook} must return a pair, {wanted}" in refusal(part("Alone", **{hook: function}), **engine)


def test_a_plan_that_is_no_plan_is_refused():
    swapped = part("Swapped", plan=lambda self, plan, state, server: (state, plan))
    assert "Swapped.plan must return a plan, not tuple" in refusal(swapped)


def results(hook: str) -> dict[str, Callable[..., Any]]:
    """A function for each wrong result of this hook, whose result should be like its first argument."""
    paired = hook in ("step", "transform", "refine", "aggregate")

    def returning(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
        def function(self: Any, tree: Any, *given: Any) -> Any:
            tree = ud.tree_map(lambda u: u[0], tree) if hook == "aggregate" else tree
            return (change(tree), given[0]) if paired else change(tree)

        return function

    return {
        "lost": returning(lambda tree: {n: t for n, t in tree.items() if n != "0.bias"}),
        "extra": returning(lambda tree: {**tree, "more": tree["0.bias"]}),
        "scalar": returning(lambda tree: {**tree, "0.bias": tree["0.bias"].sum()}),
        "shape": returning(lambda tree: {**tree, "0.bias": tree["0.bias"][:3]}),
        "number": returning(lambda tree: {**tree, "0.bias": 1.0}),
        "list": returning(lambda tree: list(tree.values())),
    }


SENTENCES = {
    "lost": "must return a dict with the parameters' own names",
    "extra": "must return a dict with the parameters' own names",
    "list": "must return a dict with the parameters' own names",
    "scalar": "returned a value of shape () for '0.bias', which has shape (8,); it must not change shapes",
    "shape": "returned a value of shape (3,) for '0.bias', which has shape (8,)",
    "number": "must return tensors, but has a value of type float for '0.bias'",
}
LIKE_PARAMETERS = ("begin", "gradient", "step", "project", "update", "aggregate", "transform", "refine", "finish")


@ON_BOTH
@pytest.mark.parametrize("hook", LIKE_PARAMETERS)
def test_results_unlike_the_parameters_are_refused(hook, engine):
    settings = {**engine, "rounds": 1}
    for wrong, function in results(hook).items():
        found = refusal(part("Wrong", **{hook: function}), **settings)
        assert f"Wrong.{hook} {SENTENCES[wrong]}" in found, (wrong, found)


@ON_BOTH
def test_rates_may_be_numbers_and_spread_but_nothing_else(engine):
    fine = {
        "number": lambda self, k, client: 0.5,
        "scalar": lambda self, k, client: torch.tensor(0.5, dtype=torch.float64),
        "by name": lambda self, k, client: dict.fromkeys(client.start, 0.5),
        "scalars": lambda self, k, client: {n: w.sum() * 0 + 0.5 for n, w in client.start.items()},
        "spread": lambda self, k, client: {n: torch.full(w.shape[:1] + (1,) * (w.dim() - 1), 0.5, dtype=w.dtype)
                                           for n, w in client.start.items()},
    }  # fmt: skip
    found = [train(part("Rate", rate=function), **engine).params for function in fine.values()]
    assert all(torch.allclose(f[n], found[0][n], rtol=1e-14) for f in found for n in f)
    wrong = {
        "must return one number, or a dict with the parameters' own names": lambda self, k, client: torch.ones(6),
        "must return a dict with the parameters' own names": lambda self, k, client: {"0.bias": 1.0},
    }
    for sentence, function in wrong.items():
        assert f"Rate.rate {sentence}" in refusal(part("Rate", rate=function), **engine)
    bent = part("Rate", rate=lambda self, k, client: {n: torch.ones(5) for n in client.start})
    assert "Rate.rate returned a value of shape (5,) for '0.weight'" in refusal(bent, **engine)


NOTHING = sorted(HOOKS - {"check", "check_model"})


def beside(hook: str) -> dict[str, Any]:
    """What a part with this hook must have besides."""
    return {
        "measure": {"measures": "before"},
        "carry": {"step": lambda self, g, carry, params, client: (g, carry)},
    }.get(hook, {})


def settings_for(hook: str) -> dict[str, Any]:
    return {"data": split()} if hook == "own" else {}


@ON_BOTH
@pytest.mark.parametrize("hook", NOTHING)
def test_a_hook_that_forgets_to_return_is_refused(hook, engine):
    made = part("Forgets", **{hook: lambda self, *given: None}, **beside(hook))
    assert f"Forgets.{hook} returned nothing" in refusal(made, **engine, **settings_for(hook))


STRANGE = {
    "start": lambda self, params: "x",
    "broadcast": lambda self, params, state, server: {"a": "x"},
    "keep": lambda self, params: {"a": None},
    "measure": lambda self, params, batch, client: "x",
    "prepare": lambda self, client: [client],
    "carry": lambda self, params, client: "x",
    "upload": lambda self, delta, client: ({"a": None}, client.kept),
    "observe": lambda self, params, state, server: {"a": None},
    "transform": lambda self, update, state, server: (update, "x"),
}


@ON_BOTH
@pytest.mark.parametrize("hook", STRANGE)
def test_leaves_that_are_no_numbers_are_refused(hook, engine):
    made = part("Strange", **{hook: STRANGE[hook]}, **beside(hook))
    assert f"Strange.{hook} must return trees of tensors and numbers, but has " in refusal(made, **engine)


def numbers_alone() -> ud.Part:
    """Python's numbers wherever a tree of tensors is expected; what they add up to is in the history."""
    return part(
        "Numbers",
        start=lambda self, params: {"seen": 0.0, "rounds": 0},
        broadcast=lambda self, params, state, server: {"a": 0.1, "b": [1, True]},
        keep=lambda self, params: {"times": 0, "share": 0.5},
        measures="before",
        measure=lambda self, params, batch, client: 1.0,
        prepare=lambda self, client: {"half": 0.1},
        carry=lambda self, params, client: 0.1,
        step=lambda self, g, carry, params, client: (
            {n: t * client.prepared["half"] * client.received["a"] for n, t in g.items()},
            0.7,
        ),
        upload=lambda self, delta, client: ({"carry": client.carry, "one": 1}, {"times": 3, "share": 0.1}),
        transform=lambda self, update, state, server: (update, {"seen": server.totals.sums["carry"], "rounds": 2}),
        history=lambda self, state: {"seen": float(state["seen"])},
    )


@EVERYWHERE
def test_plain_numbers_are_fine_where_tensors_are_and_keep_their_precision(engine):
    run = train(numbers_alone(), **engine)
    assert run.history[-1]["seen"] == pytest.approx(2.1, rel=1e-14)
    slow = train(ud.FedAvg(), local=replace(LOCAL, lr=0.1 * 0.1 * 0.1), **engine)
    assert all(torch.allclose(run.params[n], slow.params[n], rtol=1e-14) for n in run.params)


def test_other_results_of_another_kind_are_refused():
    listed = part("Wrong", history=lambda self, state: [1])
    assert "Wrong.history must return a dict of columns, not [1]" in refusal(listed)
    for size in ("many", -1, torch.nan):
        made = part("Wrong", update_bytes=lambda self, found, params, size=size: size)
        assert "Wrong.update_bytes must return a number from 0" in refusal(made)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lr": float("nan")}, "A part's plan: its lr is nan; it must be in [0, inf)"),
        ({"lr": -0.1}, "A part's plan: its lr is -0.1"),
        ({"lr": "fast"}, "A part's plan: its lr must be a number"),
        ({"momentum": 1.0}, "A part's plan: its momentum is 1; it must be in [0, 1)"),
        ({"weight_decay": -1}, "A part's plan: its weight_decay is -1"),
    ],
)
def test_a_plan_with_rates_out_of_range_is_refused(change, sentence):
    made = part("Plans", plan=lambda self, plan, state, server: (replace(plan, **change), state))
    local = replace(LOCAL, momentum=0.5, weight_decay=0.1)
    assert sentence in refusal(made, local=local)


def test_a_plan_may_have_rates_from_tensors():
    made = part("Plans", plan=lambda self, plan, state, server: (replace(plan, lr=torch.tensor(0.05)), state))
    wanted = train(ud.FedAvg(), local=replace(LOCAL, lr=0.05)).params
    assert all(torch.allclose(w, wanted[n], rtol=1e-7) for n, w in train(made).params.items())


# ---- errors ---------------------------------------------------------------------------------------------------------


def boom() -> None:
    raise KeyError("boom")


BOOM = f"{Path(__file__).name}:{inspect.getsourcelines(boom)[1] + 1}"


@ON_BOTH
@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_an_error_in_a_hook_names_part_hook_file_and_line(hook, engine):
    made = part("Fails", **{hook: lambda self, *given: boom()}, **beside(hook))
    found = refusal(made, **engine, **settings_for(hook))
    assert re.search(rf"Fails\.{hook} failed \(.*{BOOM}\): KeyError: 'boom'\.", found), found
    assert "vmap" not in found


def looks(t: Any) -> Any:
    return t if t.sum() > 0 else 0 * t


@pytest.mark.parametrize("hook", ["gradient", "project", "update", "begin"])
def test_an_if_on_a_tensor_is_blamed_on_vmap(hook):
    made = part("Looks", **{hook: lambda self, tree, *given: ud.tree_map(looks, tree)})
    for engine in (LANES, ONE_LANE):
        found = refusal(made, **engine)
        line = inspect.getsourcelines(looks)[1] + 1
        assert re.search(rf"Looks\.{hook} failed \(.*{Path(__file__).name}:{line}\)", found), found
        assert "torch.func.vmap" in found and 'engine="plain" runs the hook as it is' in found
    train(made, **PLAIN)


def item(self: Any, g: Any, params: Any, client: Any) -> Any:
    return {n: t * float(client.n.item()) for n, t in g.items()}


def test_numbers_of_tensors_are_blamed_on_vmap():
    for engine in (LANES, ONE_LANE):
        found = refusal(part("Items", gradient=item), **engine)
        assert "Items.gradient failed" in found and "torch.func.vmap" in found
    train(part("Items", gradient=item), **PLAIN)


def shapes(self: Any, g: Any, params: Any, client: Any) -> Any:
    return {n: t @ torch.ones(99, dtype=t.dtype) for n, t in g.items()}


@ON_BOTH
def test_a_wrong_product_is_not_blamed_on_vmap(engine):
    found = refusal(part("Shapes", gradient=shapes), **engine)
    assert "Shapes.gradient failed" in found and "RuntimeError" in found
    assert "torch.func.vmap" not in found, found


DRAWS = {
    "randn": lambda t: t + torch.randn(t.shape, dtype=t.dtype),
    "rand_like": lambda t: t + torch.rand_like(t),
    "normal_": lambda t: t + torch.zeros_like(t).normal_(),
    "bernoulli": lambda t: t * torch.bernoulli(torch.full_like(t, 0.5)),
    "exponential_": lambda t: t + torch.zeros_like(t).exponential_(),
    "dropout": lambda t: torch.nn.functional.dropout(t, 0.5),
    "randperm": lambda t: t + torch.randperm(3).sum(),
}


@EVERYWHERE
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_from_the_global_generator_point_to_the_key(draw, engine):
    function = DRAWS[draw]
    before = torch.get_rng_state()
    found = refusal(part("Draws", gradient=lambda self, g, params, client: ud.tree_map(function, g)), **engine)
    assert "Draws.gradient draws (" in found and "test_hook_mistakes.py:" in found, found
    assert "from a generator of torch" in found and "client.key" in found, found
    assert torch.equal(torch.get_rng_state(), before)


@ON_BOTH
@pytest.mark.parametrize("hook", ["keep", "start", "broadcast", "transform", "upload", "prepare", "begin", "finish"])
def test_draws_in_every_kind_of_hook(hook, engine):
    made = part("Draws", **{hook: lambda self, *given: torch.randn(3)})
    assert "with randn, from a generator of torch" in refusal(made, **engine)


@ON_BOTH
def test_a_models_dropout_is_no_draw_of_a_hooks(engine):
    """In evaluation mode, and with the step's draws in `client.gradient`."""

    def gradient(self, g, params, client):
        zero = {n: 0 * t for n, t in client.gradient(ud.tree_map(torch.clone, params)).items()}
        outputs = client.model(params, torch.ones(2, 6, dtype=torch.float64))
        return {n: t + zero[n] + 0 * outputs.sum() for n, t in g.items()}

    train(part("Fine", gradient=gradient), net(dropout=0.5), **engine)


class Fragile(torch.nn.Module):
    """Fails on a client's last, short batch; the samples that are tried before training do not show it."""

    def __init__(self, error: type[Exception] = KeyError) -> None:
        super().__init__()
        self.inner, self.error = net(), error

    def forward(self, x):
        if self.training and len(x) > 2:
            raise self.error("forward")
        return self.inner(x)


LINE = inspect.getsourcelines(Fragile.forward)[1] + 2


@EVERYWHERE
def test_an_error_in_the_models_forward_says_where(engine):
    found = refusal(ud.FedAvg(), Fragile(), **engine)
    assert re.search(rf"The model failed.* \(.*{Path(__file__).name}:{LINE}\): KeyError: 'forward'\.", found), found
    assert "vmap" not in found


def test_a_file_beside_undrifts_folder_is_the_users():
    """A plugin may be called undrift_extra, whose path begins like undrift's own."""
    space: dict[str, Any] = {}
    file = f"{Path(ud.__file__).parent}_extra/parts.py"
    exec(compile("def fails():\n    raise KeyError", file, "exec"), space)
    with pytest.raises(KeyError) as failed:
        space["fails"]()
    assert place(failed.value) == f" ({file}:2)"


def test_an_error_of_the_machine_stays_what_it_is():
    with pytest.raises(MemoryError):
        train(ud.FedAvg(), Fragile(MemoryError), **PLAIN)
    with pytest.raises(KeyboardInterrupt):
        train(ud.FedAvg(), Fragile(KeyboardInterrupt), **PLAIN)  # type: ignore[arg-type]


# ---- a user's optimizer ---------------------------------------------------------------------------------------------


def optimizer(name: str, **functions: Any) -> ud.Optimizer:
    return make_dataclass(name, [], bases=(ud.Optimizer,), frozen=True, namespace=functions)()


def stay(self: Any, g: Any, carry: Any, params: Any, client: Any) -> Any:
    return g, carry


OPTIMIZERS = {
    "step": (
        {"step": lambda self, g, carry, params, client: boom()},
        rf"Own\.step failed \(.*{BOOM}\): KeyError: 'boom'\.",
    ),
    "carry": (
        {"carry": lambda self, params, client: boom(), "step": stay},
        rf"Own\.carry failed \(.*{BOOM}\): KeyError: 'boom'\.",
    ),
    "no pair": (
        {"step": lambda self, g, carry, params, client: g},
        r"Own\.step must return a pair, \(direction, carry\), not dict",
    ),
    "names": (
        {"step": lambda self, g, carry, params, client: ({"0.bias": g["0.bias"]}, carry)},
        r"Own\.step must return a dict with the parameters' own names",
    ),
    "shapes": (
        {"step": lambda self, g, carry, params, client: (ud.tree_map(torch.sum, g), carry)},
        r"Own\.step returned a value of shape \(\) for '0.weight'",
    ),
    "draws": (
        {"step": lambda self, g, carry, params, client: (ud.tree_map(torch.randn_like, g), carry)},
        r"draws \(.*\) with randn_like, from a generator of torch",
    ),
    "form": (
        {"carry": lambda self, params, client: torch.zeros(()), "step": lambda self, g, carry, params, client: (g, ())},
        r"Own\.step must not change the structure of its carry",
    ),
}


@ON_BOTH
@pytest.mark.parametrize("mistake", OPTIMIZERS)
def test_mistakes_in_an_optimizer_of_ones_own(mistake, engine):
    functions, wanted = OPTIMIZERS[mistake]
    local = replace(LOCAL, optimizer=optimizer("Own", **functions))
    found = refusal(ud.FedAvg(), local=local, **engine)
    assert re.search(wanted, found), found
    assert "vmap" not in found


@pytest.mark.parametrize("state", ["keep", "average"])
def test_an_optimizer_whose_state_is_not_reset_has_no_client_to_look_at(state):
    def carry(self, params, client):
        return {"n": client.n + 0.0}

    local = replace(LOCAL, optimizer=optimizer("Curious", carry=carry, step=stay), optimizer_state=state)
    found = refusal(ud.FedAvg(), local=local)
    assert "Curious.carry failed" in found and "None" in found


# ---- the command line -----------------------------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass
import torch
import undrift as ud

@dataclass(frozen=True)
class Misses(ud.Part):
    what: str = "key"

    def gradient(self, g, params, client):
        if self.what == "vmap" and client.n > 3:
            return g
        return {n: g["nowhere"] for n in g}

@dataclass(frozen=True)
class Older(ud.Part):
    def transform(self, update, totals, state):
        return update, state
"""


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_mistakes_on_the_command_line(tmp_path, monkeypatch, engine, capsys):
    from undrift.tools import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_parts.py").write_text(OWN)
    wanted = {
        "Misses()": r"error: e\.toml: Misses\.gradient failed \(.*own_parts\.py:13\): KeyError: 'nowhere'\.$",
        "Older()": r"error: e\.toml: Older\.transform .* def transform\(self, update, state, server\)",
    }
    if engine == "lanes":
        wanted["Misses('vmap')"] = r"Misses\.gradient failed \(.*own_parts\.py:11\): .*torch\.func\.vmap"
    for number, (method, sentence) in enumerate(wanted.items()):
        (tmp_path / "e.toml").write_text(toml({**GOOD, "method": method, "engine": engine, "rounds": 1}))
        monkeypatch.setattr("sys.argv", ["undrift", "run", "e.toml", "--import", "own_parts", "--out", f"run-{number}"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        err = capsys.readouterr().err.strip()
        assert ended.value.code == 2 and re.search(sentence, err.replace("\n", " ")), err
        assert "Traceback" not in err and ("vmap" in err) == ("vmap" in method)
    assert undrift("list", "methods")


# ---- what a new user stumbled over ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldLikeAHook(ud.Part):
    rate: ud.Number = 1.0

    def gradient(self, g, params, client):
        return g


@dataclass(frozen=True)
class KeepsUnasked(ud.Part):
    def upload(self, delta, client):
        return (), delta


@dataclass(frozen=True)
class Module(ud.Part):
    personal: tuple[str, ...] = ("3",)


@dataclass(frozen=True)
class Shapeless(ud.Part):
    def logits(self, z, client):
        return z.sum(1)


@dataclass(frozen=True)
class RatesInAList(ud.Part):
    def rate(self, k, client):
        return [1.0, 2.0]


@dataclass(frozen=True)
class OneStepForTwo(ud.Part):
    def plan(self, plan, state, server):
        return replace(plan, clients=server.clients[:2]), state


@ON_BOTH
@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (FieldLikeAHook, "FieldLikeAHook has a field called 'rate', which is the name of a hook"),
        (
            KeepsUnasked,
            "KeepsUnasked.upload returns a kept state; add the hook `keep`",
        ),
        (Module, r"Module(personal) has '3', but the model has no parameter of such a name; write '3.*'."),
        (Shapeless, "The loss failed on what Shapeless.logits returned, of shape (8,)"),
        (RatesInAList, "RatesInAList.rate must return one number, or a dict with the parameters' own names, not list"),
        (OneStepForTwo, "has 2 clients and 3 step counts; see server.steps(clients)"),
    ],
)
def test_messages_say_what_to_write(made, sentence, engine):
    assert sentence in refusal(made(), **engine)


def test_a_tuple_in_an_expression_stays_a_tuple():
    """So that a run's config.toml is the same after it was read back."""
    from undrift.method.parse import as_method

    method = as_method("Module(personal=('3.*',))")
    assert method.parts[0].personal == ("3.*",) and repr(as_method(repr(method))) == repr(method)
