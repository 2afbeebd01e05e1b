"""Real federations on this machine: SuperLink and SuperNodes with TLS and keys. Needs Flower; `make flower` has it.

One SuperLink serves several runs at a time, since a run mostly waits. What a run should give is computed by nodes in
this process (`tests/federated.py`), which `test_flower_near.py` holds against local runs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.federated import BASE, FOUR, Near, here, near
from tests.flower_problem import spoiled
from tests.problems import distance, same_bits

if find_spec("flwr") is None and os.environ.get("UNDRIFT_FLOWER") != "required":  # there it is a failure
    pytest.skip('needs Flower: make flower, or pip install "undrift[flower]"', allow_module_level=True)

from safetensors.torch import load_file

from undrift.files import write_text
from undrift.flower.new import as_toml, write_app
from undrift.flower.up import Grounds, federation

NODES = 2
QUICK = {"evaluate_every": 10}
SLOW = 400
PROBLEM = Path(__file__).with_name("flower_problem.py")


def app(folder: Path, changes: dict, **terms) -> Path:
    """An experiment as a Flower app, as `undrift flower new` writes it."""
    folder.mkdir(parents=True)
    shutil.copy(PROBLEM, folder)
    write_text(folder / "experiment.toml", as_toml(BASE | changes | {"imports": ["flower_problem"]}))
    write_app(folder / "app", folder / "experiment.toml", nodes=NODES, **terms)
    return folder / "app"


def rows(out: Path) -> list[dict]:
    file = out / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def weights(out: Path):
    return load_file(out / "run" / "model.safetensors")


def until(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def problem(request):
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(PROBLEM.parent))
    patch.setenv("OMP_NUM_THREADS", "1")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The four experiments, and one with a node that spoils its replies, all on one SuperLink at a time."""
    folder = tmp_path_factory.mktemp("flower")
    with federation(folder / "grounds", NODES) as grounds:
        started = {}
        for name, changes in FOUR.items():
            started[name] = grounds.submit(app(folder / name, changes | QUICK), folder / name / "out")
        spoiling = app(folder / "spoiled", FOUR["scaffold"] | QUICK | {"rounds": 4})
        shutil.copy(Path(__file__).with_name("flower_client.py"), spoiling)
        write_text(spoiling / "app" / "client.py", "from flower_client import app_for\n\napp = app_for(__file__)\n")
        started["spoiled"] = grounds.submit(spoiling, folder / "spoiled" / "out")
        ended = {name: grounds.wait(run, folder / name / "out", SLOW) for name, run in started.items()}
        yield grounds, folder, ended


@pytest.mark.parametrize("name", FOUR)
def test_an_experiment_gives_the_parameters_of_a_local_run(runs, name, tmp_path):
    _, folder, ended = runs
    assert ended[name] == (True, "")
    local = here(FOUR[name])
    assert distance(weights(folder / name / "out"), dict(local.model.state_dict())) < 1e-9
    bits = near(tmp_path, FOUR[name], Near(tmp_path, FOUR[name], NODES))
    assert same_bits(weights(folder / name / "out"), dict(bits.model.state_dict()))
    assert [row["clients"] for row in rows(folder / name / "out")] == [row["clients"] for row in local.history]
    assert rows(folder / name / "out")[-1]["accuracy"] == pytest.approx(local.history[-1]["accuracy"])


def test_spoiled_replies_are_refused_and_the_node_goes_on_from_its_last_accepted_state(runs, tmp_path):
    _, folder, ended = runs
    assert ended["spoiled"] == (True, "")
    changes = FOUR["scaffold"] | QUICK | {"rounds": 4}
    link = Near(tmp_path, changes, NODES, lambda kind, node, _, r: spoiled(r) if kind == "train" and node else r)
    expected, found = near(tmp_path, changes, link), rows(folder / "spoiled" / "out")
    assert [row["refused"] for row in found] == [[1, 3, 5], [1, 3, 5], [1, 3, 5], []]
    reasons = [row["nodes"]["node-1"] for row in found[:3]]
    assert "NaN" in reasons[0] and "(1, 6)" in reasons[1] and "lacks" in reasons[2]
    assert distance(weights(folder / "spoiled" / "out"), dict(expected.model.state_dict())) < 1e-9


def test_a_node_without_a_registered_key_gets_nothing(runs):
    grounds, folder, _ = runs
    grounds.node("stranger", {"name": "stranger", "partition-id": 0, "num-partitions": 1, "state": str(folder / "x")})
    log = grounds.folder / "logs" / "stranger.log"
    until(lambda: "Failed to activate SuperNode" in log.read_text(), 60)
    grounds.stop("stranger")
    assert len(grounds.flwr("supernode", "list", "local")["nodes"]) == NODES
    assert not (folder / "x").exists()


def test_a_connection_without_tls_is_refused(runs):
    plain = http.client.HTTPConnection("127.0.0.1", runs[0].port, timeout=10)
    plain.request("POST", "/v1/fleet/register-node")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()


def test_a_run_goes_on_without_a_killed_node_and_a_restarted_one_keeps_its_state(tmp_path):
    changes = FOUR["scaffold"] | QUICK | {"rounds": 5}
    with federation(tmp_path / "grounds", NODES) as grounds:
        out = tmp_path / "app" / "out"
        run = grounds.submit(app(tmp_path / "app", changes, deadline=20), out)
        until(lambda: len(rows(out)) == 1)
        grounds.stop("node-1", signal.SIGKILL)
        assert grounds.wait(run, out, SLOW) == (True, "")
        assert [row["missing"] for row in rows(out)] == [[]] + [[1, 3, 5]] * 4
        assert all(row["nodes"]["node-1"].startswith("missing: ") for row in rows(out)[1:])
        state = str((tmp_path / "grounds/state/node-1").resolve())
        grounds.node("node-1", {"name": "node-1", "state": state, "partition-id": 1, "num-partitions": NODES})
        more = changes | {"rounds": 6}  # it takes part again, with the control variate of round 1
        run = grounds.submit(app(tmp_path / "more", more), out)
        assert grounds.wait(run, out, SLOW) == (True, "")
    assert rows(out)[5]["missing"] == []
    expected = near_without(tmp_path, more, [0 < t < 5 for t in range(6)])
    assert distance(weights(out), dict(expected.model.state_dict())) < 1e-9


def near_without(folder: Path, changes: dict, missing: list[bool]):
    """The run on nodes in this process, the second of which is lost in these rounds."""
    from undrift.flower.engine import Trouble
    from undrift.flower.messages import decode

    def lost(kind: str, node: int, request: bytes, reply: bytes):
        return Trouble("gone") if kind == "train" and node and missing[decode(request)[1]["round"]] else reply

    return near(folder / "near", changes, Near(folder / "near", changes, NODES, lost))


def test_a_server_that_is_killed_between_rounds_goes_on_to_the_same_bits(tmp_path):
    changes = FOUR["scaffold"] | QUICK
    with Grounds(tmp_path / "grounds") as grounds:
        place = app(tmp_path / "app", changes)
        out = tmp_path / "app" / "out"
        for life in range(2):
            grounds.link()
            for i in range(NODES):
                state = str(tmp_path / f"state{i}")
                grounds.register(f"node-{i}")
                config = {"name": f"node-{i}", "state": state, "partition-id": i, "num-partitions": NODES}
                grounds.node(f"node-{i}", config)
            run = grounds.submit(place, out)
            if life == 0:
                until(lambda: len(rows(out)) == 1 and (out / "run/checkpoint/round-1.json").exists())
                for name in list(grounds.processes):
                    grounds.stop(name, signal.SIGKILL)
        assert grounds.wait(run, out, SLOW) == (True, "")
    unbroken = near(tmp_path / "near", changes, Near(tmp_path / "near", changes, NODES))
    assert same_bits(weights(out), dict(unbroken.model.state_dict()))
    assert len(rows(out)) == 3


def test_the_command_runs_an_experiment_and_leaves_nothing_running(tmp_path):
    shutil.copy(PROBLEM, tmp_path)
    changes = FOUR["feddyn"] | {"rounds": 1, "imports": ["flower_problem"]}
    write_text(tmp_path / "e.toml", as_toml(BASE | changes))
    words = [sys.executable, "-m", "undrift", "flower", "up", "e.toml", "--nodes", "2", "--out", "here"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=SLOW, check=False)
    assert done.returncode == 0, done.stderr
    assert "round 1 of 1  loss " in done.stdout and (tmp_path / "here/federation/run/model.safetensors").exists()
    assert not [line for line in processes() if str(tmp_path) in line]


def test_a_run_that_fails_is_a_failed_command(tmp_path):
    """Flower calls a run whose app raised a success; here the exit status and the last line say what happened."""
    shutil.copy(PROBLEM, tmp_path)
    write_text(tmp_path / "e.toml", as_toml(BASE | {"imports": ["flower_problem"], "min_clients": 100}))
    words = [sys.executable, "-m", "undrift", "flower", "up", "e.toml", "--nodes", "1", "--out", "here"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=SLOW, check=False)
    assert done.returncode == 2 and "The run failed: min_clients is 100" in done.stderr
    assert not [line for line in processes() if str(tmp_path) in line]


def processes() -> list[str]:
    """The command lines of all processes."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_text(errors="replace").replace("\0", " "))
    return found
