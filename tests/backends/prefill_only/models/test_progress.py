from __future__ import annotations

import io

from backends.prefill_only.models.progress import ProgressDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(display: ProgressDisplay) -> None:
    for i in range(1, 41):
        display(i / 41, f"loading weights, layer {i} of 40")
    display(0.5, "profile run")
    display(1.0, "profile run")
    display.close()


def test_a_log_gets_a_line_at_each_quarter_of_a_stage() -> None:
    stream, lines = io.StringIO(), list[str]()
    show(ProgressDisplay(stream, lines.append))
    assert lines == [
        "loading weights, layer 1 of 40 (2%)",
        "loading weights, layer 11 of 40 (27%)",
        "loading weights, layer 21 of 40 (51%)",
        "loading weights, layer 31 of 40 (76%)",
        "profile run (50%)",
        "profile run (100%)",
    ]
    assert stream.getvalue() == ""


def test_a_terminal_gets_one_line_a_stage_that_is_drawn_over() -> None:
    stream, lines = Terminal(), list[str]()
    show(ProgressDisplay(stream, lines.append))
    assert lines == []
    first, second, rest = stream.getvalue().split("\n")
    assert first.count("\r") == 40 and first.endswith("█░  98%  loading weights, layer 40 of 40")
    assert second.count("\r") == 2 and second.endswith("█" * 30 + " 100%  profile run") and rest == ""
