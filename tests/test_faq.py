"""The frequently asked questions: every message on the page is what undrift says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import undrift as ud
from tests.pages import DOCS
from undrift.tools.cli import app
from undrift.tools.plugins import import_plugins

LOCAL = ud.Local(epochs=1, batch_size=32, lr=0.1)
PART = """from dataclasses import dataclass
import torch
import undrift as ud

{decorator}
class Mine(ud.Part):
    def {hook}:
        {body}
"""
GRADIENT = "gradient(self, g, params, client)"
FROZEN = "@dataclass(frozen=True)"


def digits(seed=0, **options):
    return ud.load("digits", ud.Dirichlet(0.3), clients=20, seed=seed, **options)


def train(method="FedAvg()", model="mlp", data=None, local=LOCAL, **options):
    return ud.train(model, data or digits(), method, rounds=1, local=local, **options)


def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def arrays():
    return np.random.default_rng(0).normal(size=(60, 3)).astype("float32"), np.arange(60) % 3


def with_nan():
    x, y = np.zeros((100, 4), "float32"), np.arange(100) % 3
    x[3, 2] = np.nan
    return ud.load((x, y), ud.IID(), clients=4)


def table(**columns):
    frame = pd.DataFrame(arrays()[0], columns=list("abc")).assign(kind=arrays()[1])
    frame.assign(**columns).to_csv("patients.csv", index=False)
    return ud.load("patients.csv", ud.IID(), clients=3, label="kind")


def twice(second, **options):
    train(out="runs/first")
    train(second, out="runs/first", **options)


def mine(hook, body, decorator=FROZEN, **options):
    Path("mine.py").write_text(PART.format(hook=hook, body=body, decorator=decorator), encoding="utf-8")
    import_plugins(["mine"])
    train("Mine()", **options)


EXPERIMENT = """rounds = 1
model = "mlp"
data = { name = "digits", clients = 4 }
local = { epochs = 1, batch_size = 32, %s = 0.1 }
"""


def command(*words, key="lr"):
    """What `undrift` says is wrong; `EXPERIMENT` is experiment.toml, and fedcm.py has a method FedCM."""
    Path("experiment.toml").write_text(EXPERIMENT % key, encoding="utf-8")
    if not Path("fedcm.py").exists():
        Path("fedcm.py").write_text(
            PART.format(hook=GRADIENT, body="return g", decorator=FROZEN).replace("Mine", "FedCM")
        )
    return f"error: {CliRunner().invoke(app, words).exception}"  # as `main` prints it


def resumed(*words):
    command("run", "experiment.toml", "--out", "runs/first", "--import", "fedcm", "--set", "method=FedCM()")
    sys.modules.pop("fedcm")
    file = Path("fedcm.py")
    file.write_text(file.read_text(encoding="utf-8").replace("return g", "return {**g}"), encoding="utf-8")
    return command("resume", "runs/first", "--rounds", "2", *words)


SAID = {
    "The last batch of a client has one sample": lambda: train(model=normed(), data=digits(seed=1)),
    "A client sent non-finite values": lambda: train(local=ud.Local(epochs=1, batch_size=32, lr=1e9)),
    "The data have no test set": lambda: train(data=ud.load(arrays(), ud.IID(), clients=3)),
    "NaN in the data": with_nan,
    "NaN in the data, of a table": lambda: table(b=[*[0.0] * 4, np.nan, *[0.0] * 55]),
    "The column holds string, not numbers": lambda: table(name="Doe"),
    "Labels and outputs do not fit": lambda: train(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 5))),
    "Cross-entropy needs whole-number labels": lambda: train(
        data=ud.load((arrays()[0], arrays()[0][:, :1]), ud.IID(), clients=3)
    ),
    "The loss must return one value per sample": lambda: train(loss=lambda z, y: torch.log_softmax(z, -1)),
    "More clients per round than have data": lambda: train(participation=30),
    "The folder exists": lambda: twice("FedAvg()"),
    "A resumed run has other settings": lambda: twice("FedProx(mu=0.1)", resume=True),
    "Two parts contradict each other": lambda: train("TwoDLRD(window=2) + AllDecreasing(window=2)"),
    "SCAFFOLD or FedNova with Adam": lambda: train(
        "Scaffold()", local=ud.Local(epochs=1, batch_size=32, lr=0.001, optimizer=ud.Adam())
    ),
    "There is no method called …": lambda: command("run", "experiment.toml", "--set", "method=FedNew(0.1)"),
    "A folder asks to import a module": resumed,
    "The code has changed since the run was started": lambda: resumed("--trust"),
    "A key is missing": lambda: command("run", "experiment.toml", key="learning_rate"),
    "It is not a hook": lambda: mine("gradients(self, g, params, client)", "return g"),
    "Put @dataclass above it": lambda: mine(GRADIENT, "return g", decorator=""),
    "Data-dependent control flow": lambda: mine(
        GRADIENT, 'return g if g["1.weight"].sum() > 0 else params', engine="lanes"
    ),
    "Draws from a generator of torch": lambda: mine(
        GRADIENT, "return ud.tree_map(lambda g: g + torch.randn_like(g), g)", engine="lanes"
    ),
    "A hook must return a pair": lambda: mine("transform(self, update, state, server)", "return update"),
    "A hook changes shapes": lambda: mine(GRADIENT, "return ud.tree_map(torch.mean, g)"),
}


def messages() -> dict[str, str]:
    """The messages on the page by their headings, each on one line."""
    text, found = (DOCS / "faq.md").read_text(encoding="utf-8").partition("## Error messages")[2], {}
    for section in re.split(r"^### ", text, flags=re.M)[1:]:
        heading = section.partition("\n")[0]
        for k, shown in enumerate(re.findall(r"^```text\n(.*?)^```$", section, re.M | re.S)):
            found[heading + ", of a table" * k] = " ".join(shown.split())
    return found


def test_every_message_on_the_page_is_tried():
    assert messages().keys() == SAID.keys()


@pytest.mark.parametrize("heading", SAID)
def test_a_message_on_the_page_is_what_is_said(heading, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    torch.manual_seed(0)
    try:
        result = SAID[heading]()
    except ud.UndriftError as error:
        said = str(error)
    else:
        said = result if isinstance(result, str) else result.stopped or caplog.messages[-1]
    assert plain(said.replace(f"{tmp_path}/", "")) == plain(messages()[heading])


def plain(message: str) -> str:
    """On one line. Which client is the first with NaN depends on rounding, the nearest method on what tests define."""
    message = re.sub(r"client \d+", "client #", " ".join(message.split()))
    return re.sub(r"mean 'Fed\w+'", "mean 'Fed…'", message)
