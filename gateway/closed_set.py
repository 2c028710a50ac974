"""Answers from a closed set of texts without generating: which tokens decide, and what the pass says about them.

Three ways, the first that applies (docs/api.md tells users):

- ``first_bytes``: all options differ in their first byte, so every token that begins an option pins it. An option's
  probability is the sum over such tokens.
- ``first_tokens``: all options differ in their first token. Only these tokens take part.
- ``full_options``: each option is scored in full, as a continuation of the prompt.

Pure but for the tokenizer. A plan's *leaves* are token sequences that spell options; their weights are natural logs of
probabilities; everything reported is computed from them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from backends.base import PrefillResult, Readout, Sampling, Tokenizer, TokenLogprob
from gateway.errors import InvalidRequest
from gateway.wire.choices import Choice, TokenReadout
from gateway.wire.logprobs import IMPOSSIBLE, finite
from gateway.wire.vocabulary import VocabularyIndex

__all__ = ["ClosedSet", "Leaf", "plan_closed_set"]

MAX_OPTIONS = 1024


class Leaf(NamedTuple):
    """A token sequence that spells an option. Leaves of one option differ in their first token."""

    option: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClosedSet:
    method: str  # "first_bytes", "first_tokens" or "full_options"
    options: tuple[str, ...]
    option_ids: tuple[tuple[int, ...], ...]  # each option's own tokens
    leaves: tuple[Leaf, ...]
    end_token: int | None = None  # scored after each option where one option begins another
    colliding: tuple[int, ...] = ()  # options that one read cannot tell apart

    @property
    def longest(self) -> int:
        return max(map(len, self.option_ids))

    def readouts(self, prompt_ids: Sequence[int]) -> list[tuple[Sequence[int], Readout]]:
        """The passes that decide: one, or one for each option."""
        if self.method != "full_options":
            first = tuple(dict.fromkeys(leaf.token_ids[0] for leaf in self.leaves))
            return [(prompt_ids, Readout(token_ids=first))]
        end = () if self.end_token is None else (self.end_token,)
        readout = Readout(prompt_logprobs=0, prompt_logprobs_start=len(prompt_ids))
        return [([*prompt_ids, *leaf.token_ids, *end], readout) for leaf in self.leaves]

    def weights(self, results: Sequence[PrefillResult]) -> list[float]:
        """One for each leaf: the log of its probability (its first token's, or its whole text's)."""
        if self.method != "full_options":
            named = {item.token_id: finite(item.logprob) for item in results[0].named}
            return [named[leaf.token_ids[0]] for leaf in self.leaves]
        weights = []
        for result in results:
            assert result.prompt is not None
            weights.append(math.fsum(finite(item.logprob) for item in result.prompt.actual))
        return weights

    def choices(
        self,
        weights: Sequence[float],
        sampling: Sampling,
        *,
        max_tokens: int | None,
        tokenizer: Tokenizer,
        top_logprobs: int | None,
        named: Sequence[int],
    ) -> list[Choice]:
        """``sampling.n`` draws. Reported log-probabilities are renormalised over the set, before temperature and bias;
        ``top_logprobs`` None leaves them out."""
        biased = [
            weight + sum(sampling.logit_bias.get(t, 0.0) for t in leaf.token_ids)
            for weight, leaf in zip(weights, self.leaves, strict=True)
        ]
        normalised = _normalised(weights)
        report = self._report(normalised)
        spelled: dict[int, Choice] = {}
        draws = _draws(biased, sampling)
        for i in set(draws):
            leaf = self.leaves[i]
            emitted = leaf.token_ids if max_tokens is None else leaf.token_ids[:max_tokens]
            whole = len(emitted) == len(leaf.token_ids)
            tokens = self._trace(emitted, normalised, top_logprobs or 0, named)
            text = self.options[leaf.option] if whole else _spelled(emitted, tokenizer)
            spelled[i] = Choice(text, "stop" if whole else "length", None, tokens, report)
        return [spelled[i] for i in draws]

    def _report(self, normalised: Sequence[float]) -> dict[str, Any]:
        by_option: list[list[float]] = [[] for _ in self.options]
        for leaf, weight in zip(self.leaves, normalised, strict=True):
            by_option[leaf.option].append(weight)
        return {
            "method": self.method,
            "options": [
                {"text": text, "token_ids": list(ids), "logprob": finite(_log_sum_exp(weights))}
                for text, ids, weights in zip(self.options, self.option_ids, by_option, strict=True)
            ],
        }

    def _trace(
        self, emitted: Sequence[int], normalised: Sequence[float], k: int, named: Sequence[int]
    ) -> list[TokenReadout]:
        """For each emitted token its probability given those before it, and that of its rivals in the set."""
        alive = [(leaf.token_ids, weight) for leaf, weight in zip(self.leaves, normalised, strict=True)]
        trace = []
        for depth, token in enumerate(emitted):
            rivals: dict[int, list[float]] = {}
            for ids, weight in alive:
                if len(ids) > depth:
                    rivals.setdefault(ids[depth], []).append(weight)
                elif self.end_token is not None:
                    rivals.setdefault(self.end_token, []).append(weight)
            sums = {rival: _log_sum_exp(weights) for rival, weights in rivals.items()}
            total = _log_sum_exp(list(sums.values()))
            ranked = sorted(((value - total, rival) for rival, value in sums.items()), key=lambda pair: -pair[0])
            entries = {
                rival: TokenLogprob(rival, max(min(value, 0.0), IMPOSSIBLE), rank)
                for rank, (value, rival) in enumerate(ranked, 1)
            }
            asked = [entries.get(i, TokenLogprob(i, IMPOSSIBLE, len(entries) + 1)) for i in named]
            trace.append(TokenReadout(entries[token], list(entries.values())[:k], asked))
            alive = [(ids, weight) for ids, weight in alive if len(ids) > depth and ids[depth] == token]
        return trace


def plan_closed_set(
    options: Sequence[str], tokenizer: Tokenizer, vocabulary: VocabularyIndex, *, param: str
) -> ClosedSet:
    """Raises InvalidRequest naming the option that cannot be used."""
    if not options:
        raise InvalidRequest(f"{param} is empty.", param=param, code="empty_array")
    if len(options) > MAX_OPTIONS:
        raise InvalidRequest(
            f"{param} lists {len(options)} options; at most {MAX_OPTIONS} are answered.",
            param=param,
            code="array_above_max_length",
        )
    seen: dict[str, int] = {}
    for i, option in enumerate(options):
        if not option:
            raise InvalidRequest(f"{param}[{i}] is empty.", param=f"{param}[{i}]", code="invalid_value")
        if option in seen:
            raise InvalidRequest(
                f"{param}[{i}] repeats {param}[{seen[option]}].", param=f"{param}[{i}]", code="invalid_value"
            )
        seen[option] = i
    raws = [option.encode() for option in options]
    ids = tuple(
        continuation_ids(option, tokenizer, param=f"{param}[{i}]", vocabulary=vocabulary)
        for i, option in enumerate(options)
    )
    if len({raw[0] for raw in raws}) == len(raws):
        leaves = []
        for i, raw in enumerate(raws):
            begins = [(token, length) for token, length in vocabulary.prefixes(raw) if token != ids[i][0]]
            leaves.append(Leaf(i, ids[i]))
            for token, length in begins:
                rest = raw[length:].decode(errors="surrogateescape")
                tail = _tail_ids(rest, tokenizer, vocabulary)
                if tail is not None:
                    leaves.append(Leaf(i, (token, *tail)))
        return ClosedSet("first_bytes", tuple(options), ids, tuple(leaves))
    own = tuple(Leaf(i, option_ids) for i, option_ids in enumerate(ids))
    firsts: dict[int, list[int]] = {}
    for i, option_ids in enumerate(ids):
        firsts.setdefault(option_ids[0], []).append(i)
    if len(firsts) == len(ids):
        return ClosedSet("first_tokens", tuple(options), ids, own)
    begun = _one_begins_another(ids)
    end = min(tokenizer.eos_token_ids, default=None) if begun else None
    if begun and end is None:
        raise InvalidRequest(
            f"One option of {param} begins another, and the model has no end token to tell them apart.",
            param=param,
            code="invalid_value",
        )
    colliding = tuple(i for group in firsts.values() if len(group) > 1 for i in group)
    return ClosedSet("full_options", tuple(options), ids, own, end, colliding)


def _one_begins_another(sequences: Sequence[tuple[int, ...]]) -> bool:
    """In order, whatever begins others is followed at once by one of them."""
    ordered = sorted(sequences)
    return any(b[: len(a)] == a for a, b in pairwise(ordered))


def continuation_ids(option: str, tokenizer: Tokenizer, *, param: str, vocabulary: VocabularyIndex) -> tuple[int, ...]:
    """The option's tokens as they follow other text. Raises InvalidRequest when no tokenisation spells it exactly."""
    ids = _tail_ids(option, tokenizer, vocabulary)
    if not ids:
        raise InvalidRequest(f"{param} cannot be spelled in the model's tokens.", param=param, code="invalid_value")
    return ids


def _tail_ids(text: str, tokenizer: Tokenizer, vocabulary: VocabularyIndex) -> tuple[int, ...] | None:
    """Tokens that spell ``text`` (bytes that are not UTF-8 as surrogates) in the middle of an answer.

    Some tokenizers put a word-start mark before a text's beginning; behind an anchor they do not."""
    if not text:
        return ()
    raw = text.encode(errors="surrogateescape")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return _by_longest_match(raw, vocabulary)
    for anchor in ("", "\n"):
        before = tokenizer.encode(anchor, add_special_tokens=False, parse_special=False) if anchor else []
        ids = tokenizer.encode(anchor + text, add_special_tokens=False, parse_special=False)
        if ids[: len(before)] == before:
            tail = ids[len(before) :]
            if b"".join(tokenizer.token_bytes(i) or b"" for i in tail) == raw:
                return tuple(tail)
    return None


def _by_longest_match(raw: bytes, vocabulary: VocabularyIndex) -> tuple[int, ...] | None:
    """For what is left of a character whose first bytes were a token of their own."""
    ids: list[int] = []
    while raw:
        begins = vocabulary.prefixes(raw)
        if not begins:
            return None
        token, length = begins[-1]
        ids.append(token)
        raw = raw[length:]
    return tuple(ids)


def _spelled(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return b"".join(tokenizer.token_bytes(i) or b"" for i in token_ids).decode(errors="replace")


def _log_sum_exp(values: Sequence[float]) -> float:
    if not values:
        return IMPOSSIBLE
    top = max(values)
    return top + math.log(math.fsum(math.exp(value - top) for value in values))


def _normalised(weights: Sequence[float]) -> list[float]:
    total = _log_sum_exp(weights)
    return [weight - total for weight in weights]


def _draws(weights: Sequence[float], sampling: Sampling) -> list[int]:
    """Indices of the drawn leaves; ties go to the first."""
    best = max(range(len(weights)), key=lambda i: weights[i])
    if sampling.temperature == 0:
        return [best] * sampling.n
    scaled = _normalised([weight / sampling.temperature for weight in weights])
    kept = _kept({i: math.exp(value) for i, value in enumerate(scaled)}, sampling)
    rng = random.Random(sampling.seed)
    return rng.choices(list(kept), list(kept.values()), k=sampling.n)


def _kept(shares: Mapping[int, float], sampling: Sampling) -> dict[int, float]:
    """What top_k, min_p and top_p leave, likeliest first."""
    ranked = sorted(shares.items(), key=lambda pair: -pair[1])
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    floor = sampling.min_p * ranked[0][1]
    kept: dict[int, float] = {}
    mass = 0.0
    budget = sampling.top_p * math.fsum(share for _, share in ranked)
    for i, share in ranked:
        if share < floor or (kept and mass >= budget):
            break
        kept[i] = share
        mass += share
    return kept
