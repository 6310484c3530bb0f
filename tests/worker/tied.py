"""A module whose weights are tied, unaligned, turned and empty."""

from __future__ import annotations

import torch
from torch import nn


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and an odd length that leaves the next tensor unaligned."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(3.0))
        self.brief = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.empty = nn.Parameter(torch.empty(0, 4))
