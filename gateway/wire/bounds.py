"""What one request may ask for, where a short body could ask for an answer or a list of passes without end.

Checked before anything of that size is built. What grows with the body, or with what is computed, needs no bound here.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import ContextLengthExceeded
from gateway.closed_set import ClosedSet
from gateway.errors import InvalidRequest

__all__ = ["MAX_ENTRIES", "MAX_PASSES", "MAX_PASS_TOKENS", "check_entries", "check_passes"]

MAX_PASSES = 4096
MAX_PASS_TOKENS = 2**25
MAX_ENTRIES = 2**19


def check_passes(closed_set: ClosedSet, prompt_lengths: Sequence[int], max_model_len: int, param: str) -> None:
    """``prompt_lengths`` in tokens. Raises ContextLengthExceeded, or InvalidRequest naming ``param``, when options that
    are scored in full would be too long behind the prompts, or too many."""
    if closed_set.method != "full_options":
        return
    longest = max(prompt_lengths) + closed_set.longest + (closed_set.end_token is not None)
    if 0 < max_model_len < longest:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {max_model_len} tokens, but the prompt and the longest option of "
            f"{param} have {longest}; shorten them"
        )
    prompts, options = len(prompt_lengths), len(closed_set.leaves)
    if prompts * options > MAX_PASSES or sum(prompt_lengths) * options > MAX_PASS_TOKENS:
        raise InvalidRequest(
            f"Prompts ({prompts}) times options of {param} ({options}) that are scored in full: at most {MAX_PASSES} "
            f"such passes, and {MAX_PASS_TOKENS} tokens, are computed at once; send fewer at a time.",
            param=param,
            code="array_above_max_length",
        )


def check_entries(entries_per_choice: int, prompts: int, n: int, param: str) -> None:
    """``entries_per_choice``: tokens with scores, and options with theirs. Raises InvalidRequest naming ``param``."""
    entries = entries_per_choice * prompts * n
    if entries > MAX_ENTRIES:
        raise InvalidRequest(
            f"The answer would hold {entries} scores in {prompts * n} choices; at most {MAX_ENTRIES} are answered at "
            "once: lower n, send fewer prompts at a time, or ask for fewer log-probabilities.",
            param=param,
            code="invalid_value",
        )
