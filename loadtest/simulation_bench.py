"""``onepass bench simulation``: are job times, and the simulator that rests on them, right about a real server?

First, prompts of 16 to 8,000 tokens one at a time, some behind a cached prefix: how far is the time predicted at
submission from the time taken? Then a Poisson trace of mixed prompts through the same server, which logs it; the
simulator replays the log with the job times that the server had learnt, and both mean latencies are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from loadtest.server_process import ServerProcess, running_server

__all__ = ["main"]

_TIMES = ("fixed_seconds", "seconds_per_token", "seconds_per_pair")


async def _ask(http: aiohttp.ClientSession, model: str, prompt: list[int]) -> tuple[float, aiohttp.ClientResponse]:
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "logprobs": 1}
    began = time.perf_counter()
    async with http.post("/v1/completions", json=body) as answer:
        await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        return time.perf_counter() - began, answer


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 40000) for _ in range(count)]


async def _job_times(http: aiohttp.ClientSession, model: str, rng: random.Random, rounds: int) -> dict[str, float]:
    lengths = (16, 40, 100, 250, 600, 1500, 3500, 8000)
    errors = []
    for _ in range(rounds):
        for length in rng.sample(lengths, len(lengths)):
            prompt = _tokens(rng, length)
            prompts = [prompt]
            if length <= 3500:  # once more behind what is cached now
                prompts.append(prompt[: length // 2] + _tokens(rng, max(1, length // 3)))
            for each in prompts:
                _, answer = await _ask(http, model, each)
                predicted = float(answer.headers["x-onepass-predicted-ms"])
                errors.append(abs(predicted / float(answer.headers["x-onepass-compute-ms"]) - 1))
    errors.sort()
    return {
        "jobs": len(errors),
        "median_error": round(statistics.median(errors), 4),
        "p95_error": round(errors[int(0.95 * len(errors))], 4),
    }


async def _trace(
    http: aiohttp.ClientSession, model: str, rng: random.Random, seconds: float, load: float
) -> list[float]:
    """Latencies of mixed prompts that arrive at ``load`` of what the server can do, as measured by their own times."""

    def length() -> int:
        return rng.choice((40, 80, 120, 200, 300, 600, 1500))

    alone = [(await _ask(http, model, _tokens(rng, length())))[0] for _ in range(12)]
    rate = load / statistics.mean(alone)
    tasks = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        tasks.append(asyncio.create_task(_ask(http, model, _tokens(rng, length()))))
        await asyncio.sleep(rng.expovariate(rate))
    return [latency for latency, _ in await asyncio.gather(*tasks)]


def _learnt(server: ServerProcess) -> list[float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return [float(next(x for x in lines if x.startswith(f"onepass_job_time_{name} ")).split()[1]) for name in _TIMES]


async def _measure(server: ServerProcess, log: Path, args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as http:
        async with http.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        print(json.dumps(await _job_times(http, model, rng, args.rounds)), flush=True)
        already = len(log.read_text().splitlines()) + 12
        latencies = await _trace(http, model, rng, args.seconds, args.load)
    trace = log.with_name("trace.jsonl")
    trace.write_text("\n".join(log.read_text().splitlines()[already:]) + "\n")
    times = ",".join(map(repr, _learnt(server)))
    measured = statistics.mean(latencies)
    print(json.dumps({"requests": len(latencies), "measured_mean_s": round(measured, 4)}), flush=True)
    command = ["scheduler.simulate", str(trace), "--times", times, "--policies", "onepass", "--cache-tokens", "150000"]
    subprocess.run([sys.executable, "-m", *command], check=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onepass bench simulation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of the job times")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the trace")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(list(argv))
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "requests.jsonl"
        with running_server({"ONEPASS_REQUEST_LOG": str(log)}) as server:
            asyncio.run(_measure(server, log, args))
    return 0
