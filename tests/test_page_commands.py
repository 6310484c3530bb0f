"""How the commands of a page are read and typed: `bench/suite/documents.py` and `page_reader.py`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from suite.documents import ROOT, Block, blocks_of, files_of
from suite.page_reader import Ending, PageReader, copy_of_checkout

import debian

PAGE = """
```console
first --a 1 \\
    --b 2     # a note
# only a note
second
```

1. In a list:

    ```console title="needs a GPU"
    third | \\
        fourth
    fifth
    ```

```python
print("calls no server")
```

## Another section

```python
print('calls "http://127.0.0.1:8000"')
```

```toml
# own.toml
x = 1
```

```text
no command
```
"""


def page(folder: Path, text: str = PAGE) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[PageReader]:
    (tmp_path / "checkout").mkdir()
    with closing(PageReader(checkout=tmp_path / "checkout", programs=tmp_path / "programs", limit_s=20)) as reader:
        yield reader


def block(*commands: str, section: int = 0) -> Block:
    return Block(page=Path("page.md"), line=1, section=section, title="", commands=commands)


def test_commands_are_whole_and_answers_are_none(tmp_path: Path) -> None:
    plain, titled, python = blocks_of(page(tmp_path))
    assert plain.commands == ("first --a 1 --b 2     # a note", "second")
    assert (plain.title, plain.place) == ("", "page.md:2")
    assert titled.commands == ("third | fourth", "fifth")
    assert (titled.title, titled.place) == ("needs a GPU", "page.md:11")
    assert [shlex.split(one) for one in python.commands] == [
        ["python", "-c", "print('calls \"http://127.0.0.1:8000\"')\n"]
    ]
    assert (plain.section, titled.section, python.section) == (0, 0, 1)


def test_files_that_a_page_shows(tmp_path: Path) -> None:
    assert files_of(page(tmp_path)) == {"own.toml": "# own.toml\nx = 1\n"}


def test_commands_find_what_those_before_left_and_end_with_the_first_that_fails(
    typed: PageReader, tmp_path: Path
) -> None:
    typing = block("export WORD=yes", 'echo "$WORD" > word', "grep yes word", "echo wrong >&2; exit 3", "touch never")
    outcomes = list(typed.read(typing))
    assert [one.ending for one in outcomes] == [Ending.DONE, Ending.DONE, Ending.DONE, Ending.FAILED]
    assert outcomes[-1].output == "wrong\n"
    assert not (tmp_path / "checkout" / "never").exists()


def test_what_takes_too_long_is_stopped_with_all_that_it_started(typed: PageReader) -> None:
    typed.limit_s = 0.2
    (one,) = typed.read(block("sleep 600 & sleep 600"))
    assert (one.ending, one.output) == (Ending.STOPPED, "")
    assert one.seconds < 60


def test_a_server_must_become_ready_and_one_that_ends_is_named(typed: PageReader, tmp_path: Path) -> None:
    (tmp_path / "programs" / "tilework").write_text("#!/bin/sh\necho no model; exit 2\n")
    (one,) = typed.read(block("tilework serve ./nowhere", "touch never"))
    assert (one.ending, one.output) == (Ending.FAILED, "no model\n")


_SERVES_A_FILE = """\
#!/bin/sh
mkdir -p w; echo ok > w/ready; cd w; exec python -m http.server --bind 127.0.0.1 "$TILEWORK_PORT"
"""


def test_a_block_that_calls_a_server_finds_one(typed: PageReader, tmp_path: Path) -> None:
    (tmp_path / "programs" / "tilework").write_text(_SERVES_A_FILE)
    fetch = "python -c 'import sys; from urllib.request import urlopen; print(urlopen(sys.argv[1]).read().decode())'"
    found = list(
        typed.read(block(f"{fetch} http://127.0.0.1:8000/ready > said", f"{fetch} http://127.0.0.1:8000/nothing"))
    )
    assert [(one.command.split()[0], one.ending) for one in found] == [
        ("tilework", Ending.DONE),
        ("python", Ending.DONE),
        ("python", Ending.FAILED),
    ]
    assert (tmp_path / "checkout" / "said").read_text() == "ok\n\n"


def test_a_server_runs_until_the_section_ends(typed: PageReader, tmp_path: Path) -> None:
    for name in ("tilework", "make"):
        (tmp_path / "programs" / name).write_text(_SERVES_A_FILE)
    call = "test -n http://127.0.0.1:8000"
    found = [
        [one.command.split()[0] for one in typed.read(typing)]
        for typing in (block("make serve  # at http://127.0.0.1:8000"), block(call), block(call, section=1))
    ]
    assert found == [["make"], ["test"], ["tilework", "test"]]


@pytest.mark.skipif(not debian.has("curl", "curl"), reason="needs the Debian package curl")
def test_curl_fails_when_a_server_answers_with_an_error(typed: PageReader, tmp_path: Path) -> None:
    (tmp_path / "programs" / "tilework").write_text(_SERVES_A_FILE)
    found = list(typed.read(block(*(f"curl -s localhost:8000/{name}" for name in ("ready", "nothing")), "touch never")))
    assert [one.ending for one in found] == [Ending.DONE, Ending.DONE, Ending.FAILED]


FIRST_READ = [
    pytest.param(name, section, id=f"{name}-{section}")
    for name in ("README.md", "docs/start.md", "docs/serving.md")
    for section in dict.fromkeys(one.section for one in blocks_of(ROOT / name) if not one.title)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout, and beside it what servers measure, for all sections."""
    folder = tmp_path_factory.mktemp("pages")
    copy_of_checkout(ROOT, folder / "checkout")
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "section"), FIRST_READ)
def test_the_commands_of_a_new_user_run_as_they_stand(name: str, section: int, place: Path) -> None:
    """With the shipped models alone. What takes longer than 60 s without an error is stopped, such as `make serve`."""
    for file, text in files_of(ROOT / name).items():
        (place / "checkout" / file).write_text(text)
    with closing(PageReader(checkout=place / "checkout", programs=place / "programs", limit_s=60)) as typed:
        blocks = [one for one in blocks_of(ROOT / name) if not one.title and one.section == section]
        outcomes = [outcome for one in blocks for outcome in typed.read(one)]
    assert [one for one in outcomes if one.ending is Ending.FAILED] == []
    assert len(outcomes) >= sum(len(one.commands) for one in blocks)


def test_the_pages_of_a_new_user_have_commands_that_run() -> None:
    assert len(FIRST_READ) > 7
