"""For tests of placements: request classes of FLUX and HunyuanVideo on 128 devices, random ones, and a cost table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from builders import PIPELINE
from stages import STAGES
from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.cost.table import CostTable
from tilework.policy.placement.demand import ClassDemand
from tilework.policy.placement.feasible import FitsAt, Footprint, fits_at
from tilework.policy.placement.placement import Nodes, Placement
from tilework.policy.placement.roles import PlacementType, Role, VirtualReplica

GB = 10**9
MB = 10**6
E, D, C = Role
USABLE = 46_300 * MB

FLUX_WEIGHTS = {E: 9_770 * MB, D: 23_800 * MB, C: 168 * MB}
VIDEO_WEIGHTS = {E: 15_260 * MB, D: 25_640 * MB, C: 493 * MB}
DEGREES = (1, 2, 4, 8)

FLUX = {
    # Side: activations in MB of D and of C by degree, optimal degrees of D and C, seconds of D (a step) and of C there.
    128: ((142, 103, 77, 63), (125, 119, 116, 114), 1, 1, 0.054289, 0.05),
    256: ((173, 121, 86, 68), (201, 175, 163, 157), 1, 1, 0.108578, 0.09),
    512: ((296, 192, 121, 86), (503, 402, 352, 326), 1, 1, 0.221729, 0.19),
    1024: ((787, 476, 263, 157), (1711, 1308, 1107, 1006), 1, 1, 0.840336, 0.7),
    2048: ((2753, 1613, 831, 441), (6542, 4932, 4127, 3724), 2, 1, 2.85, 2.8),
    3072: ((6030, 3507, 1779, 914), (19427, 10972, 9160, 8254), 4, 2, 4.55, 3.950617),
    4096: ((10618, 6159, 3105, 1577), (34460, 25870, 16206, 14596), 8, 2, 5.66, 6.764706),
}
FLUX_STEPS, FLUX_ENCODE_S = 4, 0.12

VIDEO = {
    # Height and frames: activations in MB of D by degree, of C at any degree, optimal degree of C.
    (544, 17): ((1723, 1017, 534, 292), 1920, 1),
    (544, 33): ((3029, 1772, 911, 480), 2220, 2),
    (544, 65): ((5640, 3282, 1666, 858), 2822, 2),
    (544, 129): ((10862, 6301, 3175, 1613), 4025, 2),
    (720, 17): ((2971, 1739, 894, 472), 2164, 2),
    (720, 33): ((5275, 3071, 1560, 805), 2695, 2),
    (720, 65): ((9883, 5735, 2892, 1471), 3757, 2),
    (720, 129): ((19099, 11063, 5556, 2803), 5880, 2),
}

SMALL = (128, 256, 512, 1024)
MIXES = {
    "light": {4096: 0.125, 3072: 0.09375, 2048: 0.09375} | dict.fromkeys(SMALL, 0.17188),
    "medium": {4096: 0.125, 3072: 0.125, 2048: 0.21875} | dict.fromkeys(SMALL, 0.13281),
    "heavy": {4096: 0.25, 3072: 0.21875, 2048: 0.10938} | dict.fromkeys(SMALL, 0.10547),
}


def in_mb(activations: Iterable[int]) -> dict[int, int]:
    return {degree: num * MB for degree, num in zip(DEGREES, activations, strict=True)}


def flux_footprint(side: int) -> Footprint:
    diffuse, decode, _, optimal, _, _ = FLUX[side]
    activations = {E: {1: 400 * MB}, D: in_mb(diffuse), C: in_mb(decode)}
    return Footprint(
        weights=FLUX_WEIGHTS, activations=activations, optimal={E: 1, D: FLUX[side][2], C: optimal}, usable_bytes=USABLE
    )


def video_footprint(height: int, frames: int) -> Footprint:
    diffuse, decode, optimal = VIDEO[height, frames]
    activations = {E: {1: 600 * MB}, D: in_mb(diffuse), C: dict.fromkeys(DEGREES, decode * MB)}
    return Footprint(weights=VIDEO_WEIGHTS, activations=activations, optimal={E: 1, C: optimal}, usable_bytes=USABLE)


def flux_mix(name: str) -> list[ClassDemand]:
    """The classes of a mix of FLUX; the largest first."""
    return [flux_demand(side, share) for side, share in MIXES[name].items()]


def flux_demand(side: int, count: float) -> ClassDemand:
    _, _, degree, decode_degree, step_s, decode_s = FLUX[side]
    seconds = {E: FLUX_ENCODE_S, D: FLUX_STEPS * degree * step_s, C: decode_degree * decode_s}
    device_ns = {role: round(value * 1e9) for role, value in seconds.items()}
    return ClassDemand(fits=fits_at(flux_footprint(side)), count=count, device_ns=device_ns)


def even_nodes(num_nodes: int, size: int = 8) -> Nodes:
    return {node: range(node * size, (node + 1) * size) for node in range(num_nodes)}


def nodes_of(sizes: Sequence[int]) -> Nodes:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return {node: range(start, start + size) for node, (start, size) in enumerate(zip(starts, sizes, strict=True))}


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    """A pipeline's weights and one size, in units of a 60th of a device; activations shrink with the degree."""
    weights = {role: draw(st.integers(0, most)) for role, most in zip(Role, (25, 40, 10), strict=True)}
    activations = {
        role: {degree: most // degree + least for degree in degrees}
        for role, degrees in ((E, (1,)), (D, DEGREES), (C, (1, 2, 4)))
        for most, least in [(draw(st.integers(1, 50)), draw(st.integers(0, 5)))]
    }
    optimal = {E: 1, D: 1, C: draw(st.sampled_from((1, 2, 4)))}
    return Footprint(weights=weights, activations=activations, optimal=optimal, usable_bytes=60)


@st.composite
def class_demands(draw: st.DrawFn) -> ClassDemand:
    device_ns = {E: draw(st.integers(0, 50)), D: draw(st.integers(1, 2000)), C: draw(st.integers(0, 400))}
    return ClassDemand(fits=fits_at(draw(footprints())), count=draw(st.integers(1, 50)), device_ns=device_ns)


def on_a_node(placement: Placement, nodes: Nodes) -> list[Mapping[PlacementType, int]]:
    """How many devices each node has of each type."""
    rows = [[placement.of(one) for one in nodes[node]] for node in nodes]
    return [{kind: row.count(kind) for kind in PlacementType} for row in rows]


def replicas_of(fits: FitsAt, placement: Placement, nodes: Nodes) -> list[VirtualReplica]:
    """The virtual replicas on which a class can run: of each type enough devices on one node for its least degree."""
    per_node = on_a_node(placement, nodes)
    return [
        replica
        for replica in VirtualReplica
        if all(kind in fits and any(row[kind] >= fits[kind][0] for row in per_node) for kind in replica.types)
    ]


def staged_table(
    weights: Mapping[Role, int] | None = None,
    seconds: Mapping[int, tuple[float, float, float]] | None = None,
    memory_bytes: int = 450,
    activations: Mapping[int, tuple[int, int, int]] | None = None,
) -> CostTable:
    """A latent diffusion pipeline of which a device holds ED or C by default, and not both.

    `seconds` and bytes of `activations` are those of an encode, a step and a decode by side.
    """
    weights = weights or {E: 100, D: 300, C: 400}
    seconds = seconds or {64: (0.2, 1.5, 1.5), 128: (0.2, 5.0, 6.0)}
    stages = list(zip(STAGES, Role, strict=True))
    specs = [replace(spec, components=(spec.name,)) for spec in latent_diffusion(PIPELINE).specs]
    rows = [
        CostRow(
            pipeline=PIPELINE,
            stage=stage,
            height=side,
            width=side,
            seconds=some[index],
            activation_bytes=activations[side][index] if activations else None,
        )
        for side, some in seconds.items()
        for index, stage in enumerate(STAGES)
    ]
    return CostTable(
        hardware="toy",
        rows=tuple(rows),
        graphs={PIPELINE: Graph(PIPELINE, tuple(specs))},
        components={PIPELINE: {stage: Component(stage, weights[role]) for stage, role in stages}},
        memory_bytes=memory_bytes,
        load_bytes_per_s={LoadSource.DISK: 1e4, LoadSource.HOST: 1e4},
    )
