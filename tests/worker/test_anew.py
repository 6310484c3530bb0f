"""A worker whose parent has touched CUDA: how it sees that. tests/worker/test_process.py has one that begins anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tilework.worker.start import anew


def test_torch_says_whether_cuda_was_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not anew.was_born_with_cuda()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert anew.was_born_with_cuda()


@pytest.mark.parametrize(("device", "touched"), [("nvidia-uvm", True), ("nvidiactl", False)])
def test_open_files_show_whether_cuda_was_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, touched: bool
) -> None:
    (tmp_path / "3").symlink_to(f"/dev/{device}")
    monkeypatch.setattr(anew, "_OPEN_FILES", tmp_path)
    assert anew.was_born_with_cuda() is touched, "NVML opens nvidiactl, and does no harm"
