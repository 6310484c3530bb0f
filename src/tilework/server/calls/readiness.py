"""Whether the server takes calls now, and if not, why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilework.server.calls.errors import not_ready
from tilework.server.engine_protocol import Engine
from tilework.server.schema.answers import ReadyModel


@dataclass(slots=True)
class Readiness:
    """`has_started` becomes true when the models are loaded; before that the engine can answer nothing.

    `num_restored` images were restored from the server's previous run. `stop_waits_for` says what a stop waits for,
    once one has begun.
    """

    engine: Engine
    has_started: bool = True
    num_restored: int = 0
    stop_waits_for: Callable[[], str] | None = None

    def require_started(self) -> None:
        """Raises:
        NotReady: the models are being loaded.
        """
        if not self.has_started:
            raise not_ready(f"it is starting: {self.engine.starting}", details={"status": "starting"})

    def require(self) -> None:
        """Raises:
        NotReady: no call would be taken now.
        """
        self.require_started()
        health = self.engine.health()
        seen = {"devices_up": health.num_devices_up, "devices": health.num_devices, "open_requests": health.num_jobs}
        if health.draining:
            what = "" if self.stop_waits_for is None else f": {self.stop_waits_for()}"
            raise not_ready(f"it is stopping{what}", is_stopping=True, details={"status": "stopping", **seen})
        if health.num_devices_up == 0:
            reason = f"none of its {health.num_devices} devices is up"
            raise not_ready(reason, details={"status": "no_devices", **seen})

    def report(self) -> ReadyModel:
        """What the server has, if it is ready. Raises as `require`."""
        self.require()
        health = self.engine.health()
        return ReadyModel(
            devices_up=health.num_devices_up,
            devices=health.num_devices,
            open_requests=health.num_jobs,
            restored_requests=self.num_restored,
        )
