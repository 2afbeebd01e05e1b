from __future__ import annotations

import subprocess
import sys

import undrift as ud


def test_every_public_name_is_there():
    for name in ud.__all__:
        assert getattr(ud, name) is not None
    assert set(ud.__all__) <= set(dir(ud))


def test_importing_undrift_imports_neither_torch_nor_numpy():
    script = (
        "import undrift, sys; assert not {'torch', 'numpy', 'rich', 'pandas'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
