"""The documentation site, for Sphinx: `make docs`.

The source folder is the repository itself, so that links between pages and to other files (`../examples/digits.toml`)
are the same on the site as on a Git host: Sphinx copies the files that a page links to. Pages are plain Markdown;
`source_read` makes MyST's syntax of the few things that Markdown has no word for.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from sphinx.ext.napoleon import Config, GoogleDocstring  # noqa: E402

import undrift  # noqa: E402 - this checkout's

# The navigation: a section's pages, as "page" or "title: page". A new page is one line here; new pages in how-to/ are
# found without one.
NAVIGATION = {
    "Getting started": [
        "install",
        "Tutorial: tutorial",
        "Which method helps: troubles",
        "Why undrift: why-undrift",
        "FAQ: faq",
    ],
    "Guides": [
        "Your own data: how-to/own-data",
        "Your own model: how-to/own-model",
        "Models that have been tried: how-to/compatibility",
        "Your own loss and metrics: how-to/own-loss",
        "Write a method: how-to/write-a-method",
        "Local optimizers: how-to/optimizers",
        "Transformers and LoRA: how-to/transformers",
        "Adapters: how-to/adapters",
        "GPUs: how-to/gpu",
        "Several processes and clusters: how-to/clusters",
        "Stop and resume: how-to/resume",
        "Sweeps: how-to/sweep",
        "Studies: how-to/study",
        "Read the report: how-to/report",
        "Faulty clients: how-to/faulty-clients",
        "Deploy a federation: deploy",
        "Re-run the papers: how-to/reproduce",
    ],
    "Concepts": [
        "Client drift: drift",
        "Methods: methods",
        "Correctness: correctness",
        "Hooks: hooks",
        "Reproducibility: reproducibility",
        "Performance: performance",
        "Privacy: privacy",
    ],
    "Reference": [
        "Python API: api",
        "Experiments and runs: runs",
        "Data and models: data",
        "Metrics: metrics",
        "Versions and upgrading: upgrading",
    ],
    "Papers, run again": [
        "Overview: papers",
        "Findings: papers/findings",
        "Decay by round and step (2D-LRD): papers/2d-lrd",
        "Decaying local steps K: papers/k-decay",
        "Four techniques: papers/four-techniques",
        "Rates per neuron (FedNLR): papers/fednlr",
        "Temporal ensembles: papers/temporal-targets",
    ],
    "Project": [
        "Design: design",
        "Testing: testing",
        "Contributing: contributing",
        "Security: /SECURITY",
        "Benchmarks: /benchmarks/RESULTS",
        "Changelog: /CHANGELOG",
        "References: references",
    ],
}

project = "undrift"
author = copyright = "The undrift authors"
version = release = undrift.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
smartquotes_action = "D"  # dashes, but quotes stay as they are: many are code
root_doc = "docs/index"
include_patterns = ["docs/**.md", "benchmarks/RESULTS.md", "CHANGELOG.md", "README.md", "SECURITY.md"]
exclude_patterns = [".*", "site", "dist", "runs", "src", "tests", "papers/*", "build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"Number": "undrift.Number", "Tree": "Tree"}
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00695c", "color-brand-content": "#00695c"},
    "dark_css_variables": {"color-brand-primary": "#4db6ac", "color-brand-content": "#4db6ac"},
}
html_title = "undrift"
pygments_style = "default"
pygments_dark_style = "github-dark"
html_static_path = ["extra.css"]
html_css_files = ["extra.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = ">>> |\\.\\.\\. "
copybutton_prompt_is_regexp = True

TITLED = re.compile(r'^```(\w+) title="(.+?)"$', re.M)
ANCHOR = re.compile(r'^(#+) <a id="(.+?)"></a>', re.M)
BACKTICKS = re.compile(r"(?<![`:])`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
NAPOLEON = Config(napoleon_use_rtype=False)
ALIAS = re.compile(r"TypeAliasForwardRef\('(?:undrift\.)?(\w+)'\)")
INITIAL = re.compile(r"dataclasses\.InitVar\[([^=]*)\]( =)")
GIVEN = {f"undrift.{name}" for name in ("Result", "FederatedDataset", "Client", "Batch", "Plan", "Server", "Totals")}
"""Classes whose objects users are given, and do not make with a constructor."""


def toctree(section: str, pages: list[str]) -> str:
    lines = ["Overview <self>"] if section == "Getting started" else []
    for page in pages:
        title, _, name = page.rpartition(": ")
        lines.append(f"{title} <{name}>" if title else name)
    if section == "Guides":
        named = {page.rpartition(": ")[2] for page in pages}
        found = sorted(file.relative_to(HERE).with_suffix("").as_posix() for file in HERE.glob("how-to/*.md"))
        lines += [name for name in found if name not in named]
    return "\n".join([f"\n\n:::{{toctree}}\n:caption: {section}\n:hidden:\n", *lines, ":::\n"])


def source_read(app: Any, name: str, source: list[str]) -> None:
    text = TITLED.sub(r"```{code-block} \1\n:caption: \2\n", source[0])
    text = ANCHOR.sub(r"(\2)=\n\1 ", text)
    if name == root_doc:
        text += "".join(toctree(section, pages) for section, pages in NAVIGATION.items())
    if name == "README":  # the front page of the repository, not of the site
        text = "---\norphan: true\nno-search: true\n---\n\n" + text
    source[0] = text


def docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings have Markdown's backticks, for code or a public name, which becomes a link, and Google's sections.

    Napoleon as an extension would take the first words of an attribute's docstring, up to a colon, for its type.
    """

    def linked(match: re.Match[str]) -> str:
        public = match[1].removeprefix("ud.")
        if public in undrift.__all__ and (public != match[1] or public[0].isupper()) and f"undrift.{public}" != name:
            return f":py:obj:`{match[1]} <undrift.{public}>`"
        return f"``{match[1]}``"

    lines[:] = BACKTICKS.sub(linked, "\n".join(lines)).split("\n")
    if what not in ("attribute", "property", "data"):
        lines[:] = GoogleDocstring(lines, NAPOLEON, app, what, name, thing, options).lines()


def signature(app: Any, what: str, name: str, thing: Any, options: Any, arguments: str, returned: str) -> Any:
    if name in GIVEN:
        return "", None
    if name == "undrift.Server.steps":  # a field with a function
        return "(clients)", None
    arguments = arguments and INITIAL.sub(r"\1\2", arguments)
    return tuple(ALIAS.sub(r"\1", text) if text else text for text in (arguments, returned))


def front_page(app: Any, error: Exception | None) -> None:
    """The site begins in docs/; its root leads there."""
    if error is None and app.builder.format == "html":
        page = '<!doctype html><title>undrift</title><meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(page + '<a href="docs/index.html">undrift</a>\n', encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", source_read)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
    app.connect("build-finished", front_page)
