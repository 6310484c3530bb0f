"""The routes for orchestrators and monitoring."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from tilework.server.api.openapi import errors, good, text
from tilework.server.calls.readiness import Readiness
from tilework.server.metrics.metrics import Metrics
from tilework.server.schema.answers import Alive, ReadyModel


def add_probe_routes(app: FastAPI, readiness: Readiness, metrics: Metrics) -> None:
    @app.get("/health", tags=["operations"], responses={200: good("Alive", "alive"), **errors()})
    async def health() -> Alive:
        """The process is alive, also while it loads its models."""
        return Alive()

    @app.get(
        "/ready",
        tags=["operations"],
        responses={
            200: good("Ready", "ready"),
            **errors(),
        },
    )
    async def ready() -> ReadyModel:
        """The models are loaded, at least one device is up, and the server is not stopping."""
        return readiness.report()

    @app.get(
        "/metrics",
        tags=["operations"],
        response_class=Response,
        responses={
            200: text("Metrics", "text/plain", 'tilework_requests_total{class="standard",outcome="done"} 12.0\n'),
            **errors(401),
        },
    )
    async def read_metrics() -> Response:
        """Metrics in Prometheus' text format."""
        readiness.require_started()
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)
