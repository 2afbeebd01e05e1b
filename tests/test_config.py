"""Experiment files: right ones say what `ud.train` gets, wrong ones are refused in a few words that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest

import undrift as ud
from tests.experiments import GOOD, changed, toml
from undrift.tools import cli, config
from undrift.tools.experiment import arguments

WRONG = [
    # a key, what it is set to, and what the message says
    ("roundz", 5, "There is no key 'roundz'. Did you mean 'rounds'?"),
    ("local.batchsize", 5, "There is no key 'local.batchsize'. Did you mean 'batch_size'?"),
    ("data.partion", "IID()", "There is no key 'data.partion'. Did you mean 'partition'?"),
    ("optimizer.name", "adam", "There is no key 'optimizer'."),
    ("rounds", None, "The key 'rounds' is missing; add it."),
    ("local.lr", None, "The key 'local.lr' is missing; add it."),
    ("data.name", None, "The key 'data.name' is missing; add it."),
    ("rounds", "many", "The key 'rounds' must be a whole number, not 'many'."),
    ("rounds", 2.5, "The key 'rounds' must be a whole number, not 2.5."),
    ("rounds", 0, "The key 'rounds' must be 1 or more, not 0."),
    ("seed", -1, "The key 'seed' must be 0 or more, not -1."),
    ("deterministic", "yes", "The key 'deterministic' must be true or false, not 'yes'."),
    ("local.lr", [0.1], "The key 'local.lr' must be"),
    ("local", 3, "The key 'local' must be a section, not 3."),
    ("data.server_fraction", 1.5, "The key 'data.server_fraction' must be below 1.0, not 1.5."),
    ("checkpoint_every", "soon", "checkpoint_every: checkpoint_every must be a number of rounds such as 10"),
    ("method", "FedAgv()", "method: There is no method called 'FedAgv'. Did you mean 'FedAvg'?"),
    ("method", "FedProx()", "method: FedProx needs the argument 'mu'; its arguments are mu, target."),
    ("method", "FedProx(mu=0.1", "method: Cannot read the method"),
    ("method", "FedProx(mu=-1)", "FedProx(mu) is -1; it must be in [0, inf)."),
    ("method", "__import__('os').system('true')", "method: Cannot read"),
    ("method", "ServerSGD() + ServerAdam(0.1)", "contradict"),
    ("method", "FedDyn(0.1) + FedAvg(weighting='samples')", "they contradict each other"),
    (
        "data.partition",
        "Dirichlt(0.1)",
        "data.partition: There is no partition called 'Dirichlt'. Did you mean 'Dirichlet'?",
    ),
    ("data.partition", "Dirichlet(-1)", "data.partition: Dirichlet(alpha) must be a number above 0, not -1."),
    ("data.name", "digitz", "data: There is no data set called 'digitz'. Did you mean 'digits'?"),
    ("data.name", "no/such/file.csv", "data: There is no file or folder no/such/file.csv."),
    ("data.clients", None, "data: clients must be a whole number from 1, not None."),
    ("model", "mlpp", "model: There is no model called 'mlpp'. Did you mean 'mlp'?"),
    ("model", "cnn_temporal", 'The model "cnn_temporal" needs'),
    (
        "model",
        "mlp(hiden=3)",
        "has no option 'hiden' (did you mean 'hidden'?); its options are hidden.",
    ),
    ("loss", "crossentropy", "There is no loss called 'crossentropy'. Did you mean 'cross_entropy'?"),
    ("metrics", ["acuracy"], "There is no metric called 'acuracy'. Did you mean 'accuracy'?"),
    ("participation", 9, "participation asks for 9 clients per round, but only 4 have data."),
    ("participation", 1.5, "participation as a fraction must be in (0, 1], not 1.5."),
    ("local.steps", 3, "local: Local needs either steps or epochs, and not both."),
    ("local.lr", "decy(0.1, 0.9)", "local.lr: There is no schedule called 'decy'. Did you mean 'decay'?"),
    ("local.momentum", 1.5, "Local(momentum) is 1.5; it must be in [0, 1)."),
    ("engine", "warp", 'engine must be "auto", "lanes" or "plain", not \'warp\'.'),
    ("device", "cuda:7", "device 'cuda:7' is not available"),
    ("imports", ["no_such_module"], "imports: the module 'no_such_module' cannot be imported"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), WRONG, ids=[f"{key}={value}" for key, value, _ in WRONG])
def test_a_wrong_file_is_refused_in_at_most_four_lines(tmp_path, monkeypatch, capsys, key, value, sentence):
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(toml(changed(key, value)))
    monkeypatch.setattr("sys.argv", ["undrift", "run", "e.toml"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message.startswith("error: e.toml") and sentence in message, message
    assert len(message.strip().splitlines()) <= 4 and "Traceback" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["e.toml"], "nothing written"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "The experiment file e.toml does not exist."),
        ("rounds = \n", "e.toml is not TOML"),
        ("model = mlp\n", "e.toml is not TOML"),
        ("", "The key 'model' is missing; add it."),
    ],
)
def test_a_file_that_is_no_experiment(tmp_path, monkeypatch, capsys, text, sentence):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("e.toml").write_text(text)
    monkeypatch.setattr("sys.argv", ["undrift", "run", "e.toml"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and sentence in message and len(message.strip().splitlines()) <= 4


def test_a_good_file_says_what_train_gets():
    settings = changed("local.lr", "decay(0.1, 0.9)")
    settings["method"] = "FedProx(mu=inverse(0.1, 3)) + FedNLR()"
    settings["seed"] = 5
    found = arguments(config.checked(settings, "e.toml"))
    assert found["local"] == ud.Local(epochs=1, batch_size=32, lr=ud.decay(0.1, 0.9))
    assert repr(found["method"]) == repr(ud.FedProx(mu=ud.inverse(0.1, 3)) + ud.FedNLR())
    assert found["data"].origin["seed"] == 5, "the data's seed is the run's, unless it has one"
    assert (found["rounds"], found["participation"], found["checkpoint_every"]) == (2, 0.5, "30s")


def test_an_int_is_a_count_and_a_float_a_fraction():
    for value in (1, 1.0):
        found = config.checked(changed("participation", value), "e").participation
        assert found == value and type(found) is type(value)


def test_overrides():
    settings = config.override(GOOD, ["local.lr=0.05", "method=Scaffold()", "data.name=mnist", "rounds = 7", "seed=3"])
    assert (settings["local"]["lr"], settings["method"], settings["data"]["name"]) == (0.05, "Scaffold()", "mnist")
    assert (settings["rounds"], settings["seed"], GOOD["rounds"]) == (7, 3, 2)
    for wrong in ("local.lr", "=3", "rounds.x=3"):
        with pytest.raises(ud.UndriftError, match="--set"):
            config.override(GOOD, [wrong])
