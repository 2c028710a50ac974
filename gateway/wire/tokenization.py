"""POST /tokenize and /detokenize, GET /tokenizer_info: vLLM's shapes, which evaluation harnesses look for."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.catalog import Served
from gateway.errors import InvalidRequest
from gateway.wire.chat import normalised_messages
from gateway.wire.fields import check_ids, decode_request

__all__ = ["DetokenizeRequest", "TokenizeRequest", "detokenized", "tokenized", "tokenizer_info"]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


def tokenized(body: bytes, served: Served) -> dict[str, Any]:
    request = decode_request(body, TokenizeRequest)
    tokenizer = served.tokenizer
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest(
            "Exactly one of prompt and messages is needed.", param="prompt", code="missing_required_parameter"
        )
    if request.continue_final_message and request.add_generation_prompt is not False:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false.",
            param="continue_final_message",
            code="invalid_value",
        )
    if request.messages is not None:
        ids = tokenizer.render_chat(
            normalised_messages(request.messages, tokenizer.chat_template),
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            tools=request.tools or None,
            template_kwargs=request.chat_template_kwargs,
        ).token_ids
    else:
        assert request.prompt is not None
        ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    return {
        "count": len(ids),
        "max_model_len": served.info.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(i) for i in ids] if request.return_token_strs else None,
    }


def detokenized(body: bytes, served: Served) -> dict[str, Any]:
    request = decode_request(body, DetokenizeRequest)
    check_ids("tokens", request.tokens, served.tokenizer.vocab_size)
    return {"prompt": served.tokenizer.decode(request.tokens)}


def tokenizer_info(served: Served) -> dict[str, Any]:
    tokenizer = served.tokenizer
    return {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "chat_template": tokenizer.chat_template,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": served.info.max_model_len,
    }
