"""Which slots of a run's files hold what clients keep, as a checkpoint stores it: client, file, slot, checksum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from undrift.engine.slots import Layout, Slot, SlotFiles
from undrift.training.trees import pack, unpack, write_tensors
from undrift.tree import tree_unflatten

Slots = dict[int, dict[int, Slot]]
"""By part and client."""


def write_slots(file: Path, files: SlotFiles, slots: Slots) -> str:
    """Write these slots' states to the disk, and then the table; returns its checksum."""
    files.seal(slot for own in slots.values() for slot in own.values())
    names = list(files.files)
    places = {id(files.files[name]): i for i, name in enumerate(names)}
    tensors, layouts = {}, {}
    for part, own in slots.items():
        every = list(own.values())
        layouts[part] = _describe_layout(every[0].layout)
        sums = b"".join(slot.sha256 or b"" for slot in every)
        rows = [[client, places[id(slot.file)], slot.number] for client, slot in own.items()]
        tensors[f"{part} slots"] = torch.tensor(rows, dtype=torch.int64)
        tensors[f"{part} sha256"] = torch.from_numpy(np.frombuffer(sums, np.uint8).copy()).reshape(len(every), 32)
    return write_tensors(file, tensors, {"files": json.dumps(names), "layouts": json.dumps(layouts)})


def read_slots(file: Path, files: SlotFiles) -> Slots:
    """Return the slots that a table names. Raises if `files` cannot have them."""
    found: Slots = {}
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
        names = json.loads(about["files"])
        for part, described in json.loads(about["layouts"]).items():
            layout = _layout_of(described)
            rows, sums = (opened.get_tensor(f"{part} {what}") for what in ("slots", "sha256"))
            found[int(part)] = {
                client: files.known(names[place], number, layout, sha256.tobytes())
                for (client, place, number), sha256 in zip(rows.tolist(), sums.numpy(), strict=True)
            }
    return found


def _describe_layout(layout: Layout) -> dict[str, Any]:
    """Return the layout as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    blank = [torch.empty(shape, dtype=dtype) for dtype, shape in layout.kinds]
    tree = pack(tree_unflatten(blank, layout.structure), "", tensors)
    kinds = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    return {"tree": tree, "kinds": kinds}


def _layout_of(described: dict[str, Any]) -> Layout:
    kinds = described["kinds"].items()
    blank = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in kinds}
    return Layout.of(unpack(described["tree"], blank))
