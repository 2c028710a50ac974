"""Every kernel, compiled without a GPU: nothing spills, tensor cores work, warm-up foresees what requests launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 89, 90, 100)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What compiled_session.py wrote: one process for all of these tests."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment.setdefault("TRITON_CACHE_DIR", str(folder / "cache"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled_session", str(folder / "out.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out.json").read_text())


def test_triton_versions_import_without_a_gpu() -> None:
    """In a process that does not interpret, as on a machine that lost its driver."""
    modules = sorted(f"kernels.{path.stem}" for path in (ROOT / "kernels").glob("triton_*.py"))
    assert len(modules) > 5
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, env=environment, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_shipped_configuration_may_ship(arch: int, compiled: dict) -> None:
    rows = [row for row in compiled["report"] if row["arch"] == arch]
    assert len(rows) > 40, "the report lost its cases"
    bad = [f"{row['case']}, {row['facts']['kernel']}: {'; '.join(row['problems'])}" for row in rows if row["problems"]]
    assert not bad, "\n".join(bad)


@pytest.mark.slow
def test_every_kernel_is_in_the_report(compiled: dict) -> None:
    defined = set()
    for path in (ROOT / "kernels").glob("triton_*.py"):
        for line in path.read_text().splitlines():
            if line.startswith("def _") and "_kernel(" in line:
                defined.add(line.removeprefix("def ").split("(")[0])
    assert {row["facts"]["kernel"] for row in compiled["report"]} == defined


@pytest.mark.slow
def test_the_report_in_the_docs_has_these_rows(compiled: dict) -> None:
    """Registers may differ with the compiler; what was compiled may not."""
    lines = (ROOT / "docs" / "kernel-report.md").read_text().splitlines()
    kept = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in lines if line.startswith("| sm_")]
    assert kept == [
        (f"sm_{row['arch']}", row["case"], row["facts"]["kernel"].strip("_").removesuffix("_kernel"))
        for row in compiled["report"]
    ], "run `python -m kernels.report --write docs/kernel-report.md`"
    assert not any("**" in line for line in lines), "the kept report says that something must not ship"


@pytest.mark.slow
def test_requests_launch_nothing_that_warm_up_did_not_compile(compiled: dict) -> None:
    warm = {tuple(kernel) for kernel in compiled["warm"]}
    late = {tuple(kernel) for kernel in compiled["requested"]} - warm
    assert not late, f"compiled on a request: {sorted(name for name, _ in late)}"
    assert {name for name, _ in compiled["requested"]} == {name for name, _ in warm}


@pytest.mark.slow
def test_a_late_compilation_is_counted_once(compiled: dict) -> None:
    assert compiled["counted"] == {"_rms_norm_kernel": 1}
