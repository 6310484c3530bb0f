"""What `bench/fresh.py` would run on a fresh machine, and what it leaves. Programs that make one are played."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from suite import fresh
from suite.fresh_machine import Machine, Step, index_settings, run
from typer.testing import CliRunner, Result

_UNSHARE = """\
#!/bin/sh
for word; do
    case "$word" in */machine) root="$word" ;; esac
done
case "$*" in
*debootstrap*)
    mkdir -p "$root/usr/bin" "$root/etc"
    ln -s python3.13 "$root/usr/bin/python3"
    exit {debootstrap} ;;
*tilework\\ demo*) echo pictures; {demo} ;;
*tilework\\ test*) echo "9 passed"; {test} ;;
esac
"""
"""Without a namespace: it makes the folders that are looked into."""


class Played:
    """Programs on the PATH, and the temporary folder where the machine is made."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.place = folder / "programs", folder / "place"
        self.programs.mkdir()
        self.place.mkdir()
        self._program("git", "#!/bin/sh\necho abc1234\n")
        self._program("debootstrap", "#!/bin/sh\n")
        self.behave()
        self.variables = {"PATH": f"{self.programs}:{os.environ['PATH']}", "TMPDIR": str(self.place)}

    def behave(self, debootstrap: int = 0, demo: str = "exit 0", test: str = "exit 0") -> None:
        self._program("unshare", _UNSHARE.format(debootstrap=debootstrap, demo=demo, test=test))

    def left(self) -> list[str]:
        """Names of files in folders that are left."""
        return sorted(path.name for path in self.place.glob("*/*"))

    def _program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    made = Played(tmp_path)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(fresh, "_NEEDED_BYTES", 0)
    before = signal.getsignal(signal.SIGTERM)
    yield made
    signal.signal(signal.SIGTERM, before)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(fresh.app, words)


def test_a_user_types_make_with_three_variables_and_no_other() -> None:
    machine = Machine(suite="sid", root=Path("/m"), checkout=Path("/here"), mirror="http://d", make=("TORCH=t==1",))
    bootstrap, clone = machine.setup(has_debootstrap=True)
    assert " ".join(bootstrap.words).endswith(
        "debootstrap --variant=minbase --include=python3,python3-venv,git,make sid /m http://d"
    )
    assert clone.words[-2:] == ("/here", "/m/root/tilework")
    typed = machine.types("demo")
    assert typed.what == "make demo TORCH=t==1"
    program, words = typed.words[: typed.words.index("/m")], typed.words[typed.words.index("/m") + 1 :]
    assert 'chroot "$root" env -i "$@"' in " ".join(program)
    path, *rest = words
    assert path.startswith("PATH=/usr/local/sbin:")
    assert rest[:3] == ["HOME=/root", "LANG=C.UTF-8", "make"]
    assert rest[-3:] == ["/root/tilework", "demo", "TORCH=t==1"]


def test_debootstrap_is_installed_where_it_is_missing() -> None:
    machine = Machine(suite="sid", root=Path("/m"), checkout=Path("/here"), mirror="http://d")
    assert [step.what for step in machine.setup(has_debootstrap=False)] == [
        "apt-get install debootstrap",
        "debootstrap sid",
        "git clone",
    ]


def test_the_index_is_that_of_this_machine_without_its_folders() -> None:
    listed = """\
:env:.cert='/etc/own.pem'
:env:.find-links='/opt/wheels'
global.cert='/etc/other.pem'
global.extra-index-url='file:///opt/simple https://one.example/simple'
global.index-url='https://two.example/simple'
install.no-deps='true'
"""
    assert index_settings(listed) == {
        "cert": "/etc/own.pem",
        "extra-index-url": "https://one.example/simple",
        "index-url": "https://two.example/simple",
    }


def test_a_machine_reaches_the_network_as_this_one_does(tmp_path: Path) -> None:
    (tmp_path / "m/etc").mkdir(parents=True)
    own = tmp_path / "own.pem"
    own.write_text("ours")
    machine = Machine(suite="sid", root=tmp_path / "m", checkout=tmp_path, mirror="http://d")
    machine.connect({"cert": str(own), "index-url": "https://two.example/simple", "no-deps": "true"})
    assert (tmp_path / "m/etc/pip.conf").read_text() == (
        "[global]\nindex-url = https://two.example/simple\ncert = /etc/pip-certificates.pem\n"
    )
    assert (tmp_path / "m/etc/pip-certificates.pem").read_text() == "ours"
    assert (tmp_path / "m/etc/hosts").read_text() == Path("/etc/hosts").read_text()


def test_nothing_is_left_of_commands_that_pass(played: Played) -> None:
    result = invoke("trixie")
    assert (result.exit_code, list(played.place.iterdir())) == (0, [])
    demo, test = result.stdout.splitlines()
    assert demo == "trixie, python3.13, abc1234: make demo: passed, 0:00: pictures"
    assert test.endswith("make test: passed, 0:00: 9 passed")


@pytest.mark.parametrize("failing", ["demo", "test"])
def test_the_log_of_a_command_that_fails_is_left_and_the_other_runs(played: Played, failing: str) -> None:
    played.behave(**{failing: "echo wrong >&2; exit 2"})
    result = invoke("trixie", "--json")
    assert (result.exit_code, played.left()) == (1, ["log"])
    found = {one["what"]: (one["exit_status"], one["last"]) for one in json.loads(result.stdout)["commands"]}
    usual = {"make demo": (0, "pictures"), "make test": (0, "9 passed")}
    assert found == usual | {f"make {failing}": (2, "wrong")}
    (log,) = played.place.glob("*/log")
    assert log.read_text().splitlines().count("wrong") == 1


def test_one_of_the_commands_and_the_folder_is_kept(played: Played) -> None:
    result = invoke("sid", "--only", "demo", "--keep", "--json", "--torch", "torch==1", "--torch-index", "http://t")
    (one,) = json.loads(result.stdout)["commands"]
    assert one["what"] == "make demo TORCH=torch==1 TORCH_INDEX=http://t"
    assert played.left() == ["log", "machine"]


def test_without_a_machine_nothing_is_typed(played: Played) -> None:
    played.behave(debootstrap=1)
    result = invoke("trixie")
    assert (result.exit_code, result.stdout, played.left()) == (2, "", ["log"])
    assert "make demo" not in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bookworm",), "is not one of 'trixie', 'sid'"),
        (("trixie", "--only", "lint"), "is not one of 'demo', 'test'"),
    ],
)
def test_words_that_are_wrong(words: tuple[str, ...], message: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_only_root_can_and_space_is_needed(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 * 10**9))
    monkeypatch.setattr(fresh, "_NEEDED_BYTES", 20 * 10**9)
    result = invoke("trixie")
    assert (result.exit_code, list(played.place.iterdir())) == (2, [])
    assert "has 3 GB free, and 20 are needed" in " ".join(result.stderr.replace("│", " ").split())
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    result = invoke("trixie")
    assert (result.exit_code, list(played.place.iterdir())) == (2, [])
    assert "only root can make a machine" in result.stderr


def test_a_run_that_is_interrupted_leaves_no_machine_and_no_process(played: Played, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    played.behave(demo=f"exec sleep 600 > {alive}")
    program = "import os; from suite import fresh; os.geteuid = lambda: 0; fresh._NEEDED_BYTES = 0; fresh.app()"
    bench = Path(fresh.__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", program, "trixie"],
        env=os.environ | {"PYTHONPATH": str(bench)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with alive.open("rb") as held:  # Opens once `make demo` runs.
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert held.read() == b""
    assert played.left() == ["log"]


def _can_unshare() -> bool:
    words = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    return (
        shutil.which("unshare") is not None and not subprocess.run(words, capture_output=True, check=False).returncode
    )


@pytest.mark.skipif(not _can_unshare(), reason="this user may not make namespaces")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_mounts_and_processes_end_with_the_program_that_made_them(tmp_path: Path, is_stopped: bool) -> None:
    """Even those that ignore SIGTERM. Otherwise /dev could be removed with the machine's folder."""
    mounted, alive, seen = tmp_path / "mounted", tmp_path / "alive", list[bytes]()
    mounted.mkdir()
    os.mkfifo(alive)
    machine = Machine(suite="sid", root=tmp_path, checkout=tmp_path, mirror="http://d")
    wrapped, _ = machine.setup(has_debootstrap=True)
    script = (
        f"mount -t tmpfs tmpfs {mounted}; touch {mounted}/inside; trap '' TERM; exec 3> {alive}; setsid sleep 600 &"
    )
    script += " wait" if is_stopped else ""
    words = (*wrapped.words[: wrapped.words.index("debootstrap")], "sh", "-c", script)

    def watch() -> None:
        with alive.open("rb") as held:  # Opens once the program has come so far.
            if is_stopped:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            seen.append(held.read())  # Returns when no process holds the other end.

    watching = threading.Thread(target=watch)
    watching.start()
    before = signal.signal(signal.SIGUSR1, _interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) if is_stopped else nullcontext():
            assert run(Step(what="a program", words=words), tmp_path / "log") == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    watching.join()
    assert seen == [b""]
    assert list(mounted.iterdir()) == []


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
