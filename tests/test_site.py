"""The documentation as a site: it builds without a warning, its links lead somewhere, and a browser can search it."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
from filelock import FileLock

import undrift as ud
from tests.pages import DOCS, ROOT

PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", ROOT / "benchmarks" / "RESULTS.md"]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The site, built once for all processes of the tests."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with FileLock(base / "site.lock"):
        if not (base / "site").exists():
            command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
            command += ["-d", str(base / "doctrees"), ".", str(base / "building")]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            (base / "building").rename(base / "site")
    return base / "site"


def built(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix(".html").as_posix()


class Page(html.parser.HTMLParser):
    """What a built page links to, what it loads, and the places in it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif name in ("href", "src", "srcset", "data") and value:
                self.links.append(value)
                self.loaded += [value] if tag != "a" else []


def test_every_link_of_the_site_leads_somewhere(site):
    pages = {file: Page(file) for file in site.rglob("*.html")}
    assert len(pages) > 30
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.is_file(), (file.name, link)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].places, (file.name, link)


def test_no_page_loads_anything_from_elsewhere(site):
    for file in site.rglob("*.html"):
        outside = [
            link for link in Page(file).loaded if urlsplit(link).netloc or urlsplit(link).scheme not in ("", "data")
        ]
        assert not outside, (file.name, outside)
    for file in site.rglob("*.css"):
        assert not re.findall(r"@import|url\(['\"]?(?:https?:)?//", file.read_text(encoding="utf-8")), file.name


def test_every_page_is_in_the_navigation(site):
    text = (site / "docs" / "index.html").read_text(encoding="utf-8")
    tree = text[text.index('class="sidebar-tree"') : text.index('class="main"')]
    captions = re.findall(r'class="caption-text">(.+?)<', tree)
    assert captions == ["Getting started", "Guides", "Concepts", "Reference", "Papers, run again", "Project"]
    listed = {os.path.normpath(os.path.join("docs", unquote(link))) for link in re.findall(r'href="([^"#]+)', tree)}
    assert {built(page) for page in PAGES} - {"docs/index.html"} == listed - {"docs/index.html"}


def test_files_of_the_repository_that_pages_link_to_are_on_the_site(site):
    text = (site / "docs" / "troubles.html").read_text(encoding="utf-8")
    (link,) = re.findall(r'href="([^"]+/troubles\.toml)"', text)
    copy = (site / "docs" / link).resolve()
    assert copy.is_relative_to(site.resolve())
    assert copy.read_bytes() == (ROOT / "benchmarks" / "troubles.toml").read_bytes()


def test_the_reference_shows_every_public_name_with_what_it_takes(site):
    page = site / "docs" / "api.html"
    places, text = Page(page).places, page.read_text(encoding="utf-8")
    missing = [name for name in ud.__all__ if f"undrift.{name}" not in places and name not in ("models", "random")]
    assert not missing, missing
    assert {"undrift.random.Key", "undrift.models.get", "undrift.Client.gradient"} <= places
    entry = text[text.index('id="undrift.train"') : text.index('id="undrift.Result"')]
    for heading in ("Parameters", "Returns", "Raises"):
        assert f">{heading}<span" in entry, heading
    assert "on_nonfinite" in entry and "&gt;&gt;&gt; " in entry
    for raw in ("TypeAliasForwardRef", "InitVar", "&lt;function", "&lt;factory", "Args:", "title=&quot;"):
        assert raw not in text, raw


@pytest.mark.parametrize(
    ("words", "page"), [("non-IID", "docs/"), ("FedAvgM", "docs/"), ("client drift", "docs/drift.html")]
)
def test_the_search_finds(words, page, site, browser):
    """In a browser, from a folder, without a server or a network."""
    context = browser.new_context(offline=True)
    reader, asked = context.new_page(), []
    reader.on("request", lambda request: asked.append(request.url))
    reader.goto(f"{(site / 'search.html').as_uri()}?q={quote(words)}")
    reader.wait_for_selector("#search-results li a", timeout=20_000)
    found = reader.eval_on_selector_all("#search-results li a", "links => links.map(link => link.href)")
    assert any(page in address for address in found), found
    assert all(urlsplit(address).scheme in ("file", "data") for address in asked), asked
    context.close()


NARROW = """() => ({
    wide: document.documentElement.scrollWidth - innerWidth,
    broken: [...document.querySelectorAll('td code')].filter((code) => !/[\\s\\/-]/.test(code.textContent)
        && code.getClientRects().length > 1).map((code) => code.textContent),
})"""


def narrow(browser, site: Path, pages: list[str]) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True, offline=True)
    reader = context.new_page()
    for page in pages:
        reader.goto((site / page).as_uri())
        assert reader.evaluate(NARROW) == {"wide": 0, "broken": []}, page
    context.close()


def test_pages_fit_a_phone_and_names_in_tables_are_not_broken(site, browser):
    narrow(browser, site, ["docs/index.html", "docs/methods.html", "docs/troubles.html"])


@pytest.mark.parametrize("width", [760, 900, 1020, 1100, 1280, 1600])
def test_pages_fit_windows_of_any_width(site, browser, width):
    context = browser.new_context(viewport={"width": width, "height": 800}, offline=True)
    reader = context.new_page()
    for page in ("index", "faq", "methods"):
        reader.goto((site / f"docs/{page}.html").as_uri())
        ends = reader.evaluate(
            "[...document.querySelectorAll('article > section p')].map((p) => p.getBoundingClientRect().right)"
        )
        assert max(ends) <= width and reader.evaluate("document.documentElement.scrollWidth") <= width, page
    context.close()


@pytest.mark.long
def test_all_pages_fit_a_phone(site, browser):
    narrow(browser, site, [built(page) for page in PAGES])
