"""``onepass bench invariance``: what company, cache and preemption do to a request's log-probabilities.

A seeded stress of mixed requests through the engine of this process. Each request is answered alone on a cold cache
first; then all of them together, with warm caches, while long prompts are parked for short ones. Printed is the largest
|Δ| over all reported log-probabilities, and how many answers were bitwise the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Mapping, Sequence

from backends.base import PrefillRequest, PrefillResult, Readout, TokenLogprob
from backends.prefill_only.backend import factory

__all__ = ["main"]

_VOCAB = (300, 40000)


def _requests(count: int, longest: int, seed: int) -> list[PrefillRequest]:
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(*_VOCAB) for _ in range(n)]

    stems = [tokens(n) for n in (20, 100, 500, min(1500, longest // 2))]
    found = []
    for i in range(count):
        length = int(min(longest, 1 + rng.paretovariate(0.6) * 12))
        prompt = tokens(length)
        if rng.random() < 0.5:
            prompt = (rng.choice(stems) + prompt)[:longest]
        readout = Readout(top_logprobs=20, prompt_logprobs=2 if rng.random() < 0.1 and len(prompt) < 600 else None)
        found.append(PrefillRequest(model="builtin", token_ids=prompt, readout=readout, cache_salt=f"s{i % 3}"))
    return found


def _values(result: PrefillResult) -> dict[tuple[str, int, int], float]:
    def entries(kind: str, at: int, tokens: Sequence[TokenLogprob]) -> dict[tuple[str, int, int], float]:
        return {(kind, at, t.token_id): t.logprob for t in tokens}

    values = entries("next", 0, result.top)
    if result.prompt is not None:
        for i, (actual, top) in enumerate(zip(result.prompt.actual, result.prompt.top, strict=True)):
            values |= entries("prompt", i, [actual, *top])
    return values


async def _measure(env: Mapping[str, str], count: int, longest: int, seed: int, rounds: int) -> int:
    backend = factory(env)
    await backend.start()
    while not (status := backend.status()).ready:
        if not status.alive:
            print(status.message)
            return 1
        await asyncio.sleep(0.05)
    requests = _requests(count, longest, seed)
    alone = []
    for i, request in enumerate(requests):
        # A salt of its own: nothing of another request is in its cache.
        cold = PrefillRequest(
            model=request.model, token_ids=request.token_ids, readout=request.readout, cache_salt=f"alone{i}"
        )
        alone.append(_values((await backend.prefill([cold]))[0]))
    worst, same, total, cached = 0.0, 0, 0, 0
    rng = random.Random(seed + 1)
    for _ in range(rounds):
        order = rng.sample(range(count), count)

        async def late(i: int) -> PrefillResult:
            await asyncio.sleep(rng.random() * 2.0)
            return (await backend.prefill([requests[i]]))[0]

        answers = await asyncio.gather(*map(late, order))
        for i, answer in zip(order, answers, strict=True):
            found = _values(answer)
            common = found.keys() & alone[i].keys()
            delta = max(abs(found[key] - alone[i][key]) for key in common)
            # A token that is among the k most likely in one run alone differs, by at least the gap at the k-th place.
            worst = max(worst, delta)
            same += found == alone[i]
            total += 1
            cached += answer.cached_tokens
    parked = sum(
        sample.value
        for collector in backend.collectors()
        for metric in collector.collect()
        for sample in metric.samples
        if sample.name == "onepass_passes_parked_total"
    )
    row = {
        "requests": total, "prompt_tokens": sum(len(r.token_ids) for r in requests) * rounds,
        "cached_tokens": cached, "passes_parked": int(parked), "max_abs_delta": worst, "bitwise_same": same,
    }  # fmt: skip
    print(json.dumps(row))
    await backend.stop(10.0)
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onepass bench invariance", description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--longest", type=int, default=3000, help="tokens")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    env = {"ONEPASS_DTYPE": args.dtype, "ONEPASS_MODEL": args.model}
    return asyncio.run(_measure(env, args.requests, args.longest, args.seed, args.rounds))
