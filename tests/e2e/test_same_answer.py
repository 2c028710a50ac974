"""The same question has the same answer: alone, in company, from a cold cache, a warm one, or one half evicted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from loadtest.server_process import ServerProcess
from tests.e2e.conftest import MODEL
from tests.e2e.server import start_server
from tests.e2e.test_lifecycle import metric


@pytest.fixture(scope="module")
def small_cache(base_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A prefix cache of some forty blocks: eviction is under way all the time."""
    log = tmp_path_factory.mktemp("small") / "log"
    server = start_server({**base_env, "ONEPASS_KV_CACHE_BYTES": "30M", "ONEPASS_MAX_MODEL_LEN": "700"}, log)
    yield server
    assert server.stop() == 0


def ids(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 40000) for _ in range(n)]


async def scores(client: AsyncOpenAI, prompt: list[int], salt: str = "", **more: object) -> tuple:
    """Everything in the answer that comes from the model, and how much of it came from the cache."""
    extra = {"return_tokens_as_token_ids": True, **({"cache_salt": salt} if salt else {})}
    options = {"max_tokens": 1, "temperature": 0, "logprobs": 10, **more}
    answer = await client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **options)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    choice = answer.choices[0]
    return (choice.text, choice.logprobs), answer.usage.prompt_tokens_details.cached_tokens


async def test_alone_and_among_sixty_four_others(small_cache: ServerProcess) -> None:
    """Bit for bit: the stated bound is 0."""
    stem = ids(90, 1)
    prompts = [[*stem[: i * 3], *ids(5 + i * 2, i)] for i in range(12)]
    async with AsyncOpenAI(base_url=f"{small_cache.url}/v1", api_key="x", max_retries=0) as client:
        alone = [(await scores(client, p, f"alone-{i}"))[0] for i, p in enumerate(prompts)]
        others = [scores(client, ids(random.Random(i).randrange(1, 200), 100 + i)) for i in range(64)]
        found = await asyncio.gather(*(scores(client, p, "together") for p in prompts), *others)
        assert [f[0] for f in found[: len(prompts)]] == alone


async def test_cold_warm_and_half_evicted(small_cache: ServerProcess) -> None:
    async with AsyncOpenAI(base_url=f"{small_cache.url}/v1", api_key="x", max_retries=0) as client:
        prompt = ids(600, 5)
        cold, cached = await scores(client, prompt)
        assert cached == 0
        warm, cached = await scores(client, prompt)
        assert warm == cold and cached == 576
        seen = set()
        for i in range(12):
            await scores(client, ids(200, 50 + i))
            again, cached = await scores(client, prompt)
            assert again == cold
            seen.add(cached)
        assert metric(small_cache, "onepass_prefix_block_evictions") > 0


async def test_a_prompt_as_long_as_the_setting_allows_is_scored_without_a_token_more(
    small_cache: ServerProcess,
) -> None:
    async with AsyncOpenAI(base_url=f"{small_cache.url}/v1", api_key="x", max_retries=0) as client:
        (text, logprobs), _ = await scores(client, ids(700, 8), max_tokens=0, echo=True)
        assert text and logprobs is not None and len(logprobs.token_logprobs) == 700
        with pytest.raises(BadRequestError) as caught:
            await scores(client, ids(701, 8), max_tokens=0, echo=True)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("length", [31, 32, 33, 130])
async def test_prompt_scores_are_the_same_twice(small_cache: ServerProcess, length: int) -> None:
    async with AsyncOpenAI(base_url=f"{small_cache.url}/v1", api_key="x", max_retries=0) as client:
        prompt = ids(length, length)
        first, _ = await scores(client, prompt, echo=True)
        await scores(client, [*prompt[:-3], 7, 8, 9], echo=True)
        assert (await scores(client, prompt, echo=True))[0] == first


def test_scoring_a_long_prompt_takes_little_memory(server: ServerProcess) -> None:
    """Logits of 2,500 positions at once would be 490 MB in float32."""

    def peak() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) // 1024

    def post(prompt: list[int], **more: object) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **more}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200

    post(ids(2500, 1))
    post(ids(200, 2), echo=True, logprobs=1)
    before = peak()
    post(ids(2500, 3), echo=True, logprobs=1)
    # The prefix cache takes its part as it fills: 2,500 tokens of at most 46,080 bytes.
    assert peak() - before < 110 + 150


def test_a_cache_is_kept_apart_by_key(base_env: dict[str, str], tmp_path: Path) -> None:
    keys = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
    server = start_server({**base_env, "ONEPASS_API_KEYS": ",".join(keys.values())}, tmp_path / "log")
    prompt = ids(300, 77)

    def cached(who: str, **more: object) -> int:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **more}
        headers = {"authorization": f"Bearer {keys[who]}"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        count = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(answer.headers["x-onepass-cached-tokens"]) == count
        return int(count)

    try:
        assert cached("alice") == 0
        assert cached("bob") == 0
        assert cached("alice") == 288
        assert cached("bob", cache_salt="mine") == 0
        assert cached("bob") == 288
        assert cached("alice", cache_salt="mine") == 0  # a salt does not reach into another's cache
        for headers in ({}, {"authorization": "Bearer wrong-key-123"}):
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
            refused = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "invalid_request_error"
    finally:
        assert server.stop() == 0
    log = (tmp_path / "log").read_text()
    assert "sk-alice" not in log and "wrong-key" not in log
