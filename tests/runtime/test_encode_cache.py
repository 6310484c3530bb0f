"""What was encoded before: under which key it is found, and what goes when there is no room."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

import tiny
from builders import request, table
from tilework.core.checkpoint import Checkpoint
from tilework.core.request import Request
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.spec import Image, Spec
from tilework.cost.table_costs import TableCosts
from tilework.runtime.encode_cache import EncodeCache

COSTS = TableCosts(table())
SIZE = 100


class Files:
    """Blobs by name; each copy has a name of its own."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.num = 0

    def write(self) -> StateBlob:
        self.num += 1
        self.names.add(f"{self.num}")
        return StateBlob(f"{self.num}", SIZE)

    def inherit(self, blobs: Collection[StateBlob]) -> set[StateBlob]:
        raise NotImplementedError

    def copy(self, blob: StateBlob) -> StateBlob | None:
        return self.write() if blob.name in self.names else None

    def discard(self, blob: StateBlob) -> None:
        self.names.discard(blob.name)


class Rig:
    def __init__(self, max_bytes: int = 10 * SIZE) -> None:
        self.files = Files()
        self.cache = EncodeCache(max_bytes, self.files)
        self.num_jobs = 0

    def encode(self, spec: Spec) -> StateBlob:
        """A request is encoded, and ends."""
        asked, blob = _asked(spec), self.files.write()
        self.num_jobs += 1
        states = Checkpoint((SavedState(0, 1, blob),))
        self.cache.note(self.num_jobs, asked, spec, 0, COSTS, lambda: states)
        self.cache.forget(self.num_jobs)
        self.files.discard(blob)
        return blob

    def finds(self, spec: Spec) -> bool:
        """Whether a new request begins behind its encode; its blobs are then discarded, as when it ends."""
        found = self.cache.find(_asked(spec), spec, COSTS)
        assert found.position == len(found.states)
        for blob in found.blobs:
            self.files.discard(blob)
        return bool(found.states)


def _asked(_spec: Spec) -> Request:
    return request("a")


def test_another_seed_finds_it_and_previews_do_not_matter() -> None:
    rig, spec = Rig(), tiny.spec()
    assert not rig.finds(spec)
    rig.encode(spec)
    assert rig.finds(replace(spec, seed=99, preview_every=2))
    assert rig.finds(spec), "it is found again"
    assert (rig.cache.usage.num_hits, rig.cache.usage.num_misses, rig.cache.usage.num_bytes) == (2, 1, SIZE)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a blue circle on a red background"},
        {"negative_prompt": "blurred"},
        {"height": 128},
        {"guidance_scale": 1.0},
        {"arguments": {"max_sequence_length": 12}},
        {"exact": True},
        {"pictures": {"image": (Image(height=1, width=1, pixels=b"abc"),)}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_else_differs_is_encoded_anew(change: dict[str, Any]) -> None:
    rig, spec = Rig(), tiny.spec()
    rig.encode(spec)
    assert not rig.finds(replace(spec, **change))


def test_pictures_count_by_their_pixels() -> None:
    rig = Rig()
    spec = tiny.spec(pictures={"image": (Image(height=1, width=1, pixels=b"abc"),)})
    rig.encode(spec)
    assert rig.finds(replace(spec, seed=1, pictures={"image": (Image(height=1, width=1, pixels=b"abc"),)}))
    assert not rig.finds(replace(spec, pictures={"image": (Image(height=1, width=1, pixels=b"abd"),)}))


def test_what_was_used_longest_ago_goes_first_and_no_file_is_left() -> None:
    rig = Rig(2 * SIZE)
    first, second, third = (tiny.spec(prompt=name) for name in ("one", "two", "three"))
    rig.encode(first)
    rig.encode(second)
    assert rig.finds(first)
    rig.encode(third)
    assert [rig.finds(spec) for spec in (first, second, third)] == [True, False, True]
    assert rig.cache.usage.num_bytes == 2 * SIZE == SIZE * len(rig.files.names)
    rig.cache.clear()
    assert not rig.files.names
    assert rig.cache.usage.num_bytes == 0


def test_what_does_not_fit_or_is_gone_is_not_kept() -> None:
    rig = Rig(SIZE - 1)
    rig.encode(tiny.spec())
    assert not rig.finds(tiny.spec())
    assert not rig.files.names
    rig = Rig()
    rig.encode(tiny.spec())
    rig.files.names.clear()
    assert not rig.finds(tiny.spec()), "its file was removed"


def test_without_room_for_any_it_does_nothing() -> None:
    rig = Rig(0)
    rig.encode(tiny.spec())
    assert not rig.finds(tiny.spec())
    assert rig.cache.usage.num_misses == 0


def test_what_a_lost_node_had_is_not_found() -> None:
    rig, spec = Rig(), tiny.spec()
    rig.encode(spec)
    (name,) = rig.files.names
    rig.cache.lose([StateBlob("another", SIZE)])
    assert rig.finds(spec)
    rig.cache.lose([StateBlob(name, SIZE)])
    assert not rig.finds(spec)
    assert rig.cache.usage.num_bytes == 0
