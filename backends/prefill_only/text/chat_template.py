"""Renders one chat template: the Jinja dialect that Hugging Face models are published with, in a sandbox.

Templates come with the model and their variables from clients, so neither is trusted: no attribute access beyond data,
no change to what was passed in, bounded repetition, output and time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from backends.base import InvalidInput

__all__ = ["ChatTemplate"]

_MAX_OUTPUT_CHARS = 256 << 20
_MAX_REPEATED_CHARS = 1 << 20  # by the * operator, or by an indent
_MAX_RENDER_S = 30.0
_CHECK_EVERY = 4096  # accesses to data between two looks at the clock

_deadline: ContextVar[list[float]] = ContextVar("deadline")  # [accesses so far, monotonic time to stop at]


class ChatTemplate:
    """A compiled template. Raises :class:`InvalidInput` if it does not compile. Thread-safe.

    ``now``: the local time that ``strftime_now`` formats.
    """

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        self.source = source
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals["dict"] = _plain_dict
        environment.globals["namespace"] = _PublicNamespace
        try:
            self._template = environment.from_string(source)
            self.literals = frozenset(
                node.value
                for node in environment.parse(source).find_all(nodes.Const)
                if isinstance(node.value, str) and node.value
            )
            self.text = "\0".join([*self.literals, *_template_data(environment, source)])
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidInput(f"the model's chat template does not compile: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises :class:`InvalidInput` with the template's own complaint."""
        token = _deadline.set([0.0, time.monotonic() + _MAX_RENDER_S])
        try:
            blocks, chars = [], 0
            for block in self._template.generate(variables):
                blocks.append(block)
                chars += len(block)
                if chars > _MAX_OUTPUT_CHARS:
                    raise InvalidInput(f"the chat template wrote more than {_MAX_OUTPUT_CHARS} characters")
            return "".join(blocks)
        except InvalidInput:
            raise
        except jinja2.TemplateError as error:
            raise InvalidInput(f"the chat template refuses this conversation: {error.message or error}") from error
        except RecursionError as error:
            raise InvalidInput("the chat template refuses this conversation: nested too deeply") from error
        except Exception as error:  # whatever an expression raises on data it was not written for
            raise InvalidInput(f"the chat template cannot render this conversation: {error}") from error
        finally:
            _deadline.reset(token)


def _template_data(environment: jinja2.Environment, source: str) -> list[str]:
    return [node.data for node in environment.parse(source).find_all(nodes.TemplateData)]


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits on what one rendering may use."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _count_access()
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    _check_repeated(len(sequence) * count)
        elif operator == "**":
            _check_repeated(abs(right) if isinstance(right, int) else 0)
        elif isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _count_access()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _count_access()
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _count_access()
        name = getattr(__obj, "__name__", "")
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs") and args and isinstance(args[0], int):
            _check_repeated(args[0])
        return super().call(__context, __obj, *args, **kwargs)


def _count_access() -> None:
    state = _deadline.get(None)
    if state is None:
        return
    state[0] += 1
    if state[0] % _CHECK_EVERY == 0 and time.monotonic() > state[1]:
        raise InvalidInput(f"the chat template took longer than {_MAX_RENDER_S:g} s")


def _check_repeated(count: int) -> None:
    if count > _MAX_REPEATED_CHARS:
        raise InvalidInput(f"the chat template repeats something {count} times")


def _check_format(form: str) -> None:
    """A width of many digits asks for as many characters."""
    digits = 0
    for char in form:
        digits = digits + 1 if char.isdigit() else 0
        if digits > 6:
            raise InvalidInput("the chat template formats with a width of more than six digits")


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """A namespace without underscored attributes, which could reach the interpreter's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # an attribute may be called self
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")


def _plain_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Python writes it; Jinja's own filter escapes HTML."""
    _check_repeated(indent if isinstance(indent, int) else len(indent or ""))
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )
    if ensure_ascii:
        # Lone surrogates stand for ASCII characters here (untrusted.py), so they are left alone.
        text = "".join(c if c < "\x80" or "\ud800" <= c <= "\udfff" else json.dumps(c)[1:-1] for c in text)
    return text
