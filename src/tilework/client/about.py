"""Reads what a server tells about itself before it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tilework.client.drive import open_client

TIMEOUT_S = 10.0


class ServerUnusable(Exception):
    """The server at the address cannot be measured; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server's description of itself: `models` as it lists them. The rest is known of Tilework servers only."""

    models: tuple[str, ...] = ()
    is_tilework: bool = False
    default_size: str | None = None
    default_steps: int | None = None
    num_devices: int | None = None
    policy: str | None = None


async def ask_server(base_url: str, api_key: str | None = None, model: str | None = None) -> ServerInfo:
    """Read `/v1/models` and, of a Tilework server, `/ready`. Defaults are those of `model`, or of the first model.

    Raises:
        ServerUnusable: nothing answers, or not to this key, or a Tilework server has no device up.
        ValueError: `base_url` is no address of a server.
    """
    async with open_client(base_url, api_key) as http:
        listed = await _get(http, "/v1/models")
        cards = [card for card in _list(listed.get("data")) if isinstance(card, dict) and card.get("id")]
        chosen = next((card for card in cards if card["id"] == model), cards[0] if cards else {})
        limits = chosen.get("tilework")
        if not isinstance(limits, dict):
            return ServerInfo(models=tuple(str(card["id"]) for card in cards))
        ready = await _get(http, "/ready")
    return ServerInfo(
        models=tuple(str(card["id"]) for card in cards),
        is_tilework=True,
        default_size=_default_size(limits),
        default_steps=limits.get("default_steps"),
        num_devices=ready.get("devices"),
        policy=limits.get("policy"),
    )


def _default_size(limits: Mapping[str, Any]) -> str | None:
    """Return the default size in the form that `mix.parse_size` reads; None if the server names none."""
    size, frames = limits.get("default_size"), limits.get("default_frames")
    return f"{size}x{frames}" if size and isinstance(frames, int) and frames > 1 else size


async def _get(http: httpx.AsyncClient, path: str) -> Mapping[str, Any]:
    """Return the JSON object at `path`; an empty one if the server has none."""
    url = f"{str(http.base_url).rstrip('/')}{path}"
    try:
        response = await http.get(path, timeout=TIMEOUT_S)
    except (httpx.HTTPError, OSError) as error:
        text = str(error) or type(error).__name__
        raise ServerUnusable(f"{url} does not answer ({text}); start a server there, or give its URL") from error
    if response.status_code in (401, 403):
        raise ServerUnusable(f"{url} answers {response.status_code}; give the key by --api-key or OPENAI_API_KEY")
    if response.status_code == 503:
        raise ServerUnusable(f"{url} answers 503, so the server is not ready; wait until it is")
    try:
        values = response.json() if response.status_code == 200 else {}
    except ValueError:
        values = {}
    return values if isinstance(values, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
