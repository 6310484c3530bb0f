"""What an agent knows of the files of its models; whole weights are read once for all processes of a user."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tilework.core.model import ModelSource
from tilework.core.wire.content import ModelContent, first_difference
from tilework.ownership.cache import cache_directory
from tilework.pipelines.content import digests
from tilework.pipelines.model_index import shipped_directory
from tilework.worker.models import whole_digests
from tilework.worker.models.contents import NodeContents

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@dataclass(slots=True)
class Reads:
    """The files that were read whole."""

    names: list[str] = field(default_factory=list)

    def digest(self, path: Path, is_stopped: Callable[[], bool]) -> str:
        self.names.append(path.parent.name)
        return digests.whole_digest(path, is_stopped)


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """With a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = Reads()
    monkeypatch.setattr(whole_digests, "whole_digest", found.digest)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(shipped_directory(), tmp_path / "shapes", copy_function=shutil.copyfile)
    return tmp_path / "shapes"


def content(model: Path, *, whole: bool = False) -> ModelContent:
    """What an agent that begins knows of the model, or after it has read all of it."""
    contents = NodeContents()
    contents.add([ModelSource(path=str(model), name="mine")])
    if whole:
        contents.read_whole()
    contents.close()
    return contents.models["mine"]


def known(found: ModelContent) -> set[str]:
    return {Path(name).parent.name for name, one in found.items() if one.whole}


ALL = {"text_encoder", "text_encoder_2", "transformer", "vae"}


def test_whole_weights_are_read_once(reads: Reads, model: Path) -> None:
    first = content(model)
    assert not known(first)
    assert first_difference(first, content(model, whole=True), "node 0") is None, "what is not known is no difference"
    assert sorted(reads.names) == sorted(ALL)
    again = content(model)
    assert known(again) == ALL
    assert content(model, whole=True) == again
    assert len(reads.names) == len(ALL)


def test_a_file_that_has_changed_is_read_again(reads: Reads, model: Path) -> None:
    before = content(model, whole=True)
    first = int.from_bytes((model / WEIGHTS).read_bytes()[:8], "little") + 8
    status = (model / WEIGHTS).stat()
    with (model / WEIGHTS).open("r+b") as file:
        file.seek(first)
        file.write(b"\x55\x55")
    os.utime(model / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))  # Not even that hides it.
    assert known(content(model)) == ALL - {"transformer"}
    reads.names.clear()
    after = content(model, whole=True)
    assert reads.names == ["transformer"]
    assert first_difference(after, before, "node 0") is not None


def test_what_is_kept_and_damaged_is_as_none(reads: Reads, model: Path) -> None:
    before = content(model, whole=True)
    kept = sorted((cache_directory() / "contents").iterdir())
    assert len(kept) == len(ALL)
    texts = kept[0].read_text(), kept[1].read_text()
    kept[0].write_text("")
    kept[1].write_text(("1" if texts[1][0] == "0" else "0") + texts[1][1:])
    kept[2].write_bytes(b"\xff" * 50)
    kept[3].write_text(texts[0])  # Of another file.
    assert not known(content(model))
    assert content(model, whole=True) == before
    assert known(content(model)) == ALL


def test_what_is_kept_is_the_users_alone_and_bounded(
    reads: Reads, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_digests, "_MOST", 3)
    content(model, whole=True)
    folder = cache_directory() / "contents"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kept = list(folder.iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600] * 3
    assert len(known(content(model))) == 3


def test_a_cache_that_others_may_write_to_is_not_used(
    reads: Reads, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cache_directory() / "contents"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert known(content(model, whole=True)) == ALL
    assert not list(folder.iterdir())
    assert not known(content(model))
    assert "weights are read anew at each start" in caplog.text


def test_a_file_that_changes_while_the_node_serves_is_not_compared(reads: Reads, model: Path) -> None:
    """Workers have loaded it as it was."""
    contents = NodeContents()
    contents.add([ModelSource(path=str(model), name="mine")])
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:-1] + b"1")
    assert contents.read_whole()
    assert known(contents.models["mine"]) == ALL - {"transformer"}
    contents.close()


def test_a_reader_that_is_closed_reads_no_more(reads: Reads, model: Path) -> None:
    contents = NodeContents()
    contents.add([ModelSource(path=str(model), name="mine")])
    contents.close()
    assert not contents.read_whole()
    assert not known(contents.models["mine"])


def test_models_whose_files_are_elsewhere_or_lacking_have_none(tmp_path: Path) -> None:
    """Of one of the hub the revision says what it is; that another cannot be loaded, what loads it says."""
    contents = NodeContents()
    contents.add([ModelSource(path="some/model"), ModelSource(path=str(tmp_path / "gone"), name="gone")])
    assert contents.models == {"some/model": {}, "gone": {}}
    contents.remove("gone")
    assert contents.models == {"some/model": {}}
