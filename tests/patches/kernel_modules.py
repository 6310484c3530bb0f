"""Modules of Triton kernels, loaded so that its interpreter runs them, or not."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec
from types import ModuleType

import pytest


def load_kernels(name: str, interpreted: bool) -> ModuleType:
    """A copy of its own, since it is decided on loading who runs it."""
    pytest.importorskip("triton", reason="needs Triton, which the extra `dev` brings")
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
        spec.loader.exec_module(module)
    return module
