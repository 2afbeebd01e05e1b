"""Composition: sums of parts, their contradictions, their numbers, their expressions."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from typing import Optional

import pytest
import torch

import undrift as ud
from tests.problems import net, same_bits
from undrift.method.parse import as_method


@dataclass(frozen=True)
class Uniform(ud.Part):
    implies_weighting = "uniform"


@dataclass(frozen=True)
class Mistimed(ud.Part):
    measures = "befor"


@dataclass(frozen=True)
class Untimed(ud.Part):
    def measure(self, params, batch, client):
        return batch.mask.sum()


@dataclass(frozen=True)
class Weighting(ud.Part):
    weighting: ud.Number = 0.5  # a field of one's own may have this name


def test_plus_keeps_the_order_of_parts():
    method = ud.FedAvg() + ud.FedProx(mu=0.1) + (ud.ServerSGD() + Uniform())
    assert [type(p).__name__ for p in method.parts] == ["FedAvg", "FedProx", "ServerSGD", "Uniform"]
    assert repr(ud.FedProx(mu=0.1) + ud.FedAvg()) == "FedProx(mu=0.1, target=None) + FedAvg(weighting=None)"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ud.ServerSGD() + ud.ServerAdam(lr=0.1), "ServerSGD and ServerAdam contradict each other"),
        (lambda: ud.FedProx(mu=1) + ud.FedAvg() + ud.FedProx(mu=2), "FedProx stands twice"),
        (
            lambda: ud.FedAvg(weighting="samples") + Uniform(),
            "FedAvg needs the samples mean and Uniform needs the uniform mean",
        ),
        (lambda: as_method(Mistimed()), 'Mistimed.measures must be one of "cohort", "sent", "before"'),
        (lambda: as_method(Untimed()), "Untimed has a measure hook; say when"),
        (lambda: ud.FedAvg(weighting="equal"), 'must be "samples" or "uniform"'),
        (lambda: ud.FedAvg() + 3, "3 is not a part"),
        (lambda: as_method(3), "must be a part such as FedAvg"),
        (lambda: as_method("FedProxx(mu=1)"), "no method called 'FedProxx'. Did you mean 'FedProx'"),
        (lambda: as_method("FedProx(mu=1) + Server"), "no method called 'Server'"),
        (lambda: as_method("FedProx()"), "FedProx needs the argument 'mu'"),
        (lambda: as_method("FedProx(mu=__import__('os').getpid())"), "Cannot read"),
        (lambda: as_method("FedProx(mu=1"), "Cannot read the method"),
        (lambda: as_method("FedProx(mu=1) - FedAvg()"), "Cannot read"),
        (lambda: as_method("FedAvg"), "Cannot read 'FedAvg'"),
        (lambda: as_method("FedProx(mu=decoy(1, 0.5))"), "no method called 'decoy'. Did you mean 'decay'"),
    ],
)
def test_contradictions_and_misspellings_are_refused_by_name(make, sentence):
    with pytest.raises(ud.UndriftError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        make()


def test_expressions_say_what_the_code_says():
    assert (
        as_method("FedProx(mu=decay(1, 0.5)) + ServerSGD(0.5, momentum=0.9)").parts
        == (ud.FedProx(mu=ud.decay(1, 0.5)) + ud.ServerSGD(0.5, momentum=0.9)).parts
    )
    assert as_method("Uniform() + FedAvg()").parts == (Uniform(), ud.FedAvg())  # a part of one's own


def test_weighting():
    assert as_method(ud.FedProx(mu=1)).weighting == "samples" == as_method(Weighting()).weighting
    assert (ud.FedProx(mu=1) + Uniform()).weighting == "uniform"
    assert (ud.FedAvg(weighting="uniform") + ud.ServerAdam(lr=1)).weighting == "uniform"


@dataclass(frozen=True)
class Inner:
    beta: ud.Number
    name: str = "x"


@dataclass(frozen=True)
class Outer(ud.Part):
    mu: ud.Number
    target: Inner | None = None
    by_layer: ud.Number | None = None
    label: str = "3"
    ranges = {"by_layer": "[1, inf)"}  # noqa: RUF012


def test_numbers_are_found_wherever_they_stand_and_bound():
    method = as_method(Outer(mu=ud.decay(8, 0.5), target=Inner(beta=lambda t: t), by_layer={"a": 2}))
    assert method.numbers(3) == [{"mu": 1.0, "target": {"beta": 3.0}, "by_layer": {"a": 2.0}}]
    bound = method.bind(
        [{"mu": torch.tensor(5.0), "target": {"beta": torch.tensor(6.0)}, "by_layer": {"a": torch.tensor(7.0)}}]
    )
    part = bound.parts[0]
    assert part.mu == 5 and part.target.beta == 6 and part.by_layer["a"] == 7 and part.target.name == "x"
    assert method.parts[0].target.beta(4) == 4  # the user's own is untouched
    assert as_method(Outer(mu=1)).numbers(0) == [{"mu": 1.0}]


N = ud.Number


@dataclass(frozen=True)
class NumberFormat:
    digits: int = 3


@dataclass(frozen=True)
class Aliased(ud.Part):
    mu: N
    maybe: N | None = None
    by_layer: dict[str, N] | None = None
    how: NumberFormat | str = "short"  # no Number, though its name begins like one


# As a module without `from __future__ import annotations` would have them.
Quoted = make_dataclass(
    "Quoted", [("mu", "Number"), ("maybe", Optional["Number"], None), ("each", dict[str, "Number"], None)],  # noqa: F821
    bases=(ud.Part,), frozen=True,
)  # fmt: skip


def test_numbers_are_found_by_type_not_by_name():
    part = Aliased(mu=ud.decay(8, 0.5), by_layer={"a": lambda t: t})
    assert as_method(part).numbers(3) == [{"mu": 1.0, "by_layer": {"a": 3.0}}]
    assert as_method(Aliased(mu=1, maybe=2)).numbers(0) == [{"mu": 1.0, "maybe": 2.0}]
    assert as_method(Quoted(1, 2, {"a": 3})).numbers(0) == [{"mu": 1.0, "maybe": 2.0, "each": {"a": 3.0}}]


def test_numbers_of_a_part_that_is_defined_where_no_module_sees_its_names():
    from undrift import Number

    @dataclass(frozen=True)
    class Inside(ud.Part):
        mu: Number
        maybe: Number | None = None

    assert as_method(Inside(mu=ud.decay(8, 0.5))).numbers(3) == [{"mu": 1.0}]


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (ud.FedProx(mu=-1), r"FedProx\(mu\) is -1; it must be in \[0, inf\)"),
        (ud.FedProx(mu=float("nan")), r"FedProx\(mu\) is nan"),
        (ud.FedProx(mu="much"), r"FedProx\(mu\) must be a number"),
        (ud.ServerSGD(momentum=1), r"ServerSGD\(momentum\) is 1; it must be in \[0, 1\)"),
        (ud.ServerAdam(lr=-0.1), r"ServerAdam\(lr\) is -0.1"),
        (ud.ServerAdam(lr=0.1, beta2=1), r"ServerAdam\(beta2\) is 1"),
        (Outer(mu=0, target=Inner(beta=-2)), r"Outer\(target=Inner\)\(beta\) is -2"),
        (Outer(mu=0, by_layer={"a": 0.5}), r"Outer\(by_layer\['a'\]\) is 0.5; it must be in \[1, inf\)"),
    ],
)
def test_numbers_out_of_range_are_refused_with_part_and_argument(uneven, part, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        as_method(part).check(None, uneven, rounds=3)


def test_a_part_that_is_no_dataclass_is_refused():
    class Bare(ud.Part):
        pass

    with pytest.raises(ud.UndriftError, match="put @dataclass"):
        as_method(Bare())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: {"clients": plan.clients + 1000}, "has client .1000., which does not exist or has no data"),
        (lambda plan: {"clients": 0 * plan.clients}, "lists a client twice"),
        (lambda plan: {"clients": plan.clients + 0.5}, "must list its clients as"),
        (lambda plan: {"steps": 0 * plan.steps}, "must give each client a positive integer number of steps"),
        (lambda plan: {"steps": plan.steps[:1]}, "has 6 clients and 1 step counts; see server.steps"),
        (lambda plan: {"momentum": 0.9}, "sets momentum, which Local leaves at 0"),
        (lambda plan: {"round": 7}, "must not change the round"),
    ],
)
def test_a_plan_that_no_engine_could_carry_out_is_refused(change, message, uneven):
    @dataclass(frozen=True)
    class Planner(ud.Part):
        def plan(self, plan, state, server):
            return replace(plan, **change(plan)), state

    with pytest.raises(ud.UndriftError, match=message):
        ud.train(net(), uneven, Planner(), rounds=1, local=ud.Local(steps=2, lr=0.1))


@dataclass(frozen=True)
class Misspelt(ud.Part):
    def gradients(self, g, params, client):
        return g


@dataclass(frozen=True)
class Nothing(ud.Part):
    mu: ud.Number = 0.1

    def norm(self, g):  # a helper whose name is no hook's
        return g


@dataclass(frozen=True)
class Helped(ud.FedProx):
    """Inherits its hook, and has helpers of its own."""

    def _gradients(self, g):
        return g

    def norm(self, g):
        return g


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            Misspelt(),
            r"Misspelt.gradients is not a hook; did you mean gradient\? \(If it is a helper",
        ),
        (Nothing(), "Nothing overrides no hook, so it would change nothing"),
    ],
)
def test_parts_that_would_change_nothing_are_refused(uneven, part, message):
    with pytest.raises(ud.UndriftError, match=message):
        ud.train(net(), uneven, ud.FedAvg() + part, rounds=1, local=ud.Local(steps=1, lr=0.1))


def test_inherited_hooks_and_helpers_are_fine(uneven):
    settings = {"rounds": 2, "local": ud.Local(steps=2, lr=0.1)}
    mine, theirs = (ud.train(net(), uneven, method, **settings).params for method in (Helped(0.5), ud.FedProx(0.5)))
    assert same_bits(mine, theirs)
