"""State of CUDA on this machine, in plain data: it needs no torch, so that any process can have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device. Its index is its place among those that torch sees.

    `capability` is its compute capability. `attentions` are the types of numbers and the kernels of attention that it
    has for them. On a card with a `problem`, such as exclusive use by another program, no tensor can be made; `problem`
    is torch's message.
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    problem: str = ""
    attentions: tuple[tuple[str, str], ...] = ()

    @property
    def has_bfloat16(self) -> bool:
        """True if its units compute in bfloat16, from Ampere on; older ones emulate it slowly."""
        return self.capability >= (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaState:
    """The build of torch, the driver, and the cards.

    `built_for` is the version of CUDA that torch was built for; None: CPUs alone. Without cards, `problem` is torch's
    message. Without `has_nvml`, importing the libraries asks CUDA itself for devices, and processes that are forked
    from one that has done so cannot use any.
    """

    torch: str
    built_for: str | None
    driver: str
    cards: tuple[Card, ...] = ()
    problem: str = ""
    has_nvml: bool = True

    @property
    def build(self) -> str:
        """The build of torch, in words."""
        return f"torch {self.torch}, built for {f'CUDA {self.built_for}' if self.built_for else 'CPUs'}"

    @property
    def reason_against(self) -> str:
        """Reason why CUDA cannot be used, naming build and driver; empty if there are cards."""
        if self.built_for is None:
            return self.build
        return "" if self.cards else f"{self.build}, sees no card ({self.problem}); the driver: {self.driver}"

    @property
    def remedy(self) -> str:
        """Remedy if CUDA cannot be used."""
        if self.built_for is None:
            return "install a CUDA build of torch (pytorch.org), or serve on CPUs (--device cpu)"
        return (
            f"install a driver for CUDA {self.built_for} or newer; give a container its devices (docker run --gpus "
            "all); see whether CUDA_VISIBLE_DEVICES hides them; or serve on CPUs (--device cpu)"
        )

    @staticmethod
    def from_json(document: dict[str, Any]) -> CudaState:
        """Return the state with the fields of `document`, including those of its cards."""
        return CudaState(**{**document, "cards": tuple(map(_card, document["cards"]))})


def _card(document: dict[str, Any]) -> Card:
    attentions = tuple((dtype, name) for dtype, name in document["attentions"])
    return Card(**{**document, "capability": tuple(document["capability"]), "attentions": attentions})
