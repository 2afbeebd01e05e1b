"""Made-up input: experiment files, expressions and damaged runs, from a generator of random numbers.

`make test` draws some hundred of each, `make soak` ten thousand. Whatever is drawn is read or refused with an
`UndriftError`; nothing in it may run, and nothing may take long.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from undrift.data.augment import parse_augmentation
from undrift.data.partition import parse_partition
from undrift.errors import UndriftError
from undrift.expressions import parse_number
from undrift.method.parse import parse_method
from undrift.models import parse_model
from undrift.tools import config
from undrift.tools.compare import Comparison, choose_metric, measure
from undrift.tools.experiment import understood
from undrift.tools.report.gather import gather
from undrift.tools.report.page import numbers
from undrift.tools.run_folders import RunFolder
from undrift.tools.tables import rich_table

PARSERS: list[Callable[[str], Any]] = [parse_method, parse_partition, parse_number, parse_model, parse_augmentation]
SECONDS = 20
"""More than that for one input counts as hanging."""

VALID = (
    "FedAvg()", "FedProx(mu=0.1)",
    "FedProx(0.1, target=TemporalEnsemble(0.5)) + ServerSGD(lr=1.0, momentum=0.9)",
    "FedNLR(ratio={'1': 2.0, '3': decay(3, 0.9)})", "Scaffold() + ServerAdam(0.01, beta1=0.9)",
    "TwoDLRD(window=5, C=0.2)", "Projection(radius=inf, center='global')", "Dirichlet(0.1)", "IID()",
    "Shards(2)", "ByKey()", "decay(0.1, 0.99)", "inverse(0.1, 10)", "mlp", "mlp(hidden=32)",
    "vgg9(dropout=False)", "gru(embedding=8, layers=1)", "CropFlip(padding=4, flip=True)",
)  # fmt: skip
TOKENS = (
    *"()[]{}+-*/%@<>=!,.:;#'\"\\ \n\t\0~^&|_", "0", "1", "0.1", "1e400", "-0", "0x" + "f" * 40, "9" * 30, "1j",
    "inf", "nan", "None", "True", "not ", "lambda x: x", "if", "for x in y", "yield", "await ", "**", ":=",
    "...", "f'{x}'", "b'x'", "mu=", "__import__('os').system('true')", "open('x', 'w')", "eval('1')",
    "().__class__", "é", "−", "\ud800", "\ufeff", "FedAvg", "FedProx", "FedProx(", "FedAvg()", "Dirichlet(",
    "decay(", "mlp(", "CropFlip(", "hidden=", "(" * 50, "-" * 300, "[" * 99,
)  # fmt: skip


def an_expression(chance: random.Random) -> str:
    """An expression that is valid, nearly valid, or nothing like one."""
    if chance.random() < 0.3:
        return "".join(chance.choice(TOKENS) for _ in range(chance.randint(0, 30)))
    text = chance.choice(VALID)
    for _ in range(chance.randint(0, 4)):
        at, end = sorted(chance.randint(0, len(text)) for _ in range(2))
        piece = chance.choice((chance.choice(TOKENS), text[at:end], chance.choice(VALID), ""))
        text = text[:at] + piece + text[end if chance.random() < 0.5 else at :]
    return text * (chance.randint(1, 2000) if chance.random() < 0.02 else 1)


EXPERIMENT: dict[str, Any] = {
    "model": "mlp", "method": "FedProx(mu=0.1)", "rounds": 2, "participation": 0.5, "seed": 1, "loss": "cross_entropy",
    "metrics": ["accuracy"], "device": "auto", "checkpoint_every": "30s", "imports": [], "threads": 1,
    "data": {"name": "digits", "partition": "Dirichlet(0.1)", "clients": 4, "validation_fraction": 0.1},
    "local": {"epochs": 1, "batch_size": 32, "lr": "decay(0.1, 0.99)", "momentum": 0.9},
}  # fmt: skip
KEYS = (
    *config.Experiment.model_fields, *config.Data.model_fields, *config.Work.model_fields, "lrr",
    "learning_rate", "x" * 999, "", "a.b", "é", "sweep", "0",
)  # fmt: skip


def a_value(chance: random.Random, depth: int = 0) -> str:
    """A value as TOML writes it, or nearly."""
    kind = chance.randint(0, 11 if depth < 4 else 7)
    if kind < 2:
        return repr(an_expression(chance)) if chance.random() < 0.5 else f"'{chance.choice(VALID)}'"
    if kind == 10:
        return f"[{', '.join(a_value(chance, depth + 1) for _ in range(chance.randint(0, 4)))}]"
    if kind == 11:
        return f"{{ a = {a_value(chance, depth + 1)} }}"
    plain = (
        "0", "-1", "1", "3", "0.5", "1e30", "9" * 30, "inf", "nan", "true", "false", "2020-01-01", "12:00:00", '""',
        "1979-05-27T07:32:00Z", "'x'", "x", "0x", "1__0", '"\\uD800"', "''' '''", "[" * 2000, "'no_such_module'",
    )  # fmt: skip
    return chance.choice(plain)


def a_file(chance: random.Random) -> bytes:
    """An experiment file: right, with some keys changed, with some bytes changed, or just bytes."""
    how = chance.random()
    if how < 0.1:
        return chance.randbytes(chance.randint(0, 300))
    sections = _sections()
    for _ in range(chance.randint(0, 4)):
        section = chance.choice(list(sections.values()))
        key = chance.choice(KEYS) if chance.random() < 0.4 else chance.choice(list(section) or ["x"])
        if chance.random() < 0.2:
            section.pop(key, None)
        else:
            section[key] = a_value(chance)
    if chance.random() < 0.05:
        sections[chance.choice(KEYS)] = {}
    content = bytearray(_toml(sections))
    if how < 0.3:
        spoil(chance, content)
    if chance.random() < 0.05:
        text = content.decode("utf-8", "replace")
        content = bytearray(text.encode(chance.choice(("utf-8-sig", "utf-16", "latin-1")), "replace"))
    return bytes(content)


def a_file_that_is_right() -> bytes:
    return _toml(_sections())


def _sections() -> dict[str, dict[str, str]]:
    """`EXPERIMENT` by section and key, its values as TOML."""
    top = {name: value for name, value in EXPERIMENT.items() if not isinstance(value, dict)}
    return {
        name: {key: repr(value) for key, value in section.items()}
        for name, section in (("", top), ("data", EXPERIMENT["data"]), ("local", EXPERIMENT["local"]))
    }


def _toml(sections: dict[str, dict[str, str]]) -> bytes:
    lines = []
    for name, section in sections.items():
        lines += [f"[{name}]"] if name else []
        lines += [f"{key} = {value}" for key, value in section.items()]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def spoil(chance: random.Random, content: bytearray) -> None:
    """Change some bytes, cut the end off, or repeat a piece."""
    for _ in range(chance.randint(1, 5)):
        at = chance.randint(0, len(content))
        how = chance.random()
        if how < 0.5:
            content[at : at + 1] = chance.randbytes(chance.randint(0, 3))
        elif how < 0.8:
            content[at:at] = chance.choice(TOKENS).encode("utf-8", "surrogatepass")
        elif how < 0.9:
            del content[at:]
        else:
            content[at:at] = content[: chance.randint(0, 50)]


def read_expression(text: str) -> bool:
    """Whether one of the parsers takes it; what they refuse is refused with an UndriftError."""
    taken = 0
    for parser in PARSERS:
        with contextlib.suppress(UndriftError), quickly():
            parser(text)
            taken += 1
    return taken > 0


def read_file(content: bytes, file: Path) -> bool:
    """Whether it is an experiment."""
    file.write_bytes(content)
    with contextlib.suppress(UndriftError), quickly():
        settings = config.read(file)
        settings.pop("sweep", None)
        understood(config.checked(settings, "e.toml"))
        return True
    return False


def read_run(chance: random.Random, folder: Path, whole: dict[str, bytes]) -> bool:
    """Whether a run of which one file was spoilt can still be shown; `whole` has its files as they were."""
    name = chance.choice(sorted(whole))
    for file, content in whole.items():
        damaged = bytearray(content)
        if file == name:
            spoil(chance, damaged)
        (folder / file).write_bytes(damaged)
    with contextlib.suppress(UndriftError), quickly():
        numbers(gather([folder]))
        run = RunFolder.read(folder)
        asked = Comparison(choose_metric([run], None), 2, 0.5, "it")
        rich_table({"": measure({"it": [run]}, asked)}, asked)
        return True
    return False


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Raises inside it if that takes too long."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


EXECUTES = {
    "exec", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen",
    "socket.connect", "socket.bind", "shutil.rmtree", "os.remove", "os.rename", "os.mkdir", "pty.spawn",
}  # fmt: skip
_watching: list[list[str]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in EXECUTES:
        _watching[-1].append(f"{event} {arguments!r:.100}")


@contextlib.contextmanager
def nothing_executed() -> Iterator[None]:
    """Raises at its end if something inside ran code, started a process, or touched the network or the file system."""
    if not getattr(_hook, "there", False):
        sys.addaudithook(_hook)  # for good: Python knows no way to take one back
        _hook.there = True  # type: ignore[attr-defined]
    _watching.append([])
    try:
        yield
    finally:
        seen = _watching.pop()
    assert not seen, seen[:5]
