"""Every Python example of the documentation runs, against a real server in place of the address it names."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from loadtest.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str]]:
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = BLOCK.findall(page.read_text())
        found += [(f"{page.name}-{i}", block) for i, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize(("name", "code"), examples(), ids=[name for name, _ in examples()])
def test_example_runs(name: str, code: str, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace("http://127.0.0.1:8000", server.url), name, "exec"), {"__name__": "__main__"})
    if "print(" in code:
        assert printed.getvalue().strip()
