"""A user's own code that checks prompts before they are drawn, and images before they are given out."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Protocol, cast

from PIL import Image as Pillow

from tilework.server.config import ConfigError


class SafetyFilter(Protocol):
    """A filter of a user. The server calls what `safety_filter` names once, at its start, to make one.

    Both methods are called on threads, several at a time, and return the reason for a refusal, or None. An exception
    fails the call: nothing that was not checked is given out.
    """

    def refuse_texts(self, texts: Mapping[str, str]) -> str | None:
        """Return why texts (by field: `prompt`, `negative_prompt`, `prompt_2`, ...) are refused; None if not."""

    def refuse_picture(self, picture: Pillow.Image) -> str | None:
        """Return why this image, or frame of a clip, is not to be given out; None if it is."""


def load_safety_filter(name: str | None) -> SafetyFilter | None:
    """Make the filter of MODULE:NAME.

    Raises:
        ConfigError: it cannot be imported, or makes none.
    """
    if name is None:
        return None
    wanted = "give MODULE:NAME of a class with refuse_texts and refuse_picture, whose folder is in PYTHONPATH"
    try:
        made = pkgutil.resolve_name(name)()
    except Exception as error:  # Any exception of a user's code.
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"safety_filter = {name!r} cannot be used ({reason}); {wanted}.") from error
    if not all(callable(getattr(made, method, None)) for method in ("refuse_texts", "refuse_picture")):
        raise ConfigError(f"safety_filter = {name!r} cannot be used; {wanted}.")
    return cast(SafetyFilter, made)
