"""The files of a model's components. Missing, damaged or unsafe files are found before anything is loaded.

Imports no torch, so that a server can refuse a model before it starts workers.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilework.pipelines.errors import IncompleteModel, ModelError, UnsafeWeights, UnsupportedModel

_CONFIG = "config.json"
_WEIGHTS = ".safetensors"
_CONVERTED = ".bin"
_PICKLED = (_CONVERTED, ".ckpt", ".pt", ".pth")
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_LORA = re.compile(r"\.(lora_[AB]|lora_(up|down)|lora_linear_layer|base_layer)\.")
_UNFUSED = "pipeline.fuse_lora(), pipeline.unload_lora_weights() and pipeline.save_pretrained(...)"
_PREFERRED_VARIANT = "fp16"
_WITHOUT_VOCABULARY = frozenset({"ByT5Tokenizer"})  # Its tokens are bytes.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")
_READ = ("*.json", "*.txt", "*.model", f"*{_WEIGHTS}")
_LFS = b"version https://git-lfs.github.com/spec/"


def check_components(directory: Path, components: Mapping[str, Any], in_files: Collection[str] = ()) -> str | None:
    """Check the folder of each component that `components` names, as `model_index.ModelIndex.components`.

    Returns the `variant` of `from_pretrained` that the weights need: None, unless a component has weights only in files
    of a variant, such as `model.fp16.safetensors`. Components in `in_files`, which have their own files, may lack
    weights here; "" stands for those of diffusers.

    Raises:
        IncompleteModel: a folder, a configuration or weights are missing or damaged.
        UnsafeWeights: some weights are there only in pickled form.
        UnsupportedModel: some weights have a LoRA beside them that is not fused.
    """
    _check_safe(
        [
            (pickled, library, kind)
            for name, library, kind in _named(components)
            if (pickled := _pickled(directory / name)) is not None
        ]
    )
    offers = [
        _check_component(directory / name, kind, name in in_files or (library == "diffusers" and "" in in_files))
        for name, library, kind in _named(components)
    ]
    needed = [variants for variants in offers if variants and None not in variants]
    if not needed:
        return None
    common = {name for name in set.intersection(*needed) if name is not None}
    if not common:
        found = ", ".join(sorted({str(name) for variants in needed for name in variants}))
        raise IncompleteModel(
            f"{directory}: its components have weights of different variants only ({found}); give one"
        )
    return _PREFERRED_VARIANT if _PREFERRED_VARIANT in common else min(common)


def _named(components: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield names, libraries and classes of the components that are there: others are [null, null]."""
    for name, value in components.items():
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
            yield name, value[0], value[1]


def _pickled(folder: Path) -> Path | None:
    """Return the first file of weights in a folder if all are pickled."""
    files = sorted(folder.glob("*"))
    if any(file.suffix == _WEIGHTS for file in files):
        return None
    return next((file for file in files if file.suffix in _PICKLED), None)


def _check_safe(pickled: Sequence[tuple[Path, str, str]]) -> None:
    """Refuse files of pickled weights, each with the library and the class of its component.

    Raises:
        UnsafeWeights: there are any.
        IncompleteModel: git has left a pointer in place of one, which cannot be converted.
    """
    if not pickled:
        return
    for file, _, _ in pickled:
        check_is_pulled(file)
    lines = [_conversion(*one) for one in pickled]
    code = "; ".join(line for line in lines if line is not None)
    remedy = "fetch the model as safetensors" if None in lines else f"convert them with: python -c {shlex.quote(code)}"
    raise UnsafeWeights(f"{pickled[0][0]}: pickled weights are not read; {remedy}")


def _conversion(file: Path, library: str, kind: str) -> str | None:
    """Return Python code that writes the weights of a component as safetensors beside the pickled ones.

    None if they are not named as stock pipelines name them, or if a name in the index is not a plain name: the command
    would run it.
    """
    variant = _variant(file)
    if file.suffix != _CONVERTED or not all(name.isidentifier() for name in (library, kind, variant or "none")):
        return None
    module = library if library in ("diffusers", "transformers") else f"diffusers.pipelines.{library}"
    place = json.dumps(str(file.parent))
    option = f", variant={json.dumps(variant)}" if variant else ""
    return f"from {module} import {kind}; {kind}.from_pretrained({place}{option}).save_pretrained({place})"


def _check_component(folder: Path, kind: str, may_lack_weights: bool) -> set[str | None]:
    """Check a component; return the variants of its weights, None for files without one; empty without weights."""
    if not folder.is_dir() or not any(folder.iterdir()):
        raise IncompleteModel(
            f"{folder}: is missing or empty, but the model's index names it ({kind}); fetch the model again, or set "
            f'"{folder.name}" to [null, null] there if the pipeline can do without it'
        )
    for file in sorted(file for name in _READ for file in folder.glob(name)):
        check_is_pulled(file)
    for file in sorted(folder.glob("*.json")):
        read_object(file)
    if (
        "Tokenizer" in kind
        and kind not in _WITHOUT_VOCABULARY
        and not any(any(folder.glob(name)) for name in _VOCABULARIES)
    ):
        raise IncompleteModel(f"{folder}: there is no vocabulary ({', '.join(_VOCABULARIES)}); fetch the model again")
    weights = sorted(folder.glob(f"*{_WEIGHTS}"))
    if may_lack_weights and (folder / _CONFIG).is_file() and not weights:
        return set()
    if (folder / _CONFIG).is_file() != bool(weights):
        missing = f"*{_WEIGHTS}" if not weights else _CONFIG
        raise IncompleteModel(f"{folder}: there is no {missing}; fetch the model again")
    for file in weights:
        _check_weights(file)
    return {_variant(file) for file in weights}


def check_is_pulled(file: Path, kind: type[ModelError] = IncompleteModel) -> None:
    """Raise an error of this kind if git has left a pointer in place of the file, unless the file cannot be opened."""
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            remedy = "run `git lfs pull` in its directory"
            raise kind(f"{file}: is a pointer of Git LFS, not the file itself; {remedy}")


def has_variant(folder: Path, variant: str | None) -> bool:
    """Return whether a component has weights in files of this variant."""
    return any(_variant(file) == variant for file in folder.glob(f"*{_WEIGHTS}"))


def quantized_by(folder: Path) -> str:
    """Return the method by which a component's files are quantised, according to its configuration, or ""."""
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    method = config.get("quantization_config") or {}
    return str(method.get("quant_method", "unknown")) if method else ""


def _variant(file: Path) -> str | None:
    """Return the variant in a file's name: "fp16" for `diffusion_pytorch_model.fp16.safetensors` or a shard of it."""
    return _SHARD.sub("", file.stem).partition(".")[2] or None


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises IncompleteModel."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IncompleteModel(f"{file}: cannot be read as JSON ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise IncompleteModel(f"{file}: holds a {type(value).__name__}, not a JSON object; fetch the model again")
    return value


def _check_weights(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            keys = list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise IncompleteModel(f"{file}: cannot be read ({error}); fetch the model again") from error
    lora = next((key for key in keys if _LORA.search(f"{key}.")), None)
    if lora is not None:
        raise UnsupportedModel(
            f"{file}: holds a LoRA that is not fused ({lora}); fuse it with {_UNFUSED}, "
            "or save it as a file of its own for --loras"
        )
