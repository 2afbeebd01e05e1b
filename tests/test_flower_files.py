"""What a federation is made of: messages, states on nodes, certificates, keys, apps, nodes' own data."""

from __future__ import annotations

import signal
import ssl
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import undrift as ud
from tests.federated import BASE, FOUR, Near, experiment, near
from tests.problems import distance, same_bits
from undrift.errors import UndriftError
from undrift.files import write_text
from undrift.flower.certificates import make_certificates, make_key
from undrift.flower.check import check_finite, check_form
from undrift.flower.engine import Trouble
from undrift.flower.federation import founded, read
from undrift.flower.holding import holding
from undrift.flower.messages import RefusedError, decode, encode
from undrift.flower.new import as_toml, write_app
from undrift.flower.node_state import KEEP, NodeStates
from undrift.flower.outline import check_report, outline, report
from undrift.flower.up import Grounds
from undrift.tools import config
from undrift.tools.experiment import loaded

RUN = "0" * 32

pytestmark = pytest.mark.usefixtures("flower_problem")


def test_messages_keep_trees_types_and_bits():
    tree = {"b": [torch.arange(3), ()], "a": (torch.tensor(0.1, dtype=torch.float64), torch.zeros(0, 2).bfloat16())}
    found, notes = decode(encode(tree, {"round": 1}))
    assert list(found) == ["b", "a"] and found["b"][1] == () and notes == {"round": 1}
    check_form(found, tree)
    assert torch.equal(found["b"][0], tree["b"][0]) and torch.equal(found["a"][0], tree["a"][0])


@pytest.mark.parametrize("junk", [b"", b"junk", encode((), {})[:-3], b"\xff" * 100])
def test_what_is_no_message_is_refused(junk):
    with pytest.raises(RefusedError, match="cannot be read"):
        decode(junk)


def test_a_message_that_is_too_long_is_not_even_read():
    with pytest.raises(RefusedError, match="at most 10 are expected"):
        decode(encode(torch.zeros(100), {}), most=10)


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"w": torch.zeros(2)}, "lacks 'v'"),
        ({"w": torch.zeros(2), "v": [()], "x": ()}, "'x', which was not asked for"),
        ({"w": torch.zeros(3), "v": [()]}, r"\(3,\) float32, not \(2,\) float32"),
        ({"w": torch.zeros(2).double(), "v": [()]}, "float64, not"),
        ({"w": torch.zeros(2), "v": ((),)}, "a tuple, not a list"),
        ({"w": (), "v": [()]}, "no tensor"),
        ([], "a list, not a dict"),
    ],
)
def test_replies_of_another_form_are_refused(tree, why):
    with pytest.raises(RefusedError, match=why):
        check_form(tree, {"w": torch.zeros(2), "v": [()]})
    with pytest.raises(RefusedError, match="NaN or infinity"):
        check_finite({"w": torch.tensor([1.0, torch.inf])})


def test_a_nodes_states_are_kept_by_round(tmp_path):
    states = NodeStates(tmp_path, RUN)
    assert states.read(3, 0) == {}
    for version in range(1, 9):
        states.write(3, version, {1: {"c": torch.tensor(float(version))}, 4: ()}, started=version - 1)
    assert states.versions(3) == [*range(7 - KEEP, 9)]
    assert states.read(3, 7)[1]["c"] == 7 and states.read(3, 7)[4] == ()
    for wrong in (99, 1):
        with pytest.raises(UndriftError, match=f"client 3 after round {wrong} cannot be read"):
            states.read(3, wrong)
    (tmp_path / RUN / "client-3" / "round-8.safetensors").write_bytes(b"half")
    with pytest.raises(UndriftError, match="cannot be read"):
        states.read(3, 8)
    with pytest.raises(UndriftError, match="not one that undrift makes"):
        NodeStates(tmp_path, "../../elsewhere")


def test_an_outline_has_the_numbers_of_the_data_and_none_of_its_samples():
    data = loaded(experiment({}))
    found = report(data)
    check_report(found)
    made = outline(data.sizes, np.array(found["counts"]), found)
    assert made.sizes.tolist() == data.sizes.tolist() and made.outputs == data.outputs
    assert torch.equal(made.label_counts(), data.label_counts())
    assert len(made.store["y"]) == 4 and not torch.isin(made.store["x"], data.store["x"]).any()
    for change in ({"sizes": [-1]}, {"counts": [[1]]}, {"y": [[], "object"]}, {"classes": "4"}):
        with pytest.raises(RefusedError):
            check_report(found | change)


@pytest.mark.parametrize(
    "host",
    ["a:9092", "https://a.example.org", "a.example.org/x", "a b", "", " a", "a.example.org.", "a..b", "-a", "a" * 64,
     ".".join(["a" * 60] * 5), "1.2.3", "1.2.3.400", "[::1]", "*", "a\0b", "a\n"],
)  # fmt: skip
def test_a_certificate_is_not_made_for_what_is_no_host(tmp_path, host):
    with pytest.raises(UndriftError, match=r"is no host name or address.*; write its name alone"):
        make_certificates(tmp_path / "c", ["fine.example.org", host])
    assert not (tmp_path / "c").exists()


def test_a_host_of_other_letters_is_written_in_ascii(tmp_path):
    with pytest.raises(UndriftError, match=r"write it in ASCII, as xn--mnchen-3ya\.example"):
        make_certificates(tmp_path / "c", ["münchen.example"])


@pytest.mark.parametrize(
    "host",
    ["a", "fl_1.example.org", "*.example.org", "xn--mnchen-3ya.example", ".".join(["a" * 62] * 4), "::1", "10.0.0.1"],
)
def test_hosts_of_all_kinds_have_certificates(tmp_path, host):
    make_certificates(tmp_path, [host])
    shown = ["openssl", "x509", "-in", str(tmp_path / "server.crt"), "-noout", "-text"]
    text = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    assert f"DNS:{host}" in text or "IP Address:" in text


@pytest.mark.parametrize("there", ["ca.crt", "server.crt", "server.key"])
def test_no_certificate_is_written_beside_an_old_key(tmp_path, there):
    (tmp_path / there).write_text("old")
    with pytest.raises(UndriftError, match=f"{there} is there already"):
        make_certificates(tmp_path, ["a"])
    assert [file.name for file in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize("there", ["n.key", "n.pub"])
def test_no_key_is_written_beside_an_old_one(tmp_path, there):
    (tmp_path / there).write_text("old")
    with pytest.raises(UndriftError, match=f"{there} is there already"):
        make_key(tmp_path, "n")
    assert [file.name for file in tmp_path.iterdir()] == [there]


def test_a_nodes_states_are_its_owners_alone(tmp_path):
    NodeStates(tmp_path, RUN).write(3, 1, {0: torch.ones(2)}, 0)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {0o700, 0o600}
    assert NodeStates(tmp_path, RUN).read(3, 1)[0].tolist() == [1, 1]


def test_certificates_are_for_their_hosts_and_secrets_for_their_owner(tmp_path):
    make_certificates(tmp_path, ["fl.example.org"])
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    assert context.cert_store_stats()["x509_ca"] == 1
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    assert shaken(context, server, "fl.example.org") and shaken(context, server, "127.0.0.1")  # its own processes
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(context, server, "elsewhere.example.org")
    private, public = make_key(tmp_path, "hospital-a")
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ") and "OPENSSH PRIVATE KEY" in private.read_text()
    for secret in (private, tmp_path / "server.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    with pytest.raises(UndriftError, match="not written over"):
        make_key(tmp_path, "hospital-a")
    with pytest.raises(UndriftError, match="node's name"):
        make_key(tmp_path, "../x")


def shaken(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> bool:
    """Whether the two shake hands, in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there, server_hostname=host), server.wrap_bio(there, back, server_side=True)]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[0].version() is not None


def test_an_app_has_the_experiment_and_the_modules_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "own_parts_of_a_test.py", "import undrift as ud\n")
    settings = BASE | FOUR["adam"] | {"imports": ["own_parts_of_a_test"], "seed": 3}
    write_text(tmp_path / "e.toml", as_toml(settings))
    write_app(tmp_path / "app", tmp_path / "e.toml", nodes=5)
    project = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"]["min-nodes"] == 5
    assert config.read(tmp_path / "app/app/experiment.toml") == settings
    assert (tmp_path / "app/own_parts_of_a_test.py").exists()
    with pytest.raises(UndriftError, match="not empty"):
        write_app(tmp_path / "app", tmp_path / "e.toml")


def test_so_it_has_where_python_finds_them_by_itself(tmp_path, monkeypatch):
    """With PYTHONPATH, say; the nodes' Python will not."""
    write_text(tmp_path / "found_anyway.py", "ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_text(tmp_path / "e.toml", as_toml(BASE | {"imports": ["found_anyway"]}))
    write_app(tmp_path / "app", tmp_path / "e.toml")
    assert (tmp_path / "app" / "found_anyway.py").read_text(encoding="utf-8") == "ANSWER = 42\n"


def test_an_app_has_the_packages_of_its_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("__init__.py", "parts.py", "inner/__init__.py", "inner/more.py"):
        (tmp_path / "own_package_of_a_test" / file).parent.mkdir(exist_ok=True)
        write_text(tmp_path / "own_package_of_a_test" / file, f"# {file}\n")
    settings = BASE | {"imports": ["own_package_of_a_test.parts", "json"]}
    write_text(tmp_path / "e.toml", as_toml(settings))
    write_app(tmp_path / "app", tmp_path / "e.toml")
    for file in ("__init__.py", "parts.py", "inner/__init__.py", "inner/more.py"):
        assert (tmp_path / "app/own_package_of_a_test" / file).read_text() == f"# {file}\n"
    assert len(list((tmp_path / "app").rglob("*.py"))) == 4 + 3


def test_nodes_with_data_of_their_own(tmp_path):
    """Each is one client, in the order of their names; the result is that of the same clients on one machine."""
    draw, own = np.random.default_rng(0), []
    for i, n in enumerate((30, 12, 21)):
        x, y = draw.normal(size=(n, 3)).round(3).astype(np.float32), draw.integers(0, 2 + i, n)
        lines = [",".join(map(str, [*row, label])) for row, label in zip(x.tolist(), y.tolist(), strict=True)]
        write_text(tmp_path / f"{i}.csv", "\n".join(["a,b,c,label", *lines]) + "\n")
        own.append({"data": str(tmp_path / f"{i}.csv"), "test-fraction": 0.2})
    changes = {"model": "mlp", "method": "Scaffold()"}
    found = near(tmp_path, changes, Near(tmp_path, changes, 3, own=own))
    held = [holding(experiment(changes), {**config, "name": "x"}).data for config in own]
    data = ud.FederatedDataset.from_clients([part[0] for part in held], task=ud.Task(classes=4))
    local = ud.train("mlp", data, ud.Scaffold(), rounds=3, local=ud.Local(epochs=1, batch_size=8, lr=0.1))
    assert distance(found.params, local.params) < 1e-6
    assert found.history[-1]["accuracy"] <= 1 and (tmp_path / "state0").is_dir()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "must name its data"),
        ({"partition-id": 3, "num-partitions": 3}, "count from 0"),
        ({"partition-id": 9, "num-partitions": 10}, "has none with data"),
        ({"data": "/nowhere/at/all.csv"}, "do not exist"),
        ({"date": "x"}, "The node's config has 'date'"),
    ],
)
def test_a_nodes_config_is_checked(changes, why):
    with pytest.raises(UndriftError, match=why):
        holding(experiment({}), changes)


def test_nodes_that_do_not_fit_together_are_refused():
    held = {i: holding(experiment({}), {"partition-id": i, "num-partitions": 2}).report() for i in range(2)}
    with pytest.raises(UndriftError, match="Two nodes have client 0"):
        founded({"a": ("a", held[0]), "b": ("b", held[0])})
    with pytest.raises(UndriftError, match="give all the same"):
        founded({"a": ("a", held[0]), "b": ("b", held[1] | {"ids": None})})
    other = founded({"a": ("a", held[0]), "b": ("b", held[1] | {"x": {"x": [[5], "float64"]}})})
    with pytest.raises(UndriftError, match="a and b differ in x"):
        other.data()


def test_a_federation_is_kept(tmp_path):
    held = {i: holding(experiment({}), {"partition-id": i, "num-partitions": 2}).report() for i in range(2)}
    made = founded({"b": ("", held[1]), "a": ("one", held[0])})
    made.save(tmp_path)
    assert read(tmp_path) == made and [m.name for m in made.members.values()] == ["one", "node b"]


def test_a_node_that_cannot_take_part_ends_the_run_before_it_begins(tmp_path):
    link = Near(tmp_path, {}, spoil=lambda kind, *_: Trouble("no such file") if kind == "hello" else None)
    with pytest.raises(UndriftError, match="cannot take part: no such file"):
        near(tmp_path, {}, link)
    assert not (tmp_path / "out" / "federation.json").exists()


def test_more_rounds_go_on_from_where_a_run_ended(tmp_path):
    changes = FOUR["feddyn"] | {"evaluate_every": 10}
    near(tmp_path, changes | {"rounds": 2})
    more = near(tmp_path, changes)
    assert same_bits(more.params, near(tmp_path / "at once", changes).params)


ANSWER = """
import sys
from pathlib import Path

from tests.federated import FOUR, Near, experiment
from tests.flower_problem import register
from undrift.flower.node import Node
from undrift.flower.uncompiled import leave_compiler_out

register()
leave_compiler_out()
place = {"name": "n0", "state": sys.argv[2], "partition-id": 0, "num-partitions": 3}
Path(sys.argv[3]).write_bytes(Node(experiment(FOUR["scaffold"]), place).answer("train", Path(sys.argv[1]).read_bytes()))
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
"""


def test_a_nodes_process_answers_without_torchs_compiler(tmp_path):
    """Its import takes a second, and Flower starts a process per message."""
    seen = []

    def first(kind, node, request, reply):
        seen.extend([(request, reply)] if kind == "train" and node == 0 and not seen else [])
        return reply

    near(tmp_path, FOUR["scaffold"], Near(tmp_path, FOUR["scaffold"], 3, first))
    files = [tmp_path / "request", tmp_path / "state", tmp_path / "reply"]
    files[0].write_bytes(seen[0][0])
    words = [sys.executable, "-c", ANSWER, *map(str, files)]
    root = Path(__file__).parents[1]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = decode(seen[0][1])[0]["total"], decode(files[2].read_bytes())[0]["total"]
    assert distance(ours[0], theirs[0]) < 1e-12


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_process_takes_along_those_that_it_put_in_groups_of_their_own(tmp_path):
    """As Flower's SuperLink does with its SuperExec, whose server app would go on."""
    with Grounds(tmp_path, secure=False) as grounds:
        note = tmp_path / "child"
        grounds.start("parent", [sys.executable, "-c", PARENT, str(note)])
        while not note.exists() or not note.read_text():
            time.sleep(0.05)
        grounds.stop("parent", signal.SIGKILL)
    stat_file, end = Path(f"/proc/{note.read_text()}/stat"), time.monotonic() + 60
    while stat_file.exists() and stat_file.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)
