"""``python -m loadtest.run``: locust, headless and for a bounded time, against a server that this starts and stops.

Generation goes to a real llama.cpp server on the same model file where ``llama-cpp-python[server]`` is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from backends.prefill_only.models.loader import load
from loadtest.server_process import free_port, running_server

__all__ = ["main", "running_llama"]

_UPSTREAM_MODEL = "smollm2-generating"


@contextmanager
def running_llama(model: Path) -> Iterator[str]:
    """Root URL of a llama.cpp server for ``model``, which calls it ``smollm2-generating``."""
    port = free_port()
    arguments = ["--model", str(model), "--model_alias", _UPSTREAM_MODEL, "--host", "127.0.0.1", "--port", str(port)]
    # Its threads spin while they wait: more than one would take the cores that the gateway is measured on.
    arguments += ["--n_threads", "1", "--n_threads_batch", "1", "--n_ctx", "2048", "--verbose", "False"]
    process = subprocess.Popen(
        [sys.executable, "-m", "llama_cpp.server", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/v1/models"):
                break
            if process.poll() is not None:
                raise RuntimeError(f"llama.cpp's server ended with status {process.returncode}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.run", description=__doc__)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--csv", metavar="PREFIX", help="also write locust's CSV files")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        env: dict[str, str] = {}
        locust_env = dict(os.environ)
        if importlib.util.find_spec("llama_cpp") is not None:
            upstream = stack.enter_context(running_llama(load("builtin").path))
            env["ONEPASS_UPSTREAM_BASE_URL"] = f"{upstream}/v1"
            locust_env["ONEPASS_LOADTEST_UPSTREAM_MODEL"] = _UPSTREAM_MODEL
        else:
            print("no generation: llama-cpp-python[server] is not installed", flush=True)
        server = stack.enter_context(running_server(env))
        command = [
            sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless",
            "--only-summary", "--host", server.url, "-u", str(args.users), "-r", str(args.users),
            "-t", f"{args.seconds}s", "--stop-timeout", "20",
        ]  # fmt: skip
        if args.csv:
            command += ["--csv", args.csv]
        return subprocess.run(command, env=locust_env, check=False, timeout=args.seconds + 120).returncode


if __name__ == "__main__":
    sys.exit(main())
