"""How the commands of a page are read and typed: `bench/suite/documents.py` and `page_reader.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite.documents import Block, blocks_of, files_of
from suite.page_reader import Ending, PageReader

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
    $ third | \\
        fourth
    what it says
    $ fifth
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


def reader(folder: Path, limit_s: float = 20) -> PageReader:
    (folder / "checkout").mkdir()
    return PageReader(checkout=folder / "checkout", programs=folder / "programs", limit_s=limit_s)


def block(*commands: str) -> Block:
    return Block(page=Path("page.md"), line=1, title="", commands=commands)


def test_commands_are_whole_and_answers_are_none(tmp_path: Path) -> None:
    plain, titled = blocks_of(page(tmp_path))
    assert plain.commands == ("first --a 1 --b 2     # a note", "second")
    assert (plain.title, plain.place) == ("", "page.md:2")
    assert titled.commands == ("third | fourth", "fifth")
    assert (titled.title, titled.place) == ("needs a GPU", "page.md:11")


def test_files_that_a_page_shows(tmp_path: Path) -> None:
    assert files_of(page(tmp_path)) == {"own.toml": "# own.toml\nx = 1\n"}


def test_commands_find_what_those_before_left_and_end_with_the_first_that_fails(tmp_path: Path) -> None:
    typed = block("export WORD=yes", 'echo "$WORD" > word', "grep yes word", "echo wrong >&2; exit 3", "touch never")
    outcomes = list(reader(tmp_path).read(typed))
    assert [one.ending for one in outcomes] == [Ending.DONE, Ending.DONE, Ending.DONE, Ending.FAILED]
    assert outcomes[-1].output == "wrong\n"
    assert not (tmp_path / "checkout" / "never").exists()


def test_what_takes_too_long_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    (one,) = reader(tmp_path, limit_s=0.2).read(block("sleep 600 & sleep 600"))
    assert (one.ending, one.output) == (Ending.STOPPED, "")
    assert one.seconds < 60


def test_a_server_must_become_ready_and_one_that_ends_is_named(tmp_path: Path) -> None:
    typed = reader(tmp_path)
    (tmp_path / "programs" / "tilework").write_text("#!/bin/sh\necho no model; exit 2\n")
    (one,) = typed.read(block("tilework serve ./nowhere", "touch never"))
    assert (one.ending, one.output) == (Ending.FAILED, "no model\n")


_SERVES_A_FILE = """\
#!/bin/sh
mkdir -p w; echo ok > w/ready; cd w; exec python -m http.server --bind 127.0.0.1 "$TILEWORK_PORT"
"""


def test_a_block_that_calls_a_server_finds_one(tmp_path: Path) -> None:
    typed = reader(tmp_path)
    (tmp_path / "programs" / "tilework").write_text(_SERVES_A_FILE)
    fetch = "python -c 'import sys; from urllib.request import urlopen; print(urlopen(sys.argv[1]).read().decode())'"
    found = list(typed.read(block(f"{fetch} http://127.0.0.1:8000/ready > said", f"{fetch} $URL/nothing")))
    assert [(one.command.split()[0], one.ending) for one in found] == [
        ("tilework", Ending.DONE),
        ("python", Ending.DONE),
        ("python", Ending.FAILED),
    ]
    assert (tmp_path / "checkout" / "said").read_text() == "ok\n\n"


@pytest.mark.skipif(not debian.has("curl", "curl"), reason="needs the Debian package curl")
def test_curl_fails_when_a_server_answers_with_an_error(tmp_path: Path) -> None:
    typed = reader(tmp_path)
    (tmp_path / "programs" / "tilework").write_text(_SERVES_A_FILE)
    found = list(typed.read(block("curl -s $URL/ready", "curl -s $URL/nothing", "touch never")))
    assert [one.ending for one in found] == [Ending.DONE, Ending.DONE, Ending.FAILED]
