"""Files of the repository that pages link to, on the site: MkDocs knows only what lies in docs/.

A page links to them as they lie (`../examples/digits.toml`), so links work wherever the repository is read. The site
has a copy of each under `repository/`, and links are turned there and back.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\(|src=\")(?!https?://|mailto:|#)([^)#\"\s]+)")


def links(source: str) -> list[str]:
    """What the page at this path in the repository links to, as paths in the repository."""
    here = posixpath.dirname(source)
    text = (ROOT / source).read_text(encoding="utf-8")
    return [posixpath.normpath(posixpath.join(here, target)) for _, target in LINK.findall(text)]


def on_files(files: Files, config: Any) -> Files:
    waiting, known = ["docs/" + file.src_uri for file in files.documentation_pages()], set()
    while waiting:
        for target in links(waiting.pop()):
            if target.startswith("docs/") or target in known or not (ROOT / target).is_file():
                continue
            known.add(target)
            files.append(File.generated(config, f"repository/{target}", abs_src_path=str(ROOT / target)))
            waiting += [target] if target.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    site = page.file.src_uri
    source = site.removeprefix("repository/") if site.startswith("repository/") else f"docs/{site}"

    def turned(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = target.removeprefix("docs/") if target.startswith("docs/") else f"repository/{target}"
        return match[1] + posixpath.relpath(target, posixpath.dirname(site) or ".")

    return LINK.sub(turned, markdown)
