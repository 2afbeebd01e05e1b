"""What goes wrong on the command line is said in a sentence, with the path and the right exit status."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import undrift as ud
from benchmarks.report_page import make_run
from tests.experiments import GOOD, changed, toml
from tests.problems import make_clients
from undrift.data.augment import parse_augmentation
from undrift.data.partition import parse_partition
from undrift.errors import UndriftError, machine_trouble, quoted
from undrift.expressions import parse_number
from undrift.method.parse import parse_method
from undrift.models import parse_model
from undrift.schedule import check_number, sampled_rounds
from undrift.tools import cli, config
from undrift.tools.experiment import understood
from undrift.tools.report.gather import gather
from undrift.tools.report.watch import watch


def refused(function, *arguments: object, **more: object) -> str:
    with pytest.raises(UndriftError) as caught:
        function(*arguments, **more)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


# ---- expressions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (parse_method, f"FedProx({'-' * 20_000}1)", "The method has 20,010 characters; the limit is 10,000."),
        (parse_method, f"FedProx({'-' * 9_000}1)", "Cannot read the method"),
        (parse_method, "+".join(["FedAvg()"] * 5000), "The method has 44,999 characters"),
        (parse_method, "+".join(["FedAvg()"] * 1000), "nests deeper than 100 levels"),
        (parse_method, "FedProx(mu={[]: 1})", "Cannot read '{[]: 1}'"),
        (parse_method, "FedProx(mu={[1],2})", "Cannot read '{[1], 2}'"),
        (parse_method, f"FedProx(mu=0x{'f' * 6000})", "has a number of more than 64 bits"),
        (parse_method, f"0x{'f' * 6000}", "has a number of more than 64 bits"),
        (parse_method, f"FedProx(mu={'9' * 6000})", "Cannot read the method"),
        (parse_method, "FedAvg()) + (FedProx(1)", "Cannot read the method"),
        (parse_method, "FedAvg(), FedProx(1)", "Cannot read the method"),
        (parse_method, "FedProx(\0)", "Cannot read the method"),
        (parse_method, "", "Cannot read the method ''"),
        (parse_method, "a" * 9999, "There is no method called 'aaaa"),
        (parse_method, "FedProx(nu=1)", "has no argument 'nu' (did you mean 'mu'?); its arguments are mu, target."),
        (parse_method, "FedAvg(x=1)", "FedAvg has no argument 'x'; its arguments are weighting."),
        (parse_method, "FedProx(1, 2, 3, 4)", "FedProx is given 4 arguments; its arguments are mu, target."),
        (parse_method, "FedProx(1, mu=2)", "FedProx is given 'mu' twice"),
        (parse_method, "FedProx(mu=1, mu=2)", "FedProx is given 'mu' twice"),
        (parse_method, "FedProx()", "FedProx needs the argument 'mu'; its arguments are mu, target."),
        (parse_method, "FedProx(1, target=5)", "FedProx(target) must be a TemporalEnsemble(beta), or None, not 5."),
        (parse_method, "FedCL(1, target='x')", "FedCL(target) must be a TemporalEnsemble(beta), or None, not 'x'."),
        (parse_partition, "Dirichlet(alhpa=1)", "Dirichlet has no argument 'alhpa' (did you mean 'alpha'?)"),
        (parse_partition, "IID(3)", "IID is given 1 arguments; it has none."),
        (parse_number, "decay(0.1)", "decay needs the argument 'rate'; its arguments are initial, rate."),
        (parse_number, "0.1", "'0.1' is a string; write the number without quotes."),
        (parse_augmentation, "CropFlip(pad=1)", "CropFlip has no argument 'pad' (did you mean 'padding'?)"),
        (parse_model, "mlp(classes=3)", "The model \"mlp\" takes 'classes' from the data and the run; leave it out."),
        (parse_model, "mlp(seed=3)", "The model \"mlp\" takes 'seed' from the data and the run; leave it out."),
        (parse_model, "mlp(64)", "Options of the model mlp need their names"),
        (parse_model, "mlp(hiden=64)", "has no option 'hiden' (did you mean 'hidden'?); its options are hidden."),
    ],
)  # fmt: skip
def test_expressions_that_cannot_be_read(parse, text, sentence):
    assert sentence in refused(parse, text)


def test_a_method_may_span_lines():
    text = "FedProx(mu=0.1)  # near the global model\n  + ServerSGD(\n      momentum=0.9)\n"
    assert repr(parse_method(text)) == repr(parse_method("FedProx(mu=0.1) + ServerSGD(momentum=0.9)"))


def test_a_part_without_its_number():
    local = ud.Local(steps=1, lr=0.1)
    assert "FedProx(mu) must be a number or a function of the round that returns one, not None." in refused(
        ud.train, "mlp", make_clients([5, 5]), ud.FedProx(mu=None), rounds=1, local=local
    )
    assert ud.FedNLR(ratio=None).ratio is None


# ---- sizes -------------------------------------------------------------------------------------------------------


def test_a_schedule_is_checked_in_some_rounds_of_a_long_run():
    asked = []
    check_number(lambda t: asked.append(t) or 0.1, 10**12, "lr")
    assert len(asked) < 5000 and {0, 1, 999, 10**12 - 1} <= set(asked)
    assert list(sampled_rounds(3000)) == list(range(3000))
    assert "lr is -1 in round 999999999991" in refused(
        check_number, lambda t: 0.1 if t < 10**12 - 9 else -1, 10**12, "lr"
    )
    assert "Numerical result out of range" in refused(check_number, ud.decay(0.1, 1.1), 10**9, "lr")


def test_sizes_beyond_reason():
    data, local = make_clients([5, 9]), {"batch_size": 2, "lr": 0.1}
    train = lambda **more: refused(ud.train, "mlp", data, rounds=1, **more)  # noqa: E731
    assert "Local(steps) is 1e+12; it must be in (0, 10000000]" in train(local=ud.Local(steps=10**12, **local))
    assert "Local(epochs) is 1e+09; it must be in (0, 2000000]" in train(local=ud.Local(epochs=10**9, **local))
    assert "Local(steps) has 1,000,000,000,000" in train(local=ud.Local(steps=[1, 10**12], **local))
    assert "one whole number from 1 for each" in train(local=ud.Local(steps=[1, 10**30], **local))
    assert "batch_size" in refused(ud.Local, steps=1, lr=0.1, batch_size=10**30)
    fine = ud.Local(steps=1, **local)
    assert "device 'meta' holds no values" in train(local=fine, device="meta")
    for hidden in (10**12, 10**18, 10**30):
        sentence = refused(ud.models.get, "mlp", classes=3, shape=(8, 8), hidden=hidden)
        assert 'The parameters of the model "mlp" would take' in sentence
    assert "would take" in refused(ud.models.get, "logistic", classes=1000, shape=(3, 10**5, 10**6))
    assert "The key 'threads' must be 1024 or less" in refused(config.checked, changed("threads", 5 * 10**9), "e")


def test_models_that_have_no_values():
    data, local = make_clients([5, 9]), ud.Local(steps=1, lr=0.1)
    lazy = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyLinear(3))
    assert "lazy layers cannot infer their shapes from the clients' samples" in refused(
        ud.train, lazy, data, rounds=1, local=local
    )
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    assert "'weight' is on the meta device" in refused(ud.train, empty, data, rounds=1, local=local)


def test_a_message_does_not_repeat_all_that_was_given():
    for key in ("model", "method", "data.partition", "local.lr", "on_nonfinite", "track", "rounds", "x" * 200_000):
        settings = changed(key, "x" * 200_000)
        refused(lambda settings=settings: understood(config.checked(settings, "e.toml")))  # which looks at the length
    assert quoted("a" * 200_000) == "'" + "a" * 78 + "…" and quoted([1]) == "[1]" and quoted(10**5000) == "<int>"


# ---- experiment files --------------------------------------------------------------------------------------------


def read(tmp_path: Path, content: bytes) -> object:
    (tmp_path / "e.toml").write_bytes(content)
    return config.read(tmp_path / "e.toml")


def test_files_as_windows_writes_them(tmp_path):
    assert read(tmp_path, b"\xef\xbb\xbfrounds = 3\r\n") == {"rounds": 3}
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
        assert "e.toml is UTF-16; save it as UTF-8." in refused(read, tmp_path, mark + "rounds = 3".encode(encoding))
    assert "e.toml is not UTF-8 text" in refused(read, tmp_path, b"model = '\xff'")


def test_files_that_nest_too_deeply(tmp_path):
    deep = "[" * 5000 + "]" * 5000
    assert "nested too deeply" in refused(read, tmp_path, f"a = {deep}".encode())
    assert "nested too deeply" in refused(config.override, GOOD, [f"a={deep}"])
    assert "is not TOML" in refused(read, tmp_path, f"rounds = {'9' * 5000}".encode())
    assert "larger than 16 MiB" in refused(config.read, "/dev/zero") if Path("/dev/zero").exists() else True


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("local.learning_rate", "There is no key 'local.learning_rate'. Did you mean 'lr'?"),
        ("learning_rate", "There is no key 'learning_rate'. Did you mean 'local.lr'?"),
        ("lr", "There is no key 'lr'. Did you mean 'local.lr'?"),
        ("local.rounds", "There is no key 'local.rounds'. 'rounds' is a top-level key; write it above all sections."),
        ("local.partition", "There is no key 'local.partition'. Did you mean 'data.partition'?"),
        ("data.more", "There is no key 'data.more'. Known: name, partition, clients"),
    ],
)
def test_keys_in_the_wrong_place(key, sentence):
    assert sentence in refused(config.checked, changed(key, 1), "e.toml")


def test_a_number_in_quotes():
    settings = changed("local.lr", "0.1")
    sentence = refused(lambda: understood(config.checked(settings, "e.toml")))
    assert sentence == "local.lr: '0.1' is a string; write the number without quotes."


# ---- files and memory --------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(toml(GOOD))
    return tmp_path


def command(capsys, monkeypatch, *arguments: str) -> tuple[int, str]:
    """The command in this process: its exit status, and what it wrote to stderr."""
    monkeypatch.setattr("sys.argv", ["undrift", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "e.toml", "--out", "e.toml/run"],
        ["run", "e.toml", "--out", "a" * 300],
        ["sweep", "e.toml", "--workers", "1", "--out", "e.toml/sweep"],
        ["sweep", "e.toml", "--workers", "1", "--out", "a" * 300],
        ["resume", "a" * 300],
        ["report", "a" * 300],
        ["report", "run", "--out", "e.toml/r.html"],
        ["report", "run", "--figures", "e.toml/figures"],
        ["run", "e.toml/x.toml"],
        ["compare", "a" * 300],
    ],
    ids=lambda arguments: " ".join(arguments).replace("a" * 300, "long"),
)
def test_paths_that_cannot_be(here, capsys, monkeypatch, arguments):
    make_run(Path("run"), 0.1, 0, 3)
    before = sorted(Path().rglob("*"))
    status, said = command(capsys, monkeypatch, *arguments)
    path = next(word for word in arguments if "e.toml/" in word or len(word) == 300)
    assert status == 1 and said.count("\n") == 1 and said.startswith("error: "), said
    assert path[:100] in said and ("Not a directory" in said or "File name too long" in said or "File exists" in said)
    assert {*Path().rglob("*")} - {*before} <= {Path("run/report.html")}


def test_debug_shows_the_traceback(here, monkeypatch):
    monkeypatch.setenv("UNDRIFT_DEBUG", "")  # so that whatever --debug sets is undone
    monkeypatch.delenv("UNDRIFT_DEBUG")
    monkeypatch.setattr("sys.argv", ["undrift", "--debug", "run", "nothing.toml"])
    with pytest.raises(UndriftError, match=r"The experiment file nothing.toml does not exist."):
        cli.main()


def test_what_the_machine_refuses_is_a_sentence():
    assert machine_trouble(OSError(28, "No space left on device", "runs/x")) == "'runs/x': No space left on device."
    assert machine_trouble(OSError("odd")) == "odd."
    assert machine_trouble(MemoryError()) == "Out of memory; use a smaller model, batch size, cohort or data set."
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert machine_trouble(caught.value).startswith("Out of memory (")
    assert machine_trouble(ValueError("x")) is None


LIMITED = """
import io, json, os, resource, sys
from undrift.tools import cli
import undrift.tools.experiment, undrift.tools.sweep, undrift.tools.report.gather, undrift.tools.report.page
import plotly.offline
sys.stdout = open(os.devnull, "w")
told, real = [], sys.stderr
def command(*arguments):
    sys.argv, sys.stderr = ["undrift", *arguments], io.StringIO()
    try:
        cli.main()
        status = 0
    except SystemExit as ended:
        status = ended.code
    except Exception as error:
        status = repr(error)
    told.append([status, sys.stderr.getvalue()])
command("run", "e.toml", "--out", "whole")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))  # a file may have so many bytes: what a full disk is like
command("run", "e.toml", "--out", "full")
command("report", "whole")
told += [os.path.exists("full/model.safetensors") or os.path.exists("whole/report.html")]
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
command("resume", "full")
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
os.umask(0o022)
command("run", "e.toml", "--out", "closed/run")
command("report", "whole", "--out", "closed/r.html")
command("resume", "unreadable")
print(json.dumps(told), file=sys.__stdout__)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX's limits")
def test_a_full_disk_and_folders_without_rights(here):
    settings = GOOD | {"checkpoint_every": 1, "rounds": 3}
    Path("e.toml").write_text(toml(settings))
    Path("closed").mkdir(mode=0o555)
    Path("unreadable").mkdir()
    Path("unreadable/config.toml").write_text(toml(settings))
    Path("unreadable/config.toml").chmod(0)
    for folder in [here, *here.parents]:  # a tester other than root need not see into the folders of pytest
        if folder.stat().st_uid == os.getuid() and folder.is_relative_to(tempfile.gettempdir()):
            folder.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole, full, page, there, resumed, closed, closed_page, unreadable = json.loads(done.stdout)
    assert whole[0] == 0 and "Traceback" not in done.stderr
    for status, said in (full, page, closed, closed_page, unreadable):
        assert status == 1 and said.count("\n") == 1 and said.startswith("error: "), said
    assert "full" in full[1] and "File too large" in full[1]
    assert "whole/report.html" in page[1] and "File too large" in page[1]
    assert not there, "half a file must not pass for a whole one"
    assert resumed[0] == 0 and "has no checkpoint" in resumed[1], "with more room the run goes on"
    assert Path("full/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    for _, said in (closed, closed_page, unreadable):
        assert "Permission denied" in said
    assert "closed" in closed[1] and "closed" in closed_page[1] and "unreadable" in unreadable[1]


def test_a_reader_who_has_read_enough(here):
    """`undrift list methods | head -1`: the pipe closes before anything is written."""
    listing = subprocess.Popen(
        [sys.executable, "-m", "undrift", "list", "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    listing.stdout.close()
    said = listing.stderr.read()
    assert listing.wait() == 1 and said == ""
    listing.stderr.close()


def train_into(redirection: str) -> subprocess.CompletedProcess[str]:
    """Ten rounds, started by a shell that does this with the output."""
    Path("e.toml").write_text(toml(changed("rounds", 10)))
    command = f"{sys.executable} -m undrift run e.toml --out run {redirection}"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and Path("run/model.safetensors").exists(), done.stderr
    return done


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("redirection", "why"), [("| head -1", "Broken pipe"), ("> /dev/full", "No space left")])
def test_training_goes_on_when_its_output_cannot_be_written(here, monkeypatch, redirection, why, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = train_into(redirection)
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert "progress is no longer shown" in done.stderr and why in done.stderr and "training goes on" in done.stderr


@pytest.mark.parametrize("redirection", ["2>&1 | head -1", ">&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(here, redirection):
    assert train_into(redirection).returncode == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [*range(1, 11)], "nothing else was printed into the file"


def test_a_full_standard_output_is_named(here):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "undrift", "list", "losses"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "error: The standard output cannot be written (No space left on device).\n"


# ---- damaged runs ------------------------------------------------------------------------------------------------


def line(**changes: object) -> str:
    row = {"round": 1, "clients": [0], "total_steps": 1, "total_bytes": 9, "seconds": 0.1, "loss": 1.0, "accuracy": 0.5}
    return json.dumps({key: value for key, value in (row | changes).items() if value is not None})


DAMAGE = {
    "binary metrics": ("metrics.jsonl", b"\xff\xfe\x00\x01"),
    "empty object": ("metrics.jsonl", b"{}\n"),
    "null": ("metrics.jsonl", b"null\n"),
    "list": ("metrics.jsonl", b"[1, 2]\n"),
    "empty": ("metrics.jsonl", b""),
    "10^400": ("metrics.jsonl", line(total_steps=10**400).encode()),
    "10^5000": ("metrics.jsonl", b'{"round": 1' + b"0" * 5000 + b"}"),
    "a metric of 10^400": ("metrics.jsonl", line(accuracy=10**400).encode()),
    "a metric in words": ("metrics.jsonl", line(accuracy="high", loss=None, round="first").encode()),
    "steps as a list": ("metrics.jsonl", line(local_steps=[1]).encode()),
    "clients as a number": ("metrics.jsonl", line(clients=3).encode()),
    "deep": ("metrics.jsonl", b"[" * 100_000),
    "classes in words": ("metrics.jsonl", line(class_accuracy=["a"]).encode()),
    "by_client as a list": ("metrics.jsonl", line(by_client=[1]).encode()),
    "seconds": ("metrics.jsonl", line(seconds="NaN").encode().replace(b'"NaN"', b"NaN")),
    "cut partition": ("partition.json", b'{"clients": 3, "si'),
    "null partition": ("partition.json", b"null"),
    "partition without sizes": ("partition.json", b'{"clients": 3}'),
    "date": ("config.toml", b"rounds = 2020-01-01"),
    "binary config": ("config.toml", b"\xff\xfe\x00"),
    "no text": ("config.toml", b"\x80\x81"),
    "deep config": ("config.toml", b"a = " + b"[" * 5000),
    "metrics as a number": ("config.toml", b"metrics = 5"),
    "stopped": ("stopped.json", b"\xff"),
    "skipped in lists": ("metrics.jsonl", line(skipped=[[1]]).encode()),
    "clients in objects": ("metrics.jsonl", line(clients=[{}]).encode()),
    "left out in numbers": ("metrics.jsonl", line(left_out=3).encode()),
    "endless bytes": ("metrics.jsonl", line(total_bytes=1e308).encode()),
    "deep why": ("stopped.json", b"[" * 100_000),
    "deep partition": ("partition.json", b"[" * 100_000),
}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs, and one for each kind of damage."""
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        make_run(Path(f"good-{seed}"), 0.1, seed, 3)
    for name, (file, content) in DAMAGE.items():
        shutil.copytree("good-0", name)
        (Path(name) / file).write_bytes(content)
    return tmp_path


def test_a_damaged_run_is_named_and_left_out_of_the_report(runs):
    everything = [Path(f"good-{seed}") for seed in (0, 1)] + [Path(name) for name in DAMAGE]
    done = CliRunner().invoke(cli.app, ["report", *map(str, everything), "--out", "r.html"], catch_exceptions=False)
    assert done.exit_code == 0 and "2 runs, in r.html" in done.stdout and Path("r.html").exists()
    warned = done.stderr.splitlines()
    assert [next(name for name in DAMAGE if f"warning: {name}" in said) for said in warned]
    payload = gather([Path("good-0"), Path("good-1")])
    assert payload["left_out"] == [] and len(payload["groups"]) == 1
    for name in DAMAGE:
        left = [said for said in warned if said.startswith((f"warning: {name}:", f"warning: {name}/"))]
        assert len(left) == 1 and left[0].endswith("It is left out."), (name, warned)
        assert refused(gather, [Path(name)]).startswith(name)


def test_a_damaged_run_is_left_out_of_a_comparison(runs):
    here = [name for name, (file, _) in DAMAGE.items() if file != "partition.json"]
    shown = ["classes in words"]  # which a comparison does not look at
    broken = [name for name in here if name not in shown]
    done = CliRunner().invoke(cli.app, ["compare", "good-0", "good-1", *broken], catch_exceptions=False)
    assert done.exit_code == 0 and len(done.stdout.strip().splitlines()) == 2, done.output
    assert len(done.stderr.splitlines()) == len(broken)
    assert refused(lambda: CliRunner().invoke(cli.app, ["compare", "null"], catch_exceptions=False)).startswith("null:")
    for name in shown:
        assert CliRunner().invoke(cli.app, ["compare", name], catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324])
def test_figures_at_the_ends_of_the_floats(runs, value):
    """Their sum or square is no float, but their mean and deviation are."""
    for seed in (0, 1):
        rows = [json.loads(text) for text in Path(f"good-{seed}/metrics.jsonl").read_text().splitlines()]
        changed = [row | {"accuracy": value, "loss": value * (1 - seed)} for row in rows]
        Path(f"good-{seed}/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    figures = ["--csv", "t.csv", "--last", "2", "--target", "0.1", "--baseline", "A"]
    done = CliRunner().invoke(cli.app, ["compare", "A=good-0", "B=good-1", *figures], catch_exceptions=False)
    assert done.exit_code == 0
    done = CliRunner().invoke(cli.app, ["compare", "good-0", "good-1", "--metric", "loss"], catch_exceptions=False)
    assert done.exit_code == 0 and "nan" not in done.stdout and "inf" not in done.stdout
    done = CliRunner().invoke(cli.app, ["report", "good-0", "good-1", "--out", "r.html"], catch_exceptions=False)
    assert done.exit_code == 0 and done.stderr == ""


def test_watching_survives_damage(runs, monkeypatch):
    monkeypatch.setattr("undrift.tools.report.watch.PAUSE", 0.02)
    monkeypatch.setattr("undrift.tools.report.watch.REWRITE", 0.02)
    said: list[str] = []
    end = threading.Event()

    def sleep(seconds: float) -> None:  # where Ctrl-C comes
        if end.is_set():
            raise KeyboardInterrupt
        end.wait(seconds)

    monkeypatch.setattr("undrift.tools.report.watch.time.sleep", sleep)
    watching = threading.Thread(target=watch, args=([Path("good-0"), Path("good-1")], Path("w.html"), 0, said.append))
    watching.start()
    try:
        until(lambda: said)
        address = said[0].split()[2]
        good = Path("good-0/metrics.jsonl").read_bytes()
        for damage in (b"\xff\xfe", b"null\n"):
            Path("good-0/metrics.jsonl").write_bytes(damage)
            count = len(said)
            until(lambda count=count: len(said) > count)
            assert said[-1].startswith("warning: good-0: metrics.jsonl is damaged")
            assert watching.is_alive() and len(shown(address)["runs"]) == 1
        Path("good-1/config.toml").write_bytes(b"\xff\xfe")
        until(lambda: "good-1" in said[-1] or "good-0" in said[-1])
        Path("good-0/metrics.jsonl").write_bytes(good)
        until(lambda: shown(address)["runs"][0]["folder"] == "good-0")
        until(folder_in_place_of_the_page)  # which can no longer be written
        Path("good-0/metrics.jsonl").write_bytes(good + b"\n")
        until(lambda: any("w.html cannot be written" in one for one in said))
        assert watching.is_alive()
        Path("w.html").rmdir()
    finally:
        end.set()
        watching.join(20)
    assert not watching.is_alive() and Path("w.html").exists()


def folder_in_place_of_the_page() -> bool:
    """Whether there is one: the page may be written again between the two calls."""
    Path("w.html").unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):
        Path("w.html").mkdir()
    return Path("w.html").is_dir()


def shown(address: str) -> dict:
    with urllib.request.urlopen(f"{address}data.json") as reply:
        return json.loads(reply.read())


def until(happened) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- names that look like markup ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["[/x]", "[red]y", ":smile:"])
def test_names_are_printed_as_they_are(here, name):
    done = CliRunner().invoke(cli.app, ["sweep", "e.toml", "--workers", "1", "--out", name], catch_exceptions=False)
    assert done.exit_code == 0 and f"in {name}" in done.output
    made = Path("made") / name.replace("/", "")
    make_run(made, 0.1, 0, 2)
    text = made.joinpath("config.toml").read_text()
    made.joinpath("config.toml").write_text(text.replace("FedProx(mu=0.1)", f"Own('{name}')"))
    done = CliRunner().invoke(cli.app, ["compare", str(made)], catch_exceptions=False)
    assert done.exit_code == 0 and f"Own('{name}')" in done.output
