"""A finished run as a folder for the Hugging Face hub: a model card, weights, settings, history and figures."""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from undrift import __version__
from undrift.data.sources import RECIPES
from undrift.errors import UndriftError, first_line, require
from undrift.files import file_name, read_text
from undrift.method.parse import parse_method
from undrift.models import parse_model
from undrift.tools.compare import brief_method
from undrift.tools.config import checked
from undrift.tools.experiment import loaded
from undrift.tools.plugins import import_plugins
from undrift.tools.report.curves import SOURCES
from undrift.tools.report.figures import draw
from undrift.tools.report.gather import gather
from undrift.tools.report.summary import duration, size
from undrift.tools.run_folders import RunFolder
from undrift.training.build import module_of
from undrift.training.config_writer import repeats
from undrift.training.run_folder import RUN, finished, intact, recorded

WORDS = {
    "test": "test set", "validation": "validation data", "client": "clients' own data, mean",
    "client_worst": "clients' own data, worst tenth", "tuned": "clients' own data after one more local epoch, mean",
    "tuned_worst": "clients' own data after one more local epoch, worst tenth",
}  # fmt: skip
"""What a metric may have been measured on. Deviations between clients are in `metrics.jsonl`."""
LOADING = """import json
from pathlib import Path

import undrift as ud
from safetensors.torch import load_model

folder = Path({folder})
model = ud.models.get(**json.loads((folder / "config.json").read_text())["model"])
load_model(model, folder / "model.safetensors")
model.eval()"""
FROM_HUB = "from huggingface_hub import snapshot_download\n"
OWN_MODULE = """from safetensors.torch import load_model

model = …  # the module that was trained, built as it was for the run
load_model(model, "model.safetensors")"""


def publish(folder: Path, to: Path, repo: str | None = None, license: str | None = None) -> list[str]:
    """Write a finished run's model card and files into a new folder.

    Args:
        folder: The run's folder.
        to: The folder to write, empty or not there yet.
        repo: The name that the model is to have on the hub, such as `"me/digits-fedprox"`; the card shows how to load
            it from there.
        license: The license of the weights, as the hub spells it (`"apache-2.0"`).

    Returns:
        The names of the files.

    Raises:
        UndriftError: If the run is not finished, its files have changed since, its weights do not load, or `to` is not
            empty.
    """
    run = RunFolder.read(folder)
    require(finished(folder), f"The run in {folder} stopped before its last round, so it has no model to publish.")
    require(
        intact(folder, recorded(folder) or {}),
        f"The results in {folder} are not those that the run wrote, by the checksums in {RUN}, so they are not "
        f"published. Restore the files, or have them written again: undrift resume {folder}",
    )
    require(not to.exists() or (to.is_dir() and not any(to.iterdir())), f"{to} is not empty; choose a new folder.")
    config = read_text(folder / "config.toml")
    arguments = model_arguments(run, config)
    to.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "metrics.jsonl"):
        shutil.copyfile(folder / name, to / name)
    (to / "config.toml").write_text(without_paths(config), encoding="utf-8")
    described = {"undrift": __version__, **({"model": arguments} if arguments else {})}
    (to / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    payload = gather([folder])
    drawn = draw(payload, to / "figures")
    (to / "README.md").write_text(card(run, payload, drawn, arguments, repo, license), encoding="utf-8")
    return sorted(str(file.relative_to(to)) for file in to.rglob("*") if file.is_file())


def model_arguments(run: RunFolder, config: str) -> dict[str, Any] | None:
    """The arguments of `ud.models.get` that build the run's model; None for a module of Python. Tries its weights."""
    if not repeats(config) or "model" not in run.settings:
        return None
    from safetensors.torch import load_model

    experiment = checked(nest(run.settings), str(run.folder))
    import_plugins(experiment.imports)
    data = loaded(experiment)
    name, options = parse_model(experiment.model)
    shape = list(data.take(data.store, data.index[:1])[0].shape[1:])
    try:
        load_model(module_of(experiment.model, data, experiment.seed), str(run.folder / "model.safetensors"))
    except (RuntimeError, OSError) as error:
        raise UndriftError(f"The weights in {run.folder} cannot be loaded ({first_line(error)}).") from error
    tokens = {"vocabulary": data.task.vocabulary} if data.task.vocabulary is not None else {}
    return {"name": name, "classes": data.outputs, "shape": shape, **tokens, **options}


def nest(settings: dict[str, Any]) -> dict[str, Any]:
    """`{"local.lr": 0.1}` as `{"local": {"lr": 0.1}}`."""
    document: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (document.setdefault(section, {}) if section else document)[name] = value
    return document


def without_paths(config: str) -> str:
    """The file without the paths of the machine that trained the run."""
    config = re.sub(r"(?m)^data_dir = .*$", "# data_dir: not set", config)
    return re.sub(r'(?m)^name = "/(?:[^"]*/)?([^"/]+)"$', r'name = "\1"', config)


def upload(folder: Path, repo: str) -> str:
    """Send the folder to the hub, and return the address. Needs a token: `hf auth login`, or HF_TOKEN."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UndriftError("--upload needs huggingface_hub; run pip install huggingface_hub.") from error
    try:
        api = HfApi()
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(folder))
    except Exception as error:  # whatever the network or the hub says
        raise UndriftError(
            f"{folder} was not uploaded to {repo} ({first_line(error)}); the folder is complete."
        ) from error
    return str(address)


# ---- the card ----------------------------------------------------------------------------------------------------


def card(
    run: RunFolder, payload: dict[str, Any], drawn: list[str], arguments: dict[str, Any] | None, repo: str | None,
    license: str | None,
) -> str:  # fmt: skip
    """The model card, in Markdown with the hub's metadata above it."""
    settings, figures = run.settings, results(run, payload["metrics"])
    method = brief_method(str(settings.get("method", "FedAvg()")))
    data = Path(str(settings.get("data.name", "data of Python"))).name
    title = repo.rpartition("/")[2] if repo else f"{method} on {data}"
    shown = [name for name in (*payload["metrics"], "class_accuracy", "by_client", "partition") if name in drawn]
    loading = (FROM_HUB if repo else "") + LOADING.format(folder=f'snapshot_download("{repo}")' if repo else '"."')
    table = "\n".join(f"| {on} | {name} | {value:.4f} |" for on, name, value in figures) or "| – | – | – |"
    return f"""{metadata(run, data, figures, title, license)}
# {title}

A model trained by federated learning with undrift {__version__}: the clients' data
stayed apart, and the server saw only what they sent. `config.toml` repeats the run (`undrift run config.toml`), and
`metrics.jsonl` has every round.

## Training

{facts(run, method, data)}

{parts(str(settings.get("method", "FedAvg()")))}

## Results

After the last round.

| measured on | metric | value |
|---|---|---:|
{table}

{chr(10).join(f"![{name.replace('_', ' ')}](figures/{file_name(name)}.png)" for name in shown)}

## How to load it

```python
{loading if arguments else OWN_MODULE}
```

Samples must be prepared as they were for training; `ud.load` with the settings in `config.toml` does so.

## Citation

```bibtex
@software{{undrift,
  title = {{undrift: federated learning that holds its course when clients' data differ}},
  version = {{{__version__}}},
}}
```

Please also cite the papers of the method and the data set.
"""


def results(run: RunFolder, metrics: list[str]) -> list[tuple[str, str, float]]:
    """What was measured last: on what data, the metric's name, the value."""
    values = [
        (WORDS[source], name.replace("_", " "), run.latest(form.format(name)))
        for source, form in SOURCES.items()
        if source in WORDS
        for name in metrics
    ]
    return [entry for entry in values if math.isfinite(entry[2])]


def metadata(run: RunFolder, data: str, figures: list[tuple[str, str, float]], title: str, license: str | None) -> str:
    """The hub's metadata: YAML, of which JSON is a part."""
    recipe = RECIPES.get(data)
    hub = recipe.hub if recipe and "/" in recipe.hub else None
    measured = [(name, value) for on, name, value in figures if on == WORDS["test"]] or [f[1:] for f in figures]
    results = [{"type": name.replace(" ", "_"), "name": name, "value": round(value, 6)} for name, value in measured]
    index = {"task": {"type": "other"}, "dataset": {"name": data, "type": hub or data}, "metrics": results}
    fields = {
        **({"license": license} if license else {}),
        "library_name": "undrift",
        "tags": ["federated-learning", "undrift", "pytorch"],
        **({"datasets": [hub]} if hub else {}),
        "metrics": [entry["type"] for entry in results],
        "model-index": [{"name": title, "results": [index] if results else []}],
    }
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    return "\n".join(["---", *lines, "---", ""])


def facts(run: RunFolder, method: str, data: str) -> str:
    """The settings that matter most, as a table."""
    get, end = run.settings.get, run.rows[-1]
    amount = f"{get('local.epochs')} epochs" if get("local.epochs") else f"{get('local.steps')} steps"
    rows = {
        "method": f"`{method}`",
        "model": f"`{get('model', 'a module of Python')}`",
        "data": f"{data}, partition `{get('data.partition', 'of Python')}`",
        "clients": f"{get('data.clients') or 'those of the data'}, {len(end.get('clients', []))} in the last round",
        "rounds": f"{end['round']:,}, {end['total_steps']:,} local steps in all",
        "local work": f"{amount} per round, batches of {get('local.batch_size')}, learning rate {get('local.lr')}",
        "communication": f"{size(end['total_bytes'])}, down and up, over all clients and rounds",
        "time": duration(sum(row["seconds"] for row in run.rows)),
        "seed": str(get("seed")),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def parts(method: str) -> str:
    """One line for each part of the method, from its documentation."""
    try:
        kinds = [type(part) for part in parse_method(method).parts]
    except UndriftError:  # a user's own, which is not imported here
        return ""
    return "\n".join(f"- `{part.__name__}`: {(inspect.getdoc(part) or '').splitlines()[0]}" for part in kinds)
