"""The routes that name the served models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

from fastapi import FastAPI, Path

from tilework.core.graph.stage import ResultKind
from tilework.core.model import ModelInfo, PictureInput
from tilework.pipelines.support.record import limits_of
from tilework.server.api.images import ImageService
from tilework.server.api.openapi import errors, good
from tilework.server.calls.parsing.arguments import wanted
from tilework.server.calls.readiness import Readiness
from tilework.server.calls.served_models import public_source
from tilework.server.schema.answers import ModelCard, ModelList, ModelPath, NotServedModel

ModelId = Annotated[str, Path(description="the name of the model", examples=["shapes"])]


def add_model_routes(
    app: FastAPI, images: ImageService, readiness: Readiness, created: int
) -> Callable[[ModelInfo], ModelCard]:
    """Add the routes; return the function that describes a model to clients."""

    def card(info: ModelInfo) -> ModelCard:
        return _model_card(info, images, created, images.models.called(info.name))

    @app.get(
        "/v1/models",
        tags=["models"],
        response_model=ModelList,
        responses={
            200: good("The served models"),
            **errors(401),
        },
    )
    async def list_models() -> ModelList:
        """List the served models, each with its limits and defaults; the first serves requests that name none.
        `not_served` has the models of the start that cannot run here, and why.
        """
        readiness.require()
        models = images.models
        named = [(info, name) for info in models.infos.values() for name in models.listed(info.name)]
        return ModelList(
            data=[_model_card(info, images, created, name) for info, name in named],
            not_served=[NotServedModel(id=name, reason=reason) for name, reason in models.listed_not_served],
        )

    @app.get(
        "/v1/models/{model_id:path}",
        tags=["models"],
        response_model=ModelCard,
        responses={200: good("The model"), **errors(401, 404, 503)},
    )
    async def retrieve_model(model_id: ModelId) -> ModelCard:
        """Return a served model, by its name."""
        readiness.require()
        return card(images.models.named(model_id))

    @app.get(
        "/v1/model_info",
        tags=["models"],
        responses={200: good("Its hub id or name"), **errors(401)},
    )
    async def model_info() -> ModelPath:
        """Return the hub id of the first model, or its name if it came from a directory, for clients of SGLang."""
        readiness.require()
        models = images.models
        first, *_ = models.listed(models.default.name)
        default = models.default
        return ModelPath(model_path=first if first != default.name else public_source(default))

    return card


def _picture(one: PictureInput) -> dict[str, object]:
    return {
        "name": one.name,
        "required": one.required,
        "most": one.most,
        "is_mask": one.is_mask,
        "is_clip": one.is_clip,
    }


def _model_card(info: ModelInfo, images: ImageService, created: int, name: str) -> ModelCard:
    """Describe a model to clients, under `name`."""
    slo = images.models.default_slo(info.name) or images.config.usual_slo
    limits = {
        "model": info.name,
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
        "vae_tiling": info.vae_tiling,
        "exact": images.config.exact,
        "caches": list(info.caches),
        "cache_settings": {kind: asdict(kind.setting) for kind in info.caches},
        "lacks": list(limits_of(info)),
        "words": {kind: list(words) for kind, words in info.words} or None,
        "arguments": [{"name": one.name, "value": wanted(one)} for one in info.arguments],
        "pictures": [_picture(one) for one in info.pictures],
        "default_frames": info.default_frames,
        "max_frames": info.max_frames,
        "frame_multiple": info.frame_multiple,
        "default_fps": info.default_fps or None,
        "makes_videos": info.graph.makes(ResultKind.VIDEO),
        "loras": list(info.loras),
        "aliases": images.models.aliases(info.name),
        "default_slo": None if slo is None else str(slo),
        "devices": images.engine.status.devices_with(info.name),
        "cell": info.cell,
        "serves_on": images.engine.status.devices_serving(info.name),
        "predicted_sizes": list(map(str, images.engine.status.predicted_sizes(info.name))),
        "on_host": images.engine.status.is_on_host(info.name),
        "policy": images.engine.policy,
    }
    return ModelCard(id=name, created=created, tilework=limits)
