"""Which requests a denoiser can keep patches of, and how large these are."""

from __future__ import annotations

import math

from tilework.core.cache import CacheKind
from tilework.core.packing import Reuse, Size, choose_patch
from tilework.core.wire.spec import Spec

_PER_SIDE = 4
_LEAST_SHARE = 1 / 16


def reuse_of(spec: Spec, size: Size, default_height: int, multiple: int) -> Reuse | str | None:
    """What the passes of a request share, whose picture has this `size` in the denoiser; or why they can share nothing.

    None if it asks for no cache of blocks. A patch is as large as `multiple` and the sides allow, up to a quarter of a
    picture of the `default_height` in pixels. It depends on nothing else, so it is the same for all of the request's
    life, and requests of most sizes have the same.
    """
    if spec.cache is None or spec.cache.kind.is_of_steps:
        return None
    if any(side % multiple for side in size):
        return f"a side of the picture, {spec.width} x {spec.height} px, cannot be halved as often as the model does"
    cap = size[0] * default_height // (spec.height * _PER_SIDE)
    patch = choose_patch([size], multiple, cap)
    if math.prod(patch) < cap * cap * _LEAST_SHARE:
        return f"the sides of the picture, {spec.width} x {spec.height} px, have no divisor near that of others"
    return Reuse(threshold=spec.cache.value, whole=spec.cache.kind is CacheKind.IMAGE, patch=patch)
