"""The routes that draw images, and the files of images."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Path, Request
from fastapi.responses import Response

from tilework.server.api.bodies import EDITS
from tilework.server.api.chat import ChatService
from tilework.server.api.examples import CHUNKS, PICTURES, UID
from tilework.server.api.images import ImageService
from tilework.server.api.openapi import (
    CALL_HEADERS,
    CHAT_BODY,
    EDIT_BODY,
    IDEMPOTENCY_KEY,
    IMAGE_BODY,
    PREFER,
    RANGE,
    errors,
    files,
    good,
    header_docs,
    stream,
)
from tilework.server.api.request_routes import Frame
from tilework.server.api.requests import RequestService
from tilework.server.schema.answers import ChatCompletion, ImagesResponse, RequestStatus

ImageUid = Annotated[str, Path(description="an image", examples=[f"{UID}-0"])]


def add_image_routes(app: FastAPI, images: ImageService, requests: RequestService) -> None:
    done = good("The images", *CALL_HEADERS)
    done["content"] |= stream("", PICTURES, fields={"stream": True, "partial_images": 1})["content"]
    edited = good("The images", *CALL_HEADERS, example="edit")
    accepted = {
        **good("Accepted; the images come later", asked={"Prefer": "respond-async"}),
        "model": RequestStatus,
        "headers": header_docs("Location", "Preference-Applied", *CALL_HEADERS),
    }

    @app.post(
        "/v1/images/generations",
        tags=["images"],
        response_model=ImagesResponse,
        responses={
            200: done,
            202: accepted,
            **errors(400, 401, 404, 408, 409, 410, 413, 415, 422, 429, 504),
        },
        openapi_extra={**IMAGE_BODY, "parameters": [IDEMPOTENCY_KEY, PREFER]},
    )
    async def generate_images(http: Request) -> Response:
        """Draw images, all or none of them. With n above 1, image i is drawn with seed + i."""
        return await images.generate(http)

    @app.post(
        "/v1/images/edits",
        tags=["images"],
        response_model=ImagesResponse,
        responses={
            200: edited,
            202: {**accepted, **good("Accepted; the images come later"), "headers": accepted["headers"]},
            **errors(400, 401, 404, 408, 409, 410, 413, 415, 422, 429, 504),
        },
        openapi_extra={**EDIT_BODY, "parameters": [IDEMPOTENCY_KEY, PREFER]},
    )
    async def edit_images(http: Request) -> Response:
        """Draw images from given ones, for models that take images. The body may be a form."""
        return await images.generate(http, EDITS)

    @app.get(
        "/v1/images/{uid}/content",
        tags=["images"],
        response_class=Response,
        responses={200: files("The file"), 206: files("A part of it"), **errors(400, 401, 404, 409, 410, 416, 504)},
        openapi_extra={"parameters": [RANGE]},
    )
    async def image_content(uid: ImageUid, http: Request, frame: Frame = 0) -> Response:
        """Return the file of an image, or of one frame of a clip; `uid` is the image's own."""
        return await requests.content(uid, None, frame, http)


def add_chat_route(app: FastAPI, chat: ChatService) -> None:
    done = good("The images", *CALL_HEADERS)
    done["content"] |= stream("", CHUNKS, fields={"stream": True})["content"]

    @app.post(
        "/v1/chat/completions",
        tags=["images"],
        response_model=ChatCompletion,
        responses={
            200: done,
            **errors(400, 401, 404, 408, 409, 410, 413, 415, 422, 429, 504),
        },
        openapi_extra={**CHAT_BODY, "parameters": [IDEMPOTENCY_KEY]},
    )
    async def complete_chat(http: Request) -> Response:
        """Draw images as the answer in a chat, whole or as a stream."""
        return await chat.complete(http)
