"""The settings of a run are defined once: whatever else names them agrees with `training/settings.py`."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from dataclasses import MISSING, fields, replace
from typing import get_args

import pytest

import undrift as ud
from tests.experiments import GOOD
from tests.problems import make_clients, net
from undrift.method.parse import as_method
from undrift.tools import config
from undrift.training import loop
from undrift.training.build import prepare
from undrift.training.config_writer import LINES, config_toml
from undrift.training.identity import ELSEWHERE, identity
from undrift.training.settings import FIELDS, KEYS, ROLES, Form, Settings

ARGUMENTS = [name for name, role in ROLES.items() if role.argument]
LOCAL = ud.Local(steps=1, lr=0.1)


def test_the_signature_of_train_is_the_settings():
    parameters = inspect.signature(ud.train).parameters
    assert list(parameters) == ARGUMENTS
    for name, parameter in parameters.items():
        assert parameter.annotation == FIELDS[name].type, name
        default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
        if name == "method":  # a string in files, so that they can be checked without torch
            assert as_method(default).parts == as_method(FIELDS[name].default).parts
        else:
            assert default is FIELDS[name].default or default == FIELDS[name].default, name
    assert Settings.__dataclass_params__.frozen


def test_help_explains_the_settings_in_their_order():
    listed = inspect.getdoc(ud.train).partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", listed, re.M) == ARGUMENTS


def test_every_argument_of_train_arrives_under_its_own_name(monkeypatch):
    monkeypatch.setattr(loop, "train_with", vars)
    given = {name: object() for name in ARGUMENTS}
    found = ud.train(**given)
    assert {name: found[name] for name in ARGUMENTS} == given


def test_experiment_files_have_every_setting_with_a_form():
    assert set(config.FORMS) | {"section"} == set(get_args(Form))
    assert {name for name, role in ROLES.items() if role.form == "section"} == set(config.SECTIONS)
    keys = {name for name, role in ROLES.items() if role.form}
    assert set(config.Experiment.model_fields) == keys == {key for key in KEYS if "." not in key}
    experiment = config.checked(GOOD, "e")
    for name in keys - set(GOOD) - {"checkpoint_every"}:
        assert getattr(experiment, name) == FIELDS[name].default, name
    for key in KEYS:
        section, _, name = key.rpartition(".")
        assert not section or name in config.SECTIONS[section].model_fields


@pytest.mark.parametrize(("name", "kind"), [("local", ud.Local), ("faults", ud.Faults)])
def test_a_section_has_the_fields_of_what_it_is_for(name, kind):
    section = config.SECTIONS[name].model_fields
    assert list(section) == [entry.name for entry in fields(kind)]
    for entry in fields(kind):
        found = section[entry.name]
        assert found.is_required() == (entry.default is MISSING)
        assert found.is_required() or found.default == entry.default, entry.name


def test_the_data_section_has_the_arguments_of_load():
    section, parameters = config.SECTIONS["data"].model_fields, inspect.signature(ud.load).parameters
    assert list(section) == [name for name in parameters if name != "test"], "test data are objects of Python"
    for name in section.keys() - {"name", "partition", "seed"}:
        assert section[name].default == parameters[name].default, name


def test_records_and_identities_have_every_setting(tmp_path):
    given = Settings(model=net(), data=make_clients([4, 6]), rounds=1, local=LOCAL, device="cpu", seed=3)
    run = prepare(given)
    text = config_toml(run, given)
    told = re.findall(r"^(?:# )?(\w+)(?: =|:) ", text.partition("\n\n")[0], re.M)
    recorded = {name for name, role in ROLES.items() if role.form not in (None, "section")} - {"imports"}
    assert [name for name in told if name in ROLES] == LINES and set(LINES) == recorded
    assert tomllib.loads(text)["seed"] == 3
    decisive = {name for name, role in ROLES.items() if role.resume == "same"}
    before = identity(run, given)
    assert decisive - set(ELSEWHERE) <= before.keys()
    assert identity(run, replace(given, evaluate_every=7, out=tmp_path)) == before
    assert identity(run, replace(given, output="0")) == before | {"output": "'0'"}


def test_a_file_is_checked_without_torch():
    script = "import sys, undrift.tools.config; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
