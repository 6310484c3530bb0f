"""Places for nodes: each belongs to one session at a time."""

from __future__ import annotations

from tilework.control.nodes.places import NodePlaces


def test_a_session_counts_until_its_node_is_lost() -> None:
    """Also when the next node has its place, and an equal session."""
    places, first, second = NodePlaces[list[int]](2), [1], [1]
    places.take(0, first)
    assert (places.free, places.is_current(0, first)) == (1, True)
    assert places.lose(0, first)
    assert not places.is_current(0, first)
    places.take(0, second)
    assert (places.is_current(0, first), places.is_current(0, second)) == (False, True)
    assert not places.lose(0, first), "it was lost before"
    assert places.there == {0: second}
    places.take(1, first)
    assert places.free is None
