"""A user's own code that looks at prompts before they are drawn, and at pictures before anyone sees them."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Protocol, cast

from PIL import Image as Pillow

from tilework.server.config import ConfigError


class SafetyFilter(Protocol):
    """What `safety_filter` names makes one of these when it is called, once, at the start of the server.

    Both methods are called on threads, several at a time, and answer with the reason for a refusal, or None. What they
    raise fails the call: nothing that was not looked at is given out.
    """

    def refuse_texts(self, texts: Mapping[str, str]) -> str | None:
        """Why these texts are not to be drawn, by field: `prompt`, `negative_prompt`, `prompt_2`, ..."""

    def refuse_picture(self, picture: Pillow.Image) -> str | None:
        """Why this picture, or frame of a clip, is not to be given out."""


def load_safety_filter(name: str | None) -> SafetyFilter | None:
    """The filter that MODULE:NAME makes.

    Raises:
        ConfigError: it cannot be imported, or makes none.
    """
    if name is None:
        return None
    wanted = "give MODULE:NAME of a class with refuse_texts and refuse_picture, whose folder is in PYTHONPATH"
    try:
        made = pkgutil.resolve_name(name)()
    except Exception as error:  # What code of a user raises.
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"safety_filter = {name!r} cannot be used ({reason}); {wanted}.") from error
    if not all(callable(getattr(made, method, None)) for method in ("refuse_texts", "refuse_picture")):
        raise ConfigError(f"safety_filter = {name!r} cannot be used; {wanted}.")
    return cast(SafetyFilter, made)
