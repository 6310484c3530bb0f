"""The published protocol: the paper's cases, what they do to messages, and what they leave out."""

from __future__ import annotations

import pytest

from comm.ring.published import PublishedRing

CASES = {
    1: ("L(X) TL L(Y) GH(Y) WB(Y) WL(Y) UH(Y) U(Y)", ["Y"], ["Y"]),
    2: ("L(X) GH(X) TL L(Y) GH(Y) WB(Y) WL(Y) UH(Y) U(Y) WB(X) WL(X)", ["X"], [""]),
    3: ("L(X) GH(X) TL L(Y) GH(Y) WB(Y) WB(X) WL(Y) UH(Y) U(Y) WL(X)", ["X"], [""]),
    4: ("L(X) GH(X) TL L(Y) GH(Y) WB(Y) WB(X) WL(X) WL(Y) UH(X) U(X)", ["X"], ["X"]),
    5: ("L(X) GH(X) TL L(Y) GH(Y) WB(X) WB(Y) WL(Y) WL(X) UH(Y) U(Y)", ["Y"], ["Y"]),
    6: ("L(X) GH(X) TL L(Y) GH(Y) WB(X) WB(Y) WL(X) WL(Y) UH(X) U(X)", ["Y"], [""]),
    7: ("L(X) GH(X) WB(X) WL(X) TL L(Y) GH(Y) UH(Y) WB(Y) WL(Y) U(Y)", ["X", "Y"], ["X", "Y"]),
    8: ("L(X) GH(X) WB(X) WL(X) UH(X) TL L(Y) GH(Y) WB(Y) WL(Y) UH(Y) U(Y)", ["X", "Y"], ["X", "Y"]),
}
"""By the paper's number: the actions; whose bytes the consumer gets if both messages have one length, and if not."""


@pytest.mark.parametrize("case", CASES)
def test_the_consumer_goes_on_in_the_cases_of_the_paper(case: int) -> None:
    actions, equal, different = CASES[case]
    for lengths, expected in (({"X": 2, "Y": 2}, equal), ({"X": 3, "Y": 2}, different)):
        ring = PublishedRing(lengths)
        ring.run(actions)
        assert ring.read() == expected


@pytest.mark.parametrize("case", [2, 3, 6])
def test_in_these_cases_a_message_that_was_sent_is_replaced_by_another_or_lost(case: int) -> None:
    """The paper counts them as live. The sender whose WL succeeded takes its message for sent."""
    for lengths in ({"X": 2, "Y": 2}, {"X": 3, "Y": 2}):
        ring = PublishedRing(lengths)
        ring.run(CASES[case][0])
        assert ring.read() != ring.written


def test_a_late_unlock_frees_the_lock_of_another() -> None:
    ring = PublishedRing({"X": 2, "Y": 2})
    ring.run("L(X) GH(X) WB(X) WL(X) TL L(Y) GH(Y) UH(X) U(X)")
    assert ring.lock == ""


def test_a_late_size_is_never_read() -> None:
    """Theorem 2 fails: the busy bit does not say of which lap it is."""
    ring = PublishedRing({"X": 2, "Y": 2})
    ring.run("L(X) GH(X) TL L(Y) GH(Y) WB(Y) WL(Y) UH(Y) U(Y)")
    assert ring.read() == ["Y"]
    ring.run("WB(X) WL(X)")
    assert ring.written == ["Y", "X"]
    assert ring.read() == []


def test_one_late_write_damages_two_messages() -> None:
    """Not "at most one subsequent entry"."""
    ring = PublishedRing({"X": 3, "Y": 1, "Z": 1})
    ring.run("L(X) GH(X) TL L(Y) GH(Y) WB(Y) WL(Y) UH(Y) U(Y) L(Z) GH(Z) WB(Z) WL(Z) UH(Z) U(Z) WB(X) WL(X)")
    assert ring.read() == ["", ""]
