"""Versions, GPUs and their driver, CPU threads, for bug reports."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import undrift
from undrift import __version__
from undrift.cpus import usable_cpus

PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "datasets", "pyarrow", "pydantic", "pandas", "plotly", "flwr",
    "tensorboard", "mlflow",
)  # fmt: skip


def info() -> dict[str, str]:
    """Each fact by name, in the order in which it is printed."""
    import torch

    facts = {
        "undrift": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        **{name: _version(name) for name in PACKAGES},
        "CPU": f"{os.cpu_count()} cores, {usable_cpus()} for this process, torch uses {torch.get_num_threads()} "
        f"threads; {platform.machine()}",
        "CUDA": torch.version.cuda or "none in this build of torch",
        "cuDNN": str(torch.backends.cudnn.version() or "none"),
        "driver": _driver(),
    }
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    for i in gpus:
        gpu = torch.cuda.get_device_properties(i)
        facts[f"cuda:{i}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}"
    return facts if gpus else {**facts, "GPU": "none that torch can use"}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """The NVIDIA driver's version, from `nvidia-smi`."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "nvidia-smi does not answer"
    return ", ".join(dict.fromkeys(done.stdout.split("\n"))).strip(", ")


def source(root: Path = Path(undrift.__file__).parent) -> str:
    """A digest of the package's source: which code produced a result."""
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]
