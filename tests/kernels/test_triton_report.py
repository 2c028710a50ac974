"""What the compile report lets through and what it stops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import report
from kernels.compiled_facts import CompiledFacts

GOOD = CompiledFacts("_tile_kernel", 128, 0, 90 << 10, "wgmma", 0)
BF16, FP32 = torch.bfloat16, torch.float32


def test_a_sound_kernel_may_ship() -> None:
    assert report.problems(GOOD, 90, BF16) == []
    assert report.problems(GOOD._replace(kernel="_rope_kernel", tensor_core=""), 90, BF16) == []


@pytest.mark.parametrize(
    "facts, arch, dtype, says",
    [
        (GOOD._replace(spill_bytes=8), 90, BF16, "spills 8 bytes"),
        (GOOD._replace(shared_bytes=228 << 10), 90, BF16, "shared memory"),
        (GOOD._replace(shared_bytes=100 << 10, tensor_core="mma.sync"), 89, BF16, "shared memory"),
        (GOOD._replace(scratch_bytes=256), 90, BF16, "allocates"),
        (GOOD._replace(tensor_core="mma.sync"), 90, BF16, "no wgmma but mma.sync"),
        (GOOD._replace(tensor_core=""), 80, BF16, "no mma.sync but scalar"),
        (GOOD, 100, BF16, "no tcgen05"),
        (GOOD._replace(tensor_core=""), 90, FP32, "scalar products"),
    ],
)
def test_what_is_stopped(facts: CompiledFacts, arch: int, dtype: torch.dtype, says: str) -> None:
    found = report.problems(facts, arch, dtype)
    assert len(found) == 1 and says in found[0], found


def test_fp32_may_use_any_tensor_core() -> None:
    assert report.problems(GOOD._replace(tensor_core="mma.sync"), 90, FP32) == []


def test_an_unknown_gpu_is_judged_by_the_least() -> None:
    assert report.shared_limit(120) == report.shared_limit(89) < report.shared_limit(80)
    assert report.tensor_core(120) == "mma.sync"


def test_the_command_fails_when_something_must_not_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [report.Row(90, "rope bf16", GOOD, []), report.Row(90, "rope bf16", GOOD, ["spills 8 bytes"])]
    written = tmp_path / "report.md"
    for count, status in ((1, 0), (2, 1), (0, 1)):
        monkeypatch.setattr(report, "compile_all", lambda *_, count=count: rows[:count])
        assert report.main(["--arch", "90", "--write", str(written)]) == status
    monkeypatch.setattr(report, "compile_all", lambda *_: rows)
    report.main(["--arch", "90", "--write", str(written)])
    assert "**spills 8 bytes**" in written.read_text()
