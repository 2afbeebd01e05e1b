"""What files may make undrift do, and what they may not."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import undrift as ud
from tests.experiments import GOOD, deadline, reseal, toml
from undrift import files
from undrift.errors import UndriftError
from undrift.files import file_name, seal, unseal
from undrift.tools import cli_helpers, plugins
from undrift.tools.cli import app
from undrift.training import provenance

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib", "code", "pty"}
"""What turns data into code or objects, or runs a shell."""
NAMES = {"eval", "exec", "__import__", "execfile", "breakpoint"}
METHODS = {
    "torch.load", "torch.save", "torch.hub.load", "torch.jit.load", "torch.package", "os.system", "os.popen",
    "numpy.load", "np.load", "pd.read_pickle", "pandas.read_pickle", "subprocess.getoutput", "runpy.run_path",
}  # fmt: skip
KEYWORDS = {"shell", "trust_remote_code", "allow_pickle", "weights_only"}


def forbidden(tree: ast.AST) -> list[tuple[int, str]]:
    """The places in a module that could run what a file says."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names if name.name.split(".")[0] in MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append((node.lineno, str(node.module)))
        if isinstance(node, ast.Name) and node.id in NAMES:
            found.append((node.lineno, node.id))
        if isinstance(node, ast.Attribute) and (ast.unparse(node) in METHODS or node.attr in MODULES - {"code", "pty"}):
            found.append((node.lineno, ast.unparse(node)))
        if isinstance(node, ast.Call):
            found += [(node.lineno, "compile")] if ast.unparse(node.func) == "compile" else []
            found += [(node.lineno, f"{k.arg}=") for k in node.keywords if k.arg in KEYWORDS]
    return found


def test_nothing_in_the_source_runs_what_a_file_says():
    assert len(SOURCES) > 80
    found = {f"{file.name}: {place}" for file in SOURCES for place in forbidden(ast.parse(file.read_text("utf-8")))}
    assert found == set()


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import yaml.nodes", "eval(x)", "f = exec", "compile(x)",
        "subprocess.run(x, shell=True)", "os.system(x)", "__import__(x)", "load(name, trust_remote_code=True)",
        "torch.load(f)", "torch.serialization.pickle.loads(x)", "np.load(f, allow_pickle=True)",
    ],
)  # fmt: skip
def test_the_check_of_the_source_finds_what_it_looks_for(line):
    assert forbidden(ast.parse(line))


def test_the_security_policy_is_there():
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    for word in ("Supported versions", "Reporting", "imports", "--trust", "safetensors"):
        assert word in text


# ---- the working directory ---------------------------------------------------------------------------------------

MARK = "import pathlib; pathlib.Path({mark!r}).touch()\n"


def distribution(folder: Path, name: str, code: str) -> None:
    """A package as pip leaves it, with an entry point of undrift's group."""
    (folder / f"{name}-1.0.dist-info").mkdir(parents=True)
    (folder / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(f"[undrift]\nx = {name}_module\n")
    (folder / f"{name}_module.py").write_text(code)


def test_the_working_directory_is_no_code_and_a_broken_package_one_warning(tmp_path):
    """A package in the working directory is not asked; one that is installed, and broken, is named."""
    here, installed, mark = tmp_path / "here", tmp_path / "installed", tmp_path / "executed"
    for name in ("datasets", "queue", "selectors", "typer", "rich", "random"):
        here.mkdir(exist_ok=True)
        (here / f"{name}.py").write_text(MARK.format(mark=str(mark)))
    distribution(here, "evil", MARK.format(mark=str(mark)))
    distribution(installed, "broken", "raise RuntimeError('it is broken')")
    distribution(installed, "fine", MARK.format(mark=str(tmp_path / "fine")))
    (here / "own.py").write_text(MARK.format(mark=str(tmp_path / "own")))
    path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH")]))  # an empty entry is `here`
    command = [sys.executable, "-m", "undrift", "list", "losses", "--import", "own"]
    done = subprocess.run(
        command, cwd=here, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "cross_entropy" in done.stdout, done.stderr
    assert not mark.exists(), "code of the working directory ran"
    assert (tmp_path / "fine").exists() and (tmp_path / "own").exists()
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert "the package broken cannot be used with undrift" in done.stderr and "it is broken" in done.stderr


def test_only_imports_put_the_working_directory_on_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    before = list(sys.path)
    assert CliRunner().invoke(app, ["list", "losses"], catch_exceptions=False).exit_code == 0
    assert sys.path == before
    Path("own_module_of_a_test.py").write_text("")
    done = CliRunner().invoke(app, ["list", "losses", "--import", "own_module_of_a_test"], catch_exceptions=False)
    assert done.exit_code == 0 and sys.path == [*before, str(tmp_path)]


# ---- a run's folder from somebody else ---------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A run's folder whose config.toml names code, which lies beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    Path("evil").mkdir()
    Path("evil/config.toml").write_text(toml(GOOD | {"imports": ["evil.payload"]}))
    Path("evil/payload.py").write_text("import pathlib; pathlib.Path('executed').touch()")
    Path("evil/metrics.jsonl").write_text("")
    yield tmp_path
    for name in ("evil", "evil.payload"):
        sys.modules.pop(name, None)


def test_code_that_a_runs_folder_names_is_not_imported(foreign):
    for arguments in (["resume", "evil"], ["run", "evil"], ["sweep", "evil"], ["resume", "evil", "--import", "json"]):
        done = CliRunner().invoke(app, arguments)
        assert isinstance(done.exception, UndriftError)
        assert "config.toml asks to import 'evil.payload', which executes that code." in str(done.exception)
        assert "--import evil.payload, or with --trust." in str(done.exception)
    for arguments in (["report", "evil"], ["compare", "evil"], ["data", "show", "digits"], ["list", "losses"]):
        CliRunner().invoke(app, arguments)
    assert not Path("executed").exists()


STUDY = "[study]\nseeds = [0]\n"
RANDOM = STUDY + 'tuning_seeds = [1]\nsearch = "random"\ntrials = 1\n'


@pytest.mark.parametrize(
    ("command", "config"),
    [
        (["sweep"], '[sweep]\nimports = [["evil.payload"]]'),
        (["sweep"], '[sweep.""]\nimports = [["evil.payload"]]'),
        (["study"], STUDY + '[study.partitions]\na = { imports = ["evil.payload"] }'),
        (["study"], STUDY + '[study.methods]\na = { method = "FedAvg()", imports = [["evil.payload"]] }'),
        (["study"], STUDY + '[study.tune]\nimports = [["evil.payload"]]'),
        (["study"], RANDOM + '[study.tune]\nimports = [["evil.payload"], ["evil.payload", "json"]]'),
        (["flower", "new", "app", "--from"], {"imports": ["evil.payload"]}),
        (["flower", "up"], {"imports": ["evil.payload"]}),
    ],
)
@pytest.mark.parametrize("given", ["evil", "evil/config.toml"])
def test_nor_is_code_that_it_names_anywhere_else(foreign, command, config, given):
    settings = GOOD | {"data": GOOD["data"] | {"validation_fraction": 0.2}}
    text = toml({**config, **settings}) if isinstance(config, dict) else f"{toml(settings)}\n{config}"
    Path("evil/config.toml").write_text(text)
    Path("evil/run.json").touch()
    done = CliRunner().invoke(app, [*command, given])
    assert not Path("executed").exists() and not Path("app").exists()
    assert "asks to import 'evil.payload'" in str(done.exception)


def test_nor_when_it_is_published(foreign):
    Path("evil/config.toml").write_text(toml(GOOD))
    assert CliRunner().invoke(app, ["run", "evil", "--out", "run"]).exit_code == 0
    with Path("run/config.toml").open("a") as opened:
        opened.write('\n[""]\nimports = ["evil.payload"]\n')
    reseal(Path("run"))
    done = CliRunner().invoke(app, ["publish", "run", "--to", "hub"])
    assert "asks to import 'evil.payload'" in str(done.exception) and not Path("executed").exists()


def test_an_app_of_a_runs_config_imports_nothing(foreign):
    pytest.importorskip("flwr")
    from undrift.flower.apps import read

    Path("evil/run.json").touch()
    with pytest.raises(UndriftError, match="flower new APP --from"):
        read("evil/config.toml")


def test_what_a_command_may_not_import_the_next_one_may(foreign):
    CliRunner().invoke(app, ["run", "evil"])
    plugins.import_plugins(["evil.payload"])
    assert Path("executed").exists()


@pytest.mark.parametrize("allowed", [["--trust"], ["--import", "evil.payload"]])
def test_it_is_imported_where_that_is_asked_for(foreign, allowed):
    done = CliRunner().invoke(app, ["run", "evil", "--out", "again", *allowed])
    assert Path("executed").exists() and done.exit_code == 0
    assert Path("again/config.toml").read_text().count("evil.payload") == 1
    Path("executed").unlink()


def test_a_file_that_the_user_names_may_import(foreign):
    done = CliRunner().invoke(app, ["run", "evil/config.toml", "--out", "again"])
    assert done.exit_code == 0 and Path("executed").exists()


# ---- where the modules of a run are searched for -----------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Writes the folder `run` of a run that imports `mine_of_a_test`, with what its `run.json` says about modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [folder for folder in sys.path if folder])
    for name in ("_added", "_recorded", "_excluded"):
        monkeypatch.setattr(plugins, name, type(getattr(plugins, name))())
    monkeypatch.setattr(provenance, "modules", {})
    monkeypatch.setattr(plugins, "_gates", [plugins.Gate()])

    def write(modules: object, **settings: object) -> None:
        Path("run").mkdir(exist_ok=True)
        config = toml(GOOD | {"imports": ["mine_of_a_test"]} | settings)
        Path("run/config.toml").write_text(config)
        seal(Path("run/run.json"), {"config": config, "started": {"modules": modules}})

    yield write
    for name in ("mine", "timm", "sibling"):
        sys.modules.pop(f"{name}_of_a_test", None)


def put(folder: str, name: str, code: str = "") -> str:
    """A module that leaves the file `ran-FOLDER`. Returns its folder."""
    Path(folder).mkdir(exist_ok=True)
    Path(folder, f"{name}_of_a_test.py").write_text(f"import pathlib; pathlib.Path('ran-{folder}').touch()\n{code}")
    return os.path.abspath(folder)


def test_a_recorded_folder_is_searched_only_for_the_module_recorded_with_it(recorded):
    """Not even for a package that undrift itself looks for, as the folder may hold one of the same name."""
    put("own", "mine")
    evil = put("evil", "timm")
    sys.path.append(os.path.abspath("own"))
    recorded({"x": evil, "mine_of_a_test": evil})
    cli_helpers.read_experiment(Path("run"), None, ["mine_of_a_test"], None, False)
    plugins.import_plugins(["mine_of_a_test"])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("timm_of_a_test")
    assert Path("ran-own").exists() and not Path("ran-evil").exists() and evil not in sys.path


def test_nor_for_modules_that_only_the_command_line_names(recorded):
    evil = put("evil", "mine")
    recorded({"mine_of_a_test": evil}, imports=[])
    done = CliRunner().invoke(app, ["run", "run", "--out", "again", "--import", "mine_of_a_test"])
    assert "No module named" in str(done.exception) and not Path("ran-evil").exists()


def test_an_allowed_module_is_found_where_it_was_with_what_it_imports(recorded):
    project = put("project", "mine", "import sibling_of_a_test")
    put("project", "sibling")
    recorded({"mine_of_a_test": project})
    before = [*sys.path, os.getcwd()]
    cli_helpers.read_experiment(Path("run"), None, None, None, True)
    plugins.import_plugins(["mine_of_a_test"])
    assert sys.modules["sibling_of_a_test"].__file__ == os.path.join(project, "sibling_of_a_test.py")
    assert sys.path == before and provenance.modules == {"mine_of_a_test": project}


@pytest.mark.parametrize("modules", [["mine_of_a_test"], "x", None, {"mine_of_a_test": 3}, {"mine_of_a_test": ["/"]}])
def test_a_run_json_that_says_nothing_sensible_about_modules_is_ignored(recorded, modules):
    recorded(modules)
    done = CliRunner().invoke(app, ["run", "run", "--trust", "--out", "again"])
    assert isinstance(done.exception, UndriftError) and "No module named 'mine_of_a_test'" in str(done.exception)


@pytest.mark.parametrize("folder", ["evil", "../{here}/evil", "{root}/evil\0", "{root}/\ud800", "{root}/run"])
def test_recorded_folders_are_absolute_and_outside_of_the_run(recorded, tmp_path, folder):
    put("evil", "mine")
    put("run", "mine")
    recorded({"mine_of_a_test": folder.format(root=tmp_path, here=tmp_path.name)})
    done = CliRunner().invoke(app, ["run", "run", "--trust", "--out", "again"])
    assert isinstance(done.exception, UndriftError) and "No module named 'mine_of_a_test'" in str(done.exception)
    assert not list(tmp_path.glob("ran-*"))


@pytest.mark.parametrize("given", [".", "config.toml"])
def test_the_folder_of_a_run_is_not_searched_as_the_working_directory(recorded, monkeypatch, given):
    """Otherwise a file there could take the place of any package that is not installed."""
    put("own", "mine")
    put("run", "timm")
    recorded({})
    sys.path.append(os.path.abspath("own"))
    monkeypatch.chdir("run")
    assert CliRunner().invoke(app, ["run", given, "--import", "mine_of_a_test", "--out", "../again"]).exit_code == 0
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("timm_of_a_test")
    assert os.getcwd() not in sys.path
    with pytest.raises(UndriftError, match=r"among installed packages\. The folder of a run is never searched\.$"):
        plugins.import_plugins(["timm_of_a_test"])


@pytest.mark.parametrize("given", ["run/config.toml", "link.toml"])
def test_the_config_of_a_run_stands_for_its_folder(recorded, given):
    put("run", "mine")
    recorded({})
    Path("link.toml").symlink_to("run/config.toml")
    for command in ("run", "sweep", "compare"):
        done = CliRunner().invoke(app, [command, given])
        assert "config.toml asks to import 'mine_of_a_test'" in str(done.exception)
        assert ("--trust" in str(done.exception)) == (command != "compare")
    done = CliRunner().invoke(app, ["run", given, "--trust", "--out", "again"])
    assert "No module named" in str(done.exception) and not Path("ran-run").exists()
    recorded({"mine_of_a_test": put("project", "mine")})
    assert CliRunner().invoke(app, ["run", given, "--trust", "--out", "again"]).exit_code == 0


# ---- names that a run's folder chooses ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    data = ud.load("digits", ud.IID(), clients=4)
    ud.train("mlp", data, rounds=2, local=ud.Local(steps=1, batch_size=8, lr=0.1), out=folder / "run")
    return folder / "run"


@pytest.fixture
def renamed(trained, tmp_path, monkeypatch):
    """Writes the folder `run`, whose metric has another name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str) -> None:
        shutil.copytree(trained, "run")
        config = Path("run/config.toml")
        lines = [line for line in config.read_text().splitlines() if not line.startswith("metrics = ")]
        config.write_text("\n".join([f"metrics = [{json.dumps(name)}]", *lines]))
        rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
        named = [{name if key == "accuracy" else key: value for key, value in row.items()} for row in rows]
        Path("run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
        reseal(Path("run"))

    return write


@pytest.mark.parametrize(
    "name", ["../../victim/thesis", "{here}/victim/thesis", "..", "a\0b", "x" * 300, "$x^", "C:\\x"]
)
def test_a_metrics_name_is_no_path(renamed, tmp_path, name):
    name = name.format(here=tmp_path)
    Path("victim").mkdir()
    Path("deep/er").mkdir(parents=True)
    renamed(name)
    for command in (["report", "run", "--out", "deep/er/page.html"], ["compare", "run"]):
        done = CliRunner().invoke(app, [*command, "--figures", "deep/er/figures"])
        assert done.exit_code == 0, done
    done = CliRunner().invoke(app, ["publish", "run", "--to", "deep/er/hub"])
    assert done.exit_code == 0, done
    assert not list(Path("victim").iterdir()) and {file.name for file in tmp_path.iterdir()} == {
        "deep",
        "run",
        "victim",
    }
    drawn = {file.name for file in Path("deep/er/figures").iterdir()}
    assert len(drawn) == 3 * 7 and {file.name for file in Path("deep/er/hub/figures").iterdir()} == drawn


def test_a_figure_takes_the_place_of_a_link(renamed):
    renamed("accuracy")
    Path("figures").mkdir()
    Path("victim").touch()
    Path("figures/accuracy.pdf").symlink_to("../victim")
    assert CliRunner().invoke(app, ["compare", "run", "--figures", "figures"]).exit_code == 0
    assert Path("victim").read_bytes() == b"" and Path("figures/accuracy.pdf").stat().st_size


def test_file_names_stay_apart_and_in_the_folder():
    same = ["accuracy", "accuracy_over_bytes", "top 5", "Ä", "a.b", "F1(macro)"]
    assert [file_name(text) for text in same] == same
    other = ["", ".", "..", "/", "a/b", "a_b", "a\\b", "../a", ".a", "a\n", "\0", "\ud800", "x" * 201, "x" * 202, "-rf"]
    made = [file_name(text) for text in other]
    assert len(set(made)) == len(made) and all(re.fullmatch(r"\w[\w .-]*", name) for name in made)
    assert all(len(name.encode()) <= 200 for name in made)


# ---- files that are no files -------------------------------------------------------------------------------------

PIPES = [
    ("metrics.jsonl", ["compare", "run", "other"]),
    ("metrics.jsonl", ["report", "run", "other", "--out", "page.html"]),
    ("config.toml", ["compare", "run", "other"]),
    ("config.toml", ["report", "run", "other", "--out", "page.html"]),
    ("config.toml", ["run", "run", "--out", "again"]),
    ("partition.json", ["report", "run", "other", "--out", "page.html"]),
    ("run.json", ["compare", "run", "other"]),
    ("stopped.json", ["compare", "run", "other"]),
    ("metrics.jsonl", ["publish", "run", "--to", "hub"]),
    ("metrics.jsonl", ["resume", "run"]),
    ("config.toml", ["resume", "run"]),
]


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(("name", "command"), PIPES)
def test_pipes_and_devices_in_a_runs_folder_are_not_read(trained, tmp_path, monkeypatch, name, command, kind):
    """A pipe without a writer blocks whoever opens it, and a device may never end."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    shutil.copytree(trained, "other")
    Path("run", name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(Path("run", name))
    else:
        Path("run", name).symlink_to("/dev/zero")
    with deadline(20):
        done = CliRunner().invoke(app, command)
    if "other" in command:  # which is shown without it
        assert done.exit_code == 0 and "It is left out." in done.stderr
    elif command[0] != "resume" or name != "config.toml":  # of which run.json has a copy
        assert isinstance(done.exception, UndriftError)


def test_what_was_replaced_by_a_pipe_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    stat = os.stat
    monkeypatch.setattr("os.stat", lambda path, **how: stat(tmp_path / "file" if "pipe" in str(path) else path, **how))
    with deadline(20), pytest.raises(OSError, match="not a regular file"):
        files.open_regular(tmp_path / "pipe")


# ---- results that were changed -----------------------------------------------------------------------------------


@pytest.fixture
def edited(trained, tmp_path, monkeypatch):
    """Two copies of a run, the first with a better accuracy than it had."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "other"):
        shutil.copytree(trained, name)
    rows = [json.loads(line) | {"accuracy": 0.987} for line in Path("run/metrics.jsonl").read_text().splitlines()]
    Path("run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_changed_figures_are_neither_compared_nor_reported_nor_published(edited):
    for command in (["compare", "run", "other"], ["report", "run", "other", "--out", "page.html"]):
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert "warning: run/metrics.jsonl has been changed since the run ended" in done.stderr
        assert "0.987" not in done.stdout and done.exit_code == 0
    assert "0.987" not in Path("page.html").read_text("utf-8")
    for command in (["compare", "run"], ["report", "run"], ["publish", "run", "--to", "hub"]):
        assert "changed since the run ended" in str(CliRunner().invoke(app, command).exception)
    assert not Path("hub").exists()


def test_resuming_restores_figures_that_were_changed(edited):
    assert CliRunner().invoke(app, ["resume", "run"]).exit_code == 0
    assert CliRunner().invoke(app, ["compare", "run"]).exit_code == 0
    assert "0.987" not in Path("run/metrics.jsonl").read_text()


def unsummed(folder: str) -> None:
    """Remove the checksums of the results, which a run writes last."""
    record = unseal(Path(folder, "run.json"))
    del record["results"]
    seal(Path(folder, "run.json"), record)


@pytest.mark.parametrize("change", ["weights", "run.json", "no run.json", "no sums"])
def test_nothing_is_published_that_the_run_did_not_write(trained, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    if change == "weights":
        with Path("run/model.safetensors").open("r+b") as opened:
            opened.seek(-4, 2)
            opened.write(b"\x01\x02\x03\x04")
    elif change == "no run.json":
        Path("run/run.json").unlink()
    elif change == "no sums":
        unsummed("run")
    else:
        Path("run/run.json").write_text(Path("run/run.json").read_text().replace("0", "1"))
    done = CliRunner().invoke(app, ["publish", "run", "--to", "hub"])
    assert isinstance(done.exception, UndriftError) and "run.json" in str(done.exception)
    assert not Path("hub").exists()


def test_changed_settings_are_not_compared(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    config = Path("run/config.toml")
    config.write_text(config.read_text().replace("seed = 0", "seed = 7"))
    for command in (["compare", "run"], ["report", "run"], ["publish", "run", "--to", "hub"]):
        said = str(CliRunner().invoke(app, command).exception)
        assert "seed was 0, and is 7 now. Change it back." in said
    config.write_text(Path(trained, "config.toml").read_text().replace("rounds = 2", "rounds = 3"))  # for resume
    assert CliRunner().invoke(app, ["compare", "run"]).exit_code == 0


def test_a_run_that_still_trains_is_shown(trained, tmp_path, monkeypatch):
    """It has no checksums yet; nor is one that is resumed just now taken for one that ended."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    with Path("run/metrics.jsonl").open("a") as opened:
        opened.write('{"round": 3, "cli')
    Path("run/model.safetensors").unlink()
    for sums in (True, False):
        if not sums:
            unsummed("run")
        done = CliRunner().invoke(app, ["report", "run", "--out", "page.html"], catch_exceptions=False)
        assert done.exit_code == 0 and not done.stderr


ODD = [None, [], {}, 3, "x", [1], {"x": []}, True]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_sealed_record_that_no_run_wrote_is_no_traceback(trained, tmp_path, monkeypatch, odd):
    """Whoever sends a run's folder can seal what they like."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    good = unseal(Path("run/run.json"))
    del good["diverged"]
    bodies = [odd, *({**good, name: odd} for name in good)]
    bodies += [{**good, "identity": {**good["identity"], "rounds": odd}}, {**good, "config": "data = 3"}]
    bodies += [{**good, "results": dict.fromkeys(good["results"], odd)}]
    for body in bodies:
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree("run", "copy")
        seal(Path("copy/run.json"), body)
        for command in (["compare", "copy"], ["resume", "copy", "--rounds", "1"], ["resume", "copy", "--set", "x=1"]):
            done = CliRunner().invoke(app, command)
            assert done.exception is None or isinstance(done.exception, UndriftError | SystemExit), (body, command)


# ---- what a run's folder makes a terminal do ---------------------------------------------------------------------

ESCAPES = ("\x1b", "\x9b", "\x07", "\x08", "\r", "\u202e")


@pytest.fixture
def controlling(trained, tmp_path, monkeypatch):
    """The folders of runs that control terminals wherever they can: by methods, metrics, and why they ended."""
    monkeypatch.chdir(tmp_path)
    evil = "".join(f"{sign}]0;owned" for sign in ESCAPES)
    for i, name in enumerate(("run", "other")):
        shutil.copytree(trained, name)
        lines = [line for line in Path(name, "config.toml").read_text().splitlines() if not line.startswith("met")]
        own = [f"method = {json.dumps(f'Mine{i}{evil}')}", f"metrics = [{json.dumps(f'm{evil}')}]"]
        Path(name, "config.toml").write_text("\n".join([*own, *lines]))
        rows = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        named = [{f"m{evil}" if key == "accuracy" else key: value for key, value in row.items()} for row in rows]
        Path(name, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
        reseal(Path(name))
    record = unseal(Path("other/run.json"))
    seal(Path("other/run.json"), record | {"diverged": {"kind": "diverged", "what": f"It {evil}."}})
    for name in ("broken", "stopped"):
        shutil.copytree("run", name)
    Path("broken/metrics.jsonl").write_text(json.dumps({evil: 1, "round": evil}))
    reseal(Path("broken"))
    Path("stopped/stopped.json").write_text(json.dumps({"why": evil}))
    shutil.copytree("other", f"{evil}")


@pytest.mark.parametrize("wide", [False, True])
def test_no_command_lets_a_runs_folder_control_the_terminal(controlling, monkeypatch, wide):
    if wide:
        monkeypatch.setenv("FORCE_COLOR", "1")  # Rich takes it for a terminal
        monkeypatch.setenv("TERM", "dumb")
    own = [str(path) for path in Path().iterdir()]
    tables = ["--latex", "t.tex", "--csv", "t.csv", "--markdown", "t.md"]
    commands = [["compare", *own, *tables], ["report", *own, "--out", "page.html"], ["publish", "run", "--to", "hub"]]
    commands += [[name, folder] for name in ("resume", "run", "sweep", "compare") for folder in own]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", "from undrift.tools.cli import main; main()", *command],
            capture_output=True, check=False,
        )  # fmt: skip
        said = (done.stdout + done.stderr).decode()
        assert "Traceback" not in said
        shown = re.sub(r"\x1b\[[0-9;]*m", "", said) if wide else said  # colours are ours
        assert not any(sign in shown for sign in ESCAPES), (command, shown)
        if command[0] == "compare" and len(command) > 3:
            assert "Mine0\\x1b]0;owned" in shown and done.returncode == 0
    for file in ("t.tex", "t.csv", "t.md"):
        assert not any(sign in Path(file).read_bytes().decode() for sign in ESCAPES)


def test_commands_print_with_functions_that_control_nothing():
    """Of the ways to print, only these: each passes text through `printable`, or prints what undrift itself says."""
    allowed = {
        ("tools/output.py", "typer.echo"), ("tools/cli_helpers.py", "typer.echo"),
        ("tools/cli.py", "typer.echo"), ("tools/cli.py", "print"), ("tools/stopping.py", "print"),
    }  # fmt: skip
    found = set()
    for folder in ("tools", "flower"):
        for file in (ROOT / "src/undrift" / folder).rglob("*.py"):
            calls = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)]
            names = {ast.unparse(node.func) for node in calls if "printable(" not in ast.unparse(node)}
            here = file.relative_to(ROOT / "src/undrift").as_posix()
            found |= {(here, name) for name in names & {"print", "typer.echo", "click.echo", "Console", "rich.print"}}
    assert found <= allowed
