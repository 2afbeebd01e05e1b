"""`undrift flower up`: start a SuperLink and SuperNodes on this machine, run an experiment on them, and stop them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError
from undrift.flower.certificates import make_certificates, make_key
from undrift.flower.server import STATUS

HOST, NAME = "127.0.0.1", "local"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
"""Settings without telemetry, update checks and installations, and with a short polling interval."""
PATIENCE = 60.0
"""Seconds for the SuperLink to listen, and for processes to end before they are killed."""
LOOK = 20.0
"""Seconds between two status queries to Flower, whose command line takes two seconds."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Signals:
    """What is done about signals that end a process: they raise, so that contexts are left and processes are ended."""

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}
        self.holding, self.waiting = 0, list[int]()

    def handle(self) -> None:
        """Raise `KeyboardInterrupt` for Ctrl-C, and `SystemExit` for SIGTERM and SIGHUP, from now on."""
        if threading.current_thread() is not threading.main_thread():  # which alone gets signals
            return
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # as with nohup
                self.before[number] = signal.signal(number, self._arrived)

    def _arrived(self, number: int, frame: object) -> None:
        if self.holding:
            self.waiting.append(number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which signals wait for its end: a process that has started is also noted."""
        self.holding += 1
        try:
            yield
        finally:
            self.holding -= 1
        if self.waiting and not self.holding:
            self._end(self.waiting.pop(0))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context after which signals do what they did before."""
        try:
            yield
        finally:
            for number, handler in self.before.items():
                signal.signal(number, handler)
            self.before = {}


def command(name: str) -> str:
    """Return the path of one of Flower's commands, in the environment of this Python."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise UndriftError(f'There is no {name} here; install Flower: pip install "undrift[flower]".')
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@dataclass
class Grounds:
    """A federation on this machine: its folder, its processes. Use it as a context, which ends what it started.

    Ctrl-C, SIGTERM and SIGHUP end it too.
    """

    folder: Path
    secure: bool = True
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)

    @property
    def home(self) -> Path:
        return self.folder / "flower"

    @property
    def environment(self) -> dict[str, str]:
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # Flower calls its own
        return {**os.environ, **QUIET, "FLWR_HOME": str(self.home), "PATH": beside}

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def authority(self) -> Path:
        return self.folder / "certificates" / "ca.crt"

    def __enter__(self) -> Grounds:
        self.home.mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        if self.secure and not self.authority.exists():
            make_certificates(self.authority.parent, [HOST, "localhost"])
        way = f"root-certificates = {json.dumps(str(self.authority.resolve()))}" if self.secure else "insecure = true"
        text = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{self.address}"\n{way}\n'
        (self.home / "config.toml").write_text(text, encoding="utf-8")
        self.signals.handle()
        return self

    def __exit__(self, *_: object) -> None:
        with self.signals.restored(), self.signals.held():
            for name in reversed(list(self.processes)):
                self.stop(name)

    # ---- processes -------------------------------------------------------------------------------------------
    def start(self, name: str, words: Sequence[str]) -> None:
        """Start a process in a group of its own, with its output in a log file."""
        with (self.folder / "logs" / f"{name}.log").open("ab") as log, self.signals.held():
            self.processes[name] = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment,
                start_new_session=True,
            )  # fmt: skip

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        """End a process and those that it started."""
        process = self.processes.pop(name)
        groups = _groups(process.pid)
        _signal(groups, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE / 4)
        _signal(groups, signal.SIGKILL)
        process.wait()

    def link(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        words = [command("flower-superlink"), "--host", HOST, "--port", str(self.port)]
        words += ["--disable-runtime-dependency-installation"]
        certificates = self.authority.parent
        words += [
            "--ssl-ca-certfile", str(certificates / "ca.crt"), "--ssl-certfile", str(certificates / "server.crt"),
            "--ssl-keyfile", str(certificates / "server.key"), "--enable-supernode-auth",
        ] if self.secure else ["--insecure"]  # fmt: skip
        self.start("superlink", words)
        end = time.monotonic() + PATIENCE
        while not _listens(self.port):
            if self.processes["superlink"].poll() is not None or time.monotonic() > end:
                raise UndriftError(f"The SuperLink did not start: {self.last_words('superlink')}")
            time.sleep(0.1)

    def key(self, name: str) -> Path:
        """Return a node's key, made where it is not there yet."""
        folder = self.folder / "keys"
        file = folder / f"{name}.key"
        return file if file.exists() else make_key(folder, name)[0]

    def register(self, name: str) -> None:
        """Tell the SuperLink that a node with this key may take part."""
        public = self.key(name).with_suffix(".pub")
        self.flwr("supernode", "register", str(public), NAME, "--name", name)

    def node(self, name: str, config: dict[str, Any]) -> None:
        """Start a SuperNode."""
        words = [command("flower-supernode"), "--superlink", self.address, "--port", str(free_port())]
        words += ["--node-config", " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())]
        if self.secure:
            words += ["--root-certificates", str(self.authority), "--auth-supernode-private-key", str(self.key(name))]
        else:
            words += ["--insecure"]
        self.start(name, words)

    def last_words(self, name: str) -> str:
        lines = (self.folder / "logs" / f"{name}.log").read_text("utf-8", errors="replace").splitlines()
        return " / ".join(COLOURS.sub("", line) for line in lines[-3:])

    # ---- Flower's command line -------------------------------------------------------------------------------
    def flwr(self, *words: str) -> dict[str, Any]:
        """Run one of Flower's commands, and return its JSON output. Raises `UndriftError` if it fails."""
        asked = [command("flwr"), *words, "--format", "json"]
        done = subprocess.run(asked, capture_output=True, text=True, env=self.environment, timeout=300, check=False)
        try:
            found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            found = {}
        if done.returncode or not found.get("success", True):
            why = found.get("error-message") or COLOURS.sub("", done.stderr or done.stdout).strip()[-500:]
            raise UndriftError(f"flwr {words[0]} failed: {why}")
        return found

    def submit(self, app: Path, out: Path, **values: Any) -> str:
        """Start a run of an app whose server's folder is `out`; returns Flower's id of it."""
        (out / STATUS).unlink(missing_ok=True)
        given = {"out": str(out.resolve()), **{key.replace("_", "-"): value for key, value in values.items()}}
        config = [word for key, value in given.items() for word in ("-c", f"{key}={json.dumps(value)}")]
        found = self.flwr("run", str(app), NAME, *config)
        return str(found["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        """Flower's status of a run, such as `finished:completed`, and what it says about it."""
        listed = self.flwr("list", NAME, "--run-id", run)["runs"][0]
        return str(listed["status"]), str(listed.get("status-details", ""))

    def wait(self, run: str, out: Path, seconds: float, tell: Callable[[], None] = lambda: None) -> tuple[bool, str]:
        """Whether a run has ended well, and what is said about it. Raises `UndriftError` if it does not end in time."""
        end, look = time.monotonic() + seconds, time.monotonic() + LOOK
        while (found := standing(out)).get("status", "running") == "running":
            tell()
            if self.processes["superlink"].poll() is not None:
                raise UndriftError(f"The SuperLink has ended: {self.last_words('superlink')}")
            if time.monotonic() > end:
                raise UndriftError(
                    f"The run has not ended after {seconds:g} s; its logs are in {self.folder / 'logs'}."
                )
            if time.monotonic() > look:  # a server that was killed, or did not start, has said nothing
                status, details = self.status(run)
                if status.startswith("finished") and standing(out).get("status", "running") == "running":
                    return False, f"{status}: {details}"
                look = time.monotonic() + LOOK
            time.sleep(0.3)
        tell()
        return found["status"] == "finished", str(found.get("why", ""))


def standing(out: Path) -> dict[str, Any]:
    """Return the status of the run in this folder, as its server reported it."""
    try:
        found: dict[str, Any] = json.loads((out / STATUS).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _groups(process: int) -> set[int]:
    """Return the groups of a process and of its descendants: Flower starts some of them in groups of their own.

    Where there is no /proc, the process's group alone; Flower's processes notice after a while that it is gone.
    """
    parents, groups = {}, {process: process}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent, group = file.read_text().rpartition(")")[2].split()[1:3]
            parents[int(file.parent.name)], groups[int(file.parent.name)] = int(parent), int(group)
    family = {process}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return {groups[member] for member in family}


def _signal(groups: set[int], how: int) -> None:
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, how)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


@contextmanager
def federation(folder: Path, nodes: int, configs: Sequence[dict[str, Any]] | None = None) -> Iterator[Grounds]:
    """A SuperLink and nodes, which know each other by their keys, in a folder that may be used again."""
    with Grounds(folder) as grounds:
        grounds.link()
        for i in range(nodes):
            name = f"node-{i}"
            own = {"partition-id": i, "num-partitions": nodes} if configs is None else configs[i]
            grounds.register(name)
            grounds.node(name, {"name": name, "state": str((folder / "state" / name).resolve()), **own})
        yield grounds
