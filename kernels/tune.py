"""Times tile sizes on this machine's GPU and writes the fastest into config_table.py.

    python -m kernels.tune                    # prints what would change
    python -m kernels.tune --write            # rewrites kernels/config_table.py; commit it with kernels.bench's figures

A candidate that spills, exceeds the shared memory or misses the tensor cores is not timed. Rows of other architectures
stay as they are. Nothing is tuned while requests are served.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
import triton

from kernels import config_table, triton_attention, triton_linear, triton_lm_head
from kernels.compile_only import compile_only
from kernels.compiled_facts import facts_of
from kernels.config_table import ATTENTION, MATMUL, QUANTISED_MATMUL
from kernels.configs import rows_of
from kernels.report import problems
from kernels.timing import median_seconds

_DTYPES = {"16": torch.bfloat16, "32": torch.float32}
_LENGTH, _HEADS, _KV_HEADS = 8192, 32, 8
_ROWS, _INPUTS, _CHANNELS = 4096, 4096, 8192

_HEADER = '''"""Tile sizes by architecture, dtype and head size: data, written by `python -m kernels.tune --write`.

A row is (block_m, block_n, num_warps, num_stages) for attention and (block_m, block_n, block_k, num_warps, num_stages)
for the matrix products.
"""
'''


def render(
    origin: str,
    attention: dict[tuple[int, str, int], tuple[int, int, int, int]],
    matmul: dict[tuple[int, str], tuple[int, int, int, int, int]],
    quantised: dict[tuple[int, str], tuple[int, int, int, int, int]],
) -> str:
    """The text of config_table.py."""

    def rows(table: dict) -> str:
        return "".join(f"    {_literal(key)}: {_literal(row)},\n" for key, row in sorted(table.items()))

    matmul_type = "dict[tuple[int, str], tuple[int, int, int, int, int]]"
    return (
        f"{_HEADER}\n#: Where the rows come from.\nORIGIN = {_literal(origin)}\n\n"
        "# (capability, dtype, head_dim rounded up to a power of two)\n"
        f"ATTENTION: dict[tuple[int, str, int], tuple[int, int, int, int]] = {{\n{rows(attention)}}}\n\n"
        f"# (capability, dtype); block_n is no smaller than block_m\nMATMUL: {matmul_type} = {{\n{rows(matmul)}}}\n\n"
        "# (capability, dtype of the activations)\n"
        f"QUANTISED_MATMUL: {matmul_type} = {{\n{rows(quantised)}}}\n"
    )


def _literal(value: object) -> str:
    return repr(value).replace("'", '"')


# What does not fit is sorted out by compiling it.
def attention_candidates(width: str) -> list[tuple[int, int, int, int]]:
    if width == "32":
        return list(itertools.product((16, 32, 64), (16, 32), (4, 8), (1, 2)))
    return list(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)))


def matmul_candidates(width: str) -> list[tuple[int, int, int, int, int]]:
    if width == "32":
        return list(itertools.product((32, 64), (64, 128), (32,), (4, 8), (2, 3)))
    return list(itertools.product((64, 128), (128, 256), (32, 64), (4, 8), (3, 4)))


def fastest(
    name: str,
    table: dict,
    key: tuple,
    candidates: Iterable[tuple],
    call: Callable[[], object],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Puts the fastest of `candidates` at `key` of `table`, which `call` reads; changes nothing if none may ship."""
    arch, before = int(key[0]), table.get(key)
    best: tuple[float, tuple] | None = None
    for candidate in candidates:
        table[key] = candidate
        if not _may_ship(call, arch, dtype):
            continue
        seconds = median_seconds(call, device)
        if best is None or seconds < best[0]:
            best = (seconds, candidate)
    if best is not None:
        table[key] = best[1]
        print(f"{name} {key}: {best[1]}, {best[0] * 1e6:.0f} µs (before: {before})", flush=True)
    elif before is not None:
        table[key] = before
    else:
        del table[key]


def _may_ship(call: Callable[[], object], arch: int, dtype: torch.dtype) -> bool:
    try:
        with compile_only(arch) as compiled:
            call()
    except (triton.CompilationError, triton.runtime.errors.OutOfResources):
        return False
    return not any(problems(facts_of(kernel), arch, dtype) for kernel in compiled)


def tune(device: torch.device) -> None:
    """Fills the rows of `device`'s architecture in the tables of config_table.py, in memory."""
    major, minor = torch.cuda.get_device_capability(device)
    arch = 10 * major + minor
    # A new architecture starts from the rows it would have used.
    tables: tuple[dict, ...] = (ATTENTION, MATMUL, QUANTISED_MATMUL)
    for rows in tables:
        for key in [key for key in rows if key[0] == rows_of(arch)]:
            rows.setdefault((arch, *key[1:]), rows[key])
    for width, dtype in _DTYPES.items():
        for head_dim in (64, 128, 256):
            call, key = _attention_call(head_dim, dtype, device), (arch, width, head_dim)
            fastest("attention", ATTENTION, key, attention_candidates(width), call, dtype, device)
        candidates = matmul_candidates(width)
        fastest("matmul", MATMUL, (arch, width), candidates, _readout_call(dtype, device), dtype, device)
        fastest("8-bit", QUANTISED_MATMUL, (arch, width), candidates, _int8_call(dtype, device), dtype, device)


def _attention_call(head_dim: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    q = torch.randn(_LENGTH, _HEADS, head_dim, dtype=dtype, device=device)
    pages = torch.randn(_LENGTH // 64, 64, _KV_HEADS, head_dim, dtype=dtype, device=device)
    table = torch.arange(_LENGTH // 64, dtype=torch.int32, device=device)[None]
    bounds = torch.tensor([0, _LENGTH], dtype=torch.int32, device=device)
    return partial(
        triton_attention.attention, q, pages, pages, table, bounds, bounds[:1], scale=head_dim**-0.5, max_q=_LENGTH,
        window=0, soft_cap=0.0, sinks=None, out=torch.empty_like(q), lse=None,
    )  # fmt: skip


def _readout_call(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    hidden, weight = (torch.randn(n, _INPUTS, dtype=dtype, device=device) for n in (_ROWS, _CHANNELS))
    return partial(
        triton_lm_head.lm_head_readout, hidden, weight, targets=None, top_k=0, bias=None, allowed=None, soft_cap=0.0,
        scale=1.0, named_ids=None,
    )  # fmt: skip


def _int8_call(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    x, out = (torch.randn(_ROWS, n, dtype=dtype, device=device) for n in (_INPUTS, _CHANNELS))
    weight = torch.randint(-128, 128, (_CHANNELS, _INPUTS), dtype=torch.int8, device=device)
    scale = torch.ones(_CHANNELS, device=device)
    return partial(triton_linear.int8_linear, x, weight, scale, bias=None, out=out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", action="store_true", help="rewrite kernels/config_table.py")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("tuning times kernels on a GPU, and there is none")
    device = torch.device(options.device)
    with torch.cuda.device(device), torch.inference_mode():
        tune(device)
    origin = (
        f"timed on {torch.cuda.get_device_name(device)} on {datetime.date.today()} with torch {torch.__version__} and "
        f"triton {triton.__version__}; other architectures: {config_table.ORIGIN}"
    )
    if options.write:
        path = Path(config_table.__file__)
        path.write_text(render(origin, ATTENTION, MATMUL, QUANTISED_MATMUL))
        print(f"wrote {path}; now run `python -m kernels.report` and `python -m pytest tests/gpu`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
