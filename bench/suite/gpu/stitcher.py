"""The case of the stitcher as it is rehearsed without a GPU. On CPUs `bench/run.py stitcher` measures it."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from suite.case import Finding, Note
from suite.cases.stitcher import Stitcher
from suite.gpu.models import on_gpu


class Stitching(Stitcher):
    """Small where there is no GPU; then nothing is compared."""

    __slots__ = ()

    @classmethod
    def make(cls, quick: bool) -> Self:
        if on_gpu():
            return cls(device="cuda", repeats=5 if quick else 30)
        sizes = ((16, 16), (24, 24), (32, 32))
        return cls(device="cpu", sizes=sizes, channels=((32,), (64,)), repeats=2, calls=1)

    def measure(self, note: Note) -> Finding:
        finding = Stitcher.measure(self, note)
        return finding if self.on_device else replace(finding, checks=())
