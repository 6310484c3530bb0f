"""Framed TCP: what is damaged, cut off, too long or of another session is refused; files are whole or not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from tilework.comm.net.channel import Channel
from tilework.comm.net.codec import Codec
from tilework.comm.net.files import FetchFailed, FileServer, checked_name, fetch_file
from tilework.comm.net.frames import BadFrame, frame, read_frame
from tilework.comm.net.handshake import Refused, admit, join
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import Command, Execute, GroupRef, ImportState
from tilework.core.wire.node_blobs import Origin
from tilework.core.wire.reports import Ended, Report
from tilework.core.wire.spec import Image, Spec

TOKEN, DIGEST, EPOCH = b"known to both", b"d" * 32, 7
SPEC = Spec(
    prompt="a circle",
    height=8,
    width=8,
    steps=2,
    guidance_scale=4.0,
    seed=1,
    arguments={"sigmas": (1.0, 0.5)},
    pictures={"image": (Image(1, 1, b"\0\1\2"),)},
)


def read(data: bytes, epoch: int = EPOCH, most_bytes: int = 100) -> bytes | None:
    async def run() -> bytes | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader, epoch, most_bytes)

    return asyncio.run(run())


def framed(payload: bytes = b"payload", epoch: int = EPOCH) -> bytes:
    return b"".join(frame(payload, epoch))


@pytest.mark.parametrize("payload", [b"", b"payload", bytes(100)])
def test_a_frame_comes_as_it_was_sent(payload: bytes) -> None:
    assert read(framed(payload)) == payload


def test_an_end_between_frames_is_none() -> None:
    assert read(b"") is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (framed()[:3], "ended after 3 of 20 bytes"),
        (framed()[:-1], "ended after 6 of 7 bytes"),
        (framed()[:-1] + b"x", "checksum"),
        (framed()[:8] + b"\0\0\0\x08" + framed()[12:], "checksum"),
        (framed(epoch=8), "of epoch 8, and this connection of epoch 7"),
        (framed(bytes(101)), "101 bytes is longer than the 100"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", "the other end is no node"),
    ],
)
def test_what_cannot_be_trusted_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadFrame, match=why):
        read(data)


def codec() -> Codec:
    return Codec(tuple(dict.fromkeys((*get_args(Command), *get_args(Report)))))


@pytest.mark.parametrize(
    "message",
    [
        Execute(1, "m", "s", ((3, 0),), 4, {3: SPEC}, GroupRef(2, (0, 1))),
        ImportState(3, "m", SPEC, 2, (SavedState(0, 1, StateBlob("a", 9)),), known=True),
        Ended(1, 5, 9, 4, blobs={3: StateBlob("a", 9)}, images={3: Image(1, 1, b"abc")}, for_any_seed=frozenset((3,))),
    ],
)
def test_messages_come_as_they_were_sent(message: object) -> None:
    assert codec().decode(codec().encode(message, 5)) == (5, message)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0\0\0\0\xff\xff\x80",
        codec().encode(Ended(1, 5, 9, 4))[:-1],
        codec().encode(Ended(1, 5, 9, 4))[:6] + b"\x81\xa7work_id\xa3one",
        codec().encode(Ended(1, 5, 9, 4))[:6] + b"cos\nsystem\n",
    ],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(BadFrame, match="cannot be read"):
        codec().decode(payload)


def test_codecs_of_other_messages_have_another_digest() -> None:
    """Also if only a field of a field differs."""

    @dataclass
    class Inner:
        value: Any

    first, second = ([dataclass(type("Outer", (), {"__annotations__": {"inner": kind}}))] for kind in (Inner, Spec))
    assert Codec(first).digest != Codec(second).digest
    assert codec().digest == codec().digest


@asynccontextmanager
async def connected(server_token: bytes = TOKEN, server_digest: bytes = DIGEST) -> AsyncIterator[Any]:
    """The streams of a client, and the future of what the server makes of its greeting."""
    admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            admitted.set_result(await admit(reader, writer, server_token, server_digest, EPOCH))
        except ConnectionError as error:
            admitted.set_exception(error)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer, admitted
    finally:
        writer.close()
        server.close()


def test_a_greeting_tells_the_epoch() -> None:
    async def run() -> None:
        async with connected() as (reader, writer, admitted):
            assert await join(reader, writer, TOKEN, DIGEST) == EPOCH
            await admitted

    asyncio.run(run())


@pytest.mark.parametrize(
    ("token", "digest", "why"), [(b"guessed", DIGEST, "another token"), (TOKEN, b"e" * 32, "same version")]
)
def test_who_does_not_belong_is_not_admitted_and_told_why(token: bytes, digest: bytes, why: str) -> None:
    async def run() -> None:
        async with connected() as (reader, writer, admitted):
            with pytest.raises(Refused, match=why):
                await join(reader, writer, token, digest)
            with pytest.raises(Refused, match=why):
                await admitted

    asyncio.run(run())


def test_a_server_without_the_token_is_not_trusted() -> None:
    """It repeats what it was sent, since it knows nothing better."""

    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.writelines(frame(bytes(16), 0))
            answer = await read_frame(reader, 0)
            assert answer is not None
            writer.writelines(frame(answer[16:48] + b"\0\0\0\7", 0))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with pytest.raises(Refused, match="another token"):
            await join(reader, writer, TOKEN, DIGEST)
        writer.close()
        server.close()

    asyncio.run(run())


def fetch(tmp_path: Path, name: str, *, epoch: int = EPOCH, token: bytes = TOKEN, size: int = 3 << 20) -> bytes:
    """Fetch a file that is there under the name "blob"."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (there / "blob").write_bytes(bytes(range(256)) * (size // 256) + b"end")
    (tmp_path / "secret").write_text("not for others")

    async def run() -> None:
        files = FileServer(there, TOKEN, EPOCH)
        await files.start("127.0.0.1")
        try:
            await fetch_file(Origin("127.0.0.1", files.port, epoch), token, name, here / "blob", 5.0)
        finally:
            files.close()

    try:
        asyncio.run(run())
    except FetchFailed:
        assert list(here.iterdir()) == [], "nothing is left of a file that did not come"
        raise
    assert [one.name for one in here.iterdir()] == ["blob"]
    return (here / "blob").read_bytes()


@pytest.mark.parametrize("size", [0, 3 << 20])
def test_a_file_comes_as_it_is(tmp_path: Path, size: int) -> None:
    assert fetch(tmp_path, "blob", size=size) == (tmp_path / "there" / "blob").read_bytes()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": "gone"}, "has no such file"),
        ({"name": "../secret"}, "is not the name of a blob"),
        ({"name": "blob", "epoch": 6}, "is in epoch 7, and the file was there in epoch 6"),
        ({"name": "blob", "token": b"guessed"}, "another token"),
    ],
)
def test_a_file_that_cannot_be_had_is_named(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(FetchFailed, match=why):
        fetch(tmp_path, **options)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "/etc/passwd", "a\0"])
def test_a_server_opens_nothing_outside_its_directory(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a blob"):
        checked_name(name)


@pytest.mark.parametrize(("silent", "why"), [(True, "within 0.05 s"), (False, "before the end of the file")])
def test_a_fetch_that_breaks_off_leaves_nothing(tmp_path: Path, silent: bool, why: str) -> None:
    """The node says nothing more in the middle of the file, or closes."""

    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from tilework.comm.net.files import _DIGEST

            await admit(reader, writer, TOKEN, _DIGEST, EPOCH)
            await read_frame(reader, EPOCH)
            writer.writelines([*frame((10).to_bytes(8, "big"), EPOCH), *frame(b"half", EPOCH)])
            if silent:
                await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(FetchFailed, match=why):
            await fetch_file(Origin("127.0.0.1", port, EPOCH), TOKEN, "blob", tmp_path / "blob", 0.05 if silent else 5)
        server.close()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_a_channel_carries_messages_both_ways() -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = Channel(reader, writer, codec(), EPOCH)
            async for address, message in channel.messages():
                channel.send(message, address + 1)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        channel = Channel(reader, writer, codec(), EPOCH)
        channel.send(Ended(1, 5, 9, 4), 3)
        channel.send(Ended(2, 5, 9, 4), 5)
        messages = channel.messages()
        assert [await anext(messages), await anext(messages)] == [(4, Ended(1, 5, 9, 4)), (6, Ended(2, 5, 9, 4))]
        channel.close()
        server.close()

    asyncio.run(run())
