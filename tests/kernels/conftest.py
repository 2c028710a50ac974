"""Where the kernels under test run: interpreted on the CPU, or on the GPU that this machine has.

The same tests serve both (tests/gpu collects them again beside its own): they call the Triton version of an op, not the
public function, which would choose torch on a CPU.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

# macOS and Windows have no triton; there the ops run in torch and only test_imports.py applies.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]


@pytest.fixture
def device() -> torch.device:
    from kernels.triton_lang import INTERPRETED

    if INTERPRETED:
        return torch.device("cpu")
    assert torch.cuda.is_available(), "triton was imported without TRITON_INTERPRET=1 before tests/conftest.py set it"
    return torch.device("cuda")
