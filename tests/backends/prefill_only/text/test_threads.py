"""Many threads at once get what one gets, and a long text lets the others run."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backends.prefill_only.text.model_tokenizer import ModelTokenizer, load_tokenizer
from tests.backends.prefill_only.text.texts import random_texts


def test_threads_agree(directories: dict[str, Path], family: str) -> None:
    """The first calls of all, which set up what is set up lazily, come from several threads too."""
    tokenizer = load_tokenizer(directories[family], vocab_rows=4096, eos_token_ids=[1])
    texts = random_texts(120, seed=41, control=["<|end|>", "<s>", "</think>"])

    def work(text: str) -> tuple[list[int], list[int], str]:
        ids = tokenizer.render_chat([{"role": "user", "content": text}]).token_ids
        return ids, tokenizer.encode(text, parse_special=False), tokenizer.decode(ids)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, texts))
    assert together == [work(text) for text in texts]


def test_a_long_text_lets_other_threads_run(builtin: ModelTokenizer) -> None:
    """Counts what another thread does meanwhile, so that no clock decides: if the text kept the lock, it would be 0."""
    text = "".join(random_texts(3000, seed=42)) * 8
    done, turns = threading.Event(), 0

    def tick() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0.001)

    other = threading.Thread(target=tick)
    other.start()
    before = turns
    builtin.encode(text)
    during = turns - before
    done.set()
    other.join()
    assert during > 20, f"the other thread ran {during} times while {len(text)} characters were encoded"
