"""The benchmark's arithmetic; its times are nobody's promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernels import bench
from kernels.timing import median_seconds

CPU = torch.device("cpu")


def test_every_op_is_timed() -> None:
    tiny = bench.Size(64, 128, 3, 1, 64, 500, 64, (64, 128), 4)
    timed = {case.op.split(" ")[0] for case in bench.cases(tiny, torch.bfloat16, CPU)}
    assert timed == {
        "attention", "rms_norm", "gated_act", "rope", "kv_write", "lm_head_readout", "moe_grouped_gemm", "fp8_linear",
        "int8_linear",
    }  # fmt: skip


def test_a_result_is_work_over_time() -> None:
    case = bench.Case("op", "shape", "compute", 1e6, lambda: None, {"slow": lambda: sum(range(20000)), "fast": list})
    result = bench.measure(case, {"compute": 1e12}, CPU)
    assert result.rate == pytest.approx(1e6 / result.seconds)
    assert result.of_ceiling == pytest.approx(result.rate / 1e12)
    assert result.torch_way == "fast"
    assert "op" in bench.line(result)


def test_the_command_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SIZES, "small", bench.Size(64, 128, 3, 1, 64, 500, 64, (64,), 4))
    monkeypatch.setattr(bench, "copy_bytes_per_s", lambda _: 1e9)
    monkeypatch.setattr(bench, "matmul_flop_per_s", lambda *_: 1e9)
    assert bench.main(["--device", "cpu", "--op", "rms_norm", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert [result["op"] for result in written["results"]] == ["rms_norm", "rms_norm + residual"]


def test_time_is_the_median_of_several_runs() -> None:
    calls = []
    assert median_seconds(lambda: calls.append(0), CPU, budget_s=0.0) >= 0
    assert len(calls) == 4, "one to warm up, three that count"
