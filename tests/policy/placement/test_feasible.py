"""Where request classes fit: the published pipelines, and the virtual replica that follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from placements import FLUX, GB, MIXES, VIDEO, C, D, E, flux_footprint, footprints, video_footprint
from tilework.policy.placement.feasible import Footprint, can_run, fits_at, virtual_replica
from tilework.policy.placement.roles import PlacementType, Role, VirtualReplica

V0, V1, V2, V3 = VirtualReplica
ALL = dict.fromkeys(PlacementType, 1)


@pytest.mark.parametrize("side", FLUX)
def test_flux_sheds_its_decoder_at_4096_px_alone(side: int) -> None:
    fits = fits_at(flux_footprint(side))
    least = {kind: degrees[0] for kind, degrees in fits.items()}
    shed = {PlacementType.ED: 1, PlacementType.D: 1, PlacementType.E: 1, PlacementType.C: 1}
    assert least == {3072: ALL | {PlacementType.EDC: 2}, 4096: shed}.get(side, ALL)
    assert virtual_replica(fits) is (V2 if side == 4096 else V0)


@pytest.mark.parametrize(
    ("size", "edc", "ed"),
    [((544, 65), 2, 2), ((544, 129), 4, 4), ((720, 33), 2, 1), ((720, 65), 4, 4), ((720, 129), None, 8)],
)
def test_video_needs_more_devices_the_longer_it_is(size: tuple[int, int], edc: int | None, ed: int) -> None:
    """Where memory depends on the degree."""
    fits = fits_at(video_footprint(*size))
    assert fits.get(PlacementType.EDC, (None,))[0] == edc
    assert fits[PlacementType.ED][0] == ed
    assert all(fits[kind][0] == 1 for kind in (PlacementType.DC, PlacementType.D, PlacementType.E, PlacementType.C))


def test_video_sheds_its_encoder_at_the_longest_720_lines_alone() -> None:
    found = {size: virtual_replica(fits_at(video_footprint(*size))) for size in VIDEO}
    assert found == dict.fromkeys(VIDEO, V0) | {(720, 129): V1}


@pytest.mark.parametrize(("mix", "share"), [("light", 0.875), ("medium", 0.875), ("heavy", 0.75)])
def test_the_share_of_v0_in_the_mixes_of_flux(mix: str, share: float) -> None:
    eligible = [num for side, num in MIXES[mix].items() if virtual_replica(fits_at(flux_footprint(side))) is V0]
    assert sum(eligible) == pytest.approx(share, abs=2e-4)


def test_decode_beyond_its_optimal_degree_is_no_way_out() -> None:
    """FLUX at 4096 px fits on DC with the decode at degree 4."""
    footprint = flux_footprint(4096)
    wider = replace(footprint, optimal={E: 1, D: 8, C: 4})
    assert virtual_replica(fits_at(footprint)) is V2
    assert virtual_replica(fits_at(wider)) is V1


def test_an_auxiliary_fits_up_to_its_optimal_degree() -> None:
    fits = fits_at(flux_footprint(4096))
    assert fits[PlacementType.C] == (1, 2)
    assert fits[PlacementType.D] == (1, 2, 4, 8)


def test_a_node_may_be_too_narrow() -> None:
    fits = fits_at(video_footprint(720, 65))
    assert [virtual_replica(fits, widest) for widest in (1, 3, 4)] == [V1, V1, V0]


def test_without_a_stage_before_the_steps_there_is_nothing_to_shed() -> None:
    def of(decode: int) -> VirtualReplica | None:
        activations = {D: {1: 20 * GB}, C: {1: decode * GB}}
        weights = {D: 20 * GB, C: 1 * GB}
        footprint = Footprint(weights=weights, activations=activations, optimal={C: 1}, usable_bytes=42 * GB)
        return virtual_replica(fits_at(footprint))

    assert [of(20), of(22), of(42)] == [V0, V2, None]


def test_what_fits_on_no_device_has_no_replica() -> None:
    footprint = replace(flux_footprint(128), usable_bytes=20 * GB)
    assert virtual_replica(fits_at(footprint)) is None


@given(footprints())
def test_what_fits_with_more_stages_fits_with_fewer(footprint: Footprint) -> None:
    """`smallest` rests on it: what can run at all can run on V3, and what can run on V0 can run on any replica."""
    fits = fits_at(footprint)
    able = [can_run(fits, replica) for replica in VirtualReplica]
    assert able[3] == any(able)
    assert not able[0] or all(able)
    for kind, degrees in fits.items():
        for other in PlacementType:
            if other.is_primary and kind.is_primary and set(other.roles) < set(kind.roles):
                assert fits[other][0] <= degrees[0], f"{other} takes less than {kind}"


@given(footprints())
def test_a_device_has_room_for_its_weights_and_the_largest_activation(footprint: Footprint) -> None:
    for kind, degrees in fits_at(footprint).items():
        for degree in degrees:
            most = {role: min(degree, footprint.optimal[role]) if role is not D else degree for role in Role}
            largest = max(
                min(num for at, num in footprint.activations[role].items() if at <= most[role])
                if role is not D
                else footprint.activations[role][degree]
                for role in kind.roles
            )
            assert sum(footprint.weights[role] for role in kind.roles) + largest <= footprint.usable_bytes
