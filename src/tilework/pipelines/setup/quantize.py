"""The schemes of `--quantize`: a row for each, with what it takes and the library that does it.

All quantise the weights of linear layers and compute with what these stand for, so that a request's picture does not
depend on others in its forward pass. Rejected: to quantise inputs, too. It is faster on the newest cards, but their
scale is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from tilework.pipelines.errors import InvalidSource, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights are quantised.

    Attributes:
        package: of Python, that quantises.
        weight_bytes: what the weight of a linear layer takes, by its outputs and inputs.
        config: the configuration of diffusers, or of transformers, by the module of one of them.
        needs_cuda: it quantises on CUDA devices alone.
    """

    package: str
    weight_bytes: Callable[[int, int], int]
    config: Callable[[Any], Any]
    needs_cuda: bool = False


def _int8(library: Any) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return library.TorchAoConfig(Int8WeightOnlyConfig())


def _fp8(library: Any) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return library.TorchAoConfig(Float8WeightOnlyConfig())


def _nf4(library: Any) -> Any:
    import torch

    return library.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


_BLOCK = 64
"""Weights of NF4 that have one scale, which is a float32."""
SCHEMES: Mapping[str, Scheme] = {
    # A scale in float32 for each output; of int8 a zero point, too.
    "int8": Scheme(package="torchao", weight_bytes=lambda out, into: out * into + 5 * out, config=_int8),
    "fp8": Scheme(package="torchao", weight_bytes=lambda out, into: out * into + 4 * out, config=_fp8),
    "nf4": Scheme(
        package="bitsandbytes",
        weight_bytes=lambda out, into: -(-out * into // 2) + 4 * -(-out * into // _BLOCK),
        config=_nf4,
        needs_cuda=True,
    ),
}


def parse_schemes(text: str) -> tuple[tuple[str, str], ...]:
    """Component and scheme, of SCHEME for the denoisers and COMPONENT=SCHEME for others; "" stands for the denoisers.

    Raises:
        InvalidSource: there is no such scheme, or a component is named twice.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, scheme = part.strip().rpartition("=")
        if scheme not in SCHEMES or (equals and not name) or name in found:
            raise InvalidSource(
                f"quantize is {text!r}; give one of {', '.join(SCHEMES)} for the denoiser, and NAME=SCHEME for other "
                "components, such as fp8,text_encoder_2=fp8"
            )
        found[name] = scheme
    return tuple(sorted(found.items()))


def schemes_of(
    quantize: Sequence[tuple[str, str]], denoisers: Collection[str], components: Collection[str]
) -> dict[str, str]:
    """The scheme of each component that is quantised, of those with weights, among which are the denoisers.

    Raises:
        UnsupportedModel: it names a component that there is not.
    """
    found: dict[str, str] = {}
    for name, scheme in quantize:
        if name and name not in components:
            raise UnsupportedModel(
                f"quantize names {name!r}, and the components with weights are {', '.join(components)}"
            )
        found |= dict.fromkeys([name] if name else denoisers, scheme)
    return found


def require_packages(quantize: tuple[tuple[str, str], ...], device: str) -> None:
    """Raises InvalidSource if what quantises is not installed, or needs another device."""
    for _, name in quantize:
        scheme = SCHEMES[name]
        if find_spec(scheme.package) is None:
            raise InvalidSource(
                f"quantize is {name!r}, and {scheme.package} is not installed; run: pip install 'tilework[quantize]'"
            )
        if scheme.needs_cuda and device != "cuda":
            raise InvalidSource(f"quantize is {name!r}, which needs CUDA, and device is {device!r}; take int8 or fp8")
