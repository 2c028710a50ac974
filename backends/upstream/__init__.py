"""Passes requests on, byte for byte, to another OpenAI-compatible server."""

from backends.upstream.backend import UpstreamBackend, factory

__all__ = ["UpstreamBackend", "factory"]
