"""Bodies that come compressed: they are read as others are, and the limits hold for what they become."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import FakeEngine, Served, serving
from tilework.server.bounded.json_reader import PIECE_BYTES
from tilework.server.http.content_coding import _MAX_MEMBERS, Inflated
from tilework.server.http.errors import ApiError

PATH = "/v1/images/generations"
CALL = json.dumps({"prompt": "x", "size": "16x16"}).encode()
JSON_TYPE = {"Content-Type": "application/json"}
BODY_BYTES = 256 << 10
gzipped = partial(gzip.compress, mtime=0)  # Without the time, which would stand in the names of tests.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    durable = str(tmp_path_factory.mktemp("coded") / "state")
    with serving(FakeEngine(), drain_s=0, max_body_bytes=BODY_BYTES, durable=durable) as served:
        yield served


def sent(server: Served, body: bytes, coding: str, **headers: str) -> httpx.Response:
    return server.http.post(PATH, content=body, headers=JSON_TYPE | {"Content-Encoding": coding} | headers)


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzipped(CALL)),
        ("GZip", gzipped(CALL)),
        ("x-gzip", gzipped(CALL)),
        ("deflate", zlib.compress(CALL)),
        ("gzip", gzipped(CALL[:9]) + gzipped(CALL[9:])),
        ("identity", CALL),
        ("identity, gzip", gzipped(CALL)),
        ("", CALL),
    ],
)
def test_a_compressed_call_is_a_call(server: Served, coding: str, body: bytes) -> None:
    assert sent(server, body, coding).status_code == 200


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "deflate, gzip", "gzip;q=1"])
def test_another_coding_is_refused_by_its_header(server: Served, coding: str) -> None:
    answer = sent(server, CALL, coding)
    status, code, message = error_of(answer)
    assert (status, code) == (415, "unsupported_content_encoding")
    assert message.startswith(f'Content-Encoding = "{coding}" is not accepted; ')
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    "body",
    [CALL, b"", gzipped(CALL)[:-4], gzipped(CALL)[:12], gzipped(CALL) + b"more", zlib.compress(CALL)],
    ids=["plain", "empty", "no sum", "cut off", "more behind it", "another coding"],
)
def test_what_is_not_compressed_so_is_refused(server: Served, body: bytes) -> None:
    status, code, message = error_of(sent(server, body, "gzip"))
    assert (status, code) == (400, "invalid_content_encoding")
    assert message.startswith("Content-Encoding is gzip, but the body ")


def test_the_limit_is_that_of_the_decompressed_body(server: Served) -> None:
    """JSON may have blanks, so a body of a few hundred bytes may be large."""
    room = BODY_BYTES - len(CALL)
    assert sent(server, gzipped(CALL + b" " * room), "gzip").status_code == 200
    status, code, message = error_of(sent(server, gzipped(CALL + b" " * (room + 1)), "gzip"))
    assert (status, code) == (413, "body_too_large")
    assert message == f"The body exceeds {BODY_BYTES} bytes decompressed; send a shorter one."


def test_a_bomb_is_decompressed_up_to_the_limit_and_no_further(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(Inflated):
        def piece(self) -> bytes:
            piece = super().piece()
            made.append(len(piece))
            return piece

    monkeypatch.setattr("tilework.server.http.content_coding.Inflated", Counted)
    bomb = gzipped(CALL + b" " * (64 << 20))
    assert len(bomb) < BODY_BYTES, "or its length refuses it"
    assert error_of(sent(server, bomb, "gzip"))[0] == 413
    assert max(made) <= PIECE_BYTES
    assert BODY_BYTES < sum(made) <= BODY_BYTES + PIECE_BYTES


def test_a_body_of_very_many_members_is_refused(server: Served) -> None:
    """Each of them takes a turn of the loop, and has no bytes that a limit would count."""
    most = gzipped(b"") * (_MAX_MEMBERS - 1)
    assert sent(server, most + gzipped(CALL), "gzip").status_code == 200
    status, code, message = error_of(sent(server, gzipped(b"") + most + gzipped(CALL), "gzip"))
    assert (status, code) == (400, "invalid_content_encoding")
    assert f"the body has more than {_MAX_MEMBERS} members" in message


def test_a_compressed_call_that_does_not_say_so_is_told_how_to(server: Served) -> None:
    status, _, message = error_of(sent(server, gzipped(CALL), "identity"))
    assert status == 400
    assert "it is compressed; say so by the header Content-Encoding: gzip" in message


def test_forms_and_files_of_calls_may_be_compressed(server: Served) -> None:
    line = {"custom_id": "a", "method": "POST", "url": PATH, "body": json.loads(CALL)}
    form = httpx.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": json.dumps(line).encode()})
    headers = {"Content-Type": form.headers["content-type"], "Content-Encoding": "gzip"}
    answer = server.http.post("/v1/files", content=gzipped(form.read()), headers=headers)
    assert (answer.status_code, answer.json()["bytes"]) == (200, len(json.dumps(line)))


@given(parts=st.lists(st.binary(max_size=50), min_size=1, max_size=5), cuts=st.lists(st.integers(0, 400)))
def test_it_does_not_matter_where_a_body_is_cut(parts: list[bytes], cuts: list[int]) -> None:
    """Nor how far it can be compressed."""
    whole = [part * 2000 for part in parts]
    body = b"".join(map(gzip.compress, whole))
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    coding, made = Inflated("gzip"), bytearray()
    for start, end in pairwise(places):
        coding.feed(body[start:end])
        while coding.has_more:
            made += coding.piece()
    coding.end()
    assert made == b"".join(whole)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_what_ends_too_early_is_noticed_wherever_it_does(pack: Callable[[bytes], bytes]) -> None:
    body = pack(CALL)
    for length in range(len(body)):
        coding = Inflated("gzip" if pack is gzip.compress else "deflate")
        coding.feed(body[:length])
        while coding.has_more:
            coding.piece()
        with pytest.raises(ApiError, match="ends before"):
            coding.end()
