"""``onepass bench``: measurements of a server, of memory, of independence from company, of kernels."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

__all__ = ["main"]

_BENCHES = {
    "serving": ("loadtest.serving_bench", "one-token work against a real server, beside a plain torch forward"),
    "memory": (
        "loadtest.memory_bench",
        "peak memory of a pass by prompt length, beside all-layers KV and transformers",
    ),
    "invariance": (
        "loadtest.invariance_bench",
        "largest difference that company makes to a request's log-probabilities",
    ),
    "simulation": ("loadtest.simulation_bench", "predicted job times and simulated latencies beside measured ones"),
    "kernels": ("kernels.bench", "each op beside torch's best equivalent"),
}


def main(argv: Sequence[str]) -> int:
    """``argv`` without the program's name. The exit status of the bench."""
    described = "\n".join(f"  {name:11} {about}" for name, (_, about) in _BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="onepass bench",
        description=f"Measurements:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bench", choices=_BENCHES)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its own arguments; --help lists them")
    args = parser.parse_args(list(argv))
    module = importlib.import_module(_BENCHES[args.bench][0])
    status: int = module.main(args.rest)
    return status
