"""Times every op beside torch's best equivalent and the device's ceilings, in one run.

    python -m kernels.bench                    # the GPU if there is one, else the CPU
    python -m kernels.bench --device cpu --op attention --json out.json

Memory-bound ops are given in bytes per second and as a fraction of a copy's, products in FLOP per second and as a
fraction of a large matrix product's, both measured at the start. On a GPU the caches are emptied between runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import attention
from kernels.dispatch import describe_kernels
from kernels.fp8_linear import fp8_linear
from kernels.gated_act import gated_act
from kernels.int8_linear import int8_linear
from kernels.kv_write import kv_write, kv_write_torch
from kernels.lm_head_readout import lm_head_readout
from kernels.moe_grouped_gemm import moe_grouped_gemm, moe_grouped_gemm_torch, sort_by_expert
from kernels.rms_norm import rms_norm
from kernels.rope import rope_, rope_torch_
from kernels.timing import copy_bytes_per_s, matmul_flop_per_s, median_seconds


class Size(NamedTuple):
    """A model's sizes and the lengths to try."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rows: int
    lengths: tuple[int, ...]
    experts: int


#: SmolLM2-135M for a CPU, Llama-3.1-8B for a GPU.
SIZES = {
    "small": Size(576, 1536, 9, 3, 64, 49152, 512, (128, 512, 2048), 8),
    "large": Size(4096, 14336, 32, 8, 128, 128256, 8192, (2048, 8192, 32768), 64),
}


class Case(NamedTuple):
    """One op at one size. `work` is bytes or FLOP a call."""

    op: str
    shape: str
    bound: Literal["memory", "compute"]
    work: float
    ours: Callable[[], object]
    theirs: Mapping[str, Callable[[], object]]  # torch's ways of doing the same


@dataclass
class Result:
    """A line of the table. Seconds, and bytes or FLOP per second."""

    op: str
    shape: str
    seconds: float
    rate: float
    unit: str
    of_ceiling: float
    torch_seconds: float
    torch_way: str


def cases(size: Size, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    def randn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    bytes_of = dtype.itemsize
    for length in size.lengths:
        yield _attention_case(size, length, randn)
    n, h, i = size.rows, size.hidden, size.intermediate
    x, weight, residual = randn(n, h), randn(h), randn(n, h)
    out = torch.empty_like(x)
    norm = _compiled(lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), device)
    yield Case(
        "rms_norm", f"{n}×{h}", "memory", 2 * n * h * bytes_of, lambda: rms_norm(x, weight, 1e-5, out=out),
        {"F.rms_norm": lambda: F.rms_norm(x, weight.shape, weight, 1e-5)} | norm(x, weight),
    )  # fmt: skip
    yield Case(
        "rms_norm + residual", f"{n}×{h}", "memory", 4 * n * h * bytes_of,
        lambda: rms_norm(x, weight, 1e-5, residual=residual, out=out),
        {"add_, F.rms_norm": lambda: F.rms_norm(x.add_(residual), weight.shape, weight, 1e-5)},
    )  # fmt: skip
    gate_up, activated = randn(n, 2 * i), randn(n, i)
    act = _compiled(lambda g: F.silu(g[:, :i]) * g[:, i:], device)
    yield Case(
        "gated_act", f"{n}×{i}", "memory", 3 * n * i * bytes_of, lambda: gated_act(gate_up, out=activated),
        {"silu · up": lambda: F.silu(gate_up[:, :i]) * gate_up[:, i:]} | act(gate_up),
    )  # fmt: skip
    yield from _rotary_cases(size, randn)
    rows = min(n, 1024)
    hidden, head = randn(rows, h), randn(size.vocab, h) / h**0.5
    targets = torch.randint(size.vocab, (rows,), device=device)
    for top_k in (0, 20):
        yield Case(
            "lm_head_readout", f"{rows}×{h}→{size.vocab}, top {top_k}", "compute", 2 * rows * h * size.vocab,
            partial(lm_head_readout, hidden, head, targets=targets, top_k=top_k),
            {"F.linear alone": lambda: F.linear(hidden, head)},
        )  # fmt: skip
    expert_rows, wide = n // 4, i // 4
    experts = randn(size.experts, wide, h) / h**0.5
    routed = sort_by_expert(torch.randint(size.experts, (expert_rows, 2), device=device), size.experts)
    pairs = randn(2 * expert_rows, wide)
    tokens = randn(expert_rows, h)
    yield Case(
        "moe_grouped_gemm", f"{2 * expert_rows} pairs, {size.experts} × {h}→{wide}", "compute",
        2 * 2 * expert_rows * h * wide,
        lambda: moe_grouped_gemm(tokens, experts, routed.offsets, row_ids=routed.row_ids, out=pairs),
        {
            "F.linear an expert": lambda: moe_grouped_gemm_torch(
                tokens, experts, routed.offsets, row_ids=routed.row_ids, out=pairs
            )
        },
    )  # fmt: skip
    linear, result = randn(i, h) / h**0.5, torch.empty(n, i, dtype=dtype, device=device)
    plain = {"F.linear in 16 bits" if bytes_of == 2 else "F.linear": lambda: F.linear(x, linear)}
    quantised = linear.to(torch.float8_e4m3fn)
    blocks = torch.rand(-(-i // 128), -(-h // 128), device=device)
    per_channel = torch.rand(i, device=device)
    integers = torch.randint(-128, 128, (i, h), dtype=torch.int8, device=device)
    flop = 2 * n * h * i
    for name, scale in (("channel", per_channel), ("block", blocks)):
        yield Case(
            "fp8_linear", f"{n}×{h}→{i}, {name} scales", "compute", flop,
            partial(fp8_linear, x, quantised, scale, out=result), plain,
        )  # fmt: skip
    yield Case(
        "int8_linear", f"{n}×{h}→{i}", "compute", flop,
        lambda: int8_linear(x, integers, per_channel, out=result), plain,
    )  # fmt: skip


def _attention_case(size: Size, length: int, randn: Callable[..., torch.Tensor]) -> Case:
    page = 64
    q = randn(length, size.heads, size.head_dim)
    k, v = (randn(length // page, page, size.kv_heads, size.head_dim) for _ in range(2))
    out, device = torch.empty_like(q), q.device
    table = torch.arange(length // page, dtype=torch.int32, device=device)[None]
    cu_q = torch.tensor([0, length], dtype=torch.int32, device=device)
    start = torch.zeros(1, dtype=torch.int32, device=device)
    scale = size.head_dim**-0.5
    # Head-major copies, keys and values repeated: what SDPA wants, made before the clock starts.
    queries = q.transpose(0, 1).contiguous()[None]
    group = size.heads // size.kv_heads
    keys, values = (
        pages.flatten(0, 1).transpose(0, 1).repeat_interleave(group, 0).contiguous()[None] for pages in (k, v)
    )

    def sdpa(backend: SDPBackend | None) -> Callable[[], object]:
        def call() -> object:
            if backend is None:
                return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)

        return call

    backends: dict[str, SDPBackend | None] = {"SDPA": None}
    if device.type == "cuda":
        backends = {
            f"SDPA {backend.name.split('_')[0].lower()}": backend
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        }
    return Case(
        "attention", f"{length} rows, {size.heads}/{size.kv_heads} heads of {size.head_dim}", "compute",
        2 * length * length * size.heads * size.head_dim,  # half the square, two products
        lambda: attention(q, k, v, table, cu_q, start, scale=scale, max_q=length, out=out),
        {name: sdpa(backend) for name, backend in backends.items()},
    )  # fmt: skip


def _rotary_cases(size: Size, randn: Callable[..., torch.Tensor]) -> Iterator[Case]:
    n, head_dim = size.rows, size.head_dim
    q = randn(n, size.heads, head_dim)
    device, bytes_of = q.device, q.element_size()
    cos, sin = (randn(n, head_dim // 2, dtype=torch.float32) for _ in range(2))
    positions = torch.arange(n, device=device)
    turn = {"written out": lambda: rope_torch_(q, cos, sin, positions)}
    tables = 2 * cos.nbytes
    yield Case(
        "rope", f"{n}×{size.heads}×{head_dim}", "memory", 2 * q.nbytes + tables,
        lambda: rope_(q, cos, sin, positions), turn,
    )  # fmt: skip
    k, v = randn(n, size.kv_heads, head_dim), randn(n, size.kv_heads, head_dim)
    k_pages, v_pages = (randn(-(-n // 64), 64, size.kv_heads, head_dim) for _ in range(2))
    yield Case(
        "kv_write with rope", f"{n}×{size.kv_heads}×{head_dim}", "memory", 4 * n * size.kv_heads * head_dim * bytes_of
        + tables,
        lambda: kv_write(k, v, k_pages, v_pages, positions, cos=cos, sin=sin, positions=positions),
        {
            "written out": lambda: kv_write_torch(
                k, v, k_pages, v_pages, positions, cos=cos, sin=sin, positions=positions
            )
        },
    )  # fmt: skip


def _compiled(
    function: Callable[..., torch.Tensor], device: torch.device
) -> Callable[..., dict[str, Callable[[], object]]]:
    """torch.compile's version as another way, on a GPU."""
    if device.type != "cuda":
        return lambda *_: {}
    compiled = torch.compile(function)
    return lambda *arguments: {"torch.compile": lambda: compiled(*arguments)}


def measure(case: Case, ceilings: dict[str, float], device: torch.device) -> Result:
    seconds = median_seconds(case.ours, device)
    ways = {}
    for name, call in case.theirs.items():
        try:
            ways[name] = median_seconds(call, device)
        except RuntimeError as error:  # a backend that this GPU or dtype has not
            print(f"{case.op}: {name} does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
    best = min(ways, key=lambda name: ways[name])
    rate = case.work / seconds
    unit = "B/s" if case.bound == "memory" else "FLOP/s"
    return Result(case.op, case.shape, seconds, rate, unit, rate / ceilings[case.bound], ways[best], best)


def line(result: Result) -> str:
    """`result` as a row of the printed table."""
    return (
        f"{result.op:20} {result.shape:38} {result.seconds * 1e6:10.1f} {result.rate / 1e9:8.0f} G{result.unit:5} "
        f"{result.of_ceiling:10.0%} {result.torch_seconds * 1e6:10.1f} "
        f"{result.torch_seconds / result.seconds:6.2f}×  {result.torch_way}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--size", choices=SIZES, help="default: large on a GPU, small on a CPU")
    parser.add_argument("--op", default="", help="only ops with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    size = SIZES[options.size or ("large" if device.type == "cuda" else "small")]
    torch.manual_seed(0)
    with torch.inference_mode():
        ceilings = {"memory": copy_bytes_per_s(device), "compute": matmul_flop_per_s(device, dtype)}
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
        print(f"{name}, torch {torch.__version__}, kernels {describe_kernels(device)}, {options.dtype}")
        print(f"{torch.get_num_threads()} threads, copy {ceilings['memory'] / 1e9:.0f} GB/s", end=", ")
        print(f"matmul {ceilings['compute'] / 1e9:.0f} GFLOP/s")
        print(f"{'op':20} {'shape':38} {'µs':>10} {'rate':>14} {'of ceiling':>10} {'torch µs':>10} {'faster':>7}  way")
        results = []
        for case in cases(size, dtype, device):
            if options.op not in case.op:
                continue
            result = measure(case, ceilings, device)
            results.append(result)
            print(line(result), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"device": name, "ceilings": ceilings, "results": [asdict(result) for result in results]})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
