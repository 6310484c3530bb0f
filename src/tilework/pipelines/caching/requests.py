"""Requests that a denoiser can keep patches of, and the size of these patches."""

from __future__ import annotations

import math

from tilework.core.cache import CacheKind
from tilework.core.packing import Reuse, Size, choose_patch
from tilework.core.wire.spec import Spec

_PER_SIDE = 4
_LEAST_SHARE = 1 / 16


def reuse_of(spec: Spec, size: Size, default_height: int, multiple: int) -> Reuse | str | None:
    """Return what a request's passes share, given its `size` in the denoiser, or the reason why they share nothing.

    Returns None if the request asks for no cache of blocks. A patch is as large as `multiple` and the sides allow, up
    to a quarter of the side of an image of the `default_height` in pixels. It depends on nothing else, so it stays the
    same during the request, and requests of most sizes have the same.
    """
    if spec.cache is None or spec.cache.kind.is_of_steps:
        return None
    if any(side % multiple for side in size):
        return f"a side of the image, {spec.width} x {spec.height} px, cannot be halved as often as the model does"
    cap = size[0] * default_height // (spec.height * _PER_SIDE)
    patch = choose_patch([size], multiple, cap)
    if math.prod(patch) < cap * cap * _LEAST_SHARE:
        return f"the sides of the image, {spec.width} x {spec.height} px, have no divisor near that of others"
    return Reuse(threshold=spec.cache.value, whole=spec.cache.kind is CacheKind.IMAGE, patch=patch)
