"""Which nodes have which blobs, and what is gone with a node."""

from __future__ import annotations

from tilework.control.nodes.blob_places import BlobPlaces
from tilework.core.wire.blobs import StateBlob

A, B, C = (StateBlob(name, 1) for name in "abc")


def places() -> BlobPlaces:
    """Node 0 wrote A and B, node 1 wrote C."""
    found = BlobPlaces()
    for blob, node in ((A, 0), (B, 0), (C, 1)):
        found.add(blob, node)
    return found


def test_a_node_lacks_what_it_neither_has_nor_gets() -> None:
    found = places()
    assert found.lacking([A, B, C], 1) == {0: [A, B]}
    assert found.lacking([A, C], 2) == {0: [A], 1: [C]}
    found.fetch(A, 1)
    assert found.lacking([A, B], 1) == {0: [B]}
    found.not_fetched(A, 1)
    assert found.lacking([A], 1) == {0: [A]}
    assert found.fetched(A, 1)
    assert found.lacking([A], 1) == {}


def test_what_only_a_lost_node_had_is_gone() -> None:
    found = places()
    found.fetch(A, 1)
    found.fetched(A, 1)
    assert found.lose(0) == [B]
    assert (found.nodes(A), found.nodes(B)) == ({1}, set())


def test_a_blob_that_was_discarded_on_its_way_is_not_kept() -> None:
    found = places()
    found.fetch(A, 1)
    assert found.discard(A) == {0}
    assert not found.fetched(A, 1)
    assert found.nodes(A) == set()


def test_a_node_that_is_lost_gets_nothing_any_more() -> None:
    found = places()
    found.fetch(A, 1)
    found.lose(1)
    assert found.lacking([A], 1) == {0: [A]}, "another node has its place"
