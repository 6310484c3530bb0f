"""Calls of one model by several requests that become one forward pass: of a denoiser, whatever loops they are in, and
of a decoder.

Rejected: deciding by the shapes alone which tensors have rows. The residuals of a control network are lists of
tensors with rows inside, and a table of positions may have as many entries as there are rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves

from tilework.pipelines.stock.component_calls import ComponentCall, Role
from tilework.pipelines.stock.walk import Ask, Onlooker, Walk

_TRANSFORMER = frozenset({"hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"})
_FLUX = _TRANSFORMER | {"pooled_projections", "guidance", "attention_mask"}
_WAN = _TRANSFORMER | {"encoder_hidden_states_image"}
_LTX = _TRANSFORMER | {"video_coords"}
_LTX_2 = _LTX | {
    *("audio_hidden_states", "audio_encoder_hidden_states", "audio_encoder_attention_mask", "audio_timestep"),
    *("audio_coords", "sigma", "audio_sigma", "video_keyframes_mask"),
}
_HUNYUAN_VIDEO_1_5 = _TRANSFORMER | {
    *("timestep_r", "encoder_hidden_states_2", "encoder_attention_mask_2", "image_embeds"),
}
_QWEN_IMAGE = _TRANSFORMER | {"encoder_hidden_states_mask", "img_shapes", "guidance", "additional_t_cond"}
_COGVIEW = _TRANSFORMER | {"original_size", "target_size", "crop_coords", "attention_mask"}
_U_NET = frozenset(
    {"sample", "timestep", "encoder_hidden_states", "timestep_cond", "added_cond_kwargs", "class_labels"}
)

ROWS: Mapping[str, frozenset[str]] = {
    "AuraFlowTransformer2DModel": _TRANSFORMER,
    "ChromaTransformer2DModel": _FLUX,
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": _TRANSFORMER,
    "CogView3PlusTransformer2DModel": _COGVIEW,
    "CogView4Transformer2DModel": _COGVIEW,
    "ErnieImageTransformer2DModel": _TRANSFORMER | {"text_bth", "text_lens"},
    "Flux2Transformer2DModel": _FLUX,
    "FluxTransformer2DModel": _FLUX,
    "HunyuanVideo15Transformer3DModel": _HUNYUAN_VIDEO_1_5,
    "HunyuanVideoTransformer3DModel": _FLUX,
    "Krea2Transformer2DModel": _TRANSFORMER,
    "LTX2VideoTransformer3DModel": _LTX_2,
    "LTXVideoTransformer3DModel": _LTX,
    "LongCatImageTransformer2DModel": _FLUX,
    "Lumina2Transformer2DModel": _TRANSFORMER,
    "MochiTransformer3DModel": _TRANSFORMER,
    "OvisImageTransformer2DModel": _FLUX,
    "PRXTransformer2DModel": _FLUX,
    "PixArtTransformer2DModel": _TRANSFORMER | {"added_cond_kwargs"},
    "QwenImageTransformer2DModel": _QWEN_IMAGE,
    "SD3Transformer2DModel": _FLUX,
    "SanaTransformer2DModel": _TRANSFORMER,
    "UNet2DConditionModel": _U_NET,
    "UNet3DConditionModel": _U_NET,
    "WanTransformer3DModel": _WAN,
    "ZImageTransformer2DModel": frozenset({"x", "t", "cap_feats"}),
}
"""Arguments with one or more rows for each request, by class of the denoiser: tensors along their first dimension,
lists, and dicts of tensors. Calls that share a pass have all other arguments equal. A class without a row shares none.
"""
_TEXTS: Mapping[str, tuple[str, str]] = {
    "QwenImageTransformer2DModel": ("encoder_hidden_states", "encoder_hidden_states_mask"),
}
"""Texts whose lengths differ, (rows, tokens, width), and their mask; for models that do not pad all texts."""
_DECODE = "decode"
_DECODED = frozenset({"z"})
_UNUSED = "generator"
_DECODES_ONE = frozenset({"AutoencoderKLAllegro", "AutoencoderKLHunyuanVideo15"})
"""Decoders that take one row only: their attention mask and their cuts are made for that."""
_CACHING = frozenset({"Flux2KleinKVPipeline"})
"""Pipelines that give their denoiser a cache; only its calls show that."""


def can_share(pipeline: Any, denoisers: Iterable[Any]) -> bool:
    """Return whether requests can share all passes of the denoisers, as far as their calls allow.

    Perturbed attention cuts its rows in two or three itself, whatever requests they belong to; an adapter adds lists of
    tensors with rows inside; and a cache belongs to one request.
    """
    if getattr(pipeline, "adapter", None) is not None or fills_caches(pipeline):
        return False
    return not perturbs_attention(pipeline) and all(type(one).__name__ in ROWS for one in denoisers)


def fills_caches(pipeline: Any) -> bool:
    """Return whether a pipeline gives its denoiser a cache of its own."""
    return type(pipeline).__name__ in _CACHING


def perturbs_attention(pipeline: Any) -> bool:
    """Return whether some attentions are perturbed (PAG), by a mask of the whole sequence, which no group can share."""
    return hasattr(pipeline, "set_pag_applied_layers")


def can_share_decoder(pipeline: Any) -> bool:
    """Return whether requests of one shape can share the passes of a decoder."""
    return any(hasattr(one, _DECODE) and _decodes_rows(one) for one in pipeline.components.values())


def iterate_together(walks: Sequence[Walk], onlookers: Sequence[Onlooker | None]) -> None:
    """Make one iteration of each walk, with its onlooker. Calls of a denoiser that fit become one, row by row.

    Each iteration runs up to its next call of a denoiser. When all have reached one, the calls are made; a walk with
    two passes for guidance meets the others twice. If an error is raised, the walks that are not torn can go on.
    """
    runs = [partial(walk.iterate, onlooker=one) for walk, one in zip(walks, onlookers, strict=True)]
    _together(runs, lambda _, call: call.run(), lambda call: call.role is not Role.SAMPLER)


def finish_together(walks: Sequence[Walk], answer: Callable[[Walk, ComponentCall], Any]) -> list[Any]:
    """Run walks to their ends; return the results of their stock calls. Calls of a decoder that fit become one.

    `answer` answers all other calls.
    """
    return _together(
        [walk.finish for walk in walks],
        lambda index, call: answer(walks[index], call),
        lambda call: call.method == _DECODE and _decodes_rows(call.owner),
    )


def _together(
    runs: Sequence[Callable[[Ask], Any]],
    answer: Callable[[int, ComponentCall], Any],
    is_shared: Callable[[ComponentCall], bool],
) -> list[Any]:
    """Run these up to their next shared calls, again and again; return their results. `answer` answers other calls."""
    hub = getcurrent()
    results = list[Any]([None] * len(runs))
    waiting: list[tuple[greenlet, AskedCall]] = []

    def run(index: int) -> None:
        def ask(call: ComponentCall) -> Any:
            if not is_shared(call):
                return answer(index, call)
            waiting.append((getcurrent(), asked(call)))
            return hub.switch()

        results[index] = runs[index](ask)

    for index in range(len(runs)):
        greenlet(run).switch(index)
    while waiting:
        stopped = list(waiting)
        waiting[:] = []
        for alike in _groups(stopped):
            for (paused, _), answered in zip(alike, _answers([one for _, one in alike]), strict=True):
                paused.switch(answered)
    return results


@dataclass(frozen=True, slots=True, eq=False)
class AskedCall:
    """A call that waits for its answer: its arguments with `rows`, by name, and those that are `equal` in a pass."""

    call: ComponentCall
    rows: Mapping[str, Any]
    equal: Mapping[str, Any]

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def kind(self) -> Hashable:
        """Key of the call; calls of different kinds do not share a pass."""
        if not self.rows:
            return id(self)
        text, mask = _text_of(self.call)
        rows = [(name, _row_kind(value, name == text)) for name, value in self.rows.items() if name != mask]
        return self.call.component, self.call.method, tuple(rows), tuple(self.equal)

    def is_like(self, other: AskedCall) -> bool:
        """Return whether they could share a pass, with equal rows and tokens, except for texts that are padded."""
        if not self.rows or self.num_rows != other.num_rows or not self.fits(other):
            return False
        filled_up = _text_of(self.call)
        names = [name for name in self.rows if name not in filled_up]
        return all(_shapes(self.rows[name]) == _shapes(other.rows[name]) for name in names)

    def fits(self, other: AskedCall) -> bool:
        """Return whether they can share a pass."""
        return self.kind == other.kind and all(
            _is_equal(value, other.equal[name]) for name, value in self.equal.items()
        )


def asked(call: ComponentCall) -> AskedCall:
    """Return a call with its arguments sorted into rows and others."""
    kind: Any = type(call.owner)
    names = _DECODED if call.method == _DECODE else ROWS.get(kind.__name__, frozenset())
    if call.keeps_state or call.is_cached:
        names = frozenset()
    bound = _signature(kind, call.method).bind(call.owner, *call.args, **call.kwargs).arguments
    given = {name: value for name, value in list(bound.items())[1:] if value is not None}
    if names is _DECODED:
        given.pop(_UNUSED, None)
    return AskedCall(
        call,
        rows={name: value for name, value in given.items() if name in names},
        equal={name: value for name, value in given.items() if name not in names},
    )


@cache
def _signature(kind: type, method: str) -> inspect.Signature:
    return inspect.signature(getattr(kind, method))


def _decodes_rows(decoder: Any) -> bool:
    """Return whether a decoder gets nothing but latents, one row for each output.

    Others get times, masks or numbers of frames, and some draw noise. None of these uses its generator.
    """
    kind: Any = type(decoder)
    if kind.__name__ in _DECODES_ONE:
        return False
    return set(_signature(kind, _DECODE).parameters) - {"self", "return_dict", _UNUSED} == _DECODED


def _groups(waiting: Iterable[tuple[greenlet, AskedCall]]) -> Iterator[list[tuple[greenlet, AskedCall]]]:
    """Yield groups of calls that share a pass, each call in one group."""
    groups: list[list[tuple[greenlet, AskedCall]]] = []
    for one in waiting:
        group = next((group for group in groups if group[0][1].fits(one[1])), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    yield from groups


def _answers(alike: Sequence[AskedCall]) -> list[Any]:
    first = alike[0]
    if len(alike) == 1:
        return [first.call.run()]
    rows = _filled_up(alike)
    sizes = [one.num_rows for one in alike]
    joined = {name: _joined([of_one[name] for of_one in rows], sizes) for name in rows[0]}
    answer = first.call.stock(**joined, **first.equal)
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [_part(answer, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def _text_of(call: ComponentCall) -> tuple[str, str]:
    return _TEXTS.get(type(call.owner).__name__, ("", ""))


def _filled_up(alike: Sequence[AskedCall]) -> list[Mapping[str, Any]]:
    """Return the rows of each call, with texts padded to one length, and masks where that is longer than a text."""
    text, mask = _text_of(alike[0].call)
    if not text:
        return [one.rows for one in alike]
    longest = max(one.rows[text].shape[1] for one in alike)
    if all(one.rows[text].shape[1] == longest and mask not in one.rows for one in alike):
        return [one.rows for one in alike]
    filled: list[Mapping[str, Any]] = []
    for one in alike:
        tokens = one.rows[text]
        kept = one.rows.get(mask, tokens.new_ones(tokens.shape[:2], dtype=torch.bool)).to(torch.bool)
        more = longest - tokens.shape[1]
        filled.append({**one.rows, text: pad(tokens, (0, 0, 0, more)), mask: pad(kept, (0, more))})
    return filled


def _row_kind(value: Any, is_text: bool) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape[2 if is_text else 1 :]), value.dtype
    if isinstance(value, dict):
        return tuple((name, None if part is None else _row_kind(part, False)) for name, part in value.items())
    # Models that take a list of tensors take any sizes; what else is listed describes the tensors.
    return frozenset((part.ndim, part.dtype) if isinstance(part, Tensor) else repr(part) for part in value)


def _shapes(value: Any) -> list[Any]:
    return [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(value)]


def _is_equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, list | tuple):
        return type(value) is type(other) and len(value) == len(other) and all(map(_is_equal, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_equal(part, other[name]) for name, part in value.items())
    return bool(value == other)


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate the rows of all; a time without dimensions is that of all rows of its request."""
    first = values[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat(
            [value if value.ndim else value.expand(size) for value, size in zip(values, sizes, strict=True)]
        )
    if isinstance(first, dict):
        return {name: _joined([value[name] for value in values], sizes) for name in first}
    return [part for value in values for part in value]


def _part(answer: Any, rows: slice) -> Any:
    """Return these rows of an answer, in an answer of the same form."""
    if answer is None or isinstance(answer, Tensor | list):
        return answer if answer is None else answer[rows]
    if isinstance(answer, tuple):
        return tuple(_part(value, rows) for value in answer)
    return type(answer)(**{name: _part(value, rows) for name, value in answer.items()})
