"""The pages name only what exists: links, anchors, files, identifiers, make targets, commands and their options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from suite.documents import PAGES as WITH_COMMANDS
from suite.documents import TITLES, blocks_of, files_of
from suite.gpu.parts import PARTS
from suite.quarter import status
from typer.main import get_command

from tilework.cli.app import app

ROOT = Path(__file__).parents[1]
COMMANDS: Any = get_command(app)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("lab/docs/*.md")])
PLACES = [
    ROOT,
    ROOT / "src" / "tilework",
    ROOT / "src" / "tilework" / "server",
    ROOT / "bench" / "suite",
    ROOT / "lab",
    ROOT / "lab" / "src" / "tilework_lab",
]
SOURCES = (
    "src/**/*.py",
    "src/**/*.json",
    "tests/**/*.py",
    "bench/**/*.py",
    "lab/**/*.py",
    "training/**/*.py",
    "pyproject.toml",
    "lab/pyproject.toml",
    "mkdocs.yml",
)
OTHERS = {
    "DallEAPIWrapper": "LangChain",
    "LatentConsistencyModelPipeline": "diffusers",
    "client_body_timeout": "nginx",
    "client_header_timeout": "nginx",
    "client_max_body_size": "nginx",
    "large_client_header_buffers": "nginx",
    "limit_conn": "nginx",
    "limit_req": "nginx",
    "send_timeout": "nginx",
    "worker_connections": "nginx",
    "limit_concurrency": "uvicorn",
    "_sum": "Prometheus",
    "terminationGracePeriodSeconds": "Kubernetes",
    "TimeoutStopSec": "systemd",
    "stop_grace_period": "Docker Compose",
}
"""Names of other programs; add those that a page needs."""

MOST_PAGES, MOST_BYTES, LONGEST_PAGE = 20, 300_000, 25_000
"""What is read in one evening. The pages of the API and of classes are looked up: `make site` makes them."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def parts(page: Path) -> tuple[str, str]:
    """The prose of a page, and what stands in its fenced blocks."""
    blocks = re.split(r"^ *```.*$", page.read_text("utf-8"), flags=re.MULTILINE)
    return "\n".join(blocks[0::2]), "\n".join(blocks[1::2])


@cache
def in_backticks(page: Path) -> frozenset[str]:
    return frozenset(re.findall(r"`([^`\n]+)`", parts(page)[0]))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    heads = re.findall(r"^#+ (.+)$", parts(page)[0], re.MULTILINE)
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return frozenset(re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts)


def test_the_documentation_is_read_in_one_evening() -> None:
    sizes = {path.name: path.stat().st_size for path in ROOT.glob("docs/*.md")}
    assert len(sizes) <= MOST_PAGES
    assert sum(sizes.values()) <= MOST_BYTES
    assert {name: size for name, size in sizes.items() if size > LONGEST_PAGE} == {}


@each_page
def test_links_and_anchors_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^()\s]+)\)", parts(page)[0])
    for target in (target for target in targets if not re.match(r"https?:", target)):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@each_page
def test_files_exist(page: Path) -> None:
    """Source files and folders; `NAME` and `*` stand for something, and what commands write is not there yet."""
    names = {name for name in in_backticks(page) if re.fullmatch(r"[\w.-]+/[\w./-]*|[\w./-]+\.(py|md|toml)", name)}
    shown = r"out/|(results|pictures)/$|application/|text/|.*(\b|_)[A-Z]{3,}\b"
    names = {name for name in names if not re.match(shown, name)}
    anywhere = {path.name for folder in ("src", "tests", "bench", "lab") for path in (ROOT / folder).rglob("*.py")}
    places = [*PLACES, page.parent]
    missing = {name for name in names - anywhere if not any((place / name).exists() for place in places)}
    assert missing - {"tilework.toml", "tenants.toml"} == set()


@cache
def words() -> frozenset[str]:
    """Every word of the sources; a name with hyphens is one word, and its parts are words, too."""
    text = "\n".join(path.read_text("utf-8") for pattern in SOURCES for path in sorted(ROOT.glob(pattern)))
    return frozenset(re.findall(r"\w+(?:-\w+)+", text)) | frozenset(re.findall(r"\w+", text))


@each_page
def test_identifiers_exist(page: Path) -> None:
    """Names of the code, of fields and of settings. `tests/server/test_metrics.py` checks metrics."""
    names = {name for name in in_backticks(page) if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name)}
    names = {
        name
        for name in names
        if not re.search(r"\.(jsonl?|md|py|toml|csv|png|html|sqlite)$|NAME|^[A-Z]$|^tilework_", name)
    }
    known = words() | {f"TILEWORK_{word.upper()}" for word in words()}
    assert {name for name in names - set(OTHERS) if not set(name.split(".")) <= known} == set()


def lines(page: Path) -> Iterator[str]:
    """Lines of the page's blocks, and what its prose has in backticks."""
    yield from parts(page)[1].replace("\\\n", " ").splitlines()
    yield from sorted(in_backticks(page))


@each_page
def test_commands_have_the_options_that_the_page_uses(page: Path) -> None:
    for line in (line.strip().removeprefix("$ ") for line in lines(page)):
        if not line.startswith("tilework "):
            continue
        command, rest = COMMANDS, shlex.split(line, comments=True)[1:]
        while subcommands := getattr(command, "commands", {}):
            if not rest:
                break
            assert rest[0] in subcommands, line
            command, rest = subcommands[rest[0]], rest[1:]
        options = {name for option in command.params for name in [*option.opts, *option.secondary_opts]} | {"--help"}
        used = {re.sub(r"[=\]].*", "", word.lstrip("[")) for word in rest if re.match(r"\[?-[^\d]", word)}
        assert used <= options, f"{line}: {used - options}"


def test_what_a_block_of_commands_needs_is_in_its_title() -> None:
    blocks = [block for page in WITH_COMMANDS for block in blocks_of(page)]
    assert len(blocks) > 70
    assert {block.title for block in blocks} - {""} == set(TITLES)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_blocks_are_understood(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the parser of the command line itself: names, options, numbers and choices; and files of settings."""
    monkeypatch.chdir(tmp_path)
    for name, text in files_of(page).items():
        Path(name).write_text(text)
    for block in blocks_of(page):
        for command in block.commands:
            words = shlex.split(command, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words[:1] == ["tilework"]:
                parse(words[1:])


def parse(words: list[str]) -> None:
    """Raises what the command line says of words that it does not understand."""
    command = COMMANDS
    while subcommands := getattr(command, "commands", {}):
        command, words = subcommands[words[0]], words[1:]
    command.make_context("tilework", words)


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    """`tilework` is in no public registry: pages name a checkout, and messages where it was installed from."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    files = [*pages, *ROOT.glob("deploy/**/*.*"), *ROOT.glob("src/**/*.py"), *ROOT.glob("src/**/*.json")]
    by_name = re.compile(r"pip install [^`\n]*(?<![./\w-])tilework(?![\w/-])")
    assert len(files) > 500
    assert [str(file) for file in files if by_name.search(file.read_text("utf-8"))] == []


@each_page
def test_make_has_the_targets_that_the_page_uses(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    used = {match[1] for line in lines(page) if (match := re.match(r"\s*make(?: [A-Z_]+=\S+)* ([a-z-]+)", line))}
    assert used <= targets


@each_page
def test_bench_has_the_cases_that_the_page_uses(page: Path) -> None:
    cases = {path.stem for path in (ROOT / "bench" / "suite" / "cases").glob("*.py")}
    used = {match[1] for line in lines(page) if (match := re.match(r"\s*python bench/run\.py ([a-z]\w*)", line))}
    assert used <= cases


def test_the_page_of_the_bench_has_each_case_for_a_gpu_once() -> None:
    page = (ROOT / "bench" / "README.md").read_text("utf-8").partition("\n## On a GPU\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == [part.name for part in PARTS]


def test_the_page_of_what_was_measured_has_what_ran_on_a_card() -> None:
    page = (ROOT / "docs" / "measured.md").read_text("utf-8")
    assert status.table(status.measured()) in page, "run: python bench/gpu/quarter.py --status"
