"""The smallest cell in which models fit: as brute force has it, and what is said where there is none."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.core.component import MOST_IN_CELL, WeightBlocks
from tilework.core.wire.reports import ModelSize
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.models.cell_choice import smallest_cell

GB = 10**9


def model(name: str = "m", max_degree: int = MOST_IN_CELL, **components: WeightBlocks) -> ModelSize:
    """Its text encoder is needed by one stage; all else, and the text encoder, by the other."""
    stages = {"encode": ("text",), "diffuse": tuple(components)}
    return ModelSize(name=name, max_degree=max_degree, stages=stages, components=components)


def blocks(num: int, gigabytes: float = 1.0, whole: float = 0.0) -> WeightBlocks:
    size, beside = int(gigabytes * GB), int(whole * GB)
    return WeightBlocks(num_bytes=num * size + beside, whole_bytes=beside, block_bytes=(size,) * num)


FLUX = model("flux", text=blocks(4), transformer=blocks(20, whole=0.5))
"""24.5 GB for the last stage. Of two devices each needs 2 + 10.5 GB and a block of each component; of four 1 + 5.5."""

Sizes = st.builds(
    lambda whole, parts: WeightBlocks(num_bytes=whole + sum(parts), whole_bytes=whole, block_bytes=tuple(parts)),
    st.integers(0, 300),
    st.lists(st.integers(1, 5000), max_size=6),
)


@given(
    parts=st.lists(Sizes, min_size=1, max_size=3),
    num_devices=st.integers(1, 16),
    room=st.integers(0, 20_000),
    max_degree=st.integers(1, 16),
)
def test_it_is_the_smallest_that_fits(parts: list[WeightBlocks], num_devices: int, room: int, max_degree: int) -> None:
    wanted = [model(f"m{index}", max_degree, text=part) for index, part in enumerate(parts)]
    fits = [
        size
        for size in range(1, num_devices + 1)
        if num_devices % size == 0 and size <= max_degree and all(part.held_bytes(size) <= room for part in parts)
    ]
    if fits:
        assert smallest_cell(wanted, num_devices, room).size == fits[0]
    else:
        with pytest.raises(WorkerStartFailed, match="no cell fits"):
            smallest_cell(wanted, num_devices, room)


@pytest.mark.parametrize(("room", "size"), [(24.5, 1), (24.4, 2), (14.5, 2), (14.4, 4), (8.5, 4), (8.4, 8)])
def test_what_each_device_holds_counts_its_part_and_a_block(room: float, size: int) -> None:
    choice = smallest_cell([FLUX], 8, int(room * GB))
    assert choice.size == size
    lines = list(choice.lines())
    assert lines[0].startswith("no cells: a device has room" if size == 1 else f"cells of {size} devices; of {room}GB")
    held = {1: "24.5GB", 2: "14.5GB", 4: "8.5GB", 8: "5.5GB"}[size]
    assert re.search(rf"flux: .*, {held} for diffuse \(text .*, transformer ", lines[1]), lines[1]


def refusal(wanted: ModelSize, num_devices: int, room: int) -> str:
    with pytest.raises(WorkerStartFailed) as error:
        smallest_cell([wanted], num_devices, room)
    return str(error.value)


def test_what_would_do_is_named() -> None:
    said = refusal(FLUX, 4, 6 * GB)
    assert said.startswith(
        "no cell fits: in the best of 1, 2, 4 devices, each needs 8.5GB for the stage diffuse of flux"
    )
    assert said.endswith(
        "has 6GB for weights; give a device 8.5GB (--weights-memory), serve on 7 devices (--devices 7), or choose a "
        "dtype of 16 bits"
    )
    assert smallest_cell([FLUX], 7, 6 * GB).size == 7
    said = refusal(model("unet", 2, text=blocks(20)), 4, 6 * GB)
    assert "each needs 11GB for the stage encode of unet" in said
    assert said.endswith(
        "unet runs on at most 2 devices at once; give a device 11GB (--weights-memory), or choose a dtype of 16 bits"
    )
