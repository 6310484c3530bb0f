"""Corrections of predicted times: what they keep, and what is expected of works that were not measured."""

from __future__ import annotations

import pytest

from tilework.cost.corrections import CorrectionKey, Corrections


def key(pixels: int, *, degree: int = 1, stage: str = "diffuse", number: int = 1) -> CorrectionKey:
    return "toy", stage, degree, number, pixels, number


def test_what_is_kept_is_bounded_and_the_least_recently_measured_is_forgotten() -> None:
    corrections, sizes = Corrections(0.1), list[int]()
    for number in range(20_000):
        corrections.observe_single(key(-1), 1.2)  # Measured again and again.
        corrections.observe_single(key(number), 1.1)
        corrections.observe_single(key(1, stage=f"diffuse{{{number}}}"), 9.0)
        corrections.observe_batch(key(number, stage=f"diffuse{{{number}}}", number=2), 1.1)
        if number in (10_000, 19_999):
            sizes.append(len(corrections) + len(corrections.deviations))
    assert sizes[0] == sizes[1]
    assert key(-1) in corrections
    assert key(19_999) in corrections
    assert key(0) not in corrections


@pytest.mark.parametrize(("ratio", "expected"), [(2.5, 2.5), (0.3, 0.3), (40.0, 4.0), (1.3, 1.0), (0.8, 1.0)])
def test_shapes_that_were_not_measured_are_as_far_off_as_their_stage_if_that_is_more_than_half(
    ratio: float, expected: float
) -> None:
    corrections = Corrections(0.1)
    corrections.observe_single(key(1), ratio)
    corrections.observe_single(key(2), ratio)
    assert corrections.usual("toy", "diffuse") == 1.0, "two may be outliers"
    corrections.observe_single(key(3), ratio / 2, unknown=0.5)
    assert corrections.usual("toy", "diffuse") == expected
    assert corrections.usual("toy", "decode") == corrections.usual("other", "diffuse") == 1.0
    corrections.forget("toy")
    assert corrections.usual("toy", "diffuse") == 1.0


def test_a_stage_that_is_as_expected_again_corrects_nothing() -> None:
    corrections = Corrections(0.1)
    for pixels in range(3):
        corrections.observe_single(key(pixels), 3.0)
    for pixels in range(15):
        corrections.observe_single(key(pixels), 1.3)
    assert corrections.usual("toy", "diffuse") == 1.3, "or it would begin and end again and again"
    for pixels in range(15):
        corrections.observe_single(key(pixels), 1.2)
    assert corrections.usual("toy", "diffuse") == 1.0
