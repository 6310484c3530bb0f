"""The readiness of the server to take calls, or the reason why it takes none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilework.core.time import s_from_ns
from tilework.runtime.engine import Engine
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.observer import Observer
from tilework.server.calls.errors import NotReady, not_ready
from tilework.server.schema.answers import ReadyModel, Unready
from tilework.store.disk import Disk
from tilework.store.results import Backlog


@dataclass(slots=True)
class Readiness(Observer):
    """The readiness of a server. It has no `engine` until models are loaded and earlier calls are taken over.

    `num_restored` images were restored from the server's previous run. `stop_waits_for` says what a stop waits for,
    once one has begun. Without the `disk` of a durable server no call would be safe. A `backlog` of results does not
    make the server unready: images that are in answers can be drawn.
    """

    start: EngineStart
    engine: Engine | None = None
    num_restored: int = 0
    stop_waits_for: Callable[[], str] | None = None
    disk: Disk | None = None
    backlog: Callable[[], Backlog] = Backlog

    @property
    def unready(self) -> Unready | None:
        """Reason why no call would be taken now; None if one would."""
        if self.engine is None:
            return Unready.STARTING
        if self.engine.draining:
            return Unready.STOPPING
        if self.engine.status.health().num_devices_up == 0:
            return Unready.NO_DEVICES
        return Unready.DISK_UNWRITABLE if self.disk is not None and self.disk.problem else None

    def require(self) -> None:
        """Check that a call would be taken now.

        Raises:
            NotReady: none would.
        """
        if (unready := self.unready) is not None:
            raise self.error(unready)

    def error(self, unready: Unready) -> NotReady:
        """Return the error for a call."""
        if self.engine is None:
            return not_ready(f"it is starting: {self.start.starting}", details={"status": Unready.STARTING})
        health = self.engine.status.health()
        seen = {"devices_up": health.num_devices_up, "devices": health.num_devices, "open_requests": health.num_jobs}
        details = {"status": unready, **seen}
        match unready:
            case Unready.STOPPING:
                what = "" if self.stop_waits_for is None else f": {self.stop_waits_for()}"
                return not_ready(f"it is stopping{what}", is_stopping=True, details=details)
            case Unready.NO_DEVICES:
                return not_ready(f"none of its {health.num_devices} devices is up", details=details)
            case _:
                problem = "" if self.disk is None else f" ({self.disk.problem})"
                return not_ready(f"its disk cannot be written{problem}", code=unready, details=details)

    def on_log_lost(self) -> None:
        """Suspect the disk: the event log of a durable server is on it, unless another place was given for the log."""
        if self.disk is not None:
            self.disk.suspect()

    def report(self) -> ReadyModel:
        """Return the devices, requests and results of the server, if it is ready. Raises as `require`."""
        self.require()
        assert self.engine is not None
        health = self.engine.status.health()
        backlog = self.backlog()
        return ReadyModel(
            devices_up=health.num_devices_up,
            devices=health.num_devices,
            open_requests=health.num_jobs,
            restored_requests=self.num_restored,
            waiting_results=backlog.num_results,
            unwritten_s=s_from_ns(backlog.unwritten_ns),
        )
