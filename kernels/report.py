"""Compiles every kernel in every shipped configuration, for GPUs that need not be there, and says what came out.

    python -m kernels.report                       # the table; exit status 1 if a configuration must not ship
    python -m kernels.report --arch 90 --case attention
    python -m kernels.report --write docs/kernel-report.md

What must not ship: spilled registers, more shared memory than a program may have, a matrix product without the
tensor-core instruction that its architecture is built around, a launch that would allocate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from kernels import triton_attention, triton_gated_act, triton_linear, triton_lm_head, triton_rms_norm, triton_rope
from kernels.attention import HEAD_DIMS
from kernels.compile_only import compile_only
from kernels.compiled_facts import CompiledFacts, facts_of
from kernels.config_table import ORIGIN
from kernels.gated_act import KINDS, Kind

ARCHITECTURES = (80, 89, 90, 100)

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Case(NamedTuple):
    """One op with arguments that select a variant of its kernels."""

    op: str
    variant: str
    dtype: torch.dtype
    call: Callable[[], object]

    @property
    def name(self) -> str:
        return f"{self.op} {_NAMES[self.dtype]} {self.variant}".strip()


class Row(NamedTuple):
    """One kernel of one case on one architecture."""

    arch: int
    case: str
    facts: CompiledFacts
    problems: list[str]


def cases() -> Iterator[Case]:
    """Every configuration and every branch of every kernel. fp16 is compiled like bf16: one case shows that it is."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for head_dim in HEAD_DIMS:
        yield Case("attention", f"d{head_dim}", bf16, _attention(bf16, head_dim, everything=False))
        yield Case("attention", f"d{head_dim} all options", bf16, _attention(bf16, head_dim, everything=True))
        yield Case("attention", f"d{head_dim} all options", fp32, _attention(fp32, head_dim, everything=True))
    yield Case("attention", "d128", fp16, _attention(fp16, 128, everything=False))
    yield Case("rms_norm", "4096", bf16, _rms_norm((8, 4096), bf16, residual=True))
    yield Case("rms_norm", "heads of 128", bf16, _rms_norm((8, 4, 128), bf16, residual=False))
    yield Case("rms_norm", "4096", fp32, _rms_norm((8, 4096), fp32, residual=True))
    for dtype, style in ((bf16, "halves"), (bf16, "interleaved"), (fp32, "halves")):
        yield Case("rope", style, dtype, _rope(dtype, style == "interleaved"))
        yield Case("kv_write", style, dtype, _kv_write(dtype, style == "interleaved"))
    for kind in KINDS:
        yield Case("gated_act", kind, bf16, _gated_act(bf16, kind))
    yield Case("gated_act", "silu", fp32, _gated_act(fp32, "silu"))
    yield Case("lm_head_readout", "lse", bf16, _lm_head(bf16, everything=False))
    for dtype in (bf16, fp32):
        yield Case("lm_head_readout", "all options", dtype, _lm_head(dtype, everything=True))
        yield Case("moe_grouped_gemm", "", dtype, _grouped(dtype))
        yield Case("fp8_linear", "per channel", dtype, _fp8(dtype, (256,)))
        yield Case("fp8_linear", "blocks of 128", dtype, _fp8(dtype, (2, 2)))
        yield Case("int8_linear", "per channel", dtype, _int8(dtype, 1))
        yield Case("int8_linear", "groups of 32", dtype, _int8(dtype, 8))
    yield Case("int8_linear", "groups of 128", bf16, _int8(bf16, 2))


# --- arguments: small, but with the strides and alignment of a real model --------------------------------------------


def _attention(dtype: torch.dtype, head_dim: int, *, everything: bool) -> Callable[[], object]:
    def call() -> object:
        q = torch.empty(64, 8, head_dim, dtype=dtype)
        pages = torch.empty(2, 16 if everything else 64, 2, head_dim, dtype=dtype)
        index = torch.zeros(3, dtype=torch.int32)
        return triton_attention.attention(
            q, pages, pages, index[:2, None].repeat(1, 4), index, index[:2], scale=1.0, max_q=32,
            window=100 if everything else 0, soft_cap=50.0 if everything else 0.0,
            sinks=torch.empty(8) if everything else None, lse=torch.empty(64, 8) if everything else None,
            out=torch.empty_like(q),
        )  # fmt: skip

    return call


def _rms_norm(shape: tuple[int, ...], dtype: torch.dtype, *, residual: bool) -> Callable[[], object]:
    def call() -> object:
        x, weight = torch.empty(shape, dtype=dtype), torch.empty(shape[-1], dtype=dtype)
        out = torch.empty_like(x)
        return triton_rms_norm.rms_norm(x, weight, 1e-5, residual=x if residual else None, offset=0.0, out=out)

    return call


def _rope(dtype: torch.dtype, interleaved: bool) -> Callable[[], object]:
    def call() -> object:
        x, table = torch.empty(4, 32, 128, dtype=dtype), torch.empty(16, 64)
        return triton_rope.rope_(x, table, table, torch.zeros(4, dtype=torch.int32), interleaved=interleaved)

    return call


def _kv_write(dtype: torch.dtype, interleaved: bool) -> Callable[[], object]:
    def call() -> object:
        k, pages, table = (
            torch.empty(4, 8, 128, dtype=dtype),
            torch.empty(2, 64, 8, 128, dtype=dtype),
            torch.empty(16, 64),
        )
        positions = torch.zeros(4, dtype=torch.int32)
        triton_rope.kv_write(
            k, k, pages, pages, positions.long(), cos=table, sin=table, positions=positions, interleaved=interleaved
        )
        return pages

    return call


def _gated_act(dtype: torch.dtype, kind: Kind) -> Callable[[], object]:
    return lambda: triton_gated_act.gated_act(
        torch.empty(4, 4096, dtype=dtype), kind=kind, out=torch.empty(4, 2048, dtype=dtype)
    )


def _lm_head(dtype: torch.dtype, *, everything: bool) -> Callable[[], object]:
    def call() -> object:
        hidden, weight, ids = (
            torch.empty(16, 256, dtype=dtype),
            torch.empty(512, 256, dtype=dtype),
            torch.zeros(16).long(),
        )
        options = {
            "targets": ids, "top_k": 4, "bias": torch.empty(512), "allowed": torch.ones(512, dtype=torch.bool),
            "soft_cap": 30.0, "named_ids": ids[:, None],
        }  # fmt: skip
        nothing = dict.fromkeys(options) | {"top_k": 0, "soft_cap": 0.0}
        return triton_lm_head.lm_head_readout(hidden, weight, scale=1.0, **(options if everything else nothing))

    return call


def _grouped(dtype: torch.dtype) -> Callable[[], object]:
    def call() -> object:
        weight, offsets, ids = torch.empty(8, 256, 256, dtype=dtype), torch.zeros(9, dtype=torch.int32), torch.zeros(16)
        return triton_linear.moe_grouped_gemm(
            torch.empty(16, 256, dtype=dtype), weight, offsets, row_ids=ids.long(), row_scale=ids,
            bias=weight[:, 0], out=torch.empty(16, 256, dtype=dtype),
        )  # fmt: skip

    return call


def _fp8(dtype: torch.dtype, scale: tuple[int, ...]) -> Callable[[], object]:
    def call() -> object:
        x, weight = torch.empty(16, 256, dtype=dtype), torch.empty(256, 256, dtype=torch.float8_e4m3fn)
        return triton_linear.fp8_linear(x, weight, torch.empty(scale), bias=None, out=torch.empty_like(x))

    return call


def _int8(dtype: torch.dtype, groups: int) -> Callable[[], object]:
    def call() -> object:
        x, weight = torch.empty(16, 256, dtype=dtype), torch.empty(256, 256, dtype=torch.int8)
        return triton_linear.int8_linear(x, weight, torch.empty(256, groups), bias=None, out=torch.empty_like(x))

    return call


# --- compiling and judging -------------------------------------------------------------------------------------------


def compile_case(case: Case, arch: int) -> list[Row]:
    """One row for each kernel that `case` launches on sm_`arch`."""
    with compile_only(arch) as compiled:
        case.call()
    rows = []
    for kernel in compiled:
        facts = facts_of(kernel)
        rows.append(Row(arch, case.name, facts, problems(facts, arch, case.dtype)))
    return rows


def compile_all(name: str = "", architectures: Sequence[int] = ARCHITECTURES) -> Iterator[Row]:
    """The rows of all cases with `name` in theirs, case by case, computed by a process for each core."""
    wanted = [(i, arch) for i, case in enumerate(cases()) if name in case.name for arch in architectures]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as processes:
        for rows in processes.map(_compile_nth, *zip(*wanted, strict=True)) if wanted else ():
            yield from rows


def _compile_nth(case: int, arch: int) -> list[Row]:
    return compile_case(next(islice(cases(), case, None)), arch)


def problems(facts: CompiledFacts, arch: int, dtype: torch.dtype) -> list[str]:
    """Why the kernel must not ship; empty if it may."""
    found = []
    if facts.spill_bytes:
        found.append(f"spills {facts.spill_bytes} bytes")
    if facts.shared_bytes > shared_limit(arch):
        found.append(f"{facts.shared_bytes} bytes of shared memory, {shared_limit(arch)} are there")
    if facts.scratch_bytes:
        found.append(f"a launch allocates {facts.scratch_bytes} bytes")
    if _is_product(facts.kernel):
        wanted = tensor_core(arch)
        # fp32 is for checking, not for speed: any tensor-core product will do.
        if facts.tensor_core != wanted and (dtype != torch.float32 or not facts.tensor_core):
            found.append(f"no {wanted} but {facts.tensor_core or 'scalar products'}")
    return found


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that a program may have on sm_`arch`; the least that any GPU has if it is not known."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(arch, 99) << 10


def tensor_core(arch: int) -> str:
    """The product of 16-bit operands that sm_`arch` needs for its peak rate."""
    return {9: "wgmma", 10: "tcgen05"}.get(arch // 10, "mma.sync")


def _is_product(kernel: str) -> bool:
    return kernel in {"_attention_kernel", "_picked_kernel", "_tile_kernel", "_grouped_kernel", "_quantised_kernel"}


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/kernel-report.md."""
    lines = [
        "# Compile report",
        "",
        f"Written by `python -m kernels.report --write docs/kernel-report.md` with triton {triton.__version__}, "
        f"without a GPU. Tile sizes: {ORIGIN}.",
        "",
        "Registers are a thread's, shared memory a program's. What must not ship would be marked in bold.",
        "",
        "| arch | case | kernel | registers | shared KiB | tensor core |",
        "|---|---|---|---:|---:|---|",
    ]
    for row in rows:
        facts = row.facts
        name = facts.kernel.strip("_").removesuffix("_kernel")
        shared = f"{facts.shared_bytes / 1024:.0f}"
        marks = "".join(f" **{problem}**" for problem in row.problems)
        lines.append(
            f"| sm_{row.arch} | {row.case} | {name} | {facts.registers} | {shared} | {facts.tensor_core}{marks} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.report", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, action="append", help="only this one (repeatable)")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table as markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    options = parser.parse_args(arguments)
    begun, rows = time.monotonic(), []
    for row in compile_all(options.case, options.arch or ARCHITECTURES):
        rows.append(row)
        facts = row.facts
        print(
            f"sm_{row.arch:<4} {row.case:32} {facts.kernel:20} {facts.registers:4} registers "
            f"{facts.shared_bytes >> 10:4} KiB  {facts.tensor_core:9} {'; '.join(row.problems)}",
            flush=True,
        )
    if options.write:
        options.write.write_text(markdown(rows))
    if options.json:
        options.json.write_text(json.dumps([row._asdict() | {"facts": row.facts._asdict()} for row in rows]))
    failed = [row for row in rows if row.problems]
    print(f"{len(rows)} kernels in {time.monotonic() - begun:.0f} s, {len(failed)} must not ship")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
