"""The loads that a worker was told to do and has not ended: block by block, while nothing else is to be done.

Loads do not go on between the steps of a work. On a CPU that gains nothing: the load takes the core from the work. On a
GPU see `loads_ahead`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field

from tilework.core.wire.commands import LoadWeights
from tilework.core.wire.reports import WeightsLoaded
from tilework.pipelines.errors import describe
from tilework.worker.memory import Budget
from tilework.worker.models.models import Models
from tilework.worker.synchronize import synchronize

_log = logging.getLogger(__name__)


class WeightsNotLoaded(Exception):
    """A worker cannot continue, since it cannot load what its next works need."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load that has not ended: what is `left` of it, what was `dropped` instead, and its time so far."""

    command: LoadWeights
    left: list[str]
    run_ns: int
    dropped: list[str] = field(default_factory=list)


class Loads:
    """Loads in the order in which they came, a block at a time; components that a work waits for go first.

    Memory suffices for each block: commands before the load made room for it, and works that are begun meanwhile were
    planned with all of it. So the device may begin copies beside works before a load's turn. `emit` gets the end of
    each load and its time. This includes copies beside works, because all of it has to be waited for. `ahead` returns
    loads that have not been added and may begin.
    """

    def __init__(
        self,
        models: Models,
        budget: Budget,
        emit: Callable[[WeightsLoaded], None],
        ahead: Callable[[], Sequence[LoadWeights]],
    ) -> None:
        self._models = models
        self._budget = budget
        self._emit = emit
        self._ahead = ahead
        self._loads: list[_Load] = []
        self._begun: dict[str, Generator[None, None, int]] = {}  # By component.
        self._drops_ns = 0  # To make room for the next load.

    def add(self, command: LoadWeights) -> None:
        self._loads.append(_Load(command, list(command.components), self._drops_ns))
        self._drops_ns = 0
        self._begin(command)

    def begin_ahead(self) -> None:
        """Begin loads that come after the running work, beside it; not with a memory limit, which would count them."""
        if not self._budget.is_limited:
            for command in self._ahead():
                self._begin(command)

    def _begin(self, command: LoadWeights) -> None:
        """Begin what the device can copy beside works, of a load that has been added or will be."""
        try:
            for digest in command.components:
                if digest not in self._begun:
                    self._models.begin_load(digest)
        except Exception as error:  # It will be loaded block by block, which frees memory, or ends the worker.
            _log.warning("a component cannot be loaded beside works: %s", describe(error))

    def drop(self, components: Collection[str]) -> None:
        """Free the memory of components on the device; what is still to be loaded of them never is."""
        start_ns = time.monotonic_ns()
        for load in tuple(self._loads):
            for digest in [one for one in load.left if one in components]:
                if begun := self._begun.pop(digest, None):
                    begun.close()
                load.dropped.append(digest)
                self._take(load, digest)
        self._models.drop(components)
        self._drops_ns += time.monotonic_ns() - start_ns

    def finish(self, wanted: Collection[str] | None = None, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Load all components that are wanted (None: all), and no more; end early if the work that waits is stopped.

        Raises:
            WeightsNotLoaded: as `load_block`.
        """
        while not is_stopped() and self.load_block(wanted):
            pass

    def load_block(self, wanted: Collection[str] | None = None) -> bool:
        """Load a block of the first component that is wanted (None: of any); return False if there is none.

        Raises:
            WeightsNotLoaded: it cannot be loaded, even with all memory that can be freed.
        """
        for load in self._loads:
            for digest in load.left:
                if wanted is None or digest in wanted:
                    start_ns = time.monotonic_ns()
                    beside_ns = self._advance(digest, load.command)
                    synchronize(self._models.device)
                    load.run_ns += time.monotonic_ns() - start_ns
                    if beside_ns is not None:
                        load.run_ns += beside_ns
                        self._take(load, digest)
                    return True
        return False

    def _advance(self, digest: str, command: LoadWeights) -> int | None:
        """Load a block; after the last one, return the time for which the component came beside works."""
        try:
            try:
                return self._next(digest, command)
            except Exception as error:
                if not self._budget.is_exceeded_by(error):
                    raise
                self._begun.pop(digest)
                self._budget.release()
                return self._next(digest, command)
        except Exception as error:
            _log.error("weights could not be loaded: %s", error, exc_info=not isinstance(error, OSError))
            raise WeightsNotLoaded(f"weights could not be loaded: {describe(error)}") from error

    def _next(self, digest: str, command: LoadWeights) -> int | None:
        blocks = self._begun.setdefault(digest, self._models.loading(digest, command.forgets))
        try:
            next(blocks)
        except StopIteration as end:
            del self._begun[digest]
            return int(end.value)
        return None

    def _take(self, load: _Load, digest: str) -> None:
        """Remove a component from a load, which may end it."""
        load.left.remove(digest)
        if not load.left:
            self._loads.remove(load)
            self._emit(WeightsLoaded(load.command.load_id, load.run_ns, tuple(load.dropped)))
