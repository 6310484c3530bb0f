"""Learns which works do not fit into the memory of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.graph.stage import Stage
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S

FORGET_NS = 600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class _Form:
    """Properties that the memory of a work depends on: its stage, how it is run, and on how many pixels.

    `shared`: by several requests.

    The memory of several requests together is unrelated to that of one request of as many pixels.
    """

    stage: tuple[str, str, int]  # Pipeline, name, and the number of LoRAs: clients choose their scales.
    pixels: int
    degree: int
    sliced: bool
    shared: bool

    @staticmethod
    def of(stage: Stage, shapes: Sequence[Shape], degree: int, sliced: bool) -> _Form:
        key = stage.pipeline, stage.name, len(stage.loras)
        return _Form(key, sum(shape.pixels for shape in shapes), degree, sliced, len(shapes) > 1)

    def is_less(self, other: _Form) -> bool:
        """Return whether it takes no more memory than `other`: if this does not fit, `other` does not."""
        is_as_sliced = self.sliced or not other.sliced
        is_no_larger = self.pixels <= other.pixels and self.degree >= other.degree and is_as_sliced
        return (self.stage, self.shared) == (other.stage, other.shared) and is_no_larger


@dataclass(slots=True)
class MemoryLimits:
    """Limits learned from works that ran out of memory: larger works, or works on fewer devices, do not fit either.

    Other programs may free memory of a device, so a limit is forgotten after ten minutes, and at once when such a work
    fits. Another attempt costs one work.
    """

    _until_ns: dict[_Form, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._until_ns)

    def starved(self, stage: Stage, shapes: Sequence[Shape], degree: int, sliced: bool, now_ns: int) -> bool:
        """Learn that a work on outputs of these shapes ran out of memory; returns whether no limit excluded it before.

        The limit is kept even if it follows from another one, which may be forgotten sooner.
        """
        is_new = self.fits(stage, shapes, degree, sliced)
        self._until_ns[_Form.of(stage, shapes, degree, sliced)] = now_ns + FORGET_NS
        return is_new

    def fitted(self, stage: Stage, shapes: Sequence[Shape], degree: int, sliced: bool) -> bool:
        """Learn that a work has fitted; returns whether a limit is forgotten by that."""
        form = _Form.of(stage, shapes, degree, sliced)
        return self._drop([other for other in self._until_ns if other.is_less(form)])

    def fits(self, stage: Stage, shapes: Sequence[Shape], degree: int, sliced: bool = False) -> bool:
        """Return whether no limit excludes the work. A `sliced` work takes less memory."""
        form = _Form.of(stage, shapes, degree, sliced)
        return not any(other.is_less(form) for other in self._until_ns)

    def forget_pipeline(self, pipeline: str) -> None:
        """Drop the limits of the works of a pipeline."""
        self._drop([form for form in self._until_ns if form.stage[0] == pipeline])

    @property
    def forgets_ns(self) -> int | None:
        """Time at which the oldest limit is forgotten; None if there is none."""
        return min(self._until_ns.values(), default=None)

    def forget(self, now_ns: int) -> bool:
        """Forget the limits that are too old; returns whether there were any."""
        return self._drop([form for form, until_ns in self._until_ns.items() if until_ns <= now_ns])

    def _drop(self, forms: list[_Form]) -> bool:
        for form in forms:
            del self._until_ns[form]
        return bool(forms)
