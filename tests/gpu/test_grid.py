"""The tests of tests/kernels that run a kernel, on the device."""

from __future__ import annotations

import pytest

from tests.kernels import (
    test_triton_attention,
    test_triton_gated_act,
    test_triton_linear,
    test_triton_lm_head,
    test_triton_rms_norm,
    test_triton_rope,
)

pytestmark = pytest.mark.gpu

for _module in (
    test_triton_attention,
    test_triton_gated_act,
    test_triton_linear,
    test_triton_lm_head,
    test_triton_rms_norm,
    test_triton_rope,
):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_"):
            # Names repeat between modules.
            globals()[f"{_name}__{_module.__name__.rsplit('_', 1)[-1]}"] = _test
