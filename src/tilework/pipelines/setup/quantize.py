"""The schemes of `--quantize`: a row for each, with its size and the library that quantises; or a GGUF file.

With all of them a request's image is independent of others in its forward pass. All but nvfp4 compute with the values
that the weights of linear layers stand for. nvfp4 quantises inputs, too, each block of 16 values by itself. Rejected:
scales of whole inputs, which are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tilework.core.model import is_weights_file
from tilework.distribution import install_command
from tilework.pipelines.cuda.state import Card
from tilework.pipelines.errors import InvalidSource, UnsupportedModel
from tilework.pipelines.setup.gguf_files import read_header


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way to quantise weights.

    Attributes:
        package: the Python package that quantises.
        weight_bytes: bytes of a linear layer's weight, by its outputs and inputs.
        config: the configuration of diffusers, or of transformers, by the module of one of them.
        capability: the least compute capability of a CUDA device that it needs; None: CPUs have it, too.
        others: the schemes to take where this one is impossible.
    """

    package: str
    weight_bytes: Callable[[int, int], int]
    config: Callable[[Any], Any]
    capability: tuple[int, int] | None = None
    others: str = ""


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


def _nvfp4(library: Any) -> Any:
    from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig

    # Its Triton kernel needs one more package, and scales of whole inputs.
    return library.TorchAoConfig(
        NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False, use_dynamic_per_tensor_scale=False)
    )


_BLOCK = 64
"""Number of weights of NF4 that have one scale, which is a float32."""


def _nvfp4_bytes(out: int, into: int) -> int:
    """Return half a byte per weight, plus a byte of scale per 16 weights, in tiles of 128 rows and 4 columns."""
    return out * into // 2 + 128 * -(-out // 128) * 4 * -(-into // 64)


SCHEMES: Mapping[str, Scheme] = {
    # A scale in float32 for each output; of int8 a zero point, too.
    "int8": Scheme(package="torchao", weight_bytes=lambda out, into: out * into + 5 * out, config=_int8),
    "fp8": Scheme(package="torchao", weight_bytes=lambda out, into: out * into + 4 * out, config=_fp8),
    "nf4": Scheme(
        package="bitsandbytes",
        weight_bytes=lambda out, into: -(-out * into // 2) + 4 * -(-out * into // _BLOCK),
        config=_nf4,
        capability=(0, 0),
        others="int8 or fp8",
    ),
    "nvfp4": Scheme(
        package="torchao", weight_bytes=_nvfp4_bytes, config=_nvfp4, capability=(10, 0), others="nf4, int8 or fp8"
    ),
}


def parse_schemes(text: str) -> tuple[tuple[str, str], ...]:
    """Return component and scheme of each part: SCHEME for the denoisers (component ""), COMPONENT=SCHEME for others.

    A scheme is one of SCHEMES, or the path of a GGUF file.

    Raises:
        InvalidSource: there is no such scheme, or a component is named twice.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, scheme = _named(part.strip())
        if (scheme not in SCHEMES and not is_weights_file(scheme)) or (equals and not name) or name in found:
            raise InvalidSource(
                f"quantize is {text!r}; give one of {', '.join(SCHEMES)} or a file *.gguf for the denoiser, and "
                "NAME=SCHEME for other components, such as fp8,text_encoder_2=fp8"
            )
        found[name] = scheme
    return tuple(sorted(found.items()))


def begin_at(directory: Path, text: str) -> str:
    """Return the schemes as given, but with each relative path of a file taken from `directory`."""
    parts = []
    for part in text.split(","):
        name, equals, scheme = _named(part.strip())
        parts.append(f"{name}{equals}{directory / scheme if is_weights_file(scheme) else scheme}")
    return ",".join(parts)


def _named(part: str) -> tuple[str, str, str]:
    """Return name, sign and scheme. A path that begins with a directory A=B is written ./A=B."""
    name, equals, scheme = part.partition("=")
    return (name, equals, scheme) if equals and not name.startswith((".", "/", "~")) else ("", "", part)


def shown(scheme: str) -> str:
    """Return a scheme in words: for a file its name."""
    return Path(scheme).name if is_weights_file(scheme) else scheme


def schemes_of(
    quantize: Sequence[tuple[str, str]], denoisers: Collection[str], components: Collection[str]
) -> dict[str, str]:
    """Return the scheme of each quantised component. `components` have weights, and include the `denoisers`.

    Raises:
        UnsupportedModel: it names a component that there is not, or one file for several denoisers.
    """
    found: dict[str, str] = {}
    for name, scheme in quantize:
        if name and name not in components:
            raise UnsupportedModel(
                f"quantize names {name!r}, and the components with weights are {', '.join(components)}"
            )
        if not name and is_weights_file(scheme) and len(denoisers) > 1:
            each = ",".join(f"{one}=FILE.gguf" for one in denoisers)
            raise UnsupportedModel(f"quantize is one file, and there are {len(denoisers)} denoisers; give {each}")
        found |= dict.fromkeys([name] if name else denoisers, scheme)
    return found


def check_schemes(quantize: tuple[tuple[str, str], ...], device: str, cards: Sequence[Card] = ()) -> None:
    """Check that the quantising packages are installed, and support the device and its cards, if these are known.

    Raises:
        InvalidSource: they are not, or do not.
        ModelNotFound: a file cannot be read.
    """
    for _, name in quantize:
        if is_weights_file(name):
            read_header(name)
            continue
        package = SCHEMES[name].package
        if find_spec(package) is None:
            raise InvalidSource(
                f"quantize is {name!r}, and {package} is not installed; run: {install_command('quantize')}"
            )
        _check_cards(name, SCHEMES[name], device, cards)


def _check_cards(name: str, scheme: Scheme, device: str, cards: Sequence[Card]) -> None:
    if scheme.capability is None:
        return
    if device != "cuda":
        raise InvalidSource(f"quantize is {name!r}, which needs CUDA, and device is {device!r}; take {scheme.others}")
    for card in cards:
        if card.capability < scheme.capability:
            needed, has = (".".join(map(str, one)) for one in (scheme.capability, card.capability))
            raise InvalidSource(
                f"quantize is {name!r}, which needs cards of compute capability {needed}, and {card.name} has {has}; "
                f"take {scheme.others}"
            )
