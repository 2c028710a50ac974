"""Tests that need a CUDA device: `python -m pytest tests/gpu`, on a machine with torch, triton and pytest alone.

Without a device, or in a session that interprets kernels, they are collected, so that they import, and deselected: the
summary counts them as such, and a run of this folder alone ends with pytest's status for "no tests were run".
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.conftest import device

__all__ = ["device"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    mine = [item for item in items if HERE in item.path.parents]
    items[:] = [item for item in items if HERE not in item.path.parents]
    config.hook.pytest_deselected(items=mine)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        terminalreporter.write_line("tests/gpu: deselected, there is no CUDA device")
