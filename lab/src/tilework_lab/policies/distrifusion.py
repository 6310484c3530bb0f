"""DistriFusion: one request at a time, on all devices."""

from __future__ import annotations

from tilework.policy.published.fixed import FixedDegree


def distrifusion() -> FixedDegree:
    """Each request alone on eight devices, or on those that its node has, first come, first served.

    As a schedule this is `fixed-sp8`. DistriFusion's own part, displaced patches, is in the cost table, as step times
    at each degree, as far as they are known. It does not batch.

    Source: PatchedServe §8, §8.2; DistriFusion (Li et al., CVPR 2024).
    """
    return FixedDegree(degree=8)
