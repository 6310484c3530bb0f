"""The bodies of calls for images: JSON or a form on each route, as fields of an image and given pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import Request

from tilework.core.graph.stage import ResultKind
from tilework.core.model import ModelInfo
from tilework.server.calls.encode import Threads
from tilework.server.calls.idempotency import Key, idempotency_key
from tilework.server.calls.parsing.chat_call import chat_fields
from tilework.server.calls.parsing.fields import Fields, most_text_bytes, spread
from tilework.server.calls.parsing.form import form_fields, untyped_fields
from tilework.server.calls.parsing.image_call import StreamOf
from tilework.server.calls.parsing.pictures import (
    NO_PICTURES,
    GivenPicture,
    Pictures,
    decoded,
    main_picture,
    most_base64_bytes,
    reject_edits,
    takes,
)
from tilework.server.calls.parsing.video_call import video_fields
from tilework.server.calls.served_models import ServedModels
from tilework.server.config import ServerConfig
from tilework.server.http.body import read_json
from tilework.server.http.body_limits import (
    FORM,
    JSON,
    TEXT_FORM,
    BodyLimits,
    BodyPlace,
    BodyRoom,
    LongTexts,
    media_type,
)
from tilework.server.http.body_limits import wrong_media_type as wrong_type
from tilework.server.http.form import read_form
from tilework.server.tenants import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The form of a route's body: JSON, or also a form if the route `takes_forms`.

    `fields` gets a body's fields, whose texts may have the given number of characters. A route that `is_edit` needs a
    picture. The body of a chat, which `has_history`, may hold pictures that were drawn before. `suits` tells which
    models can serve the route.
    """

    fields: Callable[[Mapping[str, object], int], Fields]
    is_edit: bool = False
    takes_forms: bool = False
    has_history: bool = False
    suits: Callable[[ModelInfo], bool] = lambda _: True

    def model(self, fields: Mapping[str, object], models: ServedModels) -> ModelInfo:
        """Return the model that a body names. If it names none, return the first model that suits the route, takes the
        body's pictures and needs no others; if there is none, the first that suits the route.

        Raises:
            UnknownModel: it names one that is not served.
        """

        def takes_all(info: ModelInfo) -> bool:
            return self.suits(info) and takes(fields, info, is_edit=self.is_edit)

        return models.named(fields.get("model"), takes_all, self.suits)

    @property
    def stream_of(self) -> StreamOf:
        return "image_edit" if self.is_edit else "image_generation"


def _as_they_are(body: Mapping[str, object], _max_prompt_chars: int) -> Fields:
    return Fields(fields=spread(body))


IMAGES = Route(fields=_as_they_are)
EDITS = Route(fields=_as_they_are, is_edit=True, takes_forms=True, suits=lambda info: main_picture(info) is not None)
CHATS = Route(fields=chat_fields, has_history=True)
VIDEOS = Route(fields=video_fields, takes_forms=True, suits=lambda info: info.graph.makes(ResultKind.VIDEO))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    """Reads bodies. Large ones are accepted only in chats, or if a model takes pictures; they share `room`."""

    config: ServerConfig
    threads: Threads
    room: BodyRoom = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "room", BodyRoom(self.config.input_bytes, self.config.max_body_bytes))

    async def read(self, http: Request, route: Route, models: ServedModels, place: BodyPlace) -> Mapping[str, object]:
        """Return the fields of a body, with pictures as texts or files.

        Raises:
            ApiError: it cannot be read.
            UnknownModel: a form names a model that is not served.
            InvalidValue: a form gives a field that cannot be in one; or nothing can be edited here.
        """
        if route.is_edit and not models.takes_pictures:
            reject_edits(models.default)  # Before the pictures are read.
        is_form = route.takes_forms and media_type(http) in (FORM, TEXT_FORM)
        is_large = models.takes_pictures or (route.has_history and not is_form)
        limits = BodyLimits(
            max_bytes=self.config.max_input_bytes if is_large else self.config.max_body_bytes,
            timeout_s=self.config.read_timeout_s,
            place=place,
            texts=self._long_texts(models) if is_large else None,
        )
        if not route.takes_forms:
            return await read_json(http, limits)
        if is_form:
            form = await read_form(http, limits)
            return form_fields(form, route.model(untyped_fields(form), models))
        if media_type(http) != JSON:
            raise wrong_type(http, f'a form with "Content-Type: {FORM}", or JSON with "Content-Type: {JSON}"')
        return await read_json(http, limits)

    def _long_texts(self, models: ServedModels) -> LongTexts:
        """Return the limits of long texts. Pictures of a chat are not kept if no model takes any."""
        most_prompt_bytes = most_text_bytes(self.config.max_prompt_chars)
        most_picture_bytes = most_base64_bytes(self.config.max_picture_bytes) if models.takes_pictures else 0
        return LongTexts(
            max_rest_bytes=min(self.config.max_body_bytes, self.config.max_input_bytes),
            kept_bytes=max(most_prompt_bytes, most_picture_bytes),
        )

    async def key(self, http: Request, tenant: Tenant, body: Mapping[str, object], place: BodyPlace) -> Key | None:
        """Return the idempotency key of a body; None if the call has none. With large files it is made on a thread."""
        given = http.headers.get("idempotency-key"), tenant.name, http.scope["path"], body
        if given[0] is None or not place.num_beyond:
            return idempotency_key(*given)
        return await self.threads.run(idempotency_key, *given)

    async def decoded(self, given: Sequence[GivenPicture]) -> Pictures:
        """Decode given pictures on a thread. Raises InvalidValue."""
        if not given:
            return NO_PICTURES
        return await self.threads.run(decoded, given, self.config, keeps_files=self.config.durable is not None)
