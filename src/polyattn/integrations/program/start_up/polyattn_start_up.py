"""Waits in a process of a program until it imports torch, and only then brings in polyattn.

Imported by `sitecustomize` beside it, before anything of the program runs: it must be quick, and may
change nothing that the program could notice. What cannot be reached is written down.
"""

import json
import os
import re
import sys

# What is waited for, and what it means that it was imported.
_OF_OTHERS = "computes attention by kernels of its own, whose calls are not seen"
_LIBRARIES = {
    "torch": "",
    "transformers.modeling_utils": "",
    "diffusers.models.attention_dispatch": "",
    "flash_attn": _OF_OTHERS,
    "flash_attn_interface": _OF_OTHERS,
    "sageattention": _OF_OTHERS,
    "xformers.ops": _OF_OTHERS,
    "jax": "its attention is not routed: polyattn.jax.attention is called by the program itself",
}
_HOME = os.path.realpath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
_PYTHON = re.compile(r"python[\d.]*t?(\.exe)?")
_POPEN = (
    "args", "bufsize", "executable", "stdin", "stdout", "stderr", "preexec_fn", "close_fds",
    "shell", "cwd", "env",
)  # fmt: skip


def begin(folder):
    """Wait for the libraries in this process, which belongs to the run of this folder."""
    waiting = _Waiting(folder)
    sys.meta_path.insert(0, waiting)
    if "subprocess" in sys.modules:
        waiting.imported("subprocess", sys.modules["subprocess"])


class _Waiting:
    """A finder that finds nothing itself, and hears when one of the libraries was imported."""

    def __init__(self, folder):
        self.folder = folder
        self.names = {"subprocess", *_LIBRARIES}

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def imported(self, name, module):
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

    def __init__(self, loader, waiting):
        self._loader, self._waiting = loader, waiting

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._waiting.imported(module.__spec__.name, module)


def say(folder, what, why):
    """Write down what is out of sight; nothing if the run is over."""
    if os.path.isdir(folder):
        with open(os.path.join(folder, f"{os.getpid()}.said"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "why": why}) + "\n")


def _route(name, folder):
    """Route this process once it has torch, and see to the other libraries; or say why not."""
    from importlib.util import find_spec

    what = " ".join(sys.orig_argv[1:])[:200] or "python"
    spec = find_spec("polyattn")
    home = None if spec is None or not spec.origin else os.path.realpath(os.path.dirname(spec.origin))
    if home != _HOME:
        where = "no polyattn" if home is None else f"another polyattn, in {home}"
        say(folder, what, f"its Python, {sys.executable}, has {where}")
        return
    try:
        from polyattn.integrations.program import libraries

        libraries.imported(name, folder)
    except Exception as error:  # whatever is wrong, the program goes on as without us
        say(folder, what, f"{name} was imported, but not routed: {type(error).__name__}: {error}")


def _watch_children(subprocess, folder):
    """Look at each child that is started, whether it can be reached."""
    start = subprocess.Popen.__init__

    def __init__(self, *args, **kwargs):
        given = {**dict(zip(_POPEN, args, strict=False)), **kwargs}
        why = unreachable(given.get("args"), given.get("env"), folder)
        if why:
            say(folder, why[0], why[1])
        start(self, *args, **kwargs)

    __init__.__wrapped__ = start
    __init__.__doc__ = start.__doc__
    subprocess.Popen.__init__ = __init__


def unreachable(command, env, folder):
    """Return what cannot be reached, and why; None for what can be, or is no Python to be seen."""
    words = [command] if isinstance(command, (str, bytes, os.PathLike)) else command
    if not isinstance(words, (list, tuple)) or not words:
        return None
    if not all(isinstance(word, (str, bytes, os.PathLike)) for word in words):
        return None
    words = [os.fsdecode(word) for word in words]
    if not _PYTHON.fullmatch(os.path.basename(words[0])) and words[0] != sys.executable:
        return None
    said = " ".join(words)[:200]
    for flag in _flags(words[1:]):
        if flag in "IES":
            does = "runs no sitecustomize" if flag == "S" else "reads no PYTHONPATH"
            return said, f"python -{flag} {does}, by which programs are reached"
    given = os.environ if env is None else env
    lacking = [name for name in ("POLYATTN_RUN", "PYTHONPATH") if not _has(given, name, folder)]
    if lacking:
        return said, f"it was started with another environment, whose {lacking[0]} is not the run's"
    return None


def _flags(words):
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


def _has(env, name, folder):
    """Whether an environment has what a child is reached by."""
    try:
        value = os.fsdecode(env[name])
    except KeyError:
        return False
    if name == "POLYATTN_RUN":
        return value == folder
    here = os.path.dirname(os.path.abspath(__file__))
    return here in map(os.path.abspath, value.split(os.pathsep))
