"""Cards that there are not, for tests of what is done with them."""

from __future__ import annotations

from tilework.pipelines.cuda.state import Card, CudaState

GB = 10**9


def card(free_gb: int = 79, total_gb: int = 80, capability: tuple[int, int] = (9, 0), problem: str = "") -> Card:
    return Card("a card", total_gb * GB, free_gb * GB, capability, problem)


def with_cards(*cards: Card) -> CudaState:
    """A machine with a CUDA build of torch, a driver, and these cards."""
    return CudaState(torch="2.11.0", built_for="13.0", driver="580.65", cards=cards)
