"""Keeps the host close to a GPU. What is queued there cannot be taken back for a shorter job, nor its time be told."""

from __future__ import annotations

import torch

__all__ = ["Pace"]


class Pace:
    """Of one pass: the host queues a step while the device computes the one before it, and no more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queued: torch.cuda.Event | None = None

    def step_queued(self) -> None:
        """Blocks until the step before this one has been computed. A CPU has computed it already."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        if self._queued is not None:
            self._queued.synchronize()
        self._queued = event
