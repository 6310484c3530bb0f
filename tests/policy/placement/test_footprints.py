"""The memory of request classes, read from the shipped cost tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import request, shipped
from placements import FLUX, MB, USABLE, VIDEO, C, D, E, flux_footprint, video_footprint
from tilework.core.request import Request, Shape
from tilework.cost.table_costs import TableCosts
from tilework.policy.placement.feasible import Footprint, fits_at
from tilework.policy.placement.profile import footprint

COSTS = {name: TableCosts(shipped(name)) for name in ("flux1_l20", "hunyuanvideo_l20")}


def of(name: str, shape: Shape, **more: bool) -> Footprint:
    costs = COSTS[name]
    asked = replace(request("a"), pipeline=costs.table.rows[0].pipeline, shape=shape, **more)
    return footprint(asked, costs, USABLE)


def rounded(found: Footprint) -> tuple[object, ...]:
    """In whole MB, as the figures of `placements` are."""
    activations = {
        role: {degree: round(num / MB) for degree, num in of_degree.items()}
        for role, of_degree in found.activations.items()
    }
    return {role: round(num / MB) for role, num in found.weights.items()}, activations, found.usable_bytes


@pytest.mark.parametrize("side", FLUX)
def test_flux(side: int) -> None:
    found, expected = of("flux1_l20", Shape(side, side)), flux_footprint(side)
    assert rounded(found) == rounded(expected)
    assert found.optimal == expected.optimal
    assert fits_at(found) == fits_at(expected)


@pytest.mark.parametrize("size", VIDEO)
def test_video(size: tuple[int, int]) -> None:
    height, frames = size
    found = of("hunyuanvideo_l20", Shape(height, {544: 960, 720: 1280}[height], frames))
    assert fits_at(found) == fits_at(video_footprint(height, frames))


def test_an_exact_request_takes_one_device_for_each_stage() -> None:
    found = of("flux1_l20", Shape(2048, 2048), exact=True)
    assert found.optimal == {E: 1, D: 1, C: 1}
    assert {role: tuple(of_degree) for role, of_degree in found.activations.items()} == {E: (1,), D: (1,), C: (1,)}


def test_what_the_costs_do_not_know_takes_nothing() -> None:
    costs = TableCosts(shipped("sd3_h100"))
    asked: Request = replace(request("a"), pipeline=costs.table.rows[0].pipeline)
    found = footprint(asked, costs, USABLE)
    assert set(found.weights.values()) == {0}
    assert {num for of_degree in found.activations.values() for num in of_degree.values()} == {0}
