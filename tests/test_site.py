"""The documentation as a site: built strictly, its links lead to what is there, and it loads nothing from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}


class Read(HTMLParser):
    """Links as (tag, relation, address), and the names of places, of one file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str, str]] = []
        self.ids: set[str] = set()
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        its = {name: value or "" for name, value in attrs}
        self.ids |= {its[name] for name in ("id", "name") if name in its}
        for name in ("href", "src"):
            if name in its:
                self.links.append((tag, its.get("rel", ""), its[name]))


@cache
def read(file: Path) -> Read:
    return Read(file)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    stamps = [word for name in ("torch", "serve", "docs") for word in ("-o", f".venv/{name}")]
    command = ["make", *stamps, f"BIN={Path(sys.executable).parent}", f"OUT={out}", "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out / "html"


def pages(site: Path) -> Iterator[Path]:
    found = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]  # Its links are absolute.
    assert len(found) > 80
    yield from found


def test_every_link_leads_to_a_place_that_is_there(site: Path) -> None:
    there = {str(path) for path in site.rglob("*") if path.is_file()}
    missing: set[str] = set()
    for page in pages(site):
        for link in {link for _, _, link in read(page).links}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = os.path.normpath(page.parent / unquote(parts.path)) if parts.path else str(page)
            target = target if target in there else f"{target}/index.html"
            anchor = unquote(parts.fragment)
            is_place = target in there and (
                not anchor or not target.endswith(".html") or anchor in read(Path(target)).ids
            )
            missing |= set() if is_place else {f"{page.relative_to(site)}: {link}"}
    assert missing == set()


def test_nothing_is_loaded_from_other_machines(site: Path) -> None:
    for page in pages(site):
        loaded = [link for tag, rel, link in read(page).links if tag in LOADED and rel != "canonical"]
        assert [link for link in loaded if urlsplit(link).netloc] == [], page


def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = read(site / "index.html").links
    linked = {os.path.normpath(link) for _, _, link in home if not urlsplit(link).netloc}
    written = [path for folder in ("docs", "lab/docs") for path in (ROOT / folder).glob("*.md")]
    assert {str(path.relative_to(ROOT).with_suffix("")) for path in written if path.stem != "index"} - linked == set()
    assert "docs/classes" in linked
