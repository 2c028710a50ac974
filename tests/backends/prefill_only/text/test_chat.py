"""Prompts are those of transformers' ``apply_chat_template``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from backends.base import InvalidInput
from backends.prefill_only.text.hf_directory import directory_definition
from backends.prefill_only.text.model_tokenizer import ModelTokenizer
from tests.backends.prefill_only.text.templates import TEMPLATES
from tests.backends.prefill_only.text.texts import random_texts

Make = Callable[[str], ModelTokenizer]

DEEP: list[Any] = []
for _ in range(2000):
    DEEP = [DEEP]
USER = {"role": "user", "content": "  Is 7 a prime?\n\n"}
TURNS = [
    {"role": "system", "content": "Answer yes or no.  "},
    USER,
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "Und 8? 中文 😀 <b>"},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"é": ["<", "'", '"'], "type": "object"}}}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}


@pytest.fixture(scope="module")
def make(directories: dict[str, Path]) -> Make:
    made: dict[str, ModelTokenizer] = {}

    def with_template(source: str) -> ModelTokenizer:
        if source not in made:
            definition = directory_definition(directories["llama3"])
            definition = dataclasses.replace(definition, chat_templates={"default": source})
            made[source] = ModelTokenizer(definition, vocab_rows=4096, eos_token_ids=[1])
        return made[source]

    return with_template


@pytest.fixture(scope="module")
def reference(directories: dict[str, Path]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(directories["llama3"]))


def same(
    mine: ModelTokenizer,
    reference: PreTrainedTokenizerFast,
    messages: list[Any],
    *,
    as_sent: Any = None,
    **options: Any,
) -> None:
    """``as_sent``: what we are given, where that is not what transformers is."""
    kwargs = options.pop("template_kwargs", {})
    options.setdefault("add_generation_prompt", True)
    wanted = reference.apply_chat_template(
        messages, chat_template=mine.chat_template, return_dict=False, **options, **kwargs
    )
    text = reference.apply_chat_template(
        messages, chat_template=mine.chat_template, tokenize=False, **options, **kwargs
    )
    got = mine.render_chat(as_sent or messages, template_kwargs=kwargs, **options)
    assert got.text == text
    assert got.token_ids == wanted


@pytest.mark.parametrize("style", ["chatml", "dated", "tools", "parts", "thinking"])
@pytest.mark.parametrize("generation", [True, False])
def test_conversations(make: Make, reference: PreTrainedTokenizerFast, style: str, generation: bool) -> None:
    for messages in ([USER], TURNS, TURNS[1:], TURNS[:2], TURNS * 5):
        same(make(TEMPLATES[style]), reference, messages, add_generation_prompt=generation)


@pytest.mark.parametrize("style", ["chatml", "thinking", "parts"])
def test_random_contents(make: Make, reference: PreTrainedTokenizerFast, style: str) -> None:
    for text in random_texts(300, seed=11):
        same(
            make(TEMPLATES[style]), reference, [{"role": "system", "content": text}, {"role": "user", "content": text}]
        )


def test_builtin_model(builtin: ModelTokenizer, builtin_reference: PreTrainedTokenizerFast) -> None:
    for text in random_texts(300, seed=12):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Hm."}, USER]
        same(builtin, builtin_reference, messages)


def test_trained_families(trained: ModelTokenizer, trained_reference: PreTrainedTokenizerFast) -> None:
    """Prefix spaces, normalisation and the start token come out the same; the template writes the start token."""
    for text in random_texts(200, seed=13):
        same(trained, trained_reference, [{"role": "user", "content": text}, *TURNS[2:]])
    same(trained, trained_reference, [USER], template_kwargs={"enable_thinking": False})


def test_one_start_token(make: Make) -> None:
    mine = make(TEMPLATES["dated"])
    (bos,) = mine.encode("<s>", add_special_tokens=False)
    assert mine.encode("hello")[0] == bos
    assert mine.render_chat([USER]).token_ids.count(bos) == 1


def test_tools_and_calls(make: Make, reference: PreTrainedTokenizerFast) -> None:
    mine = make(TEMPLATES["tools"])
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    same(mine, reference, messages, tools=[TOOL, TOOL])
    same(mine, reference, messages, tools=[])
    call = {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": "é<"}'}}
    sent = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    same(mine, reference, messages, as_sent=sent, tools=[TOOL])  # the API carries arguments as JSON text


def test_arguments_stay_text_for_a_template_that_reads_text(make: Make, reference: PreTrainedTokenizerFast) -> None:
    mine = make(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments + ';' }}"
        "{% endfor %}{% endfor %}"
    )
    call = {**CALL, "function": {"name": "add", "arguments": '{"a":1}'}}
    same(mine, reference, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("style", ["chatml", "dated", "thinking"])
@pytest.mark.parametrize("start", ["The answer is", "The answer is ", " x \n", "中文"])
def test_a_prefilled_answer_is_continued(
    make: Make, reference: PreTrainedTokenizerFast, style: str, start: str
) -> None:
    messages = [USER, {"role": "assistant", "content": start}]
    same(make(TEMPLATES[style]), reference, messages, add_generation_prompt=False, continue_final_message=True)
    parts = [USER, {"role": "assistant", "content": [{"type": "text", "text": start}]}]
    got = make(TEMPLATES["parts"]).render_chat(parts, add_generation_prompt=False, continue_final_message=True)
    assert got.text.endswith(start)


def test_template_variables(make: Make, reference: PreTrainedTokenizerFast) -> None:
    same(make(TEMPLATES["dated"]), reference, TURNS, template_kwargs={"date_string": "26 Jul 2024", "unknown": [1]})
    mine = make(TEMPLATES["thinking"])
    same(mine, reference, TURNS, template_kwargs={"enable_thinking": False})
    thoughts = mine.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    assert mine.render_chat(TURNS, template_kwargs={"enable_thinking": False}).token_ids[-len(thoughts) :] == thoughts


def test_reasoning_under_each_of_its_names(make: Make, reference: PreTrainedTokenizerFast) -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages = [USER, {"role": "assistant", "content": "yes", name: "Divide.\n"}]
        same(make(TEMPLATES["thinking"]), reference, messages, add_generation_prompt=False)


def test_past_thoughts_are_dropped_as_the_template_says(make: Make, reference: PreTrainedTokenizerFast) -> None:
    messages = [USER, {"role": "assistant", "content": "<think>\nHm <i>\n</think>\n\nyes"}, USER]
    same(make(TEMPLATES["thinking"]), reference, messages)


def test_generation_marks_and_loop_controls(make: Make, reference: PreTrainedTokenizerFast) -> None:
    same(make(TEMPLATES["strict"]), reference, TURNS[1:])
    same(make(TEMPLATES["strict"]), reference, (TURNS[1:3]) * 300)


def test_text_parts_go_to_templates_that_read_them(make: Make, reference: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    same(make(TEMPLATES["parts"]), reference, [{"role": "user", "content": parts}])
    joined = [{"role": "user", "content": "a\nb"}]
    same(make(TEMPLATES["chatml"]), reference, joined, as_sent=[{"role": "user", "content": parts}])


def test_developer_is_system_where_the_template_does_not_know_it(
    make: Make, reference: PreTrainedTokenizerFast
) -> None:
    developer, system = ([{"role": role, "content": "Be brief."}, USER] for role in ("developer", "system"))
    same(make(TEMPLATES["chatml"]), reference, system, as_sent=developer)
    knows = make(TEMPLATES["parts"] + "{# #}{{ '' if messages[0].role == 'developer' else '' }}")
    same(knows, reference, developer)


def test_what_was_passed_in_is_not_changed(make: Make) -> None:
    messages: list[Any] = [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}], "name": None}]
    before = repr(messages)
    make(TEMPLATES["parts"]).render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert repr(messages) == before


@pytest.mark.parametrize(
    ("style", "messages", "options", "complaint"),
    [
        ("strict", [USER, USER], {}, "Conversation roles must alternate user/assistant"),
        ("chatml", [], {}, "at least one message"),
        ("chatml", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "'image_url'"),
        ("chatml", [{"role": "user"}], {}, "content"),
        ("chatml", [{"role": "user", "content": "\ud800"}], {}, "surrogate"),
        ("chatml", [USER], {"template_kwargs": {"x": DEEP}}, "nested too deeply"),
        ("chatml", [USER], {"continue_final_message": True}, "exclude each other"),
        ("chatml", [USER], {"template_kwargs": {"messages": []}}, "may not set messages"),
        (
            "chatml",
            [{"role": "assistant", "tool_calls": []}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "no text to continue",
        ),
    ],
)
def test_complaints(make: Make, style: str, messages: list[Any], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        make(TEMPLATES[style]).render_chat(messages, **options)


def test_keywords_may_have_any_name(make: Make) -> None:
    plain = make(TEMPLATES["chatml"]).render_chat([USER]).text
    named = {"self": 1, "": 2, "a b": 3, "loop": 4, "range": 5}
    assert make(TEMPLATES["chatml"]).render_chat([USER], template_kwargs=named).text == plain


def test_a_model_without_template_says_so(directories: dict[str, Path]) -> None:
    definition = dataclasses.replace(directory_definition(directories["gpt2"]), chat_templates={})
    mine = ModelTokenizer(definition, vocab_rows=4096, eos_token_ids=[1])
    assert mine.chat_template is None
    with pytest.raises(InvalidInput, match="no chat template"):
        mine.render_chat([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * n }}",
        "{{ [0] * n }}",
        "{{ 9 ** n }}",
        "{{ '%1000000000d' % n }}",
        "{{ '{:1000000000d}'.format(n) }}",
        "{{ 'x'.ljust(n) }}",
        "{{ messages | tojson(indent=n) }}",
        "{% for i in range(n) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_no_template_gets_out_of_hand(make: Make, source: str) -> None:
    try:
        text = make(source).render_chat([USER], template_kwargs={"n": 10**9}).text
    except InvalidInput:
        return
    assert len(text) < 100, "neither refused nor harmless"


def test_time_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.prefill_only.text.chat_template._MAX_RENDER_S", 0.0)
    with pytest.raises(InvalidInput, match="took longer than"):
        make(
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ messages[0].role[5:] }}{% endfor %}{% endfor %}"
        ).render_chat([USER])


def test_output_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.prefill_only.text.chat_template._MAX_OUTPUT_CHARS", 1000)
    with pytest.raises(InvalidInput, match="more than 1000 characters"):
        make("{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}").render_chat([USER])
