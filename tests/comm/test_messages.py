"""Messages over a socket: any objects, in any fragments, with pixels that are not copied on their way."""

from __future__ import annotations

import copy
import pickle
import socket
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.comm.messages import MessageReader, encode_message, receive_messages, send_message
from tilework.core.wire.reports import Preview
from tilework.core.wire.spec import Image

LONG = 300_000


def picture(num_bytes: int, seed: int = 0) -> Image:
    return Image(height=1, width=num_bytes, pixels=bytes([seed]) * num_bytes)


contents = st.one_of(
    st.binary(max_size=300), st.sampled_from((0, 1, 70_000, LONG)).map(picture), st.lists(st.just(picture(70_000)))
)


@given(st.lists(contents, max_size=5), st.lists(st.integers(1, 80_000), min_size=1, max_size=5))
def test_messages_are_put_together_from_any_fragments(messages: list[object], cuts: list[int]) -> None:
    sent = memoryview(b"".join(piece for message in messages for piece in encode_message(message)))
    reader, received, index = MessageReader(), list[object](), 0
    while sent:
        room = reader.room()
        size = min(cuts[index % len(cuts)], len(room), len(sent))
        room[:size] = sent[:size]
        received += reader.received(size)
        sent, index = sent[size:], index + 1
    assert received == messages


def test_both_ends_of_a_socket() -> None:
    """More than a socket holds; the receiver gets it while the sender still sends, and then sees the end."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)  # So a call sends a part of a long message, as one that a signal interrupts.
    messages = [b"short", {1: picture(LONG, 1), 2: picture(5 * LONG, 2)}, picture(0), b"x" * LONG]

    def send() -> None:
        with theirs:
            for message in messages:
                send_message(theirs, message)

    thread = Thread(target=send)
    thread.start()
    with ours:
        assert list(receive_messages(ours)) == messages
    thread.join()


def test_a_message_whose_sender_ended_in_the_middle_is_not_received() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            send_message(theirs, b"whole")
            (piece,) = encode_message(b"cut off")
            theirs.sendall(piece[:-1])
        assert list(receive_messages(ours)) == [b"whole"]


def test_pixels_are_not_copied_on_their_way() -> None:
    """What was sent are the picture's own bytes, and what was received is where the socket wrote it."""
    sent = picture(LONG)
    head, pixels = encode_message(Preview(1, 1, 1, sent))
    assert isinstance(pixels, memoryview)
    assert pixels.obj is sent.pixels
    reader = MessageReader()
    reader.room()[: len(head)] = head
    assert reader.received(len(head)) == []
    room = reader.room()
    room[:] = pixels
    (preview,) = reader.received(LONG)
    room[:1] = b"!"
    assert bytes(preview.image.pixels[:1]) == b"!"


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_picture_is_pickled_in_one_piece_by_others(protocol: int) -> None:
    sent = picture(10)
    again = pickle.loads(pickle.dumps(sent, protocol=protocol))
    assert (again, copy.deepcopy(again)) == (sent, sent)
    assert type(again.pixels) is bytes
