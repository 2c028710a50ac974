"""A backend whose model is a formula: a real tokenizer, scores that depend on the prompt, and faults to order."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from backends.base import (
    BackendStatus,
    ModelInfo,
    PrefillBackend,
    PrefillRequest,
    PrefillResult,
    PromptLogprobs,
    RenderedPrompt,
    Sampling,
    Timing,
    Tokenizer,
    TokenLogprob,
)
from gateway.app import Application
from gateway.runtime import Runtime
from gateway.settings import Settings

MODEL = "double-1"
START, END = "<|im_start|>", "<|im_end|>"

_CORPUS = [
    "The capital of France is Paris. Answer Yes or No. Yes No Maybe. Is the sky blue on a clear day?",
    "positive negative neutral, A B C D E, one two three. Yep Yeah Nope Maybe May.",
    "naïve café 東京 日本 🎉 👩‍👧 — 1,234.5",
] * 4


@cache
def trained_tokenizer() -> DoubleTokenizer:
    return DoubleTokenizer()


class DoubleTokenizer(Tokenizer):
    """Byte-level BPE, trained on a few lines, with a chat template of turns."""

    bos_token = None
    eos_token = END
    pad_token = None
    chat_template = "{turns of system, user, assistant}"

    def __init__(self) -> None:
        bpe = HfTokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=[START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(_CORPUS, trainer)
        self._bpe = bpe
        self.vocab_size = bpe.get_vocab_size()
        self._special = {bpe.token_to_id(t): t for t in (START, END)}
        self.eos_token_ids = frozenset({bpe.token_to_id(END)})
        alphabet = _byte_alphabet()
        self._bytes = [
            None if i in self._special else bytes(alphabet[c] for c in bpe.id_to_token(i))
            for i in range(self.vocab_size)
        ]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        if parse_special:
            return list(self._bpe.encode(text).ids)
        ids: list[int] = []
        for i, part in enumerate(_split_keeping(text, (START, END))):
            # The library has no switch for it: a control token's text is cut in two.
            pieces = (part[:2], part[2:]) if i % 2 else (part,)
            for piece in pieces:
                ids += self._bpe.encode(piece).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        raw = b""
        for i in token_ids:
            if i in self._special:
                raw += b"" if skip_special_tokens else self._special[i].encode()
            else:
                raw += self._bytes[i] or b""
        return raw.decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes | None:
        special = self._special.get(token_id)
        return special.encode() if special is not None else self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        ids: list[int] = []
        text = ""
        for i, message in enumerate(messages):
            open_end = continue_final_message and i == len(messages) - 1
            head, content = f"{message['role']}\n", message["content"]
            ids += [self._bpe.token_to_id(START), *self.encode(head)]
            ids += self.encode(content, parse_special=False)
            text += START + head + content
            if not open_end:
                ids += [self._bpe.token_to_id(END), *self.encode("\n")]
                text += END + "\n"
        if add_generation_prompt:
            ids += [self._bpe.token_to_id(START), *self.encode("assistant\n")]
            text += START + "assistant\n"
        return RenderedPrompt(text=text, token_ids=ids)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in printable]
    return table | {chr(256 + n): b for n, b in enumerate(others)}


def _split_keeping(text: str, marks: Sequence[str]) -> list[str]:
    """Plain parts at even places, marks at odd ones."""
    parts, rest = [], text
    while True:
        hits = [(rest.find(m), m) for m in marks if m in rest]
        if not hits:
            return [*parts, rest]
        at, mark = min(hits)
        parts += [rest[:at], mark]
        rest = rest[at + len(mark) :]


def logprobs_after(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """float64 ``[vocab]``, a function of the prompt alone."""
    digest = hashlib.blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    logits = np.random.default_rng(int.from_bytes(digest, "little")).normal(size=vocab_size) * 3
    return logits - np.log(np.exp(logits).sum())


class DoublePrefill(PrefillBackend):
    """``fault``, when set, is raised by every prefill; ``hold``, when set, is waited for; ``wait_s`` is predicted."""

    name = "double"

    def __init__(self, max_model_len: int = 4096) -> None:
        self.max_model_len = max_model_len
        self.state = BackendStatus(ready=True, message="ready")
        self.fault: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.wait_s = 0.0
        self.seen: list[PrefillRequest] = []
        self.cancelled = 0
        self.impossible: frozenset[int] = frozenset()
        self.cached_tokens = 0
        self.drained = False

    async def start(self) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        pass

    def begin_drain(self) -> None:
        self.drained = True

    def status(self) -> BackendStatus:
        return self.state

    def models(self) -> Sequence[ModelInfo]:
        return [
            ModelInfo(
                id=MODEL, aliases=("org/double",), created=7, max_model_len=self.max_model_len, fingerprint="fp-double"
            )
        ]

    def tokenizer(self, model: str) -> Tokenizer:
        return trained_tokenizer()

    def predicted_wait_s(self, requests: Sequence[PrefillRequest]) -> float:
        return self.wait_s

    async def prefill(self, requests: Sequence[PrefillRequest]) -> list[PrefillResult]:
        self.seen += requests
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fault is not None:
            raise self.fault
        return [self._result(request) for request in requests]

    def scores(self, token_ids: Sequence[int]) -> np.ndarray:
        values = logprobs_after(token_ids, trained_tokenizer().vocab_size)
        values[list(self.impossible)] = -np.inf
        return values

    def _result(self, request: PrefillRequest) -> PrefillResult:
        ids = list(request.token_ids)
        readout = request.readout
        after = self.scores(ids)
        prompt = None
        if readout.prompt_logprobs is not None:
            rows = range(readout.prompt_logprobs_start, len(ids))
            before = [self.scores(ids[:i]) for i in rows]
            prompt = PromptLogprobs(
                start=readout.prompt_logprobs_start,
                actual=[_entry(row, ids[i]) for i, row in zip(rows, before, strict=True)],
                top=[_top(row, readout.prompt_logprobs) for row in before],
            )
        return PrefillResult(
            drawn=tuple(_entry(after, i) for i in _draw(after, readout.sampling)) if readout.sampling else (),
            top=tuple(_top(after, readout.top_logprobs)),
            named=tuple(_entry(after, i) for i in readout.token_ids),
            prompt=prompt,
            cached_tokens=self.cached_tokens,
            timing=Timing(1.5, 2.5, 3.5),
        )


def _entry(row: np.ndarray, token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, float(row[token_id]), 1 + int((row > row[token_id]).sum()))


def _top(row: np.ndarray, k: int) -> list[TokenLogprob]:
    return [TokenLogprob(int(i), float(row[i]), n + 1) for n, i in enumerate(np.argsort(-row, kind="stable")[:k])]


def _draw(row: np.ndarray, sampling: Sampling) -> list[int]:
    logits = row.copy()
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    logits[list(sampling.banned_token_ids)] = -np.inf
    if sampling.allowed_token_ids is not None:
        kept = list(sampling.allowed_token_ids)
        masked = np.full_like(logits, -np.inf)
        masked[kept] = logits[kept]
        logits = masked
    if sampling.temperature == 0:
        return [int(np.argmax(logits))] * sampling.n
    shares = np.exp((logits - logits.max()) / sampling.temperature)
    rng = np.random.default_rng(None if sampling.seed is None else abs(sampling.seed))
    return [int(i) for i in rng.choice(len(shares), size=sampling.n, p=shares / shares.sum())]


def double_app(backends: Sequence[Any], **settings: Any) -> Application:
    return Application(Runtime(Settings(**settings), list(backends)))
