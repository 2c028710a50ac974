"""The ``onepass`` command: serve, doctor, score, bench."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = {
    "serve": "serve the model and pass on the rest; settings come from ONEPASS_* variables",
    "doctor": "check what the server would need, one line each",
    "score": "log-probabilities of a text, or of choices after it",
    "bench": "measurements (needs the extra onepass[loadtest])",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status. ``argv`` without the program's name; None: the process's own."""
    described = "\n".join(f"  {name:8} {about}" for name, about in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="onepass",
        description=f"An OpenAI-compatible gateway for prefill-only requests.\n\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument("command", nargs="?", choices=_COMMANDS, metavar="command")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    if args.version:
        from gateway.routes.service import version

        print(f"onepass {version()}")
        return 0
    _wait_politely()
    match args.command:
        case "serve":
            return _serve(args.rest)
        case "doctor":
            from gateway.commands.doctor import main as doctor

            return doctor(args.rest)
        case "score":
            from gateway.commands.score import main as score

            return score(args.rest)
        case "bench":
            return _bench(args.rest)
    parser.print_help()
    return 2


def _wait_politely() -> None:
    """Shortens how long CPU threads spin for each other before they sleep; OpenMP reads it when torch is imported.

    The default of some milliseconds is lost whenever another process has a sibling's core: beside busy neighbours a
    small pass took five times as long as with this, and on a machine of its own about 2 % less.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "4000")


def _serve(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onepass serve", description=_COMMANDS["serve"])
    parser.parse_args(list(argv))
    from gateway.server import serve

    try:
        status = serve(os.environ)
    except KeyboardInterrupt:  # before the server took over the signal
        status = 130
    # Threads in the middle of a long text would hold the process up; everything that matters is closed by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _bench(argv: Sequence[str]) -> int:
    try:
        from loadtest.bench import main as bench
    except ImportError as exc:
        print(f"onepass: bench needs more packages ({exc}): pip install 'onepass[loadtest]'", file=sys.stderr)
        return 1
    return bench(argv)


if __name__ == "__main__":
    sys.exit(main())
