from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import undrift as ud
from undrift.tools.info import source


def test_every_public_name_is_there():
    for name in ud.__all__:
        assert getattr(ud, name) is not None
    assert set(ud.__all__) <= set(dir(ud))


def test_importing_undrift_imports_neither_torch_nor_numpy():
    script = (
        "import undrift, sys; assert not {'torch', 'numpy', 'rich', 'pandas'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_the_digest_of_the_source_covers_every_file_of_the_package(tmp_path):
    """Results carry it, so that they can be traced to the code that made them."""
    package = Path(ud.__file__).parent
    files = sorted(package.rglob("*.py"))
    assert {"engine", "methods", "tools"} <= {file.parent.name for file in files}
    copy = tmp_path / "undrift"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = source(copy)
    assert before == source()
    for file in (copy / "engine/lanes.py", copy / "methods/fedavg.py"):
        file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
        before, earlier = source(copy), before
        assert before != earlier
