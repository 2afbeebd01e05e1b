"""Run a module or a file as if only some packages, and what they need, were installed.

python tests/only.py PACKAGE[,PACKAGE …] (MODULE | FILE.py) [ARGUMENT …]

Any other package is not found, as where it is not installed.
"""

from __future__ import annotations

import re
import runpy
import sys
from importlib import metadata
from typing import Any

ELSEWHERE = re.compile("extra ==|win32|Windows")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: list[str]) -> set[str]:
    """These packages and all that they require here, extras left out."""
    found: set[str] = set()
    waiting = [canonical(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            required = (line for line in metadata.requires(name) or () if not ELSEWHERE.search(line))
            waiting += [canonical(re.match(r"[\w.-]+", line).group()) for line in required if installed(line)]
    return found


def installed(requirement: str) -> bool:
    try:
        metadata.distribution(re.match(r"[\w.-]+", requirement).group())
    except metadata.PackageNotFoundError:  # for other systems or Pythons
        return False
    return True


class Finder:
    """One of Python's finders, to which modules of packages that are not allowed do not exist."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, path, target)


def hide(allowed: set[str]) -> None:
    """Make `import` fail for every installed package but these and undrift."""
    owners = metadata.packages_distributions()
    hidden = {name for name, of in owners.items() if not {canonical(one) for one in of} & (allowed | {"undrift"})}
    sys.meta_path[:] = [Finder(finder, hidden) for finder in sys.meta_path]


if __name__ == "__main__":
    packages, what, *arguments = sys.argv[1:]
    hide(closure(packages.split(",")))
    sys.argv = [what, *arguments]
    if what.endswith(".py"):
        runpy.run_path(what, run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)
