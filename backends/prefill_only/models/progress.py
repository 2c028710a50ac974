"""Shows how far loading is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

__all__ = ["ProgressDisplay"]

_BAR_CELLS = 30
_LOG_STEP = 0.25  # of a stage, between two lines of the log


class ProgressDisplay:
    """Called with the fraction done and ``"stage, detail"``, as ``loader.load`` calls its ``progress``.

    ``stream`` gets the bar if it is a terminal; otherwise ``log`` gets a line when a stage begins and at each quarter.
    """

    def __init__(self, stream: TextIO, log: Callable[[str], None]) -> None:
        self._stream, self._log = stream, log
        self._terminal = stream.isatty()
        self._stage = ""
        self._next = 0.0

    def __call__(self, fraction: float, message: str) -> None:
        stage = message.partition(",")[0]
        if stage != self._stage:
            self.close()
            self._stage, self._next = stage, 0.0
        if self._terminal:
            cells = round(fraction * _BAR_CELLS)
            bar = "█" * cells + "░" * (_BAR_CELLS - cells)
            self._stream.write(f"\r\x1b[K{bar} {fraction:4.0%}  {message}")
            self._stream.flush()
        elif fraction >= self._next:
            self._log(f"{message} ({fraction:.0%})")
            self._next = (fraction // _LOG_STEP + 1) * _LOG_STEP

    def close(self) -> None:
        """Leaves the bar and starts a new line."""
        if self._terminal and self._stage:
            self._stream.write("\n")
            self._stream.flush()
        self._stage = ""
