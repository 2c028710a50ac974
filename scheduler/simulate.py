"""``python -m scheduler.simulate``: latency and throughput of scheduling policies on simulated traffic."""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.job_time import JobTimeModel
from scheduler.keep_policy import NoDemand
from scheduler.prefix_index import PrefixIndex
from scheduler.scheduler import Scheduler, SchedulerConfig
from scheduler.simulator import PaperScheduler, Result, Schedules, best_hit_ratio, lognormal_noise, simulate
from scheduler.workloads import ARRIVALS, Request, credit_verification, jobs_of, mixed, post_recommendation, read_trace

__all__ = ["POLICIES", "Setting", "main", "run"]

# An 8B model in bf16 on one GPU at about 400 TFLOP/s: 16 GFLOP a token, 0.5 MFLOP a query-key pair.
_TIMES = (0.005, 4e-5, 1.3e-9)
_LOADS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)  # of the rate at which a server without a cache is just busy
_BLOCK_TOKENS = 32
_SATURATED = 0.95

_BUILT_IN = ("post", "credit", "mixed")
_COLUMNS = ("rate/s", "mean s", "P50 s", "P99 s", "done/s", "reuse", "best", "passes", "parked")

Build = Callable[[SchedulerConfig, JobTimeModel, PrefixIndex], Schedules]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated, beside requests and policy."""

    times: tuple[float, float, float] = _TIMES
    cache_tokens: int = 150_000
    fairness: float = 0.1
    noise: float = 0.0  # σ of the logarithm of a pass's time
    seed: int = 0


def _without_hints(build: Build, **changes: object) -> Build:
    """A baseline: the index does not know what waits, and ``changes`` apply to the configuration."""

    def made(config: SchedulerConfig, model: JobTimeModel, index: PrefixIndex) -> Schedules:
        scheduler = build(replace(config, **changes), model, index)  # type: ignore[arg-type]
        index.demand = NoDemand()
        return scheduler

    return made


def _with(**changes: object) -> Build:
    return lambda config, model, index: Scheduler(replace(config, **changes), model, index)  # type: ignore[arg-type]


POLICIES: dict[str, Build] = {
    "fcfs": _without_hints(Scheduler, policy="fcfs", max_pass_jobs=1),
    "sjf": _without_hints(Scheduler, policy="sjf", max_pass_jobs=1),
    "paper": PaperScheduler,
    "srjf": _with(max_parked=0, max_pass_jobs=1),
    "srjf+preempt": _with(max_pass_jobs=1),
    "srjf+pack": _with(max_parked=0),
    "onepass": Scheduler,
}


def run(requests: Sequence[Request], policy: str, setting: Setting, **config: object) -> Result:
    """Simulates timed ``requests`` under one of `POLICIES`."""
    a, b, _ = setting.times
    settings = SchedulerConfig(
        fairness=setting.fairness,
        block_tokens=_BLOCK_TOKENS,
        saturation_tokens=max(256, min(8192, int(a / b * _SATURATED / (1 - _SATURATED)))),
        **{"max_queue": None, **config},  # type: ignore[arg-type]
    )
    index = PrefixIndex(setting.cache_tokens // _BLOCK_TOKENS)
    scheduler = POLICIES[policy](settings, JobTimeModel(*setting.times), index)
    rng = random.Random(setting.seed)
    return simulate(
        jobs_of(requests, _BLOCK_TOKENS),
        scheduler,
        JobTimeModel(*setting.times),
        _BLOCK_TOKENS,
        noise=lognormal_noise(rng, setting.noise),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.arrivals is None:
        options.arrivals = "poisson" if options.workload in _BUILT_IN else "replayed"
    elif options.arrivals == "replayed" and options.workload in _BUILT_IN:
        sys.exit("only a trace can be replayed")
    setting = Setting(options.times, options.cache_tokens, options.fairness, options.noise, options.seed)
    requests, replayed = _requests(options)
    if not requests:
        sys.exit("there is nothing to replay")
    rates = options.rates or ([0.0] if replayed else [load * _cold_rate(requests, setting) for load in _LOADS])
    print("".join([f"{'policy':14s}", *(f"{name:>9s}" for name in _COLUMNS)]))
    curves: dict[str, list[tuple[float, Result]]] = {}
    for policy in options.policies:
        for rate in rates:
            timed = (
                requests if replayed else ARRIVALS[options.arrivals](requests, rate, random.Random(options.seed + 1))
            )
            result = run(timed, policy, setting)
            curves.setdefault(policy, []).append((rate, result))
            best = best_hit_ratio(result.accesses, options.cache_tokens // _BLOCK_TOKENS) if options.best else math.nan
            figures = (rate, result.mean_s, result.quantile_s(0.5), result.quantile_s(0.99), result.throughput)
            ratios = (result.reuse_ratio, best, result.passes, result.parked)
            print("".join([f"{policy:14s}", *(f"{value:9.4g}" for value in (*figures, *ratios))]), flush=True)
    if options.plot:
        for path in draw(curves, Path(options.plot), title=options.workload):
            print(f"wrote {path}")


def draw(curves: dict[str, list[tuple[float, Result]]], base: Path, title: str) -> list[Path]:
    """Rate against mean and P99 latency, a line a policy, as ``base``.png and .svg. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    for ax, name, value in (
        (axes[0], "mean latency (s)", lambda r: r.mean_s),
        (axes[1], "P99 latency (s)", lambda r: r.quantile_s(0.99)),
    ):
        for policy, points in curves.items():
            ax.plot([rate for rate, _ in points], [value(r) for _, r in points], marker="o", markersize=3, label=policy)
        ax.set(xlabel="requests a second", ylabel=name, yscale="log")
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    written = [base.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in written:
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return written


def _cold_rate(requests: Sequence[Request], setting: Setting) -> float:
    times = JobTimeModel(*setting.times)
    return len(requests) / sum(times.predict(p.tokens, 0) for r in requests for p in r.prompts)


def _requests(options: argparse.Namespace) -> tuple[list[Request], bool]:
    rng = random.Random(options.seed)
    if options.workload == "post":
        return post_recommendation(rng, users=options.users, shuffled=options.order == "shuffled"), False
    if options.workload == "credit":
        return credit_verification(rng), False
    if options.workload == "mixed":
        return mixed(rng), False
    try:
        with open(options.workload, encoding="utf-8") as lines:
            requests = read_trace(lines)
    except (OSError, ValueError) as error:
        sys.exit(f"{options.workload}: {error}")
    return requests, options.arrivals == "replayed"


def _parser() -> argparse.ArgumentParser:
    def three(text: str) -> tuple[float, float, float]:
        a, b, c = (float(part) for part in text.split(","))
        return a, b, c

    def names(text: str) -> list[str]:
        for name in (chosen := text.split(",")):
            if name not in POLICIES:
                raise argparse.ArgumentTypeError(f"{name!r}: expected some of {', '.join(POLICIES)}")
        return chosen

    parser = argparse.ArgumentParser(prog="python -m scheduler.simulate", description=__doc__)
    parser.add_argument(
        "workload",
        help="post (20 users × 50 posts), credit (60 histories), mixed (1,000 requests, 2 in 100 of them long),"
        " or a file of JSON lines such as the gateway's request log",
    )
    parser.add_argument("--policies", type=names, default=list(POLICIES), help=f"some of {','.join(POLICIES)}")
    parser.add_argument(
        "--arrivals",
        choices=[*ARRIVALS, "replayed"],
        help="poisson, bursty, or replayed as in the file (default: poisson; replayed for a file)",
    )
    parser.add_argument("--rates", type=lambda t: [float(r) for r in t.split(",")], help="requests a second")
    parser.add_argument("--users", type=int, default=20, help="of the workload post (default: %(default)s)")
    parser.add_argument("--order", choices=["shuffled", "by-user"], default="shuffled", help="of the workload post")
    parser.add_argument(
        "--times",
        type=three,
        default=_TIMES,
        metavar="A,B,C",
        help="job times: s a pass, s a token, s a query-key pair (default: an 8B model on a GPU)",
    )
    parser.add_argument("--cache-tokens", type=int, default=150_000, help="prefix cache (default: %(default)s)")
    parser.add_argument("--fairness", type=float, default=0.1, help="λ (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.0, help="σ of log pass time around the model's (default: 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--best", action="store_true", help="also the hit ratio of the best cache in hindsight")
    parser.add_argument("--plot", help="write rate-latency curves to this path with .png and .svg")
    return parser


if __name__ == "__main__":
    main()
