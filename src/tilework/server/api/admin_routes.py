"""The routes that change what is served, for clients whose key has the scope admin (docs/serving.md)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from fastapi import FastAPI, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tilework.core.model import LORA_NAME, MODEL_NAME, LoraSource, ModelInfo, NewModel, is_lora_name
from tilework.runtime.executor import ModelRefused
from tilework.server.api.images import ImageService
from tilework.server.calls.parsing.image_call import parsed
from tilework.server.calls.readiness import Readiness
from tilework.server.calls.served_models import NameRefused
from tilework.server.config import ConfigError, ModelName
from tilework.server.default_slo import WANTED, DefaultSloField
from tilework.server.http.body import read_json
from tilework.server.http.body_limits import BodyLimits
from tilework.server.http.errors import ApiError, invalid
from tilework.server.http.middleware import tenant_of
from tilework.server.lora_directory import loras_in
from tilework.server.models_file import ModelEntry
from tilework.server.schema.answers import ModelCard
from tilework.server.text import shown

logger = logging.getLogger("tilework.server")
Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


class _AddModel(BaseModel):
    """The body of `POST /v1/admin/models`. Descriptions of fields are remedies in error messages."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    path: str = Field(min_length=1, description="a diffusers directory on the server, or a hub id")
    name: ModelName | None = Field(None, description=f"a name of {MODEL_NAME}, or nothing")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description='"float32", "bfloat16", "float16", or nothing for that of the first model'
    )
    loras: str | None = Field(None, min_length=1, description="a directory of LoRAs on the server, or nothing")
    aliases: list[ModelName] = Field([], description=f'a list of other names such as ["sd-xl"], each of {MODEL_NAME}')
    default_slo: DefaultSloField = Field(None, description=f"{WANTED}, or nothing")
    measure: bool = Field(False, description="true if its costs may be measured, beside the requests that are served")


def _checked_lora_name(name: str) -> str:
    if not is_lora_name(name):
        raise ValueError(name)
    return name


class _LoraBody(BaseModel):
    """The body of `POST /v1/admin/models/{model}/loras`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(_checked_lora_name)] = Field(description=f"a name of {LORA_NAME}")
    path: str = Field(min_length=1, description="a file on the server that ends with .safetensors")


def add_admin_routes(
    app: FastAPI, images: ImageService, readiness: Readiness, card: Callable[[ModelInfo], ModelCard]
) -> None:
    """Add the routes; `card` describes a model to clients."""
    _add_lora_routes(app, images, readiness, card)

    @app.post("/v1/admin/models", status_code=201, include_in_schema=False)
    async def add_model(http: Request) -> ModelCard:
        """Serve another model."""
        _check(http, readiness)
        ask = await _asked(http, images, _AddModel, "path", '"./sdxl"')
        try:
            loras = () if ask.loras is None else loras_in(Path(ask.loras))
        except ConfigError as error:
            raise invalid("loras", ask.loras, str(error)) from None
        new = NewModel(path=ask.path, name=ask.name or "", dtype=ask.dtype, loras=loras)
        info = await _unless_refused(
            images.engine.catalog.add(
                new, measure=ask.measure, check_name=lambda name: images.check_free(name, ask.aliases)
            )
        )
        # No await before this: the next change is checked against the names of this one.
        entry = ModelEntry(
            path=ask.path,
            aliases=tuple(ask.aliases),
            dtype=ask.dtype,
            default_slo=ask.default_slo,
            loras=ask.loras,
        )
        images.entries[info.name] = entry
        images.additions.add_model(info.name, entry, loras)
        _tell(http, f"the model {info.name} was added from {shown(ask.path, 400)}")
        return card(info)

    @app.delete("/v1/admin/models/{model_id:path}", include_in_schema=False)
    async def remove_model(model_id: str, http: Request) -> dict[str, object]:
        """Stop serving a model; stop trying to at each start if it could not be served again.

        A client that shortens the path of a LoRA at `..` sends the path of its model, so the name is asked for a second
        time.
        """
        _check(http, readiness)
        is_gone = (model_id, "") in images.additions.gone
        name = model_id if is_gone else images.models.named(model_id).name
        if (confirm := http.query_params.get("confirm", "")) != model_id:
            raise invalid("confirm", confirm, f"Add ?confirm={model_id} to remove the model with all its LoRAs.")
        default = images.models.default.name
        if not is_gone:
            await _unless_refused(images.engine.catalog.remove(name))
            images.entries.pop(name, None)
        images.additions.remove(name)
        _tell(http, f"the model {name} was removed")
        if images.models.default.name != default:
            _tell(http, f"{images.models.default.name} draws calls that name no model")
        return {"id": name, "object": "model", "deleted": True}


def _add_lora_routes(
    app: FastAPI, images: ImageService, readiness: Readiness, card: Callable[[ModelInfo], ModelCard]
) -> None:
    """Add the routes of LoRAs, before those of models, whose paths match these, too."""

    @app.post("/v1/admin/models/{model_id:path}/loras", status_code=201, include_in_schema=False)
    async def add_lora(model_id: str, http: Request) -> ModelCard:
        """Let requests for a model use another LoRA."""
        _check(http, readiness)
        ask = await _asked(http, images, _LoraBody, "name", '"ink"')
        info = images.models.named(model_id)
        lora = LoraSource(ask.name, ask.path)
        await _unless_refused(images.engine.catalog.add_lora(info.name, lora))
        images.additions.add_lora(info.name, lora)
        _tell(http, f"the LoRA {lora.name} of {info.name} was added from {shown(lora.path, 400)}")
        return card(images.models.named(info.name))

    @app.delete("/v1/admin/models/{model_id:path}/loras/{lora}", include_in_schema=False)
    async def remove_lora(model_id: str, lora: str, http: Request) -> ModelCard:
        """Stop letting requests for a model use a LoRA; stop trying to serve it at each start if that failed."""
        _check(http, readiness)
        info = images.models.named(model_id)
        if (info.name, lora) not in images.additions.gone:
            if lora not in info.loras:
                raise ApiError(404, f"{info.name} has no LoRA {lora!r}.", code="lora_not_found")
            await _unless_refused(images.engine.catalog.remove_lora(info.name, lora))
        images.additions.remove(info.name, lora)
        _tell(http, f"the LoRA {lora} of {info.name} was removed")
        return card(images.models.named(info.name))


def _tell(http: Request, text: str) -> None:
    """Log a change, and the tenant that made it."""
    logger.warning("%s, by tenant %s", text, tenant_of(http.scope).name)


def _check(http: Request, readiness: Readiness) -> None:
    readiness.require()
    if not tenant_of(http.scope).is_admin:
        raise ApiError(
            403,
            "This key may not change what is served. Send one with the scope admin: TILEWORK_ADMIN_KEY, or admin = "
            "true in the file of tenants.",
            code="permission_denied",
        )


async def _asked(http: Request, images: ImageService, model: type[Body], required: str, example: str) -> Body:
    """Read the body of a change."""
    config = images.config
    with images.bodies.room.place() as place:
        limits = BodyLimits(max_bytes=config.max_body_bytes, timeout_s=config.read_timeout_s, place=place)
        body = await read_json(http, limits)
    unknown = [name for name in body if name not in model.model_fields]
    if unknown:
        raise invalid(unknown[0], body[unknown[0]], f"Give {', '.join(model.model_fields)}.")
    return parsed(model, body, required, example)


async def _unless_refused(change: Awaitable[T]) -> T:
    try:
        return await change
    except NameRefused as error:
        raise invalid(error.field, error.name, error.remedy) from None
    except ModelRefused as error:
        raise ApiError(409, f"{error}.", code="model_refused") from None
