"""A host that is at most one step ahead; the events are stand-ins, there may be no GPU."""

from __future__ import annotations

import pytest
import torch

from backends.prefill_only.pace import Pace


def test_the_step_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Event:
        made = 0

        def __init__(self, *, blocking: bool) -> None:
            assert blocking
            Event.made += 1
            self.number = Event.made

        def record(self, stream: str) -> None:
            seen.append(f"{stream} {self.number}")

        def synchronize(self) -> None:
            seen.append(f"wait {self.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}")
    pace = Pace(torch.device("cuda", 1))
    for _ in range(3):
        pace.step_queued()
    assert seen == ["cuda:1 1", "cuda:1 2", "wait 1", "cuda:1 3", "wait 2"]
    seen.clear()
    Pace(torch.device("cpu")).step_queued()
    assert not seen
