"""The components of a model that has not been loaded: the size of their weights, from configurations and headers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

from tilework.core.model import is_weights_file
from tilework.pipelines.component_files import quantized_by
from tilework.pipelines.components import is_denoiser
from tilework.pipelines.errors import ModelNotFound, UnsupportedModel
from tilework.pipelines.model_index import read_contents
from tilework.pipelines.setup.gguf_files import read_header
from tilework.pipelines.setup.quantize import SCHEMES

_META = torch.device("meta")
_LIBRARIES = {"diffusers": diffusers, "transformers": transformers}


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """A component with weights. `module` has their shapes and no memory.

    `quantized_by` names the method by which its files, which take `stored_bytes`, are quantised; empty if they are not.
    """

    name: str
    module: nn.Module
    quantized_by: str = ""
    stored_bytes: int = 0

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def is_denoiser(self) -> bool:
        return is_denoiser(self.module)

    @property
    def decodes(self) -> bool:
        return hasattr(self.module, "decode")

    def num_bytes(self, dtype: torch.dtype, scheme: str | None) -> int:
        """Return the bytes of its weights as its library loads them: some stay in float32, and some are quantised.

        Raises:
            ModelNotFound: the scheme is a file that cannot be read, or has fewer weights than the configuration asks
                for.
        """
        if scheme is not None and is_weights_file(scheme):
            return self._file_bytes(dtype, scheme)
        if self.quantized_by:
            return self.stored_bytes
        return sum(size for _, size in self._sizes(dtype, scheme))

    def _file_bytes(self, dtype: torch.dtype, file: str) -> int:
        header = read_header(file)
        least = sum(one.numel() for one in self.module.parameters())
        if header.num_weights < least:
            raise ModelNotFound(
                f"{file}: holds {header.num_weights} weights of the architecture {header.architecture!r}, and "
                f"{self.name} ({self.kind}) has {least}; give a file of that model"
            )
        return header.num_bytes(dtype.itemsize)

    def largest_layer_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the weights of its largest layer."""
        sizes: dict[nn.Module, int] = {}
        for layer, size in self._sizes(dtype, None):
            sizes[layer] = sizes.get(layer, 0) + size
        return max(sizes.values(), default=0)

    def _sizes(self, dtype: torch.dtype, scheme: str | None) -> Iterator[tuple[nn.Module, int]]:
        """Yield for each weight, once, the layer that has it, and its bytes."""
        in_float32 = _kept_in_float32(self.module, dtype)
        seen: set[int] = set()
        for path, layer in self.module.named_modules():
            own = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
            for name, weight in own:
                if id(weight) in seen:
                    continue
                seen.add(id(weight))
                is_kept = not in_float32.isdisjoint(f"{path}.{name}".split("."))
                if scheme is not None and isinstance(layer, nn.Linear) and name == "weight" and not is_kept:
                    yield layer, SCHEMES[scheme].weight_bytes(layer.out_features, layer.in_features)
                else:
                    yield layer, weight.numel() * _dtype_of(weight, torch.float32 if is_kept else dtype).itemsize


def read_parts(directory: Path) -> Sequence[ModelPart]:
    """Return the components of a diffusers directory that have weights. Its configurations are enough.

    If there are weights, too, their headers must have as many elements as the configurations ask for.

    Raises:
        ModelNotFound: a configuration cannot be read, or the weights are other ones.
        UnsupportedModel: a class is in neither diffusers nor transformers.
    """
    parts: list[ModelPart] = []
    for name, value in read_contents(directory).items():
        match value:
            case [str(library), str(kind)] if (folder := directory / name).joinpath("config.json").is_file():
                if (found := _class_of(folder, library, kind)) is not None:
                    parts.append(_read_part(folder, found))
    return parts


def _class_of(folder: Path, library: str, kind: str) -> Any:
    """Return a class as an index names it, perhaps from a package of diffusers' pipelines; None for other code."""
    if library in _LIBRARIES:
        found = getattr(_LIBRARIES[library], kind, None)
        if found is None:
            raise UnsupportedModel(f"{folder}: {library} has no class {kind}; install a version that has it")
        return found
    package = f"{diffusers.__name__}.pipelines.{library}"
    known = library.isidentifier() and find_spec(package) is not None
    return getattr(import_module(package), kind, None) if known else None


def _read_part(folder: Path, kind: Any) -> ModelPart:
    module = _on_meta(folder, kind)
    if method := quantized_by(folder):
        return ModelPart(folder.name, module, method, sum(map(_data_bytes, _weights_files(folder))))
    part = ModelPart(folder.name, module)
    _check_headers(folder, part)
    return part


def _on_meta(folder: Path, kind: Any) -> nn.Module:
    try:
        with _META:
            if issubclass(kind, transformers.PreTrainedModel):
                module = kind(kind.config_class.from_pretrained(folder))
                module.tie_weights()
            else:
                module = kind.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{folder}/config.json: cannot be read ({error}); fetch the model again") from error
    return module  # type: ignore[no-any-return]


def _check_headers(folder: Path, part: ModelPart) -> None:
    from safetensors import safe_open

    stored = 0
    for file in _weights_files(folder):
        with safe_open(file, framework="np") as tensors:
            stored += sum(_count(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    least = sum(one.numel() for one in part.module.parameters())
    if stored and stored < least:
        raise ModelNotFound(
            f"{folder}: its weights have {stored} elements, and its config.json asks for {least}; fetch the model again"
        )


def _weights_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights without those of variants, which hold the same once more."""
    return [file for file in folder.glob("*.safetensors") if file.name.count(".") == 1]


def _data_bytes(file: Path) -> int:
    """Return the bytes of the weights in a safetensors file: all but its header, whose length comes first."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


def _count(shape: Sequence[int]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def _kept_in_float32(module: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Return parts of the names of weights that stay in float32; transformers keeps some only in a float16 model."""
    always, kept = getattr(module, "_keep_in_fp32_modules_strict", None), getattr(module, "_keep_in_fp32_modules", None)
    names = list(always or ())
    if not isinstance(module, transformers.PreTrainedModel) or dtype == torch.float16:
        names += [kept] if isinstance(kept, str) else list(kept or ())
    return frozenset(names)


def _dtype_of(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if weight.is_floating_point() else weight.dtype
