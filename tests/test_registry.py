"""Things by name: one mechanism for data sets, losses, metrics, models and partitions."""

from __future__ import annotations

import re

import pytest

import undrift as ud
from undrift.data import partition
from undrift.registry import Registry
from undrift.tools import listing


def test_a_name_of_undrifts_is_taken_unless_it_may_be_replaced():
    things = Registry("thing", {"own": 1})
    with pytest.raises(ud.UndriftError, match="A thing of your own cannot be called 'own', which is one of undrift's"):
        things.register("own", 2)
    things.register("other", 2)
    things.register("other", 3)
    assert things == {"own": 1, "other": 3} and things.find("other") == 3
    replaceable = Registry("thing", {"own": 1}, replaceable=True)
    replaceable.register("own", 2)
    assert replaceable.find("own") == 2


def test_an_unknown_name_suggests_a_similar_one():
    with pytest.raises(ud.UndriftError, match=r"There is no thing called 'onw'. Did you mean 'own'\?"):
        Registry("thing", {"own": 1, "far away": 2}).find("onw")


def test_every_public_partition_has_a_name():
    assert set(partition.PARTITIONS.own) == set(ud.PARTITIONS)
    with pytest.raises(ud.UndriftError, match="no name in Python"):
        ud.register_partition("by parity", ud.IID)


@pytest.mark.parametrize(
    ("register", "name", "sentence"),
    [
        (ud.register_loss, None, "The name of a loss must be a string, not None"),
        (ud.register_metric, "", "The name of a metric must be a string, not ''"),
        (ud.register_partition, 5, "The name of a partition must be a string, not 5"),
        (ud.register_partition, "for", "A partition cannot be called 'for', which is no name in Python"),
        (ud.register_model, "a(b)", "A model cannot be called"),
    ],
)
def test_names_that_could_not_be_written_are_refused(register, name, sentence):
    with pytest.raises(ud.UndriftError, match=re.escape(sentence)):
        register(name, lambda *_: None)


def test_what_is_called_must_be_a_function():
    for register in (ud.register_partition, ud.register_model):
        with pytest.raises(ud.UndriftError, match="'P' must be a function, not 3"):
            register("P", 3)


def test_a_data_set_of_a_users_is_listed_in_the_place_of_ours():
    def mnist():
        """My own digits."""

    ud.register_data("mnist", mnist)
    assert listing.data()["mnist"][0] == "My own digits."
