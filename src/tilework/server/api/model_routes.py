"""The routes that name the served models."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Path

from tilework.core.model import ModelInfo, PictureInput
from tilework.pipelines.support.record import limits_of
from tilework.server.api.openapi import errors, good
from tilework.server.calls.parsing.arguments import wanted
from tilework.server.calls.readiness import Readiness
from tilework.server.calls.served_models import ServedModels, public_source
from tilework.server.engine_protocol import Engine
from tilework.server.schema.answers import ModelCard, ModelList, ModelPath

ModelId = Annotated[str, Path(description="the name of the model", examples=["tiny-shapes"])]


def add_model_routes(app: FastAPI, readiness: Readiness, created: int, exact: bool) -> None:
    @app.get(
        "/v1/models",
        tags=["models"],
        response_model=ModelList,
        responses={
            200: good("The served models", "models"),
            **errors(401),
        },
    )
    async def list_models() -> ModelList:
        """What is served here: models, each with its limits and defaults. The first serves requests that name none."""
        readiness.require()
        engine = readiness.engine
        return ModelList(data=[_model_card(info, engine, created, exact) for info in engine.models.values()])

    @app.get(
        "/v1/models/{model_id:path}",
        tags=["models"],
        response_model=ModelCard,
        responses={200: good("The model", "model"), **errors(401, 404)},
    )
    async def retrieve_model(model_id: ModelId) -> ModelCard:
        """A served model, by its name."""
        readiness.require()
        engine = readiness.engine
        return _model_card(ServedModels(engine.models).named(model_id), engine, created, exact)

    @app.get(
        "/v1/model_info",
        tags=["models"],
        responses={200: good("Its hub id or name", "model path"), **errors(401)},
    )
    async def model_info() -> ModelPath:
        """The hub id of the first model, or its name if it came from a directory, for clients of SGLang."""
        readiness.require()
        return ModelPath(model_path=public_source(ServedModels(readiness.engine.models).default))


def _picture(one: PictureInput) -> dict[str, object]:
    return {
        "name": one.name,
        "required": one.required,
        "most": one.most,
        "is_mask": one.is_mask,
        "is_clip": one.is_clip,
    }


def _model_card(info: ModelInfo, engine: Engine, created: int, exact: bool) -> ModelCard:
    limits = {
        "family": info.family,
        "parameters": info.parameters,
        "side_multiple": info.side_multiple,
        "max_side": info.max_side,
        "default_size": f"{info.default_width}x{info.default_height}",
        "default_steps": info.default_steps,
        "step_ranges": info.step_ranges,
        "default_guidance_scale": info.default_guidance_scale,
        "dtype": info.dtype,
        "attention_backend": info.attention_backend,
        "exact": exact,
        "lacks": list(limits_of(info)),
        "arguments": [{"name": one.name, "value": wanted(one)} for one in info.arguments],
        "pictures": [_picture(one) for one in info.pictures],
        "default_frames": info.default_frames,
        "max_frames": info.max_frames,
        "frame_multiple": info.frame_multiple,
        "devices": engine.devices_with(info.name),
        "policy": engine.policy,
    }
    return ModelCard(id=info.name, created=created, tilework=limits)
