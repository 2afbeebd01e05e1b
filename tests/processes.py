"""Runs for several processes: `torchrun … -m tests.processes FOLDER NAME…` trains each of them, `trained` one alone.

What a run leaves in process r is in `FOLDER/NAME-r.pt`: the weights, the history but for seconds, what was chosen.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import undrift as ud
from tests.parts import METHOD
from tests.problems import make_clients, net, split

SIZES = [23, 5, 0, 41, 10, 17, 1]
ROOT = Path(__file__).parent.parent
DEVICE = "UNDRIFT_TEST_DEVICE"
"""The environment variable that names another device than the CPU."""
LOCAL = ud.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.5)


@dataclass(frozen=True)
class Median(ud.Part):
    """The coordinates' medians, from single updates."""

    def aggregate(self, updates, state, server):
        assert len(server.cohort) == len(updates["3.bias"])
        return ud.tree_map(lambda u: u.median(0).values, updates), state


@dataclass(frozen=True)
class Sorted(ud.Part):
    """Depends on the order of single updates: each counts by its place in the cohort."""

    def aggregate(self, updates, state, server):
        def weighed(u):
            places = torch.arange(1, len(u) + 1, dtype=u.dtype, device=u.device).reshape(-1, *[1] * (u.dim() - 1))
            return (u * places).sum(0) / places.sum()

        return ud.tree_map(weighed, updates), state


@dataclass(frozen=True)
class Head(ud.Part):
    """The last layer is each client's own."""

    personal: tuple[str, ...] = ("3.*",)


@dataclass(frozen=True)
class Sometimes(ud.Part):
    """Nobody trains in round 1, one client in round 2."""

    def plan(self, plan, state, server):
        some = slice(0, {1: 0, 2: 1}.get(plan.round))
        return replace(plan, clients=plan.clients[some], steps=plan.steps[some]), state


@dataclass(frozen=True)
class FailsLater(ud.Part):
    """From round 1 on it cannot be traced in the first process, for an `if` on values; the others could go on."""

    def broadcast(self, params, state, server):
        return {"of": torch.ones(1 if server.round < 1 else 2)}

    def gradient(self, g, params, client):
        if len(client.received["of"]) == 2 and os.environ.get("RANK", "0") == "0" and client.n > 1000:
            return g
        return ud.tree_map(lambda g: 1.5 * g, g)


@dataclass(frozen=True)
class Spoils(ud.Part):
    """In round 2 client 3 keeps something that is not finite; it sends nothing of it."""

    def keep(self, params):
        return torch.zeros((), dtype=torch.float64)

    def upload(self, delta, client):
        bad = (client.id == 3) & (client.round == 2)
        return (), client.kept + torch.where(bad, torch.nan, 1.0)


class InAList(nn.Sequential):
    """Reaches a weight in another way than by its name, for which one process has a remedy and several have none."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Linear(8, 4))
        for p in self.parameters():
            nn.init.constant_(p, 0.1)
        self.double().kept = [self[1].weight]

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self[0](x)), self.kept[0], self[1].bias)


class ByFrequency(nn.Module):
    """Trains otherwise in lanes, and right on the plain engine."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(5, 8, scale_grad_by_freq=True), nn.Linear(8, 4)
        for p in self.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
        self.double()

    def forward(self, x):
        return self.last(self.embedding((2 * x[:, :3].abs()).long().clamp(max=4)).mean(1))


def normed() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def run(method: Any = ud.FedAvg(), model: Any = None, data: Any = None, **more: Any) -> ud.Result:  # noqa: B008
    given = {"rounds": 3, "local": LOCAL, "participation": 5, "device": os.environ.get(DEVICE, "cpu"), "seed": 1} | more
    return ud.train(model or net(), make_clients(SIZES) if data is None else data, method, **given)


def many_tests() -> ud.FederatedDataset:
    """With more test data than one batch."""
    data, rng = make_clients(SIZES), np.random.default_rng(5)
    test = (torch.tensor(rng.normal(size=(2500, 6))), torch.tensor(rng.integers(0, 4, 2500)))
    return ud.FederatedDataset.from_clients([data[i] for i in range(len(data))], test=test, validation=test)


FAULTS = ud.Faults(dropout=0.25, stragglers=0.4, nan=0.15, explode=0.15, explode_factor=1e4)
EXPERIMENTS: dict[str, Callable[[], ud.Result]] = {
    "ended by a callback": lambda: run(callbacks=lambda record: record.round == 2 and "two"),
    "FedAvg": lambda: run(data=many_tests()),
    "FedAvg, plain": lambda: run(engine="plain"),
    "FedAvg, float32": lambda: run(model=net(torch.float32), data=make_clients(SIZES, torch.float32)),
    "Scaffold": lambda: run(ud.Scaffold(), local=replace(LOCAL, momentum=0.0)),
    "Scaffold, float32": lambda: run(
        ud.Scaffold(), net(torch.float32), make_clients(SIZES, torch.float32), local=replace(LOCAL, momentum=0.0)
    ),
    "FedNLR": lambda: run(ud.FedNLR()),
    "every hook": lambda: run(METHOD, net(dropout=0.3)),
    "median": lambda: run(Median()),
    "order": lambda: run(Sorted(), on_nonfinite="skip", faults=ud.Faults(nan=0.3)),
    "personal head": lambda: run(Head(), data=split(), participation=3, personalize_every=2),
    "tuned": lambda: run(data=split(), participation=3, personalize_every=1),
    "metrics": lambda: run(data=split(), participation=3, metrics=["f1", "confusion_matrix", "balanced_accuracy"]),
    "all scores": lambda: run(data=split(), participation=3, metrics=["accuracy", "auroc", "f1"], personalize_every=2),
    "batch norm": lambda: run(model=normed(), data=make_clients([23, 5, 0, 42, 10, 18])),
    "one client": lambda: run(participation=1),
    "not in lanes": lambda: run(model=ByFrequency()),
    "one client that keeps": lambda: run(ud.FedDyn(0.1), participation=1, local=replace(LOCAL, momentum=0.0)),
    "empty cohorts": lambda: run(Sometimes()),
    "faults": lambda: run(
        ud.FedDyn(0.1),
        faults=FAULTS,
        max_norm_ratio=3.0,
        min_clients=2,
        rounds=5,
        local=STEPS,
        on_nonfinite="skip",
        drift="layers",
    ),
    "lanes fail": lambda: run(FailsLater()),
    "NaN": lambda: run(Spoils(), rounds=5),
    "stopped": lambda: run(stop_when=lambda rows: rows[-1]["seconds"] > 0 and len(rows) == 2),
}
SHORT = [
    "Scaffold, float32", "every hook", "order", "personal head", "metrics", "all scores", "one client that keeps",
    "faults", "lanes fail", "NaN", "not in lanes", "ended by a callback",
]  # fmt: skip
"""Those that meet most of the code once."""
STEPS = ud.Local(steps=5, batch_size=8, lr=0.05)
START = {name: net().state_dict() for name in EXPERIMENTS} | {
    "batch norm": normed().state_dict(),
    "not in lanes": ByFrequency().state_dict(),
}


def left(result: ud.Result) -> dict[str, Any]:
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in result.history]
    params = {name: w.cpu() for name, w in result.params.items()}
    return {"params": params, "history": rows, "choices": result.choices, "stopped": result.stopped}


@dataclass(frozen=True)
class Dies(ud.Part):
    """Kills the process whose number is in UNDRIFT_DIES, in round 3."""

    def broadcast(self, params, state, server):
        if server.round == 3 and os.environ.get("RANK") == os.environ.get("UNDRIFT_DIES", "nobody"):
            os.kill(os.getpid(), signal.SIGKILL)
        return ()


def kept(folder: Path, rounds: int = 6) -> ud.Result:
    """A run with files; it is resumed where `folder` has it."""
    method, local = ud.Scaffold() + Dies(), replace(LOCAL, momentum=0.0)
    resume = (folder / "run.json").exists()
    return run(method, local=local, out=folder, checkpoint_every=1, rounds=rounds, resume=resume)


def nodes(*processes: int) -> list[list[str]]:
    """Options of torchrun for machines with so many processes each, all of them this one."""
    if len(processes) == 1:
        return [["--standalone", "--nproc-per-node", str(processes[0])]]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=undrift", "--local-addr=localhost"]
    return [[f"--nnodes={len(processes)}", *meet, "--nproc-per-node", str(n)] for n in processes]


def torchrun(*arguments: object, options: Sequence[str], cwd: Path = ROOT, **more: str) -> subprocess.Popen:
    """Start a module with these options of torchrun and these variables of the environment."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, *map(str, arguments)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **more, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def together(folder: Path, names: list[str], *processes: int, **more: str) -> tuple[dict[str, list[Any]], str]:
    """What these runs leave in each process, on machines with so many each, as far as they end; and what they say."""
    folder.mkdir(exist_ok=True)
    started = [torchrun("-m", "tests.processes", folder, *names, options=o, **more) for o in nodes(*processes)]
    try:
        said = "".join(text for process in started for text in process.communicate(timeout=300))
    finally:
        for process in started:
            process.terminate()  # which torchrun passes on
    found = {}
    for name in names:
        files = [folder / f"{name}-{rank}.pt" for rank in range(sum(processes))]
        if all(file.exists() for file in files):
            found[name] = [torch.load(file, weights_only=False) for file in files]
    return found, said


@dataclass(frozen=True)
class FailsThere(ud.Part):
    """A hook that fails in the second process alone."""

    def update(self, delta, client):
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("in process 1")
        return delta


def elsewhere() -> nn.Module:
    """A model that nobody has seeded."""
    model = net()
    torch.nn.init.constant_(model[3].bias, float(os.environ["RANK"]))
    return model


def refused(folder: Path) -> list[str]:
    """What errors say in this process, one after another: after each of them a run can be started again."""
    head = run(Head(), data=split(), participation=3)
    wrong: list[Callable[[], Any]] = [
        lambda: run(model=elsewhere()),
        lambda: run(rounds=2 + int(os.environ["RANK"])),
        lambda: run(FailsThere(), engine="plain"),
        lambda: run(participation=10**6),
        lambda: run(out=folder),  # which is not empty
        lambda: run(on_round=lambda row: run()),
        lambda: run(stop_when=lambda rows: rows[0]["nothing"]),
        lambda: run(model=InAList()),
        lambda: run(model=InAList(), engine="plain", participation=1),
        lambda: head.own_params(1),
    ]
    said = []
    for work in wrong:
        try:
            work()
            said.append("nothing")
        except Exception as error:
            kind = ud.UndriftError if isinstance(error, ud.UndriftError) else type(error)
            said.append(f"{kind.__name__}: {error}")
    return said


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's; what is wrong is to be found out from the other process
    for name in names:
        if name == "refused":
            found: Any = refused(Path(folder))
        else:
            found = left(kept(Path(folder) / "run") if name == "kept" else EXPERIMENTS[name]())
        torch.save(found, Path(folder) / f"{name}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
