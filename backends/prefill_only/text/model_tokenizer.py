"""The gateway's view of one model's tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

from backends.base import InvalidInput, RenderedPrompt, Tokenizer
from backends.prefill_only.text.added_tokens import AddedTokenFinder
from backends.prefill_only.text.chat import Chat
from backends.prefill_only.text.chat_template import ChatTemplate
from backends.prefill_only.text.definition import AddedToken, TokenizerDefinition, TokenizerUnsupported
from backends.prefill_only.text.engine import Engine
from backends.prefill_only.text.gguf_tokenizer import gguf_definition
from backends.prefill_only.text.hf_directory import directory_definition
from backends.prefill_only.text.library_engine import LibraryEngine
from backends.prefill_only.text.tiktoken_engine import NotExpressible, TiktokenEngine
from backends.prefill_only.text.untrusted import StandIns, check_text
from backends.prefill_only.text.vocabulary import token_bytes_table

__all__ = ["ModelTokenizer", "load_tokenizer"]

log = logging.getLogger(__name__)


def load_tokenizer(
    source: str | Path,
    *,
    vocab_rows: int,
    eos_token_ids: Iterable[int],
    control_tokens_in_content: bool = False,
) -> Tokenizer:
    """``source``: a ``.gguf`` file, or a directory with ``tokenizer.json``. ``vocab_rows``: of the model's embedding.

    Raises :class:`TokenizerUnsupported`, a ValueError, if there is no tokenizer or none that can be used here.
    """
    path = Path(source)
    definition = directory_definition(path) if path.is_dir() else gguf_definition(path)
    return ModelTokenizer(
        definition,
        vocab_rows=vocab_rows,
        eos_token_ids=eos_token_ids,
        control_tokens_in_content=control_tokens_in_content,
    )


class ModelTokenizer(Tokenizer):
    """Encodes with the fastest engine that is exact for this model; decodes with the library.

    ``control_tokens_in_content``: let strings in a client's messages become control tokens.
    """

    def __init__(
        self,
        definition: TokenizerDefinition,
        *,
        vocab_rows: int,
        eos_token_ids: Iterable[int],
        control_tokens_in_content: bool = False,
    ) -> None:
        try:
            self._library = LibraryTokenizer.from_str(json.dumps(definition.spec))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerUnsupported(f"the tokenizers library refuses this tokenizer: {error}") from error
        named = definition.named_tokens
        self.vocab_size = vocab_rows
        self.bos_token = named.get("bos_token")
        self.eos_token = named.get("eos_token")
        self.pad_token = named.get("pad_token")
        self.chat_template = definition.chat_templates.get("default")
        self.eos_token_ids = frozenset(eos_token_ids)
        self._definition = definition
        self._added = definition.added_tokens()
        self._special_ids = frozenset(token.id for token in self._added if token.special)
        self._bytes = token_bytes_table(definition.spec, vocab_rows)
        self._before, self._after = self._surroundings()
        self._control = _control_tokens(self._added, definition.chat_templates.values())
        self._control_finder = AddedTokenFinder(self._control)
        self._engine = _engine(definition.spec, self._library, self._added, self._control)
        self._control_tokens_in_content = control_tokens_in_content

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        check_text(text)
        ids = self._engine.encode(text) if parse_special else self._engine.encode_pieces([text])
        if not add_special_tokens:
            return ids
        # A prompt that was rendered elsewhere may bring its own start token.
        before = [] if self._before and ids[: len(self._before)] == self._before else self._before
        return [*before, *ids, *self._after] if before or self._after else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        ids = list(token_ids)
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            raise InvalidInput(f"token ids must be at least 0 and below {self.vocab_size}")
        text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        raw = self.token_bytes(token_id)
        return "" if raw is None else raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else None

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        chats, stand_ins = self._chats
        chat = chats.get("tool_use" if tools is not None else "default") or chats.get("default")
        if chat is None:
            raise InvalidInput("this model has no chat template: use /v1/completions")
        text = chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs or {},
        )
        if stand_ins is None or not stand_ins.marks(text):
            return RenderedPrompt(text=text, token_ids=self.encode(text, add_special_tokens=False))
        pieces = [
            piece if isinstance(piece, int) else stand_ins.restore(piece) for piece in self._control_finder.pieces(text)
        ]
        return RenderedPrompt(text=stand_ins.restore(text), token_ids=self._engine.encode_pieces(pieces))

    @cached_property
    def _chats(self) -> tuple[dict[str, Chat], StandIns | None]:
        """By the template's name; and what marks clients' text, None if it may hold control tokens."""
        sources = self._definition.chat_templates
        templates = {name: ChatTemplate(source, now=datetime.now) for name, source in sources.items()}
        stand_ins = None
        if not self._control_tokens_in_content:
            own = {token.text for token in self._control if not token.special}
            compared = {literal for template in templates.values() for literal in template.literals}
            kept = (own | compared) - {token.text for token in self._control if token.special}
            stand_ins = StandIns([token.text for token in self._control], kept)
        named = self._definition.named_tokens
        return {name: Chat(template, named, stand_ins) for name, template in templates.items()}, stand_ins

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """What the library's post-processor puts before and after a text."""
        bare = self._library.encode("a", add_special_tokens=False).ids
        full = self._library.encode("a", add_special_tokens=True).ids
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return full[:at], full[at + len(bare) :]
        raise TokenizerUnsupported("the tokenizer's post-processor changes the tokens of the text itself")


def _engine(
    spec: dict[str, Any], library: LibraryTokenizer, added: Sequence[AddedToken], control: Sequence[AddedToken]
) -> Engine:
    exact = LibraryEngine(spec, library, control)
    try:
        engine = TiktokenEngine(spec, library, added, control, exact)
    except NotExpressible as reason:
        log.info("tokenizer: the tokenizers library, as tiktoken cannot be used: %s", reason)
        return exact
    log.info("tokenizer: tiktoken, found to agree with the tokenizers library")
    return engine


def _control_tokens(added: Sequence[AddedToken], templates: Iterable[str]) -> list[AddedToken]:
    """Special tokens, and others that a chat template writes, as some models' turn markers are not called special."""
    written = "\0".join(templates)
    return [token for token in added if token.special or (token.text in written and not token.text.isspace())]
