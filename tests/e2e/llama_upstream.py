"""llama.cpp's OpenAI-compatible server as a separate process: a real upstream that generates."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from loadtest.server_process import free_port

__all__ = ["MODEL", "LlamaServer"]

MODEL = "llama-smollm2"  # a name that the gateway's own engine does not serve


class LlamaServer:
    """Serves ``gguf`` under the name ``MODEL``, one request at a time and in order. Raises RuntimeError if it dies."""

    def __init__(self, gguf: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log_path = log
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-u", "-m", "llama_cpp.server"),
                *("--model", str(gguf), "--model_alias", MODEL),
                *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]),
                *("--n_ctx", "2048", "--embedding", "true"),
                # Its threads spin while they wait, which ruins a machine that does anything else.
                *("--n_threads", "1", "--n_threads_batch", "1"),
                # Otherwise a new request ends the one before it, and so hides whether a hang-up did.
                *("--interrupt_requests", "false"),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"llama.cpp's server ended with status {code}:\n{self.log()[-2000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RuntimeError(f"llama.cpp's server was not ready after {timeout_s} s")

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
