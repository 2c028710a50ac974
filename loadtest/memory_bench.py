"""``onepass bench memory``: peak memory of one pass by prompt length, each point in a fresh process.

Three ways to compute the same next-token distribution of one prompt on the same random weights: Onepass's pass; a
forward that keeps all layers' KV and full activations, as a server that is about to generate does; and transformers.
What is printed is what a pass adds to the weights: the peak resident size (on a GPU, the allocator's peak) after the
pass less the size before it. The formula's line is ``T · (hidden + 2 · kv_heads · head_dim) · bytes``, one chunk, and
one read of the head.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from backends.base import Readout
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.direct import run_directly
from backends.prefill_only.kv_pages import KvPages
from backends.prefill_only.memory import (
    CHUNK_ROWS_GPU,
    PAGE_TOKENS,
    chunk_bytes,
    pass_bytes_per_token,
    plan_memory,
    workspace_bytes,
)
from backends.prefill_only.models.families import config_spec
from backends.prefill_only.models.layout import checkpoint_tensors, layer_linears
from backends.prefill_only.models.linear import Linear
from backends.prefill_only.models.loader import load
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.models.weights import ModelWeights
from backends.prefill_only.prefill_pass import PassJob
from backends.prefill_only.readout import LmHead
from backends.prefill_only.rows import ROW_ALIGN
from loadtest.plain_forward import PlainForward

__all__ = ["main"]

_SHAPES: dict[str, dict[str, object]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False},
    "32b-fp8": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 152064, "tie_word_embeddings": False,
                "quantization_config": {"quant_method": "fp8"}},
    "70b-fp8": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
                "quantization_config": {"quant_method": "fp8"}},
}  # fmt: skip
_COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
}  # fmt: skip
_WAYS = ("onepass", "all-layers-kv", "transformers")
_CHUNK_ROWS = 256


def _config(shape: str) -> dict[str, object]:
    return {**_COMMON, **_SHAPES[shape]}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not report {field}: measure on Linux")


def _now_bytes(device: torch.device) -> int:
    """In use; what is measured as the peak starts from here."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident size
    return _status_bytes("VmRSS")


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status_bytes("VmHWM")


def _load(shape: str, device: torch.device) -> tuple[ModelSpec, ModelWeights]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(_config(shape)))
        model = load(directory, load_format="dummy", dtype="bfloat16", device=str(device))
    return model.spec, model.weights


@torch.inference_mode()
def _point(way: str, shape: str, tokens: int) -> dict[str, float]:
    """Bytes that one pass adds, measured in this process."""
    device = _device()
    prompt = [random.Random(tokens).randrange(1000, 100000) for _ in range(tokens)]
    if way == "transformers":
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**_config(shape))
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        ids = torch.tensor([prompt], device=device)

        def run() -> None:
            model(ids, logits_to_keep=1)
    else:
        spec, weights = _load(shape, device)
        if way == "onepass":
            kv = KvPages(
                num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
                page_tokens=PAGE_TOKENS, pool_pages=0, scratch_pages=-(-tokens // PAGE_TOKENS),
                dtype=torch.bfloat16, device=device,
            )  # fmt: skip
            decoder = Decoder(spec, weights, kv, max_positions=tokens, chunk_rows=_CHUNK_ROWS)
            assert isinstance(weights.lm_head, Linear)
            head = LmHead(weights.lm_head)

            def run() -> None:
                run_directly(decoder, head, [PassJob(prompt, Readout(top_logprobs=5))])
        else:
            plain = PlainForward(spec, weights)

            def run() -> None:
                plain.next_token_logits(prompt)

    gc.collect()
    before = _now_bytes(device)
    run()
    return {"bytes": _peak_bytes(device) - before}


def _formula(shape: str, tokens: int) -> int:
    spec, _ = config_spec(_config(shape))
    head = 2 * ROW_ALIGN * spec.vocab_size * 4  # logits of the fewest rows that are computed, and their exponentials
    return tokens * pass_bytes_per_token(spec, 2) + chunk_bytes(spec, _CHUNK_ROWS, 2) + head


def _weight_bytes(shape: str) -> int:
    """Of the parameters as they are stored: linears in one byte where the shape says FP8, else in two."""
    spec, names = config_spec(_config(shape))
    one_byte = layer_linears(spec, names) if "quantization_config" in _SHAPES[shape] else set()
    return sum(math.prod(s) * (1 if name in one_byte else 2) for name, s in checkpoint_tensors(spec, names).items())


def _longest(shape: str, budget_gb: float) -> int:
    """Tokens of the longest prompt that the start-up formula allows a device of that size, without a prefix cache."""
    spec, _ = config_spec(_config(shape))
    plan = plan_memory(
        spec,
        element_bytes=2,
        free=int(budget_gb * 1e9) - _weight_bytes(shape),
        workspace_bytes=workspace_bytes(spec, CHUNK_ROWS_GPU, 2),
        kv_cache_bytes=0,
        max_model_len=None,
        on_cpu=False,
    )
    return plan.max_model_len


def _budgets(shape: str, budgets: Sequence[float]) -> None:
    for budget in budgets:
        tokens = _longest(shape, budget)
        row: dict[str, object] = {"shape": shape, "budget_gb": budget, "longest_prompt": tokens, "computed": False}
        if _device().type == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            run = _in_fresh_process(shape, "onepass", tokens, fraction=budget * 1e9 / total)
            row["computed"] = run.returncode == 0
        print(json.dumps(row), flush=True)


def _in_fresh_process(shape: str, way: str, tokens: int, fraction: float = 1.0) -> subprocess.CompletedProcess[str]:
    point = ["--shape", shape, "--point", way, str(tokens), str(fraction)]
    return subprocess.run(
        [sys.executable, "-m", "loadtest.memory_bench", *point], capture_output=True, text=True, check=False
    )


def _draw(rows: Sequence[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for way in (*_WAYS, "formula"):
        points = [(r["tokens"], r["mib"]) for r in rows if r["way"] == way]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", linestyle="--" if way == "formula" else "-", label=way)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("MiB beyond the weights")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onepass bench memory", description=__doc__)
    parser.add_argument("--shape", choices=_SHAPES, default="1b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--plot", type=Path, help="draw the curves here (.png or .svg; needs matplotlib)")
    parser.add_argument(
        "--budget-gb",
        type=float,
        nargs="+",
        help="instead: the longest prompt on a device of so many GB, computed there if this machine has a GPU",
    )
    parser.add_argument("--point", nargs=3, metavar=("WAY", "TOKENS", "FRACTION"), help=argparse.SUPPRESS)
    args = parser.parse_args(list(argv))
    if args.point:
        if _device().type == "cuda":
            torch.cuda.set_per_process_memory_fraction(float(args.point[2]))
        print(json.dumps(_point(args.point[0], args.shape, int(args.point[1]))))
        return 0
    if args.budget_gb:
        _budgets(args.shape, args.budget_gb)
        return 0
    rows: list[dict[str, object]] = []
    for tokens in args.tokens:
        measured = {}
        for way in args.ways:
            run = _in_fresh_process(args.shape, way, tokens)
            if run.returncode == 0:
                measured[way] = json.loads(run.stdout.splitlines()[-1])["bytes"]
            else:
                print(f"{way} at {tokens} tokens failed: {run.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        measured["formula"] = _formula(args.shape, tokens)
        for way, size in measured.items():
            row = {"shape": args.shape, "tokens": tokens, "way": way, "mib": round(size / 2**20, 1)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.plot:
        _draw(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
