"""Messages leave in the order in which they were given, and the thread that gives them does not wait for long ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

from tilework.comm.sender import Sender
from waiting import PATIENCE_S


class Written:
    """What was written, and by which threads."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.threads: list[str] = []

    def __call__(self, message: str) -> None:
        self.messages.append(message)
        self.threads.append(threading.current_thread().name)


def unexpected(error: Exception) -> None:
    raise error


def held(message: str, until: Event) -> Callable[[], str]:
    """Makes a message when it may."""

    def make() -> str:
        assert until.wait(PATIENCE_S)
        return message

    return make


def test_a_message_goes_at_once_and_by_the_thread_that_sends_it() -> None:
    written = Written()
    sender = Sender(written, unexpected)
    sender.send("short")
    assert written.messages == ["short"]
    assert written.threads == [threading.current_thread().name]
    sender.finish()


def test_what_follows_a_message_in_the_making_waits_and_its_sender_does_not() -> None:
    written, may = Written(), Event()
    sender = Sender(written, unexpected)
    sender.send("first")
    sender.send_made(held("made", may))
    sender.send("behind")
    sender.send_made(held("made, too", may))
    sender.send("last")
    assert written.messages == ["first"]
    may.set()
    sender.finish()
    assert written.messages == ["first", "made", "behind", "made, too", "last"]
    assert set(written.threads[1:]) == {"sender"}


def test_when_none_waits_messages_go_at_once_again() -> None:
    written = Written()
    sender = Sender(written, unexpected)
    sender.send_made(lambda: "made")
    sender.finish()
    sender.send("short")
    assert written.messages == ["made", "short"]
    assert written.threads == ["sender", threading.current_thread().name]


def test_messages_are_made_where_the_thread_has_entered() -> None:
    entered = threading.local()

    @contextmanager
    def entering() -> Iterator[None]:
        entered.is_here = True
        yield

    written = Written()
    sender = Sender(written, unexpected, entering)
    sender.send_made(lambda: str(getattr(entered, "is_here", False)))
    sender.finish()
    assert written.messages == ["True"]


def test_what_a_message_was_made_of_is_let_go_though_none_follows() -> None:
    class Tensor:
        pass

    tensor, was_freed = Tensor(), Event()
    weakref.finalize(tensor, was_freed.set)
    sender = Sender[str](lambda message: None, unexpected)
    sender.send_made(lambda one=tensor: str(type(one)))  # type: ignore[misc]
    del tensor
    assert was_freed.wait(PATIENCE_S)
    sender.finish()


def test_a_thread_that_cannot_go_on_says_why() -> None:
    """Else its messages would wait for ever, and nobody would know."""
    written, errors = Written(), list[Exception]()

    @contextmanager
    def failing() -> Iterator[None]:
        raise RuntimeError("no stream")
        yield

    sender = Sender(written, errors.append, failing)
    sender.send_made(lambda: "made")
    sender.finish()
    assert [str(error) for error in errors] == ["no stream"]

    sender = Sender(written, errors.append)
    sender.send_made(lambda: str(1 // 0))
    sender.send_made(lambda: "behind")
    sender.finish()
    assert isinstance(errors[1], ZeroDivisionError)
    assert not written.messages
