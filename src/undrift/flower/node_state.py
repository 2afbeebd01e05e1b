"""What a node's clients keep between rounds: files on the node, one version per round.

A file belongs to a run, a client and a round: `RUN/client-3/round-7.safetensors` is what client 3 keeps once seven
rounds are done. The server names the version that a round starts from, that of the last round of this client's that it
accepted. So what a refused, late or repeated round leaves is never read, and is written over. Older versions stay for
a while: a server that restarts may go back to the checkpoint before its last.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from undrift.errors import UndriftError, first_line
from undrift.files import regular, remove_partial
from undrift.training.safetensors_io import own_memory, pack, unpack, write_tensors
from undrift.tree import Tree

VERSION = re.compile(r"round-(0|[1-9]\d*)\.safetensors")
TOKEN = re.compile(r"[0-9a-f]{32}")
KEEP = 4
"""How many versions older than the one that a round starts from are kept."""


class NodeStates:
    """The states of one run's clients in a node's folder."""

    def __init__(self, folder: Path, run: str) -> None:
        if not TOKEN.fullmatch(run):
            raise UndriftError("The server's name of the run is not one that undrift makes.")
        self.folder = folder / run

    def read(self, client: int, version: int) -> dict[int, Tree]:
        """Per part: what the client keeps after `version` rounds; nothing if that is 0."""
        if not version:
            return {}
        file = self._file(client, version)
        try:
            with safe_open(file, framework="pt") as opened:
                names = opened.keys()
                tensors = own_memory({name: opened.get_tensor(name) for name in names})
                trees = json.loads(opened.metadata()["trees"])
            return {int(part): unpack(tree, tensors) for part, tree in trees.items()}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UndriftError(
                f"The state of client {client} after round {version} cannot be read from {file} ({first_line(error)})."
            ) from error

    def write(self, client: int, version: int, states: dict[int, Tree], started: int) -> None:
        """Keep the client's states after `version` rounds, whose last began with those after `started` rounds."""
        file = self._file(client, version)
        for folder in (self.folder, file.parent):  # of the node's owner alone, as data can be reconstructed from states
            folder.mkdir(0o700, parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        trees: dict[str, Any] = {str(part): pack(tree, str(part), tensors) for part, tree in states.items()}
        write_tensors(file, tensors, {"trees": json.dumps(trees)}, secret=True)
        remove_partial(file.parent, VERSION)
        older = sorted(number for number in self.versions(client) if number < started)
        for number in older[:-KEEP]:
            self._file(client, number).unlink()

    def versions(self, client: int) -> list[int]:
        """Return the rounds after which the client's state is there."""
        folder = self._file(client, 0).parent
        found = [(VERSION.fullmatch(file.name), file) for file in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(match[1]) for match, file in found if match and regular(file))

    def _file(self, client: int, version: int) -> Path:
        return self.folder / f"client-{int(client)}" / f"round-{int(version)}.safetensors"
