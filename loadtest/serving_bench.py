"""``onepass bench serving``: one-token work against a real server, beside a plain torch forward in the same run.

Every prompt is fresh random token ids, so nothing is answered from an earlier case's cache; only what a case itself
shares (a profile, an instruction) can be. Cases run in turn with the plain forward (and with ``--peer``, any other
OpenAI-compatible server), since a shared machine's speed drifts and only ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import aiohttp

from loadtest.plain_forward import PlainForward
from loadtest.server_process import running_server

__all__ = ["main"]

SINGLE_LENGTHS = ((128, 8), (512, 6), (2048, 4), (8000, 2))


@dataclass(slots=True)
class Outcome:
    """Latencies in seconds."""

    latencies: list[float]
    wall_s: float
    tokens: int

    def row(self) -> dict[str, float]:
        ordered = sorted(self.latencies)
        return {
            "n": len(ordered),
            "wall_s": round(self.wall_s, 3),
            "tokens_per_s": round(self.tokens / self.wall_s),
            "mean_s": round(statistics.mean(ordered), 4),
            "p50_s": round(ordered[len(ordered) // 2], 4),
            "p99_s": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 4),
        }


class Client:
    """Asks one server for the next token's log-probabilities."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url.rstrip("/"), model

    async def ask(self, prompt: Sequence[int]) -> float:
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "logprobs": 5}
        began = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            document = await answer.json()
            if answer.status != 200 or not document["choices"][0]["logprobs"]["top_logprobs"]:
                raise RuntimeError(f"{answer.status}: {document}")
        return time.perf_counter() - began

    async def closed(self, prompts: Sequence[Sequence[int]], at_once: int) -> Outcome:
        gate = asyncio.Semaphore(at_once)
        latencies: list[float] = []

        async def one(prompt: Sequence[int]) -> None:
            async with gate:
                latencies.append(await self.ask(prompt))

        began = time.perf_counter()
        await asyncio.gather(*map(one, prompts))
        return Outcome(latencies, time.perf_counter() - began, sum(map(len, prompts)))

    async def mixed(self, long: Sequence[Sequence[int]], short: Sequence[Sequence[int]]) -> dict[str, Outcome]:
        """Short prompts that arrive 50 ms behind long ones."""
        latencies: dict[str, list[float]] = {"long": [], "short": []}

        async def one(kind: str, prompt: Sequence[int]) -> None:
            latencies[kind].append(await self.ask(prompt))

        began = time.perf_counter()
        tasks = [asyncio.create_task(one("long", p)) for p in long]
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(one("short", p)) for p in short]
        await asyncio.gather(*tasks)
        wall = time.perf_counter() - began
        return {
            "mixed-short-40x128": Outcome(latencies["short"], wall, sum(map(len, short))),
            "mixed-long-4x4096": Outcome(latencies["long"], wall, sum(map(len, long))),
        }


Run = Callable[[Client], Awaitable["Outcome | dict[str, Outcome]"]]


async def _run_cases(clients: dict[str, Client], plain: PlainForward | None, cases: Sequence[str], seed: int) -> None:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(300, 40000) for _ in range(count)]

    async def each(name: str, run: Run, plainly: Callable[[], Outcome] | None) -> None:
        rates: dict[str, float] = {}
        for who, client in clients.items():
            found = await run(client)
            for case, outcome in (found if isinstance(found, dict) else {name: found}).items():
                row = outcome.row()
                rates[f"{who} {case}"] = row["tokens_per_s"]
                print(json.dumps({"server": who, "case": case, **row}), flush=True)
        if plain is not None and plainly is not None:
            row = plainly().row()
            ratio = rates.get(f"onepass {name}", 0.0) / row["tokens_per_s"]
            print(
                json.dumps({"server": "plain torch", "case": name, **row, "onepass_ratio": round(ratio, 2)}), flush=True
            )

    for client in clients.values():
        await client.ask(tokens(64))
    if "single" in cases:
        for length, count in SINGLE_LENGTHS:
            prompts = [tokens(length) for _ in range(count)]
            await each(
                f"single-{length}", partial(Client.closed, prompts=prompts, at_once=1), partial(_plain, plain, prompts)
            )
    if "short" in cases:
        head = tokens(100)
        prompts = [head + tokens(rng.randrange(30, 200)) for _ in range(200)]
        await each("short-200", partial(Client.closed, prompts=prompts, at_once=64), partial(_plain, plain, prompts))
    if "prefix" in cases:
        profiles = [tokens(2048) for _ in range(3)]
        posts = [profile + tokens(150) for profile in profiles for _ in range(16)]
        await each("prefix-3x16-2048+150", partial(Client.closed, prompts=posts, at_once=48), None)
    if "mixed" in cases:
        long, short = [tokens(4096) for _ in range(4)], [tokens(128) for _ in range(40)]
        await each("mixed", partial(Client.mixed, long=long, short=short), None)


def _plain(plain: PlainForward | None, prompts: Sequence[Sequence[int]]) -> Outcome:
    assert plain is not None
    began, latencies = time.perf_counter(), []
    for prompt in prompts:
        start = time.perf_counter()
        plain.next_token_logits(prompt)
        latencies.append(time.perf_counter() - start)
    return Outcome(latencies, time.perf_counter() - began, sum(map(len, prompts)))


async def _measure(
    urls: dict[str, tuple[str, str]], plain: PlainForward | None, cases: Sequence[str], seed: int
) -> None:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=300)) as session:
        clients = {who: Client(session, url, model) for who, (url, model) in urls.items()}
        await _run_cases(clients, plain, cases, seed)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onepass bench serving", description=__doc__)
    parser.add_argument("cases", nargs="*", default=["single", "short", "prefix", "mixed"])
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="its model name")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL=MODEL", help="another server, in turn")
    parser.add_argument("--no-plain", action="store_true", help="leave out the plain torch forward")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    args = parser.parse_args(argv)
    peers = {}
    for text in args.peer:
        name, url, model = text.split("=", 2)
        peers[name] = (url, model)
    plain = None if args.no_plain else PlainForward.of_builtin_model()
    if args.url:
        asyncio.run(_measure({"onepass": (args.url, args.model), **peers}, plain, args.cases, args.seed))
        return 0
    with running_server({}) as server:
        asyncio.run(_measure({"onepass": (server.url, args.model), **peers}, plain, args.cases, args.seed))
    return 0
