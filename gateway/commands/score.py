"""``onepass score``: log-probabilities of a text, or of choices after it, from a running server or in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["main"]

Post = Callable[[str, Mapping[str, Any]], Any]


class ScoreError(Exception):
    """The message is fit for a user."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onepass score", description=__doc__)
    parser.add_argument("text", help="the prompt; - reads it from standard input")
    parser.add_argument("--choices", help="comma-separated answers to compare; without it the text itself is scored")
    parser.add_argument("--chat", action="store_true", help="with --choices: put the text in a user's message")
    parser.add_argument("--model", help="default: the server's local model")
    parser.add_argument("--url", help="a running server (default: ONEPASS_BASE_URL, else this process computes)")
    args = parser.parse_args(list(argv))
    if args.chat and not args.choices:
        parser.error("--chat needs --choices")
    text = sys.stdin.read() if args.text == "-" else args.text
    url = args.url or os.environ.get("ONEPASS_BASE_URL", "")
    try:
        if url:
            _run(lambda path, body: _post_http(url, path, body), text, args)
        else:
            asyncio.run(_in_process(lambda post: _run(post, text, args)))
    except ScoreError as exc:
        print(f"onepass: {exc}", file=sys.stderr)
        return 1
    return 0


def _run(post: Post, text: str, args: argparse.Namespace) -> None:
    body: dict[str, Any] = {"temperature": 0, **({"model": args.model} if args.model else {})}
    if args.choices:
        options = [part.strip() if args.chat else part for part in args.choices.split(",")]
        body["structured_outputs"] = {"choice": options}
        if args.chat:
            answer = post("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]})
        else:
            answer = post("/v1/completions", {**body, "prompt": text})
        found = answer["choices"][0]["closed_set"]
        for option in sorted(found["options"], key=lambda option: -option["logprob"]):
            print(f"{option['logprob']:10.4f}  {option['text']!r}")
        return
    answer = post("/v1/completions", {**body, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0})
    scores = answer["choices"][0]["logprobs"]
    total = 0.0
    for token, value in zip(scores["tokens"], scores["token_logprobs"], strict=True):
        print(f"{'':>10}  {token!r}" if value is None else f"{value:10.4f}  {token!r}")
        total += value or 0.0
    print(f"{total:10.4f}  total of {max(len(scores['tokens']) - 1, 0)} tokens")


def _post_http(url: str, path: str, body: Mapping[str, Any]) -> Any:
    root = url.rstrip("/").removesuffix("/v1")
    headers = {"content-type": "application/json"}
    key = os.environ.get("ONEPASS_API_KEY") or os.environ.get("OPENAI_API_KEY")
    if key:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(root + path, data=msgspec.json.encode(body), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as exc:
        raise ScoreError(_message(exc.code, exc.read())) from None
    except OSError as exc:
        raise ScoreError(f"{root} does not answer: {getattr(exc, 'reason', exc)}") from None


def _message(status: int, payload: bytes) -> str:
    try:
        return f"{status}: {msgspec.json.decode(payload)['error']['message']}"
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the server answered {status}"


async def _in_process(use: Callable[[Post], None]) -> None:
    """Runs ``use`` on a thread against an application of its own, without a socket."""
    from gateway.app import create_app
    from gateway.commands.in_process import InProcess
    from gateway.settings import SettingsError

    try:
        app = create_app({**os.environ, "ONEPASS_API_KEYS": ""})
    except SettingsError as exc:
        raise ScoreError(str(exc)) from None
    async with InProcess(app) as server:
        failure = await server.wait_ready()
        if failure is not None:
            raise ScoreError(failure)
        loop = asyncio.get_running_loop()

        def post(path: str, body: Mapping[str, Any]) -> Any:
            asked = server.post(path, msgspec.json.encode(body))
            status, payload = asyncio.run_coroutine_threadsafe(asked, loop).result()
            if status != 200:
                raise ScoreError(_message(status, payload))
            return msgspec.json.decode(payload)

        await asyncio.to_thread(use, post)
