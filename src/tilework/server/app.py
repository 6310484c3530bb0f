"""The HTTP API: routes and their wiring. `images` holds what happens in a call for images."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random, SystemRandom
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

import tilework
from tilework.core.time import ns_from_s
from tilework.server.calls import check_model
from tilework.server.config import ServerConfig
from tilework.server.encode import Threads
from tilework.server.engine_protocol import Engine
from tilework.server.errors import ApiError, install_error_handlers, shown
from tilework.server.images import ImageService, require_ready
from tilework.server.metrics import Metrics
from tilework.server.middleware import CatchBugs, HeadAsGet, RequireKey
from tilework.server.schemas import EXAMPLE, ErrorResponse, ImageRequest, ImagesResponse
from tilework.store.memory import MemoryStore
from tilework.store.results import ResultStore


def create_app(
    engine: Engine, config: ServerConfig, *, store: ResultStore | None = None, rng: Random | None = None
) -> FastAPI:
    """Build the application. It neither starts nor stops the engine: see `main.serve`.

    `store` keeps results that are fetched by URL (default: in memory); `rng` chooses seeds for clients that send none.
    """
    if store is None:
        store = MemoryStore(max_bytes=config.result_bytes, ttl_ns=ns_from_s(config.result_ttl_s))
    metrics = Metrics(engine, store)
    threads = Threads(config.encode_threads)
    images = ImageService(
        engine=engine, config=config, store=store, metrics=metrics, threads=threads, rng=rng or SystemRandom()
    )
    app = FastAPI(title="Tilework", version=tilework.__version__, redirect_slashes=False, lifespan=_closing(threads))
    _add_image_routes(app, images)
    _add_model_routes(app, engine, created=int(time.time()))
    _add_probe_routes(app, engine, metrics)
    install_error_handlers(app)
    app.add_middleware(HeadAsGet)
    if config.api_keys:
        app.add_middleware(RequireKey, keys=config.api_keys)
    app.add_middleware(CatchBugs)  # The last one added is the outermost.
    return app


def _closing(threads: Threads) -> Any:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        threads.close()

    return lifespan


def _add_image_routes(app: FastAPI, images: ImageService) -> None:
    schema = {"schema": ImageRequest.model_json_schema(), "example": EXAMPLE}

    @app.post(
        "/v1/images/generations",
        tags=["images"],
        response_model=ImagesResponse,
        responses={status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 415, 429, 500, 503)},
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": schema}}},
    )
    async def generate_images(http: Request) -> Response:
        """Draw images, all or none of them. With n above 1, image i is drawn with seed + i."""
        return await images.generate(http)

    @app.get("/v1/images/{uid}/content", tags=["images"], response_class=Response)
    async def image_content(uid: str) -> Response:
        """The file of an image that was asked for with response_format "url"."""
        result = await images.store.get(uid, images.engine.now_ns())
        if result is None:
            message = f"There is no image {shown(uid)}; results are kept for {images.config.result_ttl_s:g} seconds."
            raise ApiError(404, message, param="uid", code="image_not_found")
        return Response(result.content, media_type=result.media_type)


def _add_model_routes(app: FastAPI, engine: Engine, created: int) -> None:
    @app.get("/v1/models", tags=["models"])
    async def list_models() -> JSONResponse:
        require_ready(engine)
        return JSONResponse({"object": "list", "data": [_model_card(engine, created)]})

    @app.get("/v1/models/{model_id:path}", tags=["models"])
    async def retrieve_model(model_id: str) -> JSONResponse:
        require_ready(engine)
        check_model(model_id, engine.info)
        return JSONResponse(_model_card(engine, created))


def _model_card(engine: Engine, created: int) -> dict[str, object]:
    info = engine.info
    limits = {
        "family": info.family,
        "parameters": info.parameters,
        "side_multiple": info.side_multiple,
        "max_side": info.max_side,
        "default_size": f"{info.default_width}x{info.default_height}",
        "default_steps": info.default_steps,
        "default_guidance_scale": info.default_guidance_scale,
        "policy": engine.policy,
    }
    return {"id": info.name, "object": "model", "created": created, "owned_by": "tilework", "tilework": limits}


def _add_probe_routes(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.get("/health", tags=["operations"])
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/ready", tags=["operations"], responses={503: {"model": ErrorResponse}})
    async def ready() -> JSONResponse:
        """At least one device is up and the server is not stopping."""
        require_ready(engine)
        state = engine.health()
        return JSONResponse({"status": "ready", "devices_up": state.num_devices_up, "devices": state.num_devices})

    @app.get("/metrics", tags=["operations"], response_class=Response)
    async def read_metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)
