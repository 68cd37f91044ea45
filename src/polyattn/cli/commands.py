"""The commands by name; each one's module is imported when it is used.

Exit codes: 0 yes, 1 no, 2 cannot say or used wrongly, 128 + N ended by signal N, 130 interrupted
(Ctrl-C), 141 the reader of a pipe is gone. ``polyattn run`` gives the exit code of the program it
ran.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

__all__ = ["main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("polyattn.cli.doctor", "every backend: available or why not, and how to get it"),
    "explain": (
        "polyattn.cli.explain",
        "which backend a problem would run on, and why not the others",
    ),
    "run": ("polyattn.cli.run", "run a program with its attention routed through polyattn"),
    "tune": ("polyattn.cli.tune", "measure a program's attention problems on every backend"),
    "bench": ("polyattn.bench", "what a call costs and how fast it is, beside other libraries"),
    "flags": (
        "polyattn.cli.flags",
        "the frameworks' global switches: shown, stored, compared; the presets",
    ),
    "trace": (
        "polyattn.cli.trace",
        "what a program's models compute: recorded, shown, compared; the first wrong layer",
    ),
    "offload": (
        "polyattn.cli.offload",
        "models that do not fit: what would stream, and how long a pass would take",
    ),
    "fuzz": ("polyattn.cli.fuzz", "random problems against the float64 reference"),
}
"""Each command: the module whose ``main(argv)`` it is, imported when it is used, and its line."""
_WITH_CHILDREN = ("bench",)
"""What has processes and scratch files of its own throughout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with _streams():
        try:
            code = _dispatch(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
            return 141
        except KeyboardInterrupt:
            if argv is None:
                _end_quietly()
            print("interrupted", file=sys.stderr)
            return 130
        except OSError as error:
            if error.errno not in _OF_OUTPUT or error.filename is not None:
                raise
            _drop_output()
            print(
                f"polyattn: got a standard output that cannot be written ({error}); expected one "
                "that can: send it elsewhere, or make room.",
                file=sys.stderr,
            )
            return 2
        if argv is None:
            _end_quietly()
    return code


def _end_quietly() -> None:
    """Have this process end with the code that is returned, whatever else is typed meanwhile.

    From here on a further Ctrl-C ends it at once: the interpreter's own end would break off with
    tracebacks.
    """
    handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # by a program
    if threading.current_thread() is threading.main_thread() and not handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # An interrupt that has passed through C code which runs Python's, as imports of frameworks do,
    # has the interpreter end by SIGINT at last, whatever is returned; what is run next clears that.
    exec("")


_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What a write gives where a stream takes no more."""


@contextmanager
def _streams() -> Iterator[None]:
    """Have streams that Python has none for, since they came closed, lead nowhere.

    A child gets them closed, as it would from a shell: these are not inherited.
    """
    with ExitStack() as opened:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, opened.enter_context(open(os.devnull, "w", encoding="utf-8")))
                opened.callback(setattr, sys, name, None)
        yield


def _drop_output() -> None:
    """Have nobody get what is left in the buffer, of which the interpreter complains at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from polyattn import __version__

        print(f"polyattn {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        from polyattn.errors import near_matches

        what = "option" if name.startswith("-") else "command"
        print(
            f"polyattn: got the {what} {name!r}, expected one of {', '.join(COMMANDS)}."
            f"{near_matches(name, COMMANDS)} `polyattn --help` says what each does.",
            file=sys.stderr,
        )
        return 2
    return _command(name, arguments[1:])


def _command(name: str, arguments: list[str]) -> int:
    from polyattn.cli.supervise import told_to_end
    from polyattn.errors import PolyattnError, Unsupported

    try:
        module = importlib.import_module(COMMANDS[name][0])
        with told_to_end() if name in _WITH_CHILDREN else nullcontext():
            return int(module.main(arguments) or 0)
    except SystemExit as leave:  # argparse: help, or used wrongly; or a signal
        return leave.code if isinstance(leave.code, int) else int(bool(leave.code))
    except Unsupported as error:
        print(f"polyattn {name}: {error}", file=sys.stderr)
        return 1
    except PolyattnError as error:
        print(f"polyattn {name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        if top == "polyattn":
            raise
        how = {
            "torch": "'polyattn[torch]'",
            "jax": "'polyattn[jax]'",
            "numpy": "'polyattn[torch]'",
            "hypothesis": "'polyattn[test]'",
        }
        print(
            f"polyattn {name}: got no package {top!r}, which this command needs; "
            f"pip install {how.get(top, top)}",
            file=sys.stderr,
        )
        return 2


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: polyattn COMMAND ...   (polyattn COMMAND --help says more)",
            "",
            "One attention call that runs on the best kernel of the machine and says why.",
            "",
            *lines,
            "",
            "  --version  --help",
            "",
            "Every command takes --json. Exit codes: 0 yes, 1 no, 2 cannot say or used wrongly.",
        ]
    )
