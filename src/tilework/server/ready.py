"""Whether the server takes requests now, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.server.engine_protocol import Engine
from tilework.server.http.errors import not_ready
from tilework.server.schema.answers import ReadyModel


@dataclass(slots=True)
class Readiness:
    """`has_started` becomes true when the models are loaded; before that the engine can answer nothing.

    `num_restored` images were taken over from the server's former start.
    """

    engine: Engine
    has_started: bool = True
    num_restored: int = 0

    def require_started(self) -> None:
        """Raises:
        ApiError: 503 while the models are being loaded.
        """
        if not self.has_started:
            raise not_ready("it is starting", extra={"status": "starting"})

    def require(self) -> None:
        """Raises:
        ApiError: 503 if no request would be taken now.
        """
        self.require_started()
        health = self.engine.health()
        seen = {"devices_up": health.num_devices_up, "devices": health.num_devices, "open_requests": health.num_jobs}
        if health.draining:
            extra = {"status": "stopping", **seen}
            raise not_ready("it is stopping", headers={"Connection": "close"}, extra=extra)
        if health.num_devices_up == 0:
            reason = f"none of its {health.num_devices} devices is up"
            raise not_ready(reason, extra={"status": "no_devices", **seen})

    def report(self) -> ReadyModel:
        """How the server stands, if it is ready. Raises as `require`."""
        self.require()
        health = self.engine.health()
        return ReadyModel(
            devices_up=health.num_devices_up,
            devices=health.num_devices,
            open_requests=health.num_jobs,
            restored_requests=self.num_restored,
        )
