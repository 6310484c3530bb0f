"""Collections are rare inside, and as before outside."""

from __future__ import annotations

import gc

from tilework.core.garbage import rare_collections


def test_what_is_there_is_left_alone_until_the_end() -> None:
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() > num_frozen + 1000
        assert gc.get_threshold()[0] > before[0]
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
