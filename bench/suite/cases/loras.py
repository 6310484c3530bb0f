"""What LoRAs on a device cost the step of a request that uses one, and of one that uses none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from suite.case import Check, Finding, Note, Table
from suite.cases.weights import save_model
from suite.stats import extremes
from tilework.core.lora import UsedLora
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Loras:
    """Three times the same model in one process: without LoRAs, with one, and with `resident`.

    LoRAs have rank `rank` and are of all attention layers. A round times `steps` steps of each case, one after another.
    """

    resident: int = 32
    rank: int = 16
    layers: int = 3
    side: int = 96
    steps: int = 4
    rounds: int = 9
    most: float = 1.03

    @classmethod
    def make(cls, quick: bool) -> Loras:
        return cls(resident=4, layers=1, steps=2, rounds=3) if quick else cls()

    def measure(self, note: Note) -> Finding:
        from tilework.pipelines.loading import load, quiet
        from tilework.pipelines.numerics import pin_numerics

        quiet()
        pin_numerics(threads=1)
        with TemporaryDirectory(prefix="tilework-bench-") as room:
            place = Path(room) / "model"
            save_model(place, self.layers)
            files = self.save_loras(place, Path(room))
            none, one, many = [load(ModelSource(path=str(place))) for _ in range(3)]
            assert one.loras is not None
            assert many.loras is not None
            one.loras.add("0", files[0])
            for index, file in enumerate(files):
                many.loras.add(str(index), file)
            note(f"{len(files)} LoRAs of {files[0].stat().st_size / 1e6:.1f} MB")
            used = (UsedLora("0", 0.8),)
            cases = (
                ("none added", none, ()),
                ("many, none used", many, ()),
                ("one, used", one, used),
                ("many, one used", many, used),
            )
            times = [[self._step_s(family, loras) for _, family, loras in cases] for _ in range(self.rounds)]
            switches_s = [median(self._switch_s(family) for _ in range(self.rounds)) for family in (one, many)]
        ratios = {
            "many added and none used, over none added": [row[1] / row[0] for row in times],
            "one used of many, over one used of one": [row[3] / row[2] for row in times],
            "one used of one, over none added": [row[2] / row[0] for row in times],
        }
        goals = (self.most, self.most, inf)
        return Finding(
            checks=tuple(
                Check(what=f"time of a step, {what}", measured=extremes(values), high=goal)
                for (what, values), goal in zip(ratios.items(), goals, strict=True)
            ),
            tables=(
                Table(
                    title="Median time of a step",
                    columns=tuple(name for name, _, _ in cases),
                    rows=(
                        tuple(f"{1000 * median(row[index] for row in times):.1f} ms" for index in range(len(cases))),
                    ),
                ),
                Table(
                    title="From one LoRA to none and back",
                    columns=("one added", "many added"),
                    rows=(tuple(f"{1000 * seconds:.2f} ms" for seconds in switches_s),),
                ),
            ),
            method=(
                f"One CPU thread, float32, a transformer of Stable Diffusion 3 with {self.layers} layers, guided steps "
                f"of {self.side} px; {self.resident} LoRAs of rank {self.rank} of its attention layers.",
            ),
        )

    def save_loras(self, model: Path, room: Path) -> Sequence[Path]:
        """Equal files: which weights they have makes no difference."""
        from diffusers import StableDiffusion3Pipeline
        from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

        from tilework.pipelines.loading import load_stock

        pipeline: Any = load_stock(ModelSource(path=str(model)))
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        config = LoraConfig(r=self.rank, lora_alpha=self.rank, init_lora_weights=False, target_modules=targets)
        layers = get_peft_model_state_dict(inject_adapter_in_model(config, pipeline.transformer))
        StableDiffusion3Pipeline.save_lora_weights(room, transformer_lora_layers=layers, weight_name="0.safetensors")
        files = [room / f"{index}.safetensors" for index in range(self.resident)]
        for file in files[1:]:
            shutil.copy(files[0], file)
        return files

    def _step_s(self, family: Any, loras: Sequence[UsedLora]) -> float:
        from tilework.pipelines.draw import begin_steps

        family.loras.use(loras)
        state = begin_steps(family, self._spec())
        family.step([state])
        start_s = time.perf_counter()
        for _ in range(self.steps):
            family.step([state])
        return (time.perf_counter() - start_s) / self.steps

    def _switch_s(self, family: Any) -> float:
        family.loras.use(())
        start_s = time.perf_counter()
        family.loras.use((UsedLora("0", 0.8),))
        family.loras.use(())
        return time.perf_counter() - start_s

    def _spec(self) -> Spec:
        return Spec(
            prompt="a red circle",
            height=self.side,
            width=self.side,
            steps=self.steps + 2,
            guidance_scale=4.0,
            seed=0,
        )
