"""Who may wait: bounds on the queue, deadlines that a prediction can promise, and when to try again.

A refusal is decided at submission, from counts and predictions at hand; nothing waits to be refused.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bounds", "Load", "Refused", "check_bounds"]

_LEAST_RETRY_S = 0.05


class Refused(Exception):
    """The queue takes no more, or cannot promise the deadline. The message is fit for a client.

    ``reason``: ``queue_full``, ``queue_tokens``, ``queue_seconds``, ``tenant`` or ``deadline``.
    ``retry_after_s``: when, by prediction, the same request would be accepted.
    """

    def __init__(self, reason: str, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = max(_LEAST_RETRY_S, retry_after_s)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds on what waits; None is no bound. A queue with nothing in it takes a request of any tokens and
    seconds: refusing it for its size would refuse it for ever."""

    jobs: int | None = None
    tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What waits, or would be added."""

    jobs: int
    tokens: int
    seconds: float  # of computing, predicted


def check_bounds(waiting: Load, added: Load, bounds: Bounds, *, tenant: bool, before_s: float) -> None:
    """Raises Refused when ``waiting`` plus ``added`` is out of ``bounds``, those of one tenant or of all.

    ``before_s``: predicted time until what runs now has ended and the backlog begins to shrink.
    """
    whose = "for this API key" if tenant else "in all"

    def refuse(reason: str, excess_share: float, message: str) -> None:
        # The backlog shrinks as it is computed; what is too much of it is gone after that share of its time.
        retry = before_s + min(1.0, excess_share) * waiting.seconds
        raise Refused("tenant" if tenant else reason, f"{message}; try again in {max(1.0, retry):.0f} s", retry)

    if bounds.jobs is not None and waiting.jobs + added.jobs > bounds.jobs:
        if added.jobs > bounds.jobs:
            message = f"{added.jobs} prompts at once, but at most {bounds.jobs} may wait {whose}: send fewer at a time"
            raise Refused("tenant" if tenant else "queue_full", message, before_s + waiting.seconds)
        excess = (waiting.jobs + added.jobs - bounds.jobs) / waiting.jobs
        refuse(
            "queue_full", excess, f"the queue is full: {waiting.jobs} of at most {bounds.jobs} requests wait {whose}"
        )
    if not waiting.jobs:
        return
    if bounds.tokens is not None and waiting.tokens + added.tokens > bounds.tokens:
        excess = (waiting.tokens + added.tokens - bounds.tokens) / waiting.tokens
        refuse("queue_tokens", excess, f"{waiting.tokens} of at most {bounds.tokens} tokens wait {whose}")
    if bounds.seconds is not None and waiting.seconds + added.seconds > bounds.seconds:
        excess = (waiting.seconds + added.seconds - bounds.seconds) / max(waiting.seconds, 1e-9)
        refuse(
            "queue_seconds",
            excess,
            f"about {waiting.seconds:.1f} s of work waits {whose}, the limit is {bounds.seconds:g} s",
        )
