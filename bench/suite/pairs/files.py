"""Files that options name: cost tables, models, tenants, settings, a filter, LoRAs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import dedent

from suite.simulated_devices import with_files, write_table
from tilework.core.cost_row import CostRow
from tilework.cost.table import CostTable, merged

STILL, CLIP = "still", "clip"
"""Pipelines of the cost table: one for images, one for videos."""
FRAMES = 9
TENANT_KEY = "sk-studio"

_TEXTS = {
    "settings.toml": """
        drain_s = 20
        max_images = 4
        """,
    "tenants.toml": f"""
        [tenants.studio]
        keys = ["{TENANT_KEY}"]
        weight = 2.0
        admin = true

        [classes.audit]
        exact = true
        """,
    "models.toml": """
        [models.shapes]
        path = "shapes"
        aliases = ["figures"]
        default_slo = "3x"

        [models.shapes-motion]
        path = "shapes-motion"
        """,
    "pools.toml": """
        [models.shapes]
        path = "shapes"
        devices = [0]
        previews = false
        """,
    "filters.py": '''
        """Refuses nothing."""


        class Filter:
            def refuse_texts(self, texts):
                return None

            def refuse_picture(self, picture):
                return None
        ''',
}


def write_files(folder: Path) -> None:
    """All of them, into a new folder. The root of the repository and `tests` are to be on the path."""
    import tilework
    from live.test_workflows import costs_of
    from loras import save_lora  # With diffusers and PEFT, which the commands that are started load themselves.

    folder.mkdir()
    for name, text in _TEXTS.items():
        (folder / name).write_text(dedent(text).lstrip(), encoding="utf-8")
    clip = with_files(_table(CLIP, FRAMES), seconds=0.02)
    write_table(folder / "costs.json", merged([_table(STILL, 1), clip]))
    write_table(folder / "models.json", merged([costs_of("shapes"), costs_of("shapes-motion", FRAMES)]))
    save_lora(tilework.reference("shapes"), folder / "loras" / "ink.safetensors", seed=3)


def _table(pipeline: str, frames: int) -> CostTable:
    """What simulated devices take: a hundredth of a second for a step."""
    first = CostRow(pipeline=pipeline, stage="diffuse", height=64, width=64, frames=frames, seconds=0.01)
    rows = tuple(
        replace(first, stage=stage, height=side, width=side, degree=degree, seconds=0.01 / degree)
        for stage, degrees in (("diffuse", (1, 2)), ("decode", (1,)))
        for side in (64, 128)
        for degree in degrees
    )
    return CostTable(hardware="simulated devices of this bench", rows=rows, steps=4)
