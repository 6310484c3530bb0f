"""Requests of the pipelines that TridentServe evaluates on L20, by the names of their tables."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

from builders import request, shipped
from tilework.core.request import Request, Shape
from tilework.cost.shipped import shipped_path
from tilework.policy.placement.roles import Role

E, D, C = Role
TABLES = ("sd3medium_l20", "flux1_l20", "cogvideox15_l20", "hunyuanvideo_l20")


@cache
def notes(name: str) -> dict[str, Any]:
    """All that a shipped table says, also what is for people alone."""
    path = shipped_path(name)
    assert path is not None
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def of_size(name: str, size: str, uid: str = "a", **more: Any) -> Request:
    costs = shipped(name)
    asked = replace(request(uid, **more), pipeline=costs.rows[0].pipeline, shape=Shape.parse(size))
    return replace(asked, steps=costs.steps or 1)
