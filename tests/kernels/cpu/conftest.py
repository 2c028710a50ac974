"""The C++ kernels' tests run in every variant that this CPU has; without the library only test_dispatch.py applies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import native
from tests.kernels.cpu.variants import supported_variants

collect_ignore_glob = [] if supported_variants() else ["test_native_*.py"]


@pytest.fixture(params=supported_variants())
def variant(request: pytest.FixtureRequest) -> str:
    return native.select(request.param)


@pytest.fixture(autouse=True)
def fastest_again() -> Iterator[None]:
    yield
    if supported_variants():
        native.select()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
