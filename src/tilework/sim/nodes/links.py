"""Which simulated accelerators are connected with the others of their node, so that they can run in groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from tilework.core.events import LinksChanged


class SimLinks:
    """All are, but for a while after `cut`. `after` calls later, unless the server has been restarted by then."""

    def __init__(
        self, after: Callable[[int, Callable[[], None]], None], on_event: Callable[[LinksChanged], object]
    ) -> None:
        self._after, self._on_event = after, on_event
        self._cuts: Counter[int] = Counter()  # By device: how many have not ended.

    def cut(self, devices: Iterable[int], length_ns: int) -> None:
        """Let each of these devices be alone for this time."""
        cut = tuple(devices)
        self._cuts.update(cut)
        self._tell()
        self._after(length_ns, lambda: self._mend(cut))

    def restart(self) -> None:
        """Begin as the next server, for which all are connected."""
        self._cuts.clear()

    def _mend(self, cut: Iterable[int]) -> None:
        self._cuts -= Counter(cut)
        self._tell()

    def _tell(self) -> None:
        self._on_event(LinksChanged(tuple(sorted(self._cuts)), bool(self._cuts)))
