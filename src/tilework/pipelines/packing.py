"""Hooks of packed batches (`core.packing.Layout`) in diffusers' models, with patches as the batch dimension.

The stock forward stays. While a packed batch runs, the layout answers submodules that look beyond a patch, or that join
one row of an image with its patches; at all other times each call goes straight through. Like `hooks` and `slices`
this relies on the models' internals: names of submodules, how their `forward` is called, and that attention treats
tokens alike wherever they stand. Rejected: a forward of our own for each family (a copy to keep up with diffusers, of
all that a packed batch does not change).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilework.core.packing import IMAGE, TEXT, Layout
from tilework.pipelines.caching.blocks import TRANSFORMER, U_NET, run_through
from tilework.pipelines.hooks import Detour

_U_NET_BLOCKS = {
    "CrossAttnDownBlock2D",
    "CrossAttnUpBlock2D",
    "DownBlock2D",
    "UNetMidBlock2DCrossAttn",
    "UpBlock2D",
}
_HALF_LIMIT = 65504


class Packing:
    """The layout of the packed batch that runs now, usually None, and whether batches can be packed.

    `is_known` is True if the substitutes below know all parts of the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.is_known = True
        self.layout: Layout | None = None

    @property
    def is_possible(self) -> bool:
        """True if batches can be packed: not with an IP adapter, whose attentions are not substituted."""
        adapters = (getattr(self._model, name, None) for name in ("encoder_hid_proj", "image_proj"))
        return self.is_known and all(adapter is None for adapter in adapters)

    @contextmanager
    def running(self, layout: Layout) -> Iterator[None]:
        """Set the layout for one forward pass; a plain batch runs as stock runs it."""
        assert self.layout is None
        self.layout = None if layout.is_plain else layout
        try:
            yield
            layout.finish()
        finally:
            self.layout = None


def pack_transformer(model: Any, packing: Packing, *, text_first: bool) -> None:
    """Let image tokens of a diffusion transformer come as patches (P, h w, C), while text and time have R rows.

    Raises:
        AttributeError: the model is built otherwise.
    """
    order = (TEXT, IMAGE) if text_first else (IMAGE, TEXT)
    for block in model.transformer_blocks:
        _change_output(block.norm1.linear, packing, lambda layout, rows: layout.per_patch(rows))
        for attention in (block.attn, getattr(block, "attn2", None)):
            if attention is not None:
                _substitute(attention, packing, partial(_attend, order))
    _change_output(model.norm_out.linear, packing, lambda layout, rows: layout.per_patch(rows))
    single_blocks = getattr(model, "single_transformer_blocks", ())
    for block in single_blocks:
        _substitute(block, packing, partial(_single_block, block))
    for index, block in enumerate((*model.transformer_blocks, *single_blocks)):
        _substitute(block, packing, run_through(index, TRANSFORMER, block))


def pack_positions(embedding: Any, packing: Packing) -> None:
    """Let a `PatchEmbed` give each patch the positions that it has in its image; its table is cropped."""
    packing.is_known &= bool(embedding.pos_embed_max_size) and embedding.norm is None and embedding.flatten
    _substitute(embedding, packing, partial(_positions, embedding))


def pack_u_net(model: Any, packing: Packing) -> None:
    """Substitute the three kinds of leaves that look beyond a patch. Text has R rows, all other inputs have P.

    A ResNet block in which normalisation, SiLU and convolution follow each other is substituted as a whole, since the
    layout does the three together.
    """
    blocks = (*model.down_blocks, model.mid_block, *model.up_blocks)
    packing.is_known &= {type(block).__name__ for block in blocks} <= _U_NET_BLOCKS
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
            packing.is_known &= _is_ordinary(module)
            _substitute(module, packing, partial(_convolve, module))
        elif isinstance(module, nn.GroupNorm):
            packing.is_known &= module.affine
            _substitute(module, packing, partial(_normalise, module))
        elif type(module).__name__ == "ResnetBlock2D":
            if _is_usual(module):
                _substitute(module, packing, partial(_resnet_block, module, module.conv1, module.conv2))
        elif type(module).__name__ == "BasicTransformerBlock":
            for attention in (module.attn1, module.attn2):
                if attention is not None:
                    _substitute(attention, packing, partial(_attend, None))
    for index, block in enumerate(blocks):
        _substitute(block, packing, run_through(index, U_NET, block))


def _attend(
    order: tuple[str, str] | None,
    layout: Layout,
    stock: Callable[..., Any],
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    **options: Any,
) -> Any:
    """Run an attention module's forward on the whole batch as one sequence; only its attention knows separate images.

    With an `order`, image and text attend jointly, in that order; without one the image asks and the text answers.
    """
    image, text = hidden_states, encoder_hidden_states
    if text is None and not len(image):
        return image  # No patch is computed, so nothing attends.
    lengths = {IMAGE: _num_tokens(image)}
    tokens = _as_one(image)
    if text is None:
        with _detour(layout, lengths, lengths):
            attended: Tensor = stock(tokens, **options)
        return attended.view_as(image)
    lengths[TEXT], words = _num_tokens(text), _as_one(text)
    if order is None:
        with _detour(layout, {IMAGE: lengths[IMAGE]}, {TEXT: lengths[TEXT]}):
            attended = stock(tokens, encoder_hidden_states=words, **options)
        return attended.view_as(image)
    joint = {name: lengths[name] for name in order}
    with _detour(layout, joint, joint):
        outputs = stock(hidden_states=tokens, encoder_hidden_states=words, **options)
    return tuple(
        output.reshape(*given.shape[:2], output.shape[-1]) for output, given in zip(outputs, (image, text), strict=True)
    )


def _single_block(
    block: Any,
    layout: Layout,
    stock: Callable[..., Any],
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: Any = None,
) -> tuple[Tensor, Tensor]:
    """Run `FluxSingleTransformerBlock.forward`, which concatenates text and image before all else."""
    assert not joint_attention_kwargs
    image, text = hidden_states, encoder_hidden_states
    rows = {TEXT: (text, *block.norm(text, emb=temb)), IMAGE: (image, *block.norm(image, emb=layout.per_patch(temb)))}
    lengths = {name: _num_tokens(tokens) for name, (tokens, _, _) in rows.items()}
    joint = torch.cat([_as_one(normed) for _, normed, _ in rows.values()], dim=1)
    with _detour(layout, lengths, lengths):
        attended = block.attn(hidden_states=joint, image_rotary_emb=image_rotary_emb)
    results = []
    pieces = attended.split_with_sizes(list(lengths.values()), dim=1)
    for (tokens, normed, gate), piece in zip(rows.values(), pieces, strict=True):
        inner = torch.cat([piece.view_as(tokens), block.act_mlp(block.proj_mlp(normed))], dim=2)
        result = tokens + gate.unsqueeze(1) * block.proj_out(inner)
        results.append(result.clip(-_HALF_LIMIT, _HALF_LIMIT) if result.dtype == torch.float16 else result)
    return results[0], results[1]


def _positions(embedding: Any, layout: Layout, stock: Callable[..., Any], latent: Tensor) -> Tensor:
    """Run `PatchEmbed.forward`."""
    side = embedding.patch_size
    tables = [
        embedding.cropped_pos_embed(rows, columns)[0].T.view(-1, rows // side, columns // side)
        for rows, columns in layout.sizes
    ]
    tokens: Tensor = embedding.proj(latent).flatten(2).transpose(1, 2)
    positions: Tensor = layout.split(tables).flatten(2).transpose(1, 2)
    return (tokens + positions).to(latent.dtype)


def _convolve(module: nn.Conv2d, layout: Layout, stock: Callable[..., Any], patches: Tensor) -> Tensor:
    result: Tensor = layout.convolve(module, patches)
    return result


def _normalise(module: nn.GroupNorm, layout: Layout, stock: Callable[..., Any], patches: Tensor) -> Tensor:
    result: Tensor = layout.normalise(module, patches)
    return result


def _resnet_block(
    block: Any,
    first: nn.Conv2d,
    second: nn.Conv2d,
    layout: Layout,
    stock: Callable[..., Any],
    patches: Tensor,
    temb: Tensor,
) -> Tensor:
    """Run `ResnetBlock2D.forward` of a block that `_is_usual`, with its convolutions without LoRAs."""
    hidden = layout.convolve_activated(first, block.norm1, patches)
    hidden = hidden + block.time_emb_proj(block.nonlinearity(temb))[:, :, None, None]
    hidden = layout.convolve_activated(second, block.norm2, hidden)
    shortcut = patches if block.conv_shortcut is None else block.conv_shortcut(patches)
    result: Tensor = (shortcut + hidden) / block.output_scale_factor
    return result


def _detour(layout: Layout, queries: dict[str, int], keys: dict[str, int]) -> Detour:
    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
        if mask is not None:
            raise RuntimeError("an attention has a mask, which would have to be packed too; use batches of one")
        attended: Tensor = layout.attend(query, key, value, scale, queries=queries, keys=keys)
        return attended

    return Detour(attend)


def _as_one(rows: Tensor) -> Tensor:
    return rows.reshape(1, -1, rows.shape[-1])


def _num_tokens(rows: Tensor) -> int:
    return rows.shape[0] * rows.shape[1]


def _is_ordinary(module: nn.Conv2d) -> bool:
    return (
        module.kernel_size == (3, 3)
        and module.padding == (1, 1)
        and module.dilation == (1, 1)
        and module.stride in ((1, 1), (2, 2))
        and module.padding_mode == "zeros"
    )


def _is_usual(block: Any) -> bool:
    """Return whether a `ResnetBlock2D` is as in SD and SDXL: others do more between normalisation and convolution."""
    return (
        isinstance(block.nonlinearity, nn.SiLU)
        and block.time_embedding_norm == "default"
        and block.time_emb_proj is not None
        and not (block.skip_time_act or block.up or block.down)
        and block.dropout.p == 0
    )


def _substitute(module: nn.Module, packing: Packing, instead: Callable[..., Any]) -> None:
    """Call `instead` in packed batches, with the layout and the module's own forward before its arguments."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        layout = packing.layout
        return stock(*args, **kwargs) if layout is None else instead(layout, stock, *args, **kwargs)

    module.forward = forward


def _change_output(module: nn.Module, packing: Packing, change: Callable[[Layout, Tensor], Tensor]) -> None:
    """Change what a module returns, in packed batches only."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return None if packing.layout is None else change(packing.layout, output)

    module.register_forward_hook(hook)
