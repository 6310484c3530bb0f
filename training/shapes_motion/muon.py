"""Muon: momentum whose matrices are made orthogonal before they are applied; AdamW for all that is no matrix.

Source: Jordan et al., https://kellerjordan.github.io/posts/muon; the five Newton-Schulz steps are theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly U V^T of the singular value decomposition U S V^T of `matrix`."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon:
    """Both optimizers behind one; a kernel of a convolution counts as a matrix with a row per output channel."""

    def __init__(self, modules: Iterable[nn.Module], rate: float, vector_rate: float) -> None:
        parts = [part for module in modules for part in module.modules()]
        own = [(part, parameter) for part in parts for parameter in part.parameters(recurse=False)]
        self.matrices = [parameter for part, parameter in own if _is_matrix(part, parameter)]
        self.momenta = [torch.zeros_like(matrix) for matrix in self.matrices]
        self.rate, self.vector_rate = rate, vector_rate
        vectors = [parameter for part, parameter in own if not _is_matrix(part, parameter)]
        self.adam = torch.optim.AdamW(list(dict.fromkeys(vectors)), lr=vector_rate, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients at `factor` of the learning rates, and clear them."""
        for parameter, momentum in zip(self.matrices, self.momenta, strict=True):
            if parameter.grad is None:
                continue
            momentum.mul_(_MOMENTUM).add_(parameter.grad)
            update = (parameter.grad + _MOMENTUM * momentum).flatten(1)
            scale = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
            parameter.add_(orthogonal(update).view_as(parameter), alpha=-self.rate * factor * scale)
            parameter.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.vector_rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for momentum, saved in zip(self.momenta, state["momenta"], strict=True):
            momentum.copy_(saved)
        self.adam.load_state_dict(state["adam"])


def _is_matrix(part: nn.Module, parameter: nn.Parameter) -> bool:
    is_vector = parameter.ndim < 2 or len(parameter) == 1 or parameter[0].numel() == 1
    return not is_vector and not isinstance(part, nn.Embedding)
