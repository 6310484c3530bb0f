"""A denoiser whose weights two devices have together: what each of them holds, and what gathering costs a step."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from suite.case import Check, Finding, Note, Table
from suite.stats import bootstrap, exact, median
from tilework.comm.groups import Groups
from tilework.comm.rendezvous import Rendezvous
from tilework.core.comm import Comm
from tilework.core.wire.commands import GroupRef
from tilework.pipelines.components import weights_of
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.sequence import share
from tilework.runtime.worker_process import forkserver_context
from tilework.worker.models.cell import Cell
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.weights import KeptWeights, Weights

WHOLE, CELL, FSDP = "whole", "cell", "torch's FSDP2"
RANKS = (0, 1)
_MB = 1_000_000
_PIXELS_PER_TOKEN = 256
_TEXT, _CHANNELS = 32, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Two processes of one thread that share the steps of a FLUX transformer of random weights, in float32.

    It has `layers` blocks of two streams and `single_layers` of one, of `heads` heads, so that it has some hundred MB;
    pictures have these `sides`. In each of `repeats` rounds every side of the comparison makes a step.
    """

    layers: int = 2
    single_layers: int = 6
    heads: int = 16
    sides: tuple[int, ...] = (256, 512)
    repeats: int = 6
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Cells:
        return cls(layers=1, single_layers=2, sides=(256,), repeats=2) if quick else cls()

    def measure(self, note: Note) -> Finding:
        held = {}
        for side in (WHOLE, CELL, FSDP):
            held[side] = _measured(self, (side,), (), note)["bytes"]
            note(f"{side}: {held[side] / _MB:.0f} MB in a process")
        found = _measured(self, (WHOLE, CELL, FSDP), self.sides, note)
        ratios = {
            (side, size): bootstrap([one / other for one, other in zip(of[side], of[WHOLE], strict=True)], self.seed)
            for size, of in found["seconds"].items()
            for side in (CELL, FSDP)
        }
        part = exact(held[CELL] / held[WHOLE])
        planned = exact((found["most"] - found["planned"]) / _MB)
        return Finding(
            checks=(
                Check(what="memory of the weights in a process, of that with all of them", measured=part, high=0.55),
                Check(what="the most at any time beyond what is planned", measured=planned, high=0.0, unit="MB"),
                *(
                    Check(what=f"a step at {size} px, over that with whole weights", measured=ratio, high=1.2)
                    for (side, size), ratio in ratios.items()
                    if side == CELL
                ),
            ),
            tables=(_table(held, found, ratios),),
            method=(
                f"{found['whole'] / _MB:.0f} MB of weights; the largest block has {found['block'] / _MB:.0f} MB. All "
                "sides split the sequence and give the same prediction to 1e-5.",
                "Memory: what the private memory of a process (RssAnon) has grown by, with this model alone, before "
                "its first step. The most at any time: the storages of all weights, whenever a module has run.",
                "Steps: the median of the ratios of single steps, which take turns. Messages go through Unix sockets "
                "(torch's through gloo on the loopback); nothing is gathered ahead of need.",
            ),
            facts={"max_difference": found["difference"]},
        )


def _table(held: Mapping[str, int], found: Mapping[str, Any], ratios: Mapping[tuple[str, int], Any]) -> Table:
    rows = []
    for side, memory in held.items():
        times = [f"{median(of[side]):.2f}" for of in found["seconds"].values()]
        over = [
            f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if (ratio := ratios.get((side, size))) else "1"
            for size in found["seconds"]
        ]
        rows.append((side, f"{memory / _MB:.0f}", *(cell for both in zip(times, over, strict=True) for cell in both)))
    columns = [name for size in found["seconds"] for name in (f"{size} px, s", "over whole")]
    return Table(title="A process of two", columns=("weights", "MB", *columns), rows=tuple(rows))


def _measured(config: Cells, sides: Sequence[str], sizes: Sequence[int], note: Note) -> dict[str, Any]:
    """What the first of two processes finds with these sides, at these sizes."""
    rendezvous, context = Rendezvous(), forkserver_context()
    with TemporaryDirectory(prefix="tilework-bench-", dir="/dev/shm") as place:
        ours, theirs = context.Pipe()
        _, other = context.Pipe()
        processes = [
            context.Process(target=_rank, args=(rank, rendezvous.address, place, config, sides, sizes, pipe))
            for rank, pipe in zip(RANKS, (theirs, other), strict=True)
        ]
        for process in processes:
            process.start()
        while isinstance(message := ours.recv(), str):
            note(message)
        for process in processes:
            process.join()
    rendezvous.close()
    return dict(message)


def _rank(
    rank: int,
    address: str,
    place: str,
    config: Cells,
    sides: Sequence[str],
    sizes: Sequence[int],
    connection: Connection,
) -> None:
    torch.set_num_threads(1)
    comm = Groups(rank, address).open(GroupRef(1, RANKS))
    if FSDP in sides:
        torch.distributed.init_process_group("gloo", init_method=f"file://{place}/gloo", rank=rank, world_size=2)
    models, before = _Models(config, comm, Path(place)), _private_bytes()
    for side in sides:
        models.add(side)
    found: dict[str, Any] = {"bytes": _private_bytes() - before, "seconds": {}, **models.sizes}
    for size in sizes:
        reference, difference = models.run(WHOLE, size), 0.0
        for side in (CELL, FSDP):
            error = (models.run(side, size) - reference).abs().max() / reference.abs().max()
            difference = max(difference, float(error))
        times: dict[str, list[float]] = {side: [] for side in sides}
        for index in range(config.repeats):
            connection.send(f"{size} px, round {index + 1} of {config.repeats}")
            for side in sides:
                comm.meet("cpu")  # type: ignore[attr-defined]
                start_s = time.perf_counter()
                models.run(side, size)
                times[side].append(time.perf_counter() - start_s)
        found["seconds"][size], found["difference"] = times, difference
        found["most"] = models.most_bytes(size)
    connection.send(found)


class _Models:
    """The same model, with its weights as each side has them."""

    def __init__(self, config: Cells, comm: Comm, place: Path) -> None:
        self._config, self._comm, self._place = config, comm, place
        self._runs: dict[str, tuple[nn.Module, Parallel]] = {}
        self._cell = Cell(RANKS, comm.rank)
        self._pieces: list[torch.Tensor] = []
        self.sizes: dict[str, int] = {}

    def add(self, side: str) -> None:
        model, parallel = self._built(), Parallel()
        share(model, parallel)
        lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
        if side == CELL:
            self._split(model, [block for blocks in lists for block in blocks])
        elif side == FSDP:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (2,))
            for block in (block for blocks in lists for block in blocks):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh, reshard_after_forward=True)
        self._runs[side] = model, parallel

    def _built(self) -> Any:
        from diffusers import FluxTransformer2DModel

        torch.manual_seed(self._config.seed)
        return FluxTransformer2DModel(
            patch_size=1,
            in_channels=_CHANNELS,
            num_layers=self._config.layers,
            num_single_layers=self._config.single_layers,
            attention_head_dim=64,
            num_attention_heads=self._config.heads,
            joint_attention_dim=256,
            pooled_projection_dim=64,
            guidance_embeds=True,
            axes_dims_rope=(16, 24, 24),
        ).eval()

    def _split(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        weights, kept = Weights(SharedWeights(self._place), self._cell), KeptWeights.of(model)
        self.sizes = {
            "whole": kept.component.num_bytes,
            "planned": weights.component(model, kept).num_bytes,
            "block": max(sum(one.nbytes for one in weights_of(block)) for block in blocks),
        }
        digest = weights.add(model, _never).digest
        for _ in weights.loading(digest):
            pass
        (self._pieces,) = (known.pieces for known in weights._known.values())

    def most_bytes(self, size: int) -> int:
        """The most that the weights of the cell take here at any time in a step."""
        model, most = self._runs[CELL][0], 0

        def look(*_: object) -> None:
            nonlocal most
            storages = [one.untyped_storage() for one in (*self._pieces, *weights_of(model))]
            sizes = {one.data_ptr(): one.nbytes() for one in storages}
            most = max(most, sum(sizes.values()))

        hooks = [module.register_forward_hook(look) for module in model.modules()]
        self.run(CELL, size)
        for hook in hooks:
            hook.remove()
        return most

    @torch.no_grad()
    def run(self, side: str, size: int) -> torch.Tensor:
        """The prediction of a step."""
        model, parallel = self._runs[side]
        torch.manual_seed(self._config.seed)
        tokens = size * size // _PIXELS_PER_TOKEN
        with self._cell.running(self._comm, RANKS):
            parallel.join(self._comm, guided=False)
            prediction: torch.Tensor = model(
                hidden_states=torch.randn(1, tokens, _CHANNELS),
                encoder_hidden_states=torch.randn(1, _TEXT, 256),
                pooled_projections=torch.randn(1, 64),
                timestep=torch.tensor([0.5]),
                guidance=torch.tensor([3.5]),
                img_ids=torch.zeros(tokens, 3),
                txt_ids=torch.zeros(_TEXT, 3),
                return_dict=False,
            )[0]
            parallel.leave()
        return prediction


def _never() -> nn.Module:
    raise AssertionError("the file has it")


def _private_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    assert found is not None, "the kernel reports no RssAnon"
    return int(found[1]) * 1024
