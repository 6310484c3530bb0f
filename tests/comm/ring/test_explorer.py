"""The protocol holds in all interleavings of small rings, and the explorer finds mistakes in it.

Larger rings are explored by `check.py`.
"""

from __future__ import annotations

import pytest

from comm.ring.cases import QUICK
from comm.ring.explorer import Explorer
from comm.ring.mutants import MISTAKES, Mistake
from comm.ring.programs import setting


@pytest.mark.parametrize("name", QUICK)
def test_no_interleaving_breaks_a_small_ring(name: str) -> None:
    Explorer(setting(**QUICK[name]), is_traced=True).run()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_in_the_protocol_is_found(mistake: Mistake) -> None:
    assert mistake.is_found()
