"""Which works have been seen not to fit into the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.core.work import StageId

FORGET_NS = 600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class _Form:
    """How a stage is run, as far as its memory is concerned."""

    stage: StageId
    degree: int
    sliced: bool


@dataclass(frozen=True, slots=True)
class _Mark:
    """Works of so many pixels or more did not fit; forgotten at `until_ns`."""

    pixels: int
    until_ns: int


@dataclass(slots=True)
class MemoryLimits:
    """Learnt from works that ran out of memory: larger ones of the same form, and on fewer devices, do not fit either.

    What else uses a device's memory comes and goes, so that a limit is forgotten after ten minutes, and at once when
    such a work is seen to fit. Another attempt costs one work.
    """

    _marks: dict[_Form, _Mark] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._marks)

    def starved(self, stage: StageId, shape: Shape, degree: int, sliced: bool, now_ns: int) -> bool:
        """A work ran out of memory; returns whether that is news."""
        if not self.fits(stage, shape, degree, sliced):
            return False
        self._marks[_Form(stage, degree, sliced)] = _Mark(shape.pixels, now_ns + FORGET_NS)
        return True

    def fitted(self, stage: StageId, shape: Shape, degree: int, sliced: bool) -> bool:
        """A work did fit; returns whether that is news."""
        wrong = [form for form in self._marks if _says(form, stage, degree, sliced) and self._is_less(form, shape)]
        for form in wrong:
            del self._marks[form]
        return bool(wrong)

    def fits(self, stage: StageId, shape: Shape, degree: int, sliced: bool = False) -> bool:
        """Whether nothing is known against it. `sliced` takes less than the whole at once."""
        return not any(_says(form, stage, degree, sliced) and self._is_less(form, shape) for form in self._marks)

    @property
    def forgets_ns(self) -> int | None:
        """When the oldest limit is forgotten."""
        return min((mark.until_ns for mark in self._marks.values()), default=None)

    def forget(self, now_ns: int) -> bool:
        """Let go what is too old; returns whether something was."""
        old = [form for form, mark in self._marks.items() if mark.until_ns <= now_ns]
        for form in old:
            del self._marks[form]
        return bool(old)

    def _is_less(self, form: _Form, shape: Shape) -> bool:
        return self._marks[form].pixels <= shape.pixels


def _says(form: _Form, stage: StageId, degree: int, sliced: bool) -> bool:
    """Whether what did not fit in one form tells of another: it takes as much or more."""
    return form.stage == stage and form.degree >= degree and form.sliced >= sliced
