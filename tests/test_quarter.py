"""A quarter of an hour with a bare machine that has a card: `bench/gpu/quarter.py`."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from suite import children
from suite.children import GRACE_S
from suite.gpu.parts import PARTS, Part
from suite.quarter import command, kept, measuring, status, wheels
from suite.quarter.course import Course, Ending, UnknownPart, parts_from

from processes import is_alive
from waiting import PATIENCE_S, eventually

NAMES = [part.name for part in PARTS]


def part(name: str, limit_s: int = 10, **others: Any) -> Part:
    return Part(name=name, answers=name, limit_s=limit_s, case="none:None", **others)


@dataclass
class Clock:
    """A course whose parts take as long as they may."""

    now_s: float = 0.0
    begun: list[str] = field(default_factory=list)

    def measure(self, one: Part) -> Ending:
        self.begun.append(one.name)
        self.now_s += one.limit_s
        return Ending.PAST_LIMIT if one.name == "slow" else Ending.MEASURED

    def course(self, end_s: float, **others: object) -> Course:
        return Course(end_s=end_s, measure=self.measure, clock=lambda: self.now_s, **others)  # type: ignore[arg-type]


class TestCourse:
    def test_a_part_that_might_not_end_in_time_is_not_begun_and_a_shorter_one_is(self) -> None:
        clock = Clock()
        parts = [part("slow", 100), part("long", 60), part("short", 40)]
        outcomes = list(clock.course(100 + 40 + 2 * GRACE_S).run(parts))
        assert [one.ending for one in outcomes] == [Ending.PAST_LIMIT, Ending.NO_TIME, Ending.MEASURED]
        assert clock.begun == ["slow", "short"]
        assert clock.now_s + GRACE_S <= 100 + 40 + 2 * GRACE_S

    def test_what_was_measured_and_what_needs_more_than_is_there_is_passed_over(self) -> None:
        clock = Clock()
        parts = [
            part("before"),
            part("cards", num_cards=2),
            part("packages", packages=("json", "a_package_that_is_not")),
            part("fewer", packages=("a_package_that_is_not",), can_do_without=True),
            part("there", packages=("json",)),
        ]
        outcomes = list(clock.course(1e9, before={"before"}).run(parts))
        assert [one.ending for one in outcomes[:3]] == [Ending.BEFORE, Ending.NO_CARDS, Ending.NO_PACKAGES]
        assert clock.begun == ["fewer", "there"]

    def test_it_goes_on_at_a_part(self) -> None:
        parts = [part("a"), part("b"), part("c")]
        assert [one.name for one in parts_from(parts, "b")] == ["b", "c"]
        assert parts_from(parts, "") == parts
        with pytest.raises(UnknownPart, match="'d' is no part; choose from a, b, c"):
            parts_from(parts, "d")

    def test_the_first_parts_of_the_table_are_those_that_matter_most(self) -> None:
        assert NAMES[:7] == ["start", "exact", "sdxl", "sd35", "flux", "idle", "live"]
        assert all(one.limit_s + GRACE_S < 11 * 60 for one in PARTS), "each can be begun in eleven minutes"

    def test_each_part_makes_its_case(self) -> None:
        for one in PARTS:
            assert one.make(quick=True)


class TestLimit:
    """The process of a part, which has started another, whose number it writes."""

    CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); signal.pause()"
    PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[2], "w").write(str(child.pid))
"""

    def run(self, tmp_path: Path, then: str) -> tuple[int | None, int]:
        run = [sys.executable, "-c", self.PARENT + then, self.CHILD, str(tmp_path / "pid")]
        code = children.run(run, 300.0, tmp_path / "log", dict(os.environ), tmp_path)
        return code, int((tmp_path / "pid").read_text())

    def test_past_it_the_part_is_ended_with_its_children_even_deaf_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class PastItsLimit(subprocess.Popen[bytes]):
            """Once the child is there."""

            def wait(self, timeout: float | None = None) -> int:
                if timeout is None:
                    return super().wait()
                eventually(lambda: (tmp_path / "log").read_text() == "begun\n")
                raise subprocess.TimeoutExpired(self.args, timeout)

        monkeypatch.setattr(children.subprocess, "Popen", PastItsLimit)
        monkeypatch.setattr(children, "GRACE_S", 0.2)
        code, child = self.run(tmp_path, "print('begun', flush=True); child.wait()")
        assert code is None
        eventually(lambda: not is_alive(child))

    def test_a_part_that_ends_leaves_no_child(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(children, "GRACE_S", 0.2)
        code, child = self.run(tmp_path, "sys.exit(3)")
        assert code == 3
        eventually(lambda: not is_alive(child))

    BENCH = """
import os, pathlib, signal, sys
from suite.children import leave_on, run
leave_on(signal.SIGTERM, signal.SIGINT)
run([sys.executable, "-c", sys.argv[1]], 300.0, pathlib.Path("log"), dict(os.environ), pathlib.Path.cwd())
"""
    PART = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("its servers have stopped", flush=True)))
print("begun", flush=True)
signal.pause()
"""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
    def test_a_part_stops_its_servers_when_the_bench_is_ended(self, tmp_path: Path, number: signal.Signals) -> None:
        there = os.environ | {"PYTHONPATH": str(Path(children.__file__).parents[1])}
        bench = subprocess.Popen([sys.executable, "-c", self.BENCH, self.PART], cwd=tmp_path, env=there)
        log = tmp_path / "log"
        eventually(lambda: log.exists() and log.read_text() == "begun\n")
        bench.send_signal(number)
        assert bench.wait(PATIENCE_S) == (-number if number == signal.SIGKILL else 128 + number)
        eventually(lambda: log.read_text() == "begun\nits servers have stopped\n")


class TestKept:
    def test_many_results_are_two_files_that_are_whole_at_any_time(self, tmp_path: Path) -> None:
        folder = kept.Kept(folder=tmp_path / "out")
        for name in NAMES:
            source = tmp_path / name
            source.mkdir()
            (source / f"{name}_h100_202611.md").write_text(f"# {name}\n")
            (source / f"{name}_h100_202611_a.png").write_bytes(b"png")
            folder.add_results(source)
            folder.write_page(name)
        assert sorted(path.name for path in folder.folder.iterdir()) == ["quarter.md", "results.tar.gz"]
        assert len(folder.result_names()) == 2 * len(PARTS)
        assert list(folder.documents().values()) == [f"# {name}\n" for name in sorted(NAMES)]

    def test_a_result_takes_the_place_of_an_older_one(self, tmp_path: Path) -> None:
        folder = kept.Kept(folder=tmp_path / "out")
        for text in ("old", "new"):
            (tmp_path / "source").mkdir(exist_ok=True)
            (tmp_path / "source" / "a_h100_202611.md").write_text(text)
            folder.add_results(tmp_path / "source")
        assert folder.documents() == {"a_h100_202611.md": "new"}

    @pytest.mark.parametrize(
        "content",
        [b"", b"none", gzip.compress(b"none"), gzip.compress(bytes(3000))[:-20], None],
        ids=["empty", "no archive", "no folder", "cut", "a folder"],  # The bytes have the second of their making.
    )
    def test_what_cannot_be_read_is_said_before_anything_is_measured(
        self, tmp_path: Path, content: bytes | None
    ) -> None:
        archive = tmp_path / "results.tar.gz"
        archive.mkdir() if content is None else archive.write_bytes(content)
        with pytest.raises(kept.UnusableFolder, match=r"--out .*results\.tar\.gz"):
            kept.Kept(folder=tmp_path).check()

    def test_so_is_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for folder in (tmp_path / "file", Path("/proc/out")):
            with pytest.raises(kept.UnusableFolder, match=f"--out {folder}: .*name another folder"):
                kept.Kept(folder=folder).check()
        kept.Kept(folder=tmp_path / "a" / "new").check()
        assert not list((tmp_path / "a" / "new").iterdir())


class TestCommand:
    """The whole command, with parts that only write what they were called with."""

    SCRIPT = """
import pathlib, sys
name, folder = sys.argv[1], sys.argv[sys.argv.index("--out") + 1]
print("log of", name)
if name == "broken":
    raise RuntimeError("it cannot be imported")
pathlib.Path(folder, f"{name}_cpu_202611.md").write_text(f"# {name}\\n- cpu: two cores\\n")
raise SystemExit(name == "missed")
"""

    @pytest.fixture
    def out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "bench" / "gpu").mkdir(parents=True)
        (tmp_path / "bench" / "gpu" / "run.py").write_text(self.SCRIPT)
        packed = wheels.Pack(python="3.12", commit="abc", native=True, versions={}, num_bytes=0)
        monkeypatch.setattr(command, "PARTS", [part(name) for name in ("first", "broken", "missed", "last")])
        monkeypatch.setattr(command, "install", lambda: packed)
        monkeypatch.setattr(command, "cards", list)
        monkeypatch.setattr(command, "leave_on", lambda *_: None)
        monkeypatch.setattr(wheels, "FOLDER", tmp_path / "wheels")
        monkeypatch.setattr(measuring, "ROOT", tmp_path)
        return tmp_path / "out"

    def test_a_part_that_fails_is_said_and_the_others_follow(
        self, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command.main(["--out", str(out)]) == 2
        assert sorted(path.name for path in out.iterdir()) == ["others.tar.gz", "quarter.md", "results.tar.gz"]
        said = capsys.readouterr().out
        assert "log of broken" in said
        assert "log of first" not in said
        page = (out / "quarter.md").read_text()
        endings = {"first": "measured", "broken": "failed", "missed": "measured, and a goal is missed"}
        for name, ending in endings.items():
            assert f"| `{name}` | {ending} |" in page
        assert all(f"# {name}\n" in page for name in ("first", "missed", "last"))

    def test_what_has_a_result_is_not_measured_again_unless_it_is_asked_for(
        self, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command.main(["--out", str(out), "--from", "missed"])
        capsys.readouterr()
        assert command.main(["--out", str(out), "--from", "missed"]) == 0
        assert len(re.findall(r"(missed|last): measured before", capsys.readouterr().out)) == 2
        assert command.main(["--out", str(out), "--from", "missed", "--again"]) == 1
        assert "before" not in capsys.readouterr().out

    def test_a_rehearsal_is_no_result_of_a_card(
        self, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command.main(["--out", str(out), "--from", "last"])
        monkeypatch.setattr(command, "cards", lambda: ["NVIDIA H100"])
        capsys.readouterr()
        assert command.main(["--out", str(out), "--from", "last"]) == 0
        assert "last: measured (" in capsys.readouterr().out

    def test_only_one_is_at_work_in_a_checkout(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with wheels.alone_with_wheels():
            assert command.main(["--out", str(out)]) == 2
        assert "another quarter.py is at work" in capsys.readouterr().err
        assert not out.exists()

    def test_a_mistake_is_an_error_and_no_traceback(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--out", str(out), "--from", "nothing"]) == 2
        assert "error: 'nothing' is no part" in capsys.readouterr().err
        for minutes in ("-1", "0", "nan", "inf", "some"):
            with pytest.raises(SystemExit):
                command.main(["--out", str(out), f"--minutes={minutes}"])
            assert f"--minutes: {minutes}: give minutes above 0" in capsys.readouterr().err
        for arguments, message in {
            ("pack", "--rehearse"): "pack and --rehearse: choose one of them",
            ("--json",): "--json: it goes with --status",
        }.items():
            with pytest.raises(SystemExit):
                command.main(arguments)
            assert message in capsys.readouterr().err
        assert command.main(["pack", "--python", "3.12.4"]) == 2
        assert "--python 3.12.4: give a version such as 3.12" in capsys.readouterr().err

    def test_without_a_result_no_command_keeps_them(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        command.main(["--out", str(out), "--minutes", "0.01"])
        assert "tar xzf" not in capsys.readouterr().out
        command.main(["--out", f"{out} 2", "--from", "last"])
        assert f"tar xzf '{out} 2/results.tar.gz' -C bench/results" in capsys.readouterr().out

    def test_a_folder_that_cannot_keep_results_is_refused_before_anything_is_installed(
        self, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(command, "install", lambda: pytest.fail("it is installed"))
        out.touch()
        assert command.main(["--out", str(out)]) == 2
        assert f"error: --out {out}: " in capsys.readouterr().err

    def test_help_has_examples_and_every_part(self, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments in (["--help"], ["pack", "--help"]):
            with pytest.raises(SystemExit):
                command.main(arguments)
            said = capsys.readouterr().out
            assert "python bench/gpu/quarter.py --minutes" in said
            assert all(re.search(rf"^  {name} ", said, re.MULTILINE) for name in NAMES)


def test_it_runs_where_nothing_is_installed() -> None:
    script = Path(__file__).parents[1] / "bench" / "gpu" / "quarter.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "--status", "--json"], capture_output=True, check=True
    )
    rows = json.loads(done.stdout)["parts"]
    assert [row["part"] for row in rows] == NAMES
    assert next(row for row in rows if row["part"] == "mixed")["card"].startswith("NVIDIA")


def test_only_results_of_a_card_count(tmp_path: Path) -> None:
    for name, fact in {
        "clips_2-core-amd-epyc_202611.md": "cpu: AMD",
        "mixed_nvidia-h100_202609.md": "gpu: NVIDIA H100",
        "mixed_nvidia-h200_202611.md": "gpu: NVIDIA H200",
        "live_other_nvidia-h100_202611.md": "gpu: NVIDIA H100",
    }.items():
        (tmp_path / name).write_text(f"- date: {name[-9:-5]}-{name[-5:-3]}-01 10:00 UTC\n- {fact}\n")
    (tmp_path / "live_cut_202611.md").write_bytes(b"\xff- date")
    (tmp_path / "idle_folder_202611.md").mkdir()
    found = status.measured(tmp_path)
    assert list(found) == ["mixed"]
    assert found["mixed"].card == "NVIDIA H200", "the newest"


class TestPack:
    @staticmethod
    def needed(names: set[str]) -> set[str]:
        """These packages and all that they need beyond what is there, by what is installed here."""
        marker = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
        seen, coming = set[str](), sorted(names)
        while coming:
            name = coming.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in wheels.THERE:
                continue
            try:
                lines = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # Of the extra quantize, which is not installed everywhere.
            asked = [Requirement(line) for line in lines]
            coming += [wheels.name_of(one.name) for one in asked if one.marker is None or one.marker.evaluate(marker)]
        return seen

    def test_all_that_a_server_needs_travels_is_there_or_is_left_out_for_a_reason(self) -> None:
        direct = set(wheels.requirements())
        assert direct >= {"torch", "diffusers", "fastapi", "av", "msgspec", "numpy", "torchao"}
        assert direct <= {*wheels.PACKED, *wheels.THERE, *wheels.LEFT_OUT}
        for_packed = self.needed(direct & set(wheels.PACKED)) - set(wheels.LEFT_OUT)
        assert for_packed <= {*wheels.PACKED, *wheels.THERE}, "and what these need"

    def test_each_package_is_on_one_list(self) -> None:
        names = [*wheels.PACKED, *wheels.THERE, *wheels.LEFT_OUT]
        assert len(names) == len(set(names))

    def test_what_travels_is_small_enough(self) -> None:
        """Of each package what is installed here, compressed as in a wheel."""
        paths = [path for name in wheels.PACKED for path in importlib.metadata.files(name) or ()]
        files = [path.locate() for path in paths if path.suffix != ".pyc"]
        assert sum(len(zlib.compress(Path(file).read_bytes())) for file in files) < wheels.MOST_BYTES <= 30e6

    def test_a_checkout_may_travel_with_as_many_wheels_as_there_may_be(self) -> None:
        if not (wheels.ROOT / ".git").exists():
            pytest.skip("not a git checkout")
        run = ["git", "-C", str(wheels.ROOT), "ls-files", "-z"]
        names = os.fsdecode(subprocess.run(run, capture_output=True, check=True).stdout).split("\0")
        tree = sum(path.stat().st_size for name in names if (path := wheels.ROOT / name).is_file())
        assert tree + wheels.MOST_BYTES < 64 << 20

    def test_of_its_own_wheel_the_extension_alone_travels(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        has_compiler = True

        def pip(arguments: list[str]) -> None:
            folder = Path(arguments[arguments.index("--wheel-dir") + 1])
            folder.mkdir(exist_ok=True)
            with zipfile.ZipFile(folder / "tilework-0.1.0-py3-none-any.whl", "w") as wheel:
                for name in ("models/shapes/vae/model.safetensors", "comm/ring/_native.c", "core/time.py"):
                    wheel.writestr(f"tilework/{name}", "other")
                wheel.writestr("tilework-0.1.0.dist-info/METADATA", "other")
                if has_compiler:
                    wheel.writestr("tilework/comm/ring/_native.abi3.so", "compiled")

        monkeypatch.setattr(wheels, "_pip", pip)
        (folder := tmp_path / "folder").mkdir()
        assert wheels._take_extension(tmp_path, folder)
        assert {path.name: path.read_text() for path in folder.rglob("*")} == {"_native.abi3.so": "compiled"}
        has_compiler = False
        assert not wheels._take_extension(tmp_path, folder)

    def test_names_are_read_from_requirements(self) -> None:
        lines = ["Typing_Extensions>=4; python_version < '3.13'", "sse-starlette", "moto[s3]>=5,<6", "zope.x==1"]
        assert [wheels.name_of(line) for line in lines] == ["typing-extensions", "sse-starlette", "moto", "zope-x"]

    def test_a_package_on_no_list_and_one_that_nothing_needs_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = [*wheels.PACKED, "numpy"]

        def pip(arguments: list[str]) -> None:
            report = {"install": [{"metadata": {"name": name, "version": "1"}} for name in found]}
            Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps(report))

        monkeypatch.setattr(wheels, "_pip", pip)
        assert set(wheels._resolve(tmp_path)) == set(wheels.PACKED)
        found.append("new-one")
        with pytest.raises(wheels.PackFailed, match="new-one would be needed there"):
            wheels._resolve(tmp_path)
        found[:] = list(wheels.PACKED[1:])
        with pytest.raises(wheels.PackFailed, match=f"nothing needs {wheels.PACKED[0]}"):
            wheels._resolve(tmp_path)

    def test_more_than_may_travel_is_refused_and_the_old_folder_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def download(versions: dict[str, str], python: str, folder: Path) -> None:
            (folder / "large.whl").write_bytes(bytes(2000))

        monkeypatch.setattr(wheels, "FOLDER", tmp_path)
        monkeypatch.setattr(wheels, "_resolve", lambda _: {"large": "1"})
        monkeypatch.setattr(wheels, "_download", download)
        monkeypatch.setattr(wheels, "_take_extension", lambda *_: False)
        done = wheels.pack("3.12")
        assert done.num_bytes == 2000
        monkeypatch.setattr(wheels, "MOST_BYTES", 1000)
        with pytest.raises(wheels.PackFailed, match=r"0\.0 MB, and 0 may travel"):
            wheels.pack("3.12")
        assert json.loads((tmp_path / "3.12" / "pack.json").read_text())["num_bytes"] == 2000

    def test_without_wheels_for_this_python_the_command_that_fetches_them_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wheels, "FOLDER", tmp_path)
        with pytest.raises(wheels.PackFailed, match=r"quarter\.py pack --python 3\.\d+"):
            wheels.install()

    def test_a_damaged_folder_of_wheels_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wheels, "FOLDER", tmp_path)
        monkeypatch.setattr(wheels, "SITE", tmp_path / "site")
        folder = wheels.folder_for(f"{sys.version_info.major}.{sys.version_info.minor}")
        folder.mkdir()
        note = {"python": "3", "commit": "a", "native": False, "versions": {"a-b": "1", "uvicorn": "2"}, "num_bytes": 1}
        (folder / "A_b-1-py3-none-any.whl").touch()
        for text, message in {
            "": r"pack\.json is damaged",
            "{}": r"pack\.json is damaged",
            json.dumps(note): "lacks the wheels of uvicorn; where there is a network, run again",
        }.items():
            (folder / "pack.json").write_text(text)
            with pytest.raises(wheels.PackFailed, match=message):
                wheels.install()

    def test_what_a_killed_one_left_is_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wheels, "FOLDER", tmp_path)
        (tmp_path / ".pack-killed").mkdir()
        monkeypatch.setattr(wheels, "_resolve", lambda _: {})
        monkeypatch.setattr(wheels, "_download", lambda *_: None)
        monkeypatch.setattr(wheels, "_take_extension", lambda *_: False)
        wheels.pack("3.12")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "3.12"]
        tmp_path.joinpath("file").touch()
        monkeypatch.setattr(wheels, "FOLDER", tmp_path / "file")
        with pytest.raises(wheels.PackFailed, match=r"file/\.lock cannot be written"):
            wheels.pack("3.12")
