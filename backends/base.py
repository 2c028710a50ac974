"""The contract between the gateway and whatever computes answers.

The gateway knows backends only through this module. A third-party package adds one by exposing a factory in the entry
point group ``onepass.backends``; the factory is called with the process environment (a mapping) and returns a
:class:`PrefillBackend` or a :class:`ProxyBackend`. ``ONEPASS_BACKENDS`` names the ones to use, in order.

Nothing here knows of HTTP status codes, JSON shapes, torch or a particular tokenizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = [
    "Backend",
    "BackendError",
    "BackendFactory",
    "BackendStatus",
    "BadLogits",
    "ContextLengthExceeded",
    "DeadlineUnmeetable",
    "InvalidInput",
    "ModelInfo",
    "OutOfMemory",
    "Overloaded",
    "PrefillBackend",
    "PrefillRequest",
    "PrefillResult",
    "PromptLogprobs",
    "ProxyBackend",
    "ProxyRequest",
    "ProxyResponse",
    "Readout",
    "RenderedPrompt",
    "Sampling",
    "ShuttingDown",
    "Timing",
    "TokenLogprob",
    "Tokenizer",
    "UpstreamTimeout",
    "UpstreamUnreachable",
]


# --- what is asked ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one token is drawn from the distribution after the prompt. It never changes reported log-probabilities."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0  # counts the prompt's tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readout:
    """What is read off the pass. Log-probabilities are natural logs of the raw softmax (no temperature, no bias)."""

    sampling: Sampling | None = None  # None: nothing is drawn
    top_logprobs: int = 0  # the k most likely tokens after the prompt
    token_ids: tuple[int, ...] = ()  # these tokens after the prompt, whatever their rank
    prompt_logprobs: int | None = None  # for prompt positions: the actual token and the k most likely
    prompt_logprobs_start: int = 1  # first prompt position that is scored (0 has no predecessor)
    pooled: Literal["", "last", "mean"] = (
        ""  # hidden state after the final norm, of the last token or averaged over all
    )
    labels: bool = False  # logits of a classification head at the last token


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """One prompt and what is wanted of it."""

    model: str
    token_ids: Sequence[int]  # 1..max_model_len ids, each within the vocabulary
    readout: Readout
    tenant: str = ""  # who asks: separates prefix caches and fair shares
    cache_salt: str = ""  # narrows the tenant's prefix cache further
    priority: int = 0  # lower runs earlier
    deadline_s: float | None = None  # seconds from submission
    request_id: str = ""


# --- what is answered ------------------------------------------------------------------------------------------------


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float  # finite; -9999.0 stands for impossible
    rank: int  # 1 is the most likely


class PromptLogprobs(NamedTuple):
    """Entry i is about prompt position ``start + i``."""

    start: int
    actual: list[TokenLogprob]
    top: list[list[TokenLogprob]]  # k entries each, most likely first


class Timing(NamedTuple):
    queue_ms: float
    predicted_ms: float  # predicted at submission, for the job alone
    compute_ms: float


_NO_TIMING = Timing(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    drawn: tuple[TokenLogprob, ...] = ()  # sampling.n entries
    top: tuple[TokenLogprob, ...] = ()  # readout.top_logprobs entries, most likely first
    named: tuple[TokenLogprob, ...] = ()  # one for each of readout.token_ids, in that order
    prompt: PromptLogprobs | None = None
    pooled: tuple[float, ...] = ()  # [hidden], if readout.pooled
    label_logits: tuple[float, ...] = ()  # [labels], if readout.labels
    cached_tokens: int = 0
    timing: Timing = _NO_TIMING


# --- what can go wrong -----------------------------------------------------------------------------------------------


class BackendError(Exception):
    """Base of what a backend raises on purpose; the message is fit for a client."""


class InvalidInput(BackendError):
    """The request cannot be computed as asked: a token outside the vocabulary, an empty prompt."""


class ContextLengthExceeded(InvalidInput):
    """The prompt is longer than the model, or than the memory, allows."""


class BadLogits(BackendError):
    """The model produced NaN for this prompt."""


class OutOfMemory(BackendError):
    """This job's pass did not fit in memory."""


class Overloaded(BackendError):
    """The queue is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineUnmeetable(Overloaded):
    """By prediction, the answer would come after the deadline."""


class ShuttingDown(BackendError):
    """The backend takes no new work and drops what had not started."""


class UpstreamUnreachable(BackendError):
    """No answer: refused, reset before the status line, unresolvable, not HTTP."""


class UpstreamTimeout(BackendError):
    """Connected, but no answer in time."""


# --- backends --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    ready: bool
    alive: bool = True  # False: it died and will not come back
    message: str = ""  # "loading weights 40 %", "warming up", "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A chat rendered with the model's template."""

    text: str
    token_ids: list[int]


class Tokenizer(ABC):
    """Text to ids and back. Synchronous, thread-safe, slow on long input: call it off the event loop."""

    vocab_size: int  # rows of the model's embedding; ids are below it
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    eos_token_ids: frozenset[int]  # tokens that end an answer

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """``parse_special``: text that spells a control token becomes that token; otherwise it stays text."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """The token as shown to users: " Paris", "<|im_end|>", "\\ufffd" for a part of a character."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's own bytes, from the vocabulary; None for an id without any."""

    @abstractmethod
    def is_special(self, token_id: int) -> bool: ...

    @abstractmethod
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Same ids as transformers' ``apply_chat_template(tokenize=True)``, except that control-token strings inside
        message content stay text (unless the backend was configured otherwise). Raises InvalidInput with the
        template's own complaint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    id: str
    aliases: tuple[str, ...] = ()
    created: int = 0  # unix seconds
    owned_by: str = "onepass"
    max_model_len: int = 0
    fingerprint: str = ""  # stable per build, weights and configuration


class Backend(ABC):
    """Life cycle that all backends share. Methods are called on the event loop and must not block it."""

    name: str  # goes into x-onepass-backend and metric labels

    @abstractmethod
    async def start(self) -> None:
        """Begin to load; return at once or when ready. ``status`` tells which."""

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Take no new work, fail what waits with ShuttingDown, finish what runs within ``grace_s``, free everything."""

    @abstractmethod
    def status(self) -> BackendStatus: ...

    def begin_drain(self) -> None:  # noqa: B027 - a backend without a queue has nothing to do
        """Stop admission at once, ahead of ``stop``: waiting work fails with ShuttingDown, running work goes on."""

    def collectors(self) -> Sequence[Any]:
        """prometheus_client collectors to register, created once."""
        return ()


class PrefillBackend(Backend):
    """Answers prefill-only requests for the models it lists."""

    @abstractmethod
    def models(self) -> Sequence[ModelInfo]:
        """Known from configuration even before ``status().ready``."""

    @abstractmethod
    def tokenizer(self, model: str) -> Tokenizer: ...

    @abstractmethod
    async def prefill(self, requests: Sequence[PrefillRequest]) -> list[PrefillResult]:
        """Compute all, answers in order. Requests given together are scheduled so that they share prefixes.

        Cancelling the awaiting task drops those that wait and stops those that run at the next boundary. The first
        failure cancels the rest and is raised."""

    @abstractmethod
    def predicted_wait_s(self, requests: Sequence[PrefillRequest]) -> float:
        """Predicted time until the last of them would be answered if submitted now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    method: str
    raw_path: bytes  # as received, percent-encoding kept, without the query
    raw_query: bytes
    headers: Sequence[tuple[bytes, bytes]]  # as received: order, case and duplicates kept
    body: bytes | AsyncIterator[bytes]


class ProxyResponse(ABC):
    """An upstream answer whose head has arrived. Use as an async context manager: leaving closes the connection, and
    when the body was not read to its end, aborts it."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]  # hop-by-hop ones removed, the rest untouched

    @abstractmethod
    def body(self) -> AsyncIterator[bytes]:
        """Raw bytes, still content-encoded, as they arrive. Raises UpstreamUnreachable if the stream breaks."""

    @abstractmethod
    async def __aenter__(self) -> ProxyResponse: ...

    @abstractmethod
    async def __aexit__(self, *exc: object) -> None: ...


class ProxyBackend(Backend):
    """Passes requests on, byte for byte."""

    @abstractmethod
    async def forward(self, request: ProxyRequest) -> ProxyResponse:
        """Returns when the response head is there. Cancelling the awaiting task closes the upstream connection."""


BackendFactory = Callable[[Mapping[str, str]], Backend]
