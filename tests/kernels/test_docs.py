"""The example in docs/kernels.md runs."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_example_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(examples) == 1
    scope: dict = {}
    exec(compile(examples[0], str(DOCS), "exec"), scope)
    assert bool((scope["log_probability"] < 0).all())
