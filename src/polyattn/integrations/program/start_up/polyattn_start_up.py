"""Waits in a process of a program until it imports torch, and only then brings in polyattn.

Imported by `sitecustomize` beside it, before anything of the program runs: it must be quick, and
may change nothing that the program could notice. What cannot be reached is written down.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# What is waited for, and what it means that it was imported.
_OF_OTHERS = "was imported; what its own kernels compute is not seen"
_LIBRARIES = {
    "torch": "",
    "transformers.modeling_utils": "",
    "diffusers.models.attention_dispatch": "",
    "flash_attn": _OF_OTHERS,
    "flash_attn_interface": _OF_OTHERS,
    "sageattention": _OF_OTHERS,
    "xformers.ops": _OF_OTHERS,
    "jax": "was imported; its attention is not routed (polyattn.jax.attention is for calls)",
}
_HOME = os.path.realpath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
_PYTHON = re.compile(r"python[\d.]*t?(\.exe)?")
_LONG = 100
_POPEN = (
    "args", "bufsize", "executable", "stdin", "stdout", "stderr", "preexec_fn", "close_fds",
    "shell", "cwd", "env",
)  # fmt: skip


def begin(folder: str) -> None:
    """Wait for the libraries in this process, which belongs to the run of this folder."""
    waiting = _Waiting(folder)
    sys.meta_path.insert(0, waiting)
    if "subprocess" in sys.modules:
        waiting.imported("subprocess", sys.modules["subprocess"])


class _Waiting:
    """A finder that finds nothing itself, and hears when one of the libraries was imported."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.names = {"subprocess", *_LIBRARIES}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.names:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: Any = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, name, self)
                return spec
        return None

    def imported(self, name: str, module: Any) -> None:
        """Do what belongs to a library that was just imported, once."""
        if name not in self.names:
            return
        self.names.discard(name)
        if name == "subprocess":
            _watch_children(module, self.folder)
        elif _LIBRARIES[name]:
            say(self.folder, name.partition(".")[0], _LIBRARIES[name])
        else:
            _route(name, self.folder)


class _Loader:
    """The loader of a library, until it has loaded it."""

    def __init__(self, loader: Any, name: str, waiting: _Waiting) -> None:
        self._loader, self._name, self._waiting = loader, name, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._waiting.imported(self._name, module)


def say(folder: str, what: str, why: str) -> None:
    """Write down what is out of sight; nothing if the run is over."""
    path = os.path.join(folder, f"{os.getpid()}.said")
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "why": why}) + "\n")
    except OSError:  # nobody reads any more, or this is another user: no matter of the program's
        return


def _route(name: str, folder: str) -> None:
    """Route this process once it has torch, and see to the other libraries; or say why not."""
    what = " ".join(" ".join(sys.orig_argv[1:]).split())[:_LONG] or "python"
    try:
        other = _other_polyattn()
        if other:
            say(folder, what, f"its Python, {sys.executable}, has {other}")
            return
        from polyattn.integrations.program import libraries

        libraries.imported(name, folder)
    except Exception as error:  # whatever is wrong, the program goes on as without us
        say(folder, what, f"{name} was imported, but not routed: {type(error).__name__}: {error}")


def _other_polyattn() -> str:
    """Say what this Python has in place of the polyattn of the run; "" if it has that."""
    from importlib.util import find_spec

    spec = find_spec("polyattn")
    if spec is None or not spec.origin:
        return "no polyattn"
    home = os.path.realpath(os.path.dirname(spec.origin))
    return "" if home == _HOME else f"another polyattn, in {home}"


def _watch_children(subprocess: Any, folder: str) -> None:
    """Look at each child that is started, whether it can be reached."""
    start = subprocess.Popen.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(_POPEN, args, strict=False)), **kwargs}
        why = unreachable(given.get("args"), given.get("env"), folder)
        if why and not _is_compiler(sys._getframe(1)):
            say(folder, why[0], why[1])
        start(self, *args, **kwargs)

    __init__.__doc__ = start.__doc__
    __init__.__dict__["__wrapped__"] = start  # for those who ask for the signature
    subprocess.Popen.__init__ = __init__


def _is_compiler(frame: Any) -> bool:
    """Whether a child is started by torch's or Triton's compiler, for work without attention."""
    while frame is not None and frame.f_globals.get("__name__") in ("subprocess", __name__):
        frame = frame.f_back
    caller = "" if frame is None else str(frame.f_globals.get("__name__"))
    return caller.startswith(("torch.", "triton.")) and not caller.startswith("torch.distributed.")


def unreachable(command: Any, env: Any, folder: str) -> tuple[str, str] | None:
    """Return what cannot be reached, and why; None for what can be, or is no Python to be seen."""
    given = [command] if isinstance(command, str | bytes | os.PathLike) else command
    if not isinstance(given, list | tuple) or not given:
        return None
    if not all(isinstance(word, str | bytes | os.PathLike) for word in given):
        return None
    words = [str(os.fsdecode(word)) for word in given]
    if not _PYTHON.fullmatch(os.path.basename(words[0])) and words[0] != sys.executable:
        return None
    said = " ".join(" ".join(words).split())
    said = said if len(said) <= _LONG else said[: _LONG - 3] + "..."
    for flag in _flags(words[1:]):
        if flag in "IES":
            does = "runs no sitecustomize" if flag == "S" else "reads no PYTHONPATH"
            return said, f"python -{flag} {does}, by which programs are reached"
    around = os.environ if env is None else env
    if not isinstance(around, Mapping):
        return None  # an error, which is not ours to raise
    for name in ("POLYATTN_RUN", "PYTHONPATH"):
        if not _has(around, name, folder):
            return said, f"it was started with another environment, whose {name} is not the run's"
    return None


def _flags(words: Sequence[str]) -> Iterator[str]:
    """The one-letter options of a command line of Python."""
    for word in words:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return
        for letter in word[1:]:
            if letter in "cmWX":
                break
            yield letter
        if "c" in word[1:] or "m" in word[1:]:
            return


def _has(env: Mapping[Any, Any], name: str, folder: str) -> bool:
    """Whether an environment, whose names may be bytes, has what a child is reached by."""
    named = {os.fsdecode(key): value for key, value in env.items() if isinstance(key, str | bytes)}
    if name not in named:
        return False
    value = os.fsdecode(named[name])
    if name == "POLYATTN_RUN":
        return value == folder
    here = os.path.dirname(os.path.abspath(__file__))
    return here in map(os.path.abspath, value.split(os.pathsep))
