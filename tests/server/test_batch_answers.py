"""Files of answers that are cut off anywhere: each answer is there once, and a start reads only what is not indexed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine, Plan, serving
from tilework.core.request import RefusalCode
from tilework.server.batches import lines as batch_lines
from tilework.server.batches.answers import INDEX, AnswerFile
from tilework.server.batches.lines import BatchLine, LinePosition, answer_line, read_calls
from waiting import eventually

URL = "/v1/images/generations"
BATCH = "batch-" + "a" * 32
RECORD_BYTES = 12


def answer(number: int, num_bytes: int = 2) -> bytes:
    body = json.dumps({"data": "x" * num_bytes}).encode()
    return answer_line(BATCH, BatchLine(number, f"call-{number}", {}), 200, "uid", body)


def opened(place: Path) -> AnswerFile:
    file = AnswerFile(place)
    file.begin()
    while file.read_on():
        pass
    return file


def written(place: Path, numbers: range, num_bytes: int = 2) -> None:
    place.touch()
    file = opened(place)
    for number in numbers:
        file.append(number, answer(number, num_bytes))


def test_an_answer_is_the_json_that_its_route_gave() -> None:
    line = BatchLine(7, 'call "7"\n', {})
    text = answer_line(BATCH, line, 400, "uid", b'{"error":\n {"message": "a\\nb \xc3\xa9"}}\n')
    assert text.count(b"\n") == 1
    assert json.loads(text) == {
        "id": f"{BATCH}-7",
        "custom_id": 'call "7"\n',
        "response": {"status_code": 400, "request_id": "uid", "body": {"error": {"message": "a\nb é"}}},
        "error": None,
    }


@pytest.mark.parametrize("index_cut", [0, 1, RECORD_BYTES, 20, 2 * RECORD_BYTES, 3 * RECORD_BYTES])
def test_each_answer_is_there_once_wherever_the_files_are_cut_off(index_cut: int, tmp_path: Path) -> None:
    """The numbers do not grow, as answers come in any order."""
    whole, place = [answer(number) for number in (4, 2, 9)], tmp_path / "output"
    place.touch()
    file = opened(place)
    for number, line in zip((4, 2, 9), whole, strict=True):
        file.append(number, line)
    index, content = file.index.read_bytes(), b"".join(whole)
    for cut in range(len(content) + 1):
        place.write_bytes(content[:cut])
        file.index.write_bytes(index[:index_cut])
        num_whole = content[:cut].count(b"\n")
        found = opened(place)
        assert found.numbers == set((4, 2, 9)[:num_whole])
        assert place.read_bytes() == b"".join(whole[:num_whole])
        found.append(5, answer(5))
        assert opened(place).numbers == {*found.numbers, 5}
        assert place.read_bytes() == b"".join([*whole[:num_whole], answer(5)])


def test_an_answer_that_the_index_does_not_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a kill between both."""
    place = tmp_path / "output"
    written(place, range(1, 4))
    with monkeypatch.context() as patched:
        patched.setattr(AnswerFile, "_write_records", lambda _file: None)
        killed = opened(place)
        killed.append(4, answer(4))
        killed.append(5, answer(5))
    assert opened(place).numbers == set(range(1, 6))
    assert (tmp_path / f"output{INDEX}").stat().st_size == 5 * RECORD_BYTES


def test_an_answer_is_not_taken_for_one_that_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the same length, whose record was not written: killed twice."""
    place = tmp_path / "output"
    written(place, range(1, 4))
    place.write_bytes(answer(1))
    with monkeypatch.context() as patched:
        killed = opened(place)
        patched.setattr(AnswerFile, "_write_records", lambda _file: None)
        killed.append(7, answer(7))
    assert opened(place).numbers == {1, 7}


def test_an_index_of_other_answers_is_not_believed(tmp_path: Path) -> None:
    place = tmp_path / "output"
    written(place, range(1, 4))
    place.write_bytes(b"".join(answer(number, 50) for number in range(7, 10)))
    assert opened(place).numbers == {7, 8, 9}


def test_what_a_full_disk_left_of_an_answer_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "output"
    written(place, range(1, 3))
    file = opened(place)
    with monkeypatch.context() as patched:
        patched.setattr("tilework.server.batches.answers._write_all", torn)
        with pytest.raises(OSError, match="full"):
            file.append(3, answer(3, 500))
    assert place.stat().st_size > file.end
    file.append(4, answer(4))
    assert place.read_bytes() == answer(1) + answer(2) + answer(4)
    assert opened(place).numbers == {1, 2, 4}


def torn(file: Any, content: bytes) -> None:
    file.write(content[:300])
    raise OSError(28, "full")


def test_answers_are_read_in_pieces_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines may be longer than pieces."""
    monkeypatch.setattr("tilework.server.batches.answers._PIECE_BYTES", 100)
    place = tmp_path / "output"
    content = b"".join(answer(number, 37 * number % 400) for number in range(1, 200))
    place.write_bytes(content)
    file = AnswerFile(place)
    file.begin()
    num_pieces = 1
    while file.read_on():
        num_pieces += 1
    assert num_pieces == len(content) // 100 + 1
    assert file.numbers == set(range(1, 200))
    again = AnswerFile(place)
    again.begin()
    assert not again.read_on()
    assert again.numbers == file.numbers


def test_calls_are_read_in_pieces_and_those_with_answers_are_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "_AT_ONCE_BYTES", 300)
    place, parsed = tmp_path / "calls", list[int]()
    note_parsed(parsed, monkeypatch)
    place.write_bytes(b"\n\n" + b"".join(call(number) for number in range(1, 100)))
    found, num_pieces = list[BatchLine](), 0
    position: LinePosition | None = LinePosition()
    while position is not None:
        assert position.offset == len(b"".join(place.read_bytes().splitlines(keepends=True)[: position.number]))
        calls, position = read_calls(place, URL, position, {3, 5}, {101})
        found, num_pieces = found + calls, num_pieces + 1
    wanted = [number for number in range(3, 102) if number not in (3, 5, 101)]
    assert parsed == wanted
    assert [(one.number, one.custom_id) for one in found] == [(one, f"call-{one - 2}") for one in wanted]
    assert num_pieces > 10


def note_parsed(parsed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the numbers of lines that are parsed into a list."""
    parse = batch_lines._line

    def noted(number: int, text: bytes, endpoint: str) -> object:
        parsed.append(number)
        return parse(number, text, endpoint)

    monkeypatch.setattr(batch_lines, "_line", noted)


def call(number: int) -> bytes:
    body = {"prompt": "x", "seed": number}
    return json.dumps({"custom_id": f"call-{number}", "method": "POST", "url": URL, "body": body}).encode() + b"\n"


@pytest.mark.parametrize("has_index", [True, False])
def test_a_restart_reads_each_byte_once_and_makes_only_what_is_missing(
    has_index: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 lines, of which 1,990 are answered: work grows with the bytes, not with their square."""
    most, answered = 2000, 1990
    batch_id = left_over(tmp_path, most, answered, has_index=has_index)
    pieces, parsed = list[int](), list[int]()
    read_on = AnswerFile.read_on

    def reading(file: AnswerFile) -> bool:
        begin = file._at
        try:
            return read_on(file)
        finally:
            pieces.append(file._at - begin)

    monkeypatch.setattr(AnswerFile, "read_on", reading)
    note_parsed(parsed, monkeypatch)
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        eventually(lambda: server.http.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
        batch = server.http.get(f"/v1/batches/{batch_id}").json()
        assert batch["request_counts"] == {"total": most, "completed": most, "failed": 0}
        content = server.http.get(f"/v1/files/{batch['output_file_id']}/content").content
    num_bytes = sum(len(answer(number, 500)) for number in range(1, answered + 1))
    assert sum(pieces) == (0 if has_index else num_bytes)
    assert sorted(parsed) == list(range(answered + 1, most + 1))
    assert sorted(json.loads(one)["custom_id"] for one in content.splitlines()) == sorted(
        f"call-{number}" for number in range(1, most + 1)
    )
    assert not list(tmp_path.glob(f"batches/*/*{INDEX}")), "a batch that has ended needs none"


@pytest.mark.slow
def test_a_batch_of_50000_lines_and_a_gigabyte_of_answers_goes_on(tmp_path: Path) -> None:
    """Memory stays flat, and the event loop has next to nothing to do: no probe waits."""
    most, answered = 50_000, 49_900
    batch_id = left_over(tmp_path, most, answered, has_index=False, num_bytes=21_000)
    assert sum(one.stat().st_size for one in tmp_path.glob("batches/*/output-*")) > 10**9
    Path("/proc/self/clear_refs").write_text("5")  # The peak of memory begins anew.
    before = peak_bytes()
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        eventually(lambda: server.http.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"] >= answered)
        loop_s = server.on_loop(time.thread_time)
        eventually(lambda: server.http.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
        batch = server.http.get(f"/v1/batches/{batch_id}").json()
    assert batch["request_counts"] == {"total": most, "completed": most, "failed": 0}
    assert loop_s < 10, "the start of the server, and its answers to those who wait here"
    assert peak_bytes() - before < 100 << 20
    with next(tmp_path.glob(f"batches/*/{batch['output_file_id']}")).open("rb") as file:
        heads = [line[:64].partition(b",")[0] for line in file]
    assert len(heads) == len(set(heads)) == most


def peak_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) << 10


def left_over(directory: Path, most: int, answered: int, *, has_index: bool, num_bytes: int = 500) -> str:
    """A batch of which most calls have answers, as a server that was killed leaves it; its id."""
    full = FakeEngine(plan=Plan(code=RefusalCode.QUEUE, retry_ns=10**12))
    with serving(full, durable=str(directory), drain_s=0) as server:
        files = {"file": ("calls.jsonl", b"".join(map(call, range(1, most + 1))))}
        upload: dict[str, Any] = {"files": files, "data": {"purpose": "batch"}, "timeout": 60}
        file_id = server.http.post("/v1/files", **upload).json()["id"]
        made = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
        batch = server.http.post("/v1/batches", json=made, timeout=60).json()
    place = next(directory.glob(f"batches/*/{batch['output_file_id']}"))
    with place.open("wb") as file:
        file.writelines(answer(number, num_bytes) for number in range(1, answered + 1))
    if has_index:
        opened(place)
    return str(batch["id"])
