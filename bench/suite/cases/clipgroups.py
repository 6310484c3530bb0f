"""Decodes of clips that two workers share, whole and in tiles; and how much of a clip of few steps its decode is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import diffusers
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from suite.case import Check, Finding, Note, Table
from suite.cases.clipmemory import LARGE, pictures
from suite.stats import extremes, median
from tilework.comm.groups import Groups
from tilework.comm.rendezvous import Rendezvous
from tilework.core.comm import Comm
from tilework.core.model import ModelSource
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.spec import Spec
from tilework.pipelines.clips.decoders import ROWS
from tilework.pipelines.clips.decoding import decode
from tilework.pipelines.family import LIVE
from tilework.pipelines.loading import load, quiet
from tilework.runtime.worker_process import forkserver_context

_WAN = ROWS["AutoencoderKLWan"]
Taken = tuple[float, float]
"""Seconds, and seconds of the processor."""
Pair = tuple[Taken, Taken]
"""By one worker, and by two."""
_PAIR = GroupRef(1, (0, 1))
_TILE, _STRIDE = 64, 48
_STEPS = (4, 8)
_SMALL = {"attention_head_dim": 128, "num_layers": 30}
_WANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Wan 2.1, 1.3 billion": ({"num_attention_heads": 12, "ffn_dim": 8960, **_SMALL}, {}),
    "Wan 2.1, 14 billion": ({}, {}),
    "Wan 2.2, 5 billion": (
        {"num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48, **_SMALL},
        {
            "base_dim": 160,
            "decoder_base_dim": 256,
            "z_dim": 48,
            "in_channels": 12,
            "out_channels": 12,
            "is_residual": True,
            "patch_size": 2,
            "scale_factor_spatial": 16,
            "latents_mean": [0.0] * 48,
            "latents_std": [1.0] * 48,
        },
    ),
}
"""What the configurations of their transformers and autoencoders have besides the defaults of diffusers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipGroups:
    """Two processes of one thread. The autoencoder of Wan with `channels`, random weights, float32.

    A clip has `frames` of `rows` by `columns` latents; tiles have sides of 64 px, of which 16 overlap.
    """

    channels: int = 16
    frames: int = 5
    rows: int = 20
    columns: int = 28
    pairs: int = 5

    @classmethod
    def make(cls, quick: bool) -> ClipGroups:
        return cls(channels=8, rows=10, columns=10, pairs=2) if quick else cls()

    def measure(self, note: Note) -> Finding:
        found = {how: self._pairs(how, note) for how in ("whole", "in tiles")}
        return Finding(
            checks=tuple(check for how, pairs in found.items() for check in _checks(how, pairs)),
            method=(
                f"{self.frames} frames of {8 * self.columns}x{8 * self.rows} px. Alone and together in turns; the "
                "other process is idle meanwhile. Seconds: from a common start to the last pixels on both. Processor "
                "time: of the busier of the two, which other programs on the machine do not change; waiting for the "
                "other is not in it.",
                "Share of the decode in `shapes-motion`: measured, one thread, 64x64 px, 17 frames, guided.",
                f"Share of operations: computed by torch's counter, {LARGE[0]}x{LARGE[1]}, 81 frames, no guidance, "
                "as distilled models run. The share of the time on a GPU is another one.",
            ),
            tables=(_times(found), _measured_shares(note), _computed_shares(note)),
        )

    def _pairs(self, how: str, note: Note) -> list[Pair]:
        """Decodes alone and together, in turns."""
        note(how)
        rendezvous, context = Rendezvous(), forkserver_context()
        pipes = list[Connection]()
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = rank, rendezvous.address, theirs, self, how != "whole"
            context.Process(target=_serve, args=arguments, daemon=True).start()
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()

        def taken(num_ranks: int) -> Taken:
            for pipe in pipes[:num_ranks]:
                pipe.send(num_ranks)
            seconds, processor = zip(*(pipe.recv() for pipe in pipes[:num_ranks]), strict=True)
            return max(seconds), max(processor)

        try:
            for num_ranks in (1, 2):
                taken(num_ranks)
            return [(taken(1), taken(2)) for _ in range(self.pairs)]
        finally:
            for pipe in pipes:
                pipe.send(None)
            rendezvous.close()

    def built(self, *, in_tiles: bool) -> Any:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}
        vae = diffusers.AutoencoderKLWan(base_dim=self.channels, **sizes).eval()
        if in_tiles:
            vae.enable_tiling(
                tile_sample_min_height=_TILE,
                tile_sample_min_width=_TILE,
                tile_sample_stride_height=_STRIDE,
                tile_sample_stride_width=_STRIDE,
            )
        return vae

    def latents(self) -> Tensor:
        shape = 1, 16, 1 + (self.frames - 1) // 4, self.rows, self.columns
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _serve(rank: int, address: str, pipe: Connection, case: ClipGroups, in_tiles: bool) -> None:
    torch.set_num_threads(1)
    quiet()
    group: Comm = Groups(rank, address).open(_PAIR)
    vae, latents = case.built(in_tiles=in_tiles), case.latents()
    pipe.send(None)
    while (num_ranks := pipe.recv()) is not None:
        begin, begin_processor = time.perf_counter(), time.process_time()
        decode(_WAN, vae, pictures, latents, comm=group if num_ranks > 1 else None)
        pipe.send((time.perf_counter() - begin, time.process_time() - begin_processor))


def _checks(how: str, pairs: list[Pair]) -> tuple[Check, ...]:
    seconds, processor = ([alone[kind] / together[kind] for alone, together in pairs] for kind in (0, 1))
    busier = f"{how}: processor time of one worker, over the busier of two"
    return (
        Check(what=f"{how}: seconds of one worker, over two", measured=extremes(seconds), low=1.5),
        Check(what=busier, measured=extremes(processor), low=1.5),
    )


def _times(found: dict[str, list[Pair]]) -> Table:
    rows = tuple(
        (how, *(f"{median([pair[side][kind] for pair in pairs]):.2f}" for kind in (0, 1) for side in (0, 1)))
        for how, pairs in found.items()
    )
    columns = ("", "one worker, s", "two, s", "one worker, processor s", "the busier of two, processor s")
    return Table(title="A decode (median)", columns=columns, rows=rows)


def _share(step: float, after: float) -> tuple[str, ...]:
    return tuple(f"{100 * after / (num_steps * step + after):.0f}%" for num_steps in _STEPS)


def _measured_shares(note: Note) -> Table:
    note("shares of `shapes-motion`")
    torch.set_num_threads(1)
    made = load(ModelSource(path="shapes-motion"))
    spec = Spec(
        prompt="a red circle moves left on a black background",
        height=64,
        width=64,
        frames=17,
        steps=_STEPS[-1],
        guidance_scale=4.0,
        seed=1,
    )
    encode, loop, after, *_ = made.info.stages
    (values,) = made.run(encode.name, [spec], [{}])
    state, steps = made.begin(loop.name, spec, values), list[float]()
    while state.steps_done < state.num_steps:
        steps.append(_seconds(lambda: made.step([state])))
    latents = {name: value for name, value in made.finish(state).items() if name != LIVE}  # That goes on once.
    decodes = [_seconds(lambda: made.run(after.name, [spec], [latents])) for _ in range(3)]
    step, decoded = median(steps), median(decodes)
    row = f"{1e3 * step:.0f}", f"{1e3 * decoded:.0f}", *_share(step, decoded)
    columns = ("a step, ms", "the decode, ms", *(f"of {one} steps" for one in _STEPS))
    return Table(title="Share of the decode in `shapes-motion`", columns=columns, rows=(row,))


@torch.no_grad()
def _computed_shares(note: Note) -> Table:
    rows = list[tuple[str, ...]]()
    for name, (transformer, autoencoder) in _WANS.items():
        note(f"operations of {name}")
        with torch.device("meta"):
            denoiser = diffusers.WanTransformer3DModel(**transformer)
            vae = diffusers.AutoencoderKLWan(**autoencoder)
        side = vae.config.scale_factor_spatial
        channels = vae.config.z_dim
        latents = torch.empty(1, channels, 21, LARGE[1] // side // 2 * 2, LARGE[0] // side // 2 * 2, device="meta")
        texts = torch.empty(1, 512, 4096, device="meta")
        times = torch.zeros(1, device="meta")
        step, _ = _operations(lambda model=denoiser, given=(latents, times, texts): model(*given))  # type: ignore[misc]
        after, others = _operations(lambda one=vae, given=latents: list(_WAN.whole(one, given)))  # type: ignore[misc]
        sizes = f"{step / 1e12:.0f}", f"{after / 1e12:.0f}", f"{100 * others / after:.1f}%"
        rows.append((name, *sizes, *_share(step, after)))
    columns = ("", "a step, 10^12", "the decode, 10^12", "its attention", *(f"of {one} steps" for one in _STEPS))
    return Table(title="Share of the decode in the operations of Wan", columns=columns, rows=tuple(rows))


def _operations(run: Callable[[], object]) -> tuple[float, float]:
    """All of them, and those outside of convolutions."""
    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    others = sum(count for kind, count in counts.items() if kind != torch.ops.aten.convolution)
    return float(counter.get_total_flops()), float(others)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
