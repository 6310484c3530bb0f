"""A workflow of two pipelines: a picture is drawn, and moves. Videos of it are mp4 files, as of any model of clips.

Try it: save an image-to-video model beside this file as `wan`, and tilework serve examples/film.py:film
"""

from __future__ import annotations

import tilework


def motion(prompt: str) -> str:
    """What the second pipeline reads as its prompt."""
    return f"{prompt}, moving slowly"


film = tilework.Workflow(
    "film",
    tilework.Pipeline("shapes", name="still"),
    motion,
    tilework.Pipeline("./wan", image="picture", prompt="motion", returns="clip", settings={"steps": 8}),
)
