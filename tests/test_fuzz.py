"""Made-up experiment files, expressions and damaged runs: read, or refused with a sentence. See tests/fuzzing.py."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.report_page import make_run
from tests import fuzzing
from undrift.errors import UndriftError
from undrift.tools import config
from undrift.tools.experiment import understood

few = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
chances = st.randoms(use_true_random=False)


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory):
    """What is imported on first use is imported."""
    file = tmp_path_factory.mktemp("warm") / "e.toml"
    assert fuzzing.read_file(fuzzing.a_file_that_is_right(), file)
    assert fuzzing.read_expression("FedAvg()") and fuzzing.read_expression("mlp(hidden=3)")


@few
@given(chances)
def test_expressions(chance):
    text = fuzzing.an_expression(chance)
    with fuzzing.nothing_executed():
        fuzzing.read_expression(text)


@few
@given(st.text(max_size=100))
def test_any_text_as_an_expression(text):
    with fuzzing.nothing_executed():
        fuzzing.read_expression(text)


@few
@given(chances)
def test_files(tmp_path_factory, chance):
    content = fuzzing.a_file(chance)
    with fuzzing.nothing_executed():
        fuzzing.read_file(content, tmp_path_factory.getbasetemp() / "e.toml")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(fuzzing.VALID),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(fuzzing.KEYS), inner, max_size=3),
    max_leaves=8,
)
changes = st.dictionaries(st.sampled_from(fuzzing.KEYS).filter(lambda key: key != "imports"), values, max_size=4)


@few
@given(changes, changes, changes)
def test_settings_of_any_kind(top, data, local):
    found = fuzzing.EXPERIMENT | top
    for name, section in (("data", data), ("local", local)):
        found[name] = found[name] | section if isinstance(found[name], dict) else found[name]
    with fuzzing.nothing_executed(), fuzzing.quickly(), contextlib.suppress(UndriftError):
        understood(config.checked(found, "e.toml"))


@few
@given(chances)
def test_damaged_runs(tmp_path_factory, chance):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        make_run(folder, 0.1, 0, 3)
        test_damaged_runs.whole = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    fuzzing.read_run(chance, folder, test_damaged_runs.whole)


def test_the_watch_for_execution_sees_it():
    with pytest.raises(AssertionError, match="exec"), fuzzing.nothing_executed():
        exec("1")
    with fuzzing.nothing_executed():
        Path("x").exists()
