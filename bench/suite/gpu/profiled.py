"""A cost table of this GPU with rows of batches, as it would ship: what `tilework profile --mixed` measures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from suite.case import Check, Finding, Note, Table
from suite.gpu.models import FOLDER, TOY, folder_of, on_gpu
from suite.server import tilework_json
from suite.stats import exact
from tilework.cost.table_file import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """Each stage at `sizes`, and `combinations` of them in batches, `runs` times.

    The table stays in the folder `keep`; what is measured is kept, too, so that a run that was cut off goes on.
    """

    device: str
    model: str
    sizes: str
    runs: int
    combinations: int
    keep: str = ""

    @classmethod
    def make(cls, quick: bool) -> Profiled:
        if not on_gpu():
            return cls(device="cpu", model=TOY.model, sizes="64,96", runs=1, combinations=2)
        amount = (5, 10) if quick else (20, 110)  # Fewer than 100 mixed batches teach nothing.
        sizes = "256,512,768,1024"
        return cls(
            device="cuda", model="SDXL", sizes=sizes, runs=amount[0], combinations=amount[1], keep=f"{FOLDER}/profiles"
        )

    def measure(self, note: Note) -> Finding:
        folder = folder_of(self.model, note)
        with TemporaryDirectory() as temporary:
            keep = Path(self.keep or temporary)
            keep.mkdir(parents=True, exist_ok=True)
            table, start_s = keep / f"{self.model}.cost.json", time.monotonic()
            amount = ["--runs", str(self.runs), "--mixed", "--combinations", str(self.combinations)]
            places = ["--profiles", str(keep / "profiles.db"), "--out", str(table)]
            common = ["--device", self.device, "--workers", "1", "--sizes", self.sizes]
            profile = tilework_json(["profile", folder, *common, *amount, *places])
            seconds = time.monotonic() - start_s
            rows = read_table(table).rows
        batches = [row for row in rows if row.batch != 1]
        note(f"{len(rows)} rows, {len(batches)} of batches")
        learned = profile["batch_model"]
        return Finding(
            checks=(Check(what="rows of batches", measured=exact(len(batches)), low=1),),
            method=("`tilework profile --mixed`; on a GPU the table stays beside the models, to be shipped.",),
            tables=(
                Table(
                    title=f"{self.model} at {self.sizes} px",
                    columns=("rows", "of batches", "error of what is learned from batches", "s"),
                    rows=(
                        (
                            str(len(rows)),
                            str(len(batches)),
                            "too few batches" if learned is None else f"{learned['error']:.3f}",
                            f"{seconds:.0f}",
                        ),
                    ),
                ),
            ),
        )
