"""Experiment files: a TOML file that says what `ud.train` and `ud.load` are given, checked before anything runs."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    create_model,
)

from undrift.errors import UndriftError, first_line, nearest, quoted
from undrift.files import open_regular
from undrift.training.settings import FIELDS, ROLES, Form

Number = StrictInt | StrictFloat | StrictStr
"""A value, or a schedule in a string: "decay(0.1, 0.99)"."""
Count = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**64)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Section):
    """`[data]`: the arguments of `ud.load`."""

    name: StrictStr
    partition: StrictStr = "IID()"
    clients: Count | None = None
    seed: Seed | None = None
    """The run's own, if not set."""
    server_fraction: Fraction = 0.0
    validation_fraction: Fraction = 0.0
    client_test_fraction: Fraction = 0.0
    test_fraction: Fraction | None = None
    test_size: Count | None = None
    label: StrictStr = "label"
    client: StrictStr | None = None
    columns: list[StrictStr] | None = None
    drop: list[StrictStr] | None = None
    missing: StrictStr | None = None
    resize: Count | list[Count] | None = None
    normalize: StrictBool = False
    augment: StrictStr | None = None
    data_dir: StrictStr | None = None
    lazy: StrictBool = False
    workers: Count | None = None


class Factors(Section):
    """An entry of `[local.groups]`: the arguments of `ud.Group`."""

    rate: StrictInt | StrictFloat = 1.0
    weight_decay: StrictInt | StrictFloat = 1.0


class Work(Section):
    """`[local]`: the arguments of `ud.Local`."""

    steps: Number | list[Count] | None = None
    epochs: Number | None = None
    batch_size: Count | None = None
    drop_last: StrictBool = False
    lr: Number
    momentum: Number = 0.0
    weight_decay: Number = 0.0
    optimizer: StrictStr | None = None
    optimizer_state: StrictStr = "reset"
    clip_norm: Number | None = None
    step_schedule: StrictStr | None = None
    groups: dict[StrictStr, Factors] | None = None
    sampling: StrictStr = "shuffle"


class Failures(Section):
    """`[faults]`: the arguments of `ud.Faults`."""

    dropout: Number = 0.0
    stragglers: Number = 0.0
    straggler_work: Number | None = None
    nan: Number = 0.0
    explode: Number = 0.0
    explode_factor: Number = 100.0


SECTIONS: dict[str, type[Section]] = {"data": Data, "local": Work, "faults": Failures}
FORMS: dict[Form, Any] = {
    "text": StrictStr,
    "texts": StrictStr | list[StrictStr],
    "count": Count,
    "seed": Seed,
    "number": StrictInt | StrictFloat,
    "switch": StrictBool,
    "interval": Count | StrictStr,
    "threads": Annotated[int, Field(strict=True, ge=1, le=1024)],
    "modules": list[StrictStr],
    "drift": StrictBool | Literal["layers"],
}


def _fields() -> dict[str, Any]:
    """Each setting that has a form in files, with its type and default. Messages about keys follow their order."""
    fields: dict[str, Any] = {}
    for name, role in ROLES.items():
        if role.form:
            default = ... if FIELDS[name].default is MISSING else role.file_default or FIELDS[name].default
            kind = SECTIONS.get(name) or FORMS[role.form]
            fields[name] = (kind | None if default is None else kind, default)
    order = sorted(fields, key=lambda name: (name != "model", name not in SECTIONS, fields[name][1] is not ...))
    return {name: fields[name] for name in order}


if TYPE_CHECKING:

    class Experiment(Section):
        """The whole file: the settings of a run."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Experiment = create_model("Experiment", __base__=Section, **_fields())


Document = dict[str, Any]
"""What a TOML file holds: keys, and sections of keys."""
LARGEST = 2**24
"""How many bytes an experiment file may have."""


def read(file: str | Path) -> Document:
    """A file's settings, as they stand there. A folder is a run's, whose `config.toml` is meant."""
    path = Path(file)
    inside = path.is_dir()
    path = path / "config.toml" if inside else path
    try:
        # A file that the user names may be a pipe; one that lies in a folder may be anything.
        with open_regular(path) if inside else path.open("rb") as opened:
            content = opened.read(LARGEST + 1)
    except FileNotFoundError:
        raise UndriftError(f"The experiment file {path} does not exist.") from None
    except OSError as error:
        raise UndriftError(f"{path} cannot be read ({error.strerror}).") from error
    if len(content) > LARGEST:
        raise UndriftError(f"{path} is larger than 16 MiB, which is too large for an experiment file.")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UndriftError(f"{path} is UTF-16; save it as UTF-8.")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # Windows' editors put a mark at the beginning
    except UnicodeDecodeError as error:
        raise UndriftError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except RecursionError:
        raise UndriftError(f"{path} has values that are nested too deeply.") from None
    except ValueError as error:
        raise UndriftError(f"{path} is not TOML: {first_line(error)}. Fix that line; strings need quotes.") from None


def override(settings: Document, assignments: list[str]) -> Document:
    """The settings with each `key=value` put in, the value as TOML would read it, or else as a string."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UndriftError(f"--set {quoted(assignment)}: write it as key=value, such as local.lr=0.05.")
        settings = put(settings, key.strip(), toml_value(text.strip()), f"--set {quoted(assignment)}")
    return settings


def put(settings: Document, key: str, value: Any, where: str) -> Document:
    """A copy of the settings with `value` under a dotted key."""
    section, _, name = key.rpartition(".")
    inside = settings.get(section, {}) if section else settings
    if not isinstance(inside, dict):
        raise UndriftError(f"{where}: {quoted(section)} is not a section; {_hint(section, list(SECTIONS))}")
    changed = {**inside, name: value}
    return {**settings, section: changed} if section else changed


def toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise UndriftError(f"The value {quoted(text)} is nested too deeply.") from None
    except ValueError:
        pass
    try:
        return float(text)  # .05, which TOML does not know
    except ValueError:
        return text  # a bare word: a method, a name


def checked(settings: Document, where: str) -> Experiment:
    """The settings as an experiment, or a message that names each key that is wrong and what it must be."""
    try:
        return Experiment.model_validate(settings)
    except ValidationError as error:
        by_key: dict[str, list[Any]] = {}
        for one in error.errors(include_url=False):
            by_key.setdefault(_key(one), []).append(one)
        problems = [_sentence(key, errors) for key, errors in by_key.items()]
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UndriftError(f"{where}: " + "\n  ".join(problems[:3]) + more) from None


def _key(error: Any) -> str:
    """The key as it stands in the file; pydantic's path also says which kind of a union it tried."""
    path = [str(part) for part in error["loc"][:4]]
    if path[:2] == ["local", "groups"]:
        return ".".join([*path[:2], *(f'"{pattern}"' for pattern in path[2:3]), *path[3:]])
    return ".".join(path[:2] if path[0] in SECTIONS else path[:1])


def _sentence(key: str, errors: list[Any]) -> str:
    kind, given = errors[0]["type"], errors[0].get("input")
    section, _, name = key.rpartition(".")
    if kind == "extra_forbidden":
        return f"There is no key {quoted(key)}. {_place(section, name)}"
    if kind == "missing":
        return f"The key {key!r} is missing; add it."
    wanted = list(dict.fromkeys(_wanted(error) for error in errors))
    return f"The key {key!r} must be {' or '.join(wanted)}, not {quoted(given)}."


def _wanted(error: Any) -> str:
    context = error.get("ctx", {})
    return {
        "model_type": "a section",
        "string_type": "a string in quotes",
        "bool_type": "true or false",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "greater_than_equal": f"{context.get('ge')} or more",
        "less_than": f"below {context.get('lt')}",
        "less_than_equal": f"{context.get('le')} or less",
        "list_type": "a list",
        "dict_type": 'a table such as { "*.bias" = { weight_decay = 0.0 } }',
    }.get(error["type"], error["msg"])


SYNONYMS = {"learning_rate": "lr", "batch": "batch_size", "algorithm": "method"}
"""What else people call a key."""


def _keys(section: str) -> list[str]:
    return list(SECTIONS.get(section, Experiment).model_fields)


def _place(section: str, name: str) -> str:
    """Where a key of that name, or one like it, belongs."""
    if section.startswith("local.groups."):
        return _hint(name, list(Factors.model_fields))
    wanted = SYNONYMS.get(name.lower(), name)
    here = _keys(section)
    if wanted not in here:
        for other in ("", *SECTIONS):
            if wanted in _keys(other):
                return (
                    f"Did you mean {f'{other}.{wanted}'!r}?"
                    if other
                    else f"{wanted!r} is a top-level key; write it above all sections."
                )
    return _hint(wanted, here)


def _hint(name: str, known: list[str]) -> str:
    close = nearest(name, known, cutoff=0.6)
    return f"Did you mean {close!r}?" if close else f"Known: {', '.join(known)}."
