"""What importing this package costs, and that nobody takes it for the package of the same name on the hub."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str) -> None:
    """In a process of its own, as on a machine without a GPU and without our settings."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_ops_need_no_triton() -> None:
    """As on macOS: triton cannot be imported, and every op computes."""
    run("""
        import sys
        sys.modules["triton"] = None
        import torch
        from kernels import attention, dispatch, fp8_linear, gated_act, int8_linear, kv_write, lm_head_readout
        from kernels import moe_grouped_gemm, rms_norm, rope, warmup
        x = torch.randn(3, 64)
        rms_norm.rms_norm(x, torch.ones(64), 1e-5)
        gated_act.gated_act(x)
        lm_head_readout.lm_head_readout(x, torch.randn(10, 64), top_k=2)
        assert "cannot be imported" in dispatch.triton_missing()
        assert not dispatch.use_triton("rms_norm", x)
    """)


def test_ops_on_a_cpu_import_no_triton() -> None:
    run("""
        import sys
        import torch
        from kernels import attention, dispatch, fp8_linear, gated_act, int8_linear, kv_write, lm_head_readout
        from kernels import moe_grouped_gemm, rms_norm, rope, warmup
        x = torch.randn(3, 64)
        rms_norm.rms_norm(x, torch.ones(64), 1e-5)
        dispatch.count_compilations(x.device)
        dispatch.describe_kernels(x.device)
        assert "triton" not in sys.modules
    """)


def test_the_package_itself_imports_nothing() -> None:
    run("""
        import sys
        before = set(sys.modules)
        import kernels
        assert set(sys.modules) - before == {"kernels"}, set(sys.modules) - before
        assert not hasattr(kernels, "__version__")
    """)


def test_transformers_takes_no_notice_of_this_package() -> None:
    run("""
        import sys
        import torch
        import transformers
        from transformers.utils import import_utils
        assert not import_utils.is_kernels_available()
        assert "kernels" not in sys.modules, "transformers imported our package"
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=20,
        )
        model = transformers.LlamaForCausalLM(config)
        assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 20)
    """)


def test_our_version_lies_outside_what_transformers_believes() -> None:
    """An installed import package `kernels` counts as the hub's if its distribution's version is in range."""
    from packaging.version import Version
    from transformers.utils import import_utils

    ours = Version(importlib.metadata.version("onepass"))
    assert ours < Version("0.9")
    assert ours < Version(import_utils.KERNELS_MIN_VERSION)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")
