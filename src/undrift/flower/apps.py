"""Flower's `ServerApp` and `ClientApp`: thin shells around `server.py` and `node.py`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from undrift.errors import UndriftError, printable, quoted
from undrift.files import write_text
from undrift.flower.engine import Trouble
from undrift.flower.node import Node
from undrift.flower.server import STATUS, described, serve
from undrift.flower.uncompiled import leave_compiler_out
from undrift.tools import config
from undrift.tools.config import Experiment
from undrift.tools.plugins import run_folder
from undrift.training.result import Result

RECORD, ENTRY, FORMAT = "undrift", "message", "safetensors"
KINDS = {"hello": "query.hello", "train": "train", "measure": "query.measure", "evaluate": "evaluate"}
"""The server's requests, and Flower's type of each message."""
PAUSE = 0.2
"""Seconds between two checks for replies."""
WAIT, DEADLINE = 300.0, 3600.0
"""Default seconds to wait for the nodes before a run starts, and for their replies in a round."""


def wrapped(data: bytes) -> RecordDict:
    """Return bytes as Flower carries them, in pieces if there are many."""
    return RecordDict({RECORD: ArrayRecord({ENTRY: Array("uint8", (len(data),), FORMAT, data)})})


def unwrapped(content: RecordDict) -> bytes:
    """Return the bytes in a message."""
    record: Any = content.get(RECORD)
    array = record.get(ENTRY) if isinstance(record, ArrayRecord) else None
    return bytes(array.data) if array is not None and array.stype == FORMAT else b""


@dataclass
class GridLink:
    """The connection to the nodes through Flower's grid."""

    grid: Grid
    deadline: float
    """Seconds until replies of a round are too late."""

    def online(self) -> dict[str, int]:
        """Return Flower's ids of the nodes that are online, by the digest of their keys."""
        return {_key(node): node.node_id for node in self.grid.get_nodes()}

    def found(self, count: int, wait: float) -> list[str]:
        """Return the keys of the nodes that are there, once there are enough of them."""
        end = time.monotonic() + wait
        while len(there := self.online()) < count:
            if time.monotonic() > end:
                raise UndriftError(f"After {wait:.0f} s, {len(there)} nodes are there, and {count} are needed.")
            time.sleep(PAUSE)
        return sorted(there)

    def ask(self, kind: str, requests: dict[str, bytes]) -> dict[str, bytes | Trouble]:
        there = self.online()
        found: dict[str, bytes | Trouble] = {k: Trouble("it is not connected") for k in requests if k not in there}
        keys = [key for key in requests if key in there]
        messages = [Message(wrapped(requests[key]), there[key], KINDS[kind], ttl=self.deadline) for key in keys]
        ids = list(self.grid.push_messages(messages)) if messages else []
        waiting = {sent: key for sent, key in zip(ids, keys, strict=bool(ids)) if sent}
        end = time.monotonic() + self.deadline
        while waiting and time.monotonic() < end:
            for reply in self.grid.pull_messages(list(waiting)):
                key = waiting.pop(reply.metadata.reply_to_message_id, None)
                if key is not None:
                    found[key] = Trouble(_reason(reply)) if reply.has_error() else unwrapped(reply.content)
            time.sleep(PAUSE if waiting else 0)
        return found | {key: Trouble(f"no answer within {self.deadline:g} s") for key in waiting.values()}


def _key(node: Any) -> str:
    """Nodes are known by their key; a simulation's have none, but there their ids do not change."""
    return hashlib.sha256(node.public_key or f"simulated {node.node_id}".encode()).hexdigest()


def _reason(reply: Message) -> str:
    return f"{reply.error.reason} (Flower's code {reply.error.code})"[:500]


def server_app(experiment: str | Path, **given: Any) -> ServerApp:
    """Return the `ServerApp` for an experiment file; `given` takes the place of values in the app's config."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run_server(read(experiment), grid, {**context.run_config, **given})

    return app


def run_server(experiment: Experiment, grid: Grid, given: Mapping[str, Any]) -> Result:
    """Run with these values of the app's config. Raises if the run fails, so that Flower reports a failure."""
    nodes, replies = int(given.get("min-nodes", 1)), int(given.get("min-replies", 1))
    link = GridLink(grid, float(given.get("deadline", DEADLINE)))
    wait, out = float(given.get("wait", WAIT)), Path(str(given.get("out") or "federation")).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    with standing(out):
        result = serve(
            experiment, link, lambda: link.found(nodes, wait), out, replies, partial(tell, experiment.rounds)
        )
        if result.stopped:
            raise UndriftError(f"The run stopped: {result.stopped}")
    return result


def tell(rounds: int, row: dict[str, Any]) -> None:
    """Write a line about a round to the server's log."""
    print(printable(described(row, rounds)), flush=True)


@contextmanager
def standing(out: Path) -> Iterator[None]:
    """Write the status of the run to a file, since Flower does not say why an app failed."""
    write_text(out / STATUS, json.dumps({"status": "running"}))
    try:
        yield
    except BaseException as error:
        why = f"{type(error).__name__}: {error}" if not isinstance(error, UndriftError) else str(error)
        write_text(out / STATUS, json.dumps({"status": "failed", "why": why}))
        raise
    write_text(out / STATUS, json.dumps({"status": "finished"}))


def client_app(experiment: str | Path, **given: Any) -> ClientApp:
    """Return the `ClientApp` for an experiment file; `given` is for what a node's config does not say."""
    app = ClientApp()

    def answer(kind: str, message: Message, context: Context) -> Message:
        leave_compiler_out()
        node = Node(read(experiment), {**given, **context.node_config})
        return Message(wrapped(node.answer(kind, unwrapped(message.content))), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer("train", message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer("evaluate", message, context)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return answer("hello", message, context)

    @app.query("measure")
    def measure(message: Message, context: Context) -> Message:
        return answer("measure", message, context)

    return app


def read(experiment: str | Path) -> Experiment:
    """The experiment of an app. A run's `config.toml` may not import anything, as it may come from somebody else."""
    file = Path(experiment)
    found = config.checked(config.read(file), str(file))
    if found.imports and run_folder(file):
        raise UndriftError(
            f"{file} asks to import {', '.join(map(quoted, found.imports))}, which executes that code. If you trust "
            f"it, write an app from it: undrift flower new APP --from {file} --trust"
        )
    return found
