"""A small made-up folder in hub layout: the files that the real data sets have, with few rows and known contents."""

from __future__ import annotations

import io
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as Pillow

TEXTS = {
    "LEAR": "Blow, winds, and crack your cheeks! rage! blow! You cataracts and hurricanoes, spout till you have "
    "drench'd our steeples, drown'd the cocks! You sulphurous and thought-executing fires, "
    "vaunt-couriers to oak-cleaving thunderbolts, singe my white head! And thou, all-shaking thunder, smite flat the "
    "thick rotundity o' the world! Crack nature's moulds, all germens spill at once, that make ingrateful man! Rumble "
    "thy bellyful! Spit, fire! spout, rain! Nor rain, wind, thunder, fire, are my daughters.",
    "FOOL": "O nuncle, court holy-water in a dry house is better than this rain-water out o' door. Good nuncle, in, "
    "and ask thy daughters' blessing: here's a night pities neither wise man nor fool.",
    "SERVANT": "Full oft 'tis seen.",
}
QUESTIONS = [
    ("How to sort a list in c++", ["c++", "sorting"]),
    ("Sort a list, sort it fast", ["python"]),
    ("c# list of lists", ["c#", "python"]),
    ("What is a closure?", ["javascript", "python", "c#"]),
    ("Closure over a loop variable", ["javascript"]),
]


def pixels(kind: str, row: int, shape: tuple[int, ...]) -> np.ndarray:
    """What row `row` of a made-up picture set looks like."""
    return np.random.default_rng([len(kind), ord(kind[0]), row]).integers(0, 256, shape, np.uint8)


def encoded(array: np.ndarray, format: str = "PNG") -> dict[str, Any]:
    stream = io.BytesIO()
    Pillow.fromarray(array).save(stream, format, lossless=True)
    return {"bytes": stream.getvalue(), "path": None}


def write(
    root: Path, name: str, split: str, columns: dict[str, list[Any]], features: Any = None, parts: int = 1
) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    data = Dataset.from_dict(columns, features=Features(features) if features else None)
    for i in range(parts):
        file = folder / f"{split}-{i:05}-of-{parts:05}.parquet"
        data.shard(parts, i, contiguous=True).to_parquet(file)


def pictures(
    root: Path, name: str, rows: dict[str, int], shape: tuple[int, ...], classes: int, image: str = "image",
    label: str = "label", client: str | None = None, parts: int = 1, format: str = "PNG",
) -> None:  # fmt: skip
    for split, n in rows.items():
        columns = {
            image: [encoded(pixels(split, i, shape), format) for i in range(n)],
            label: [i % classes for i in range(n)],
        }
        features = {image: Image(), label: ClassLabel(names=[f"class {c}" for c in range(classes)])}
        if client:
            columns[client] = [f"w{i % 3}" for i in range(n)]
            features[client] = Value("string")
        write(root, name, split, columns, features, parts if split == "train" else 1)


def tone(hertz: float, rate: int = 16000) -> dict[str, Any]:
    stream = io.BytesIO()
    sound = 20000 * np.sin(2 * math.pi * hertz * np.arange(rate) / rate)
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(sound.astype("<i2").tobytes())
    return {"bytes": stream.getvalue(), "path": None}


def make(root: Path) -> Path:
    """Every data set that has a name, in small."""
    both = {"train": 40, "test": 20}
    pictures(root, "uoft-cs/cifar10", both, (32, 32, 3), 10, image="img", parts=2, format="WEBP")
    pictures(root, "uoft-cs/cifar100", both, (32, 32, 3), 10, image="img", label="fine_label")
    pictures(root, "flwrlabs/cinic10", both, (32, 32, 3), 10)
    pictures(root, "ylecun/mnist", both, (28, 28), 10, format="WEBP")
    pictures(root, "zalando-datasets/fashion_mnist", both, (28, 28), 10)
    pictures(root, "Royc30ne/emnist-byclass", both, (28, 28), 10)
    pictures(root, "flwrlabs/femnist", {"train": 60}, (28, 28), 4, label="character", client="writer_id")
    pictures(root, "chars74k_hnd", {"train": 60}, (28, 28), 4, label="character", client="writer_id")
    pictures(root, "audiomnist", {"train": 60}, (40, 64), 4, client="speaker")
    write(root, "mnist_writers", "train", {"writer_id": [f"{i % 7:04}" for i in range(40)]})
    sounds = {"audio": {"bytes": Value("binary"), "path": Value("string")}, "label": ClassLabel(names=["low", "high"])}
    for split in both:
        columns = {"audio": [tone(300), tone(3000)], "label": [0, 1], "speaker_id": ["a", "b"]}
        write(root, "google/speech_commands/v0.02", split, columns, {**sounds, "speaker_id": Value("string")})
    roles = {"character_id": [f"KING_LEAR_{role}" for role in TEXTS], "text": list(TEXTS.values())}
    write(root, "shakespeare_roles", "train", roles)
    cut: dict[str, list[str]] = {"character_id": [], "x": [], "y": []}
    for role, text in TEXTS.items():
        for p in range(len(text) - 80):
            for column, cell in zip(cut, (role, text[p : p + 80], text[p + 80]), strict=True):
                cut[column].append(cell)
    write(root, "flwrlabs/shakespeare", "train", cut)
    asked = {"title": [title for title, _ in QUESTIONS], "tags": [tags for _, tags in QUESTIONS]}
    write(root, "stackoverflow_tags", "train", asked, {"title": Value("string"), "tags": List(Value("string"))})
    posts = {"Title": [*asked["title"], None], "Tags": [*asked["tags"], None], "OwnerUserId": [7, 7, 9, 9, 9, 9]}
    kinds = {"Title": Value("string"), "Tags": List(Value("string")), "OwnerUserId": Value("int64")}
    write(root, "mikex86/stackoverflow-posts", "train", posts, kinds)
    news = {"text": Value("string"), "label": ClassLabel(names=["World", "Sports"])}
    write(root, "fancyzhx/ag_news", "train", {"text": ["Peace at last", "Peace, and a goal"], "label": [0, 1]}, news)
    write(root, "fancyzhx/ag_news", "test", {"text": ["A goal unheard of " * 20], "label": [1]}, news)
    return root
