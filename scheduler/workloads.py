"""What arrives when: the two workloads of the PrefillOnly paper, arrival processes, and traces.

A workload is a list of requests, each of one or more prompts whose first tokens may be shared; an arrival process gives
them times. Both draw from a ``random.Random`` of the caller's.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scheduler.job import Job

__all__ = [
    "ARRIVALS",
    "Prompt",
    "Request",
    "bursty",
    "credit_verification",
    "jobs_of",
    "mixed",
    "poisson",
    "post_recommendation",
    "read_trace",
]


_GROUP_TOKENS = 256  # prompts of a prefix group in the request log have so many first tokens in common


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens`` in all, of which the first ``prefix_tokens`` are the same for everybody who names ``prefix``."""

    tokens: int
    prefix: str = ""
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    prompts: tuple[Prompt, ...]
    arrival_s: float = 0.0
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None  # from arrival


def post_recommendation(
    rng: random.Random,
    *,
    users: int = 20,
    posts: int = 50,
    profile_tokens: tuple[int, int] = (11_000, 17_000),
    post_tokens: int = 150,
    shuffled: bool = True,
) -> list[Request]:
    """Each user's profile in front of each of ``posts`` posts, one prompt a request; mixed, or user after user."""
    lengths = [rng.randint(*profile_tokens) for _ in range(users)]
    order = [user for user in range(users) for _ in range(posts)]
    if shuffled:
        rng.shuffle(order)
    return [Request((Prompt(lengths[user] + post_tokens, f"user {user}", lengths[user]),)) for user in order]


def credit_verification(
    rng: random.Random, *, histories: int = 60, history_tokens: tuple[int, int] = (40_000, 60_000)
) -> list[Request]:
    """Long histories that share nothing, each asked about once."""
    return [Request((Prompt(rng.randint(*history_tokens)),)) for _ in range(histories)]


def mixed(
    rng: random.Random,
    *,
    requests: int = 1000,
    short_tokens: tuple[int, int] = (50, 500),
    long_tokens: tuple[int, int] = (20_000, 60_000),
    long_share: float = 0.02,
) -> list[Request]:
    """Short questions among a few long documents; nothing is shared."""
    lengths = [rng.randint(*(long_tokens if rng.random() < long_share else short_tokens)) for _ in range(requests)]
    return [Request((Prompt(tokens),)) for tokens in lengths]


def poisson(requests: Sequence[Request], rate: float, rng: random.Random) -> list[Request]:
    """Independent arrivals, ``rate`` requests a second on average."""
    now, timed = 0.0, []
    for request in requests:
        now += rng.expovariate(rate)
        timed.append(replace(request, arrival_s=now))
    return timed


def bursty(requests: Sequence[Request], rate: float, rng: random.Random, burst: float = 10.0) -> list[Request]:
    """Poisson bursts of geometrically distributed size, ``burst`` requests on average, at once; same mean rate."""
    now, timed, left = 0.0, [], 0
    for request in requests:
        if left == 0:
            now += rng.expovariate(rate / burst)
            left = 1
            while rng.random() > 1 / burst:
                left += 1
        left -= 1
        timed.append(replace(request, arrival_s=now))
    return timed


ARRIVALS = {"poisson": poisson, "bursty": bursty}


def read_trace(lines: Iterable[str]) -> list[Request]:
    """Requests from JSON lines, times counted from the first.

    Each line is either what the gateway's request log writes for a request answered locally (``arrival`` in s,
    ``tokens``, ``cached``, ``prefix_groups``, ``tenant``; other lines are passed over), or has the fields of `Request`:
    ``arrival_s``, ``prompts`` (a list of objects with ``tokens``, ``prefix``, ``prefix_tokens``), ``tenant``,
    ``priority``, ``deadline_s``. Raises ValueError with the line's number.

    The log does not say how long a shared prefix is. It is taken to be the most that was ever cached of a prompt of
    that group, and at least the tokens by which prompts are grouped.
    """
    own: list[Request] = []
    logged: list[Mapping[str, Any]] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if "prompts" in line:
                prompts = tuple(Prompt(**prompt) for prompt in line.pop("prompts"))
                own.append(Request(prompts=prompts, **line))
            elif line["backend"] == "prefill-only" and line["status"] == 200 and line["prefix_groups"]:
                logged.append({**line, "arrival": float(line["arrival"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} of the trace: {error!r}") from None
    found = sorted([*own, *_from_log(logged)], key=lambda request: request.arrival_s)
    begin = found[0].arrival_s if found else 0.0
    return [replace(request, arrival_s=request.arrival_s - begin) for request in found]


def _from_log(lines: Sequence[Mapping[str, Any]]) -> Iterator[Request]:
    count = Counter(group for line in lines for group in line["prefix_groups"])
    shared = {group: _GROUP_TOKENS if seen > 1 else 0 for group, seen in count.items()}
    for line in lines:
        for group, cached in zip(line["prefix_groups"], line["cached"], strict=False):
            shared[group] = max(shared[group], cached)
    for line in lines:
        prompts = tuple(
            Prompt(tokens, group, min(shared[group], tokens))
            for tokens, group in zip(line["tokens"], line["prefix_groups"], strict=True)
        )
        yield Request(prompts, line["arrival"], line["tenant"] or "")


def jobs_of(requests: Sequence[Request], block_tokens: int) -> list[list[Job]]:
    """Jobs for each request, with block hashes that are equal where prefixes are. Ids count from 1."""
    prefixes: dict[str, list[bytes]] = {}
    job_id = 0
    made: list[list[Job]] = []
    for request in requests:
        group: list[Job] = []
        first_id = job_id + 1
        for prompt in request.prompts:
            job_id += 1
            blocks = prompt.tokens // block_tokens
            shared = min(prompt.prefix_tokens // block_tokens, blocks)
            name = f"{request.tenant}|{prompt.prefix}"
            prefix = prefixes.setdefault(name, [])
            prefix.extend(f"{name}|{i}".encode() for i in range(len(prefix), shared))
            own = [f"{job_id}#{i}".encode() for i in range(shared, blocks)]
            group.append(
                Job(
                    job_id,
                    prompt.tokens,
                    request.arrival_s,
                    [*prefix[:shared], *own],
                    (prompt.tokens - 1) // block_tokens,
                    request.tenant,
                    request.priority,
                    None if request.deadline_s is None else request.arrival_s + request.deadline_s,
                    first_id,
                )
            )
        made.append(group)
    return made
