"""What a Python runs at its start, asked from that Python itself; and which Python a command line will start.

Starts short-lived interpreters; changes nothing. facts: one ``sitecustomize`` is imported, the first on ``sys.path``;
Debian's lies in the standard library's directory and shadows that of every venv; ``-I`` and ``-E`` ignore PYTHONPATH,
``-S`` runs no start-up file; the flags are copied to every spawn child.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

SECONDS = 20.0

#: Options of Python, uv run and env that take the next word.
_PYTHON_VALUES = frozenset(("-X", "-W", "--check-hash-based-pycs"))
_UV_VALUES = frozenset(
    (
        "--python", "-p", "--with", "--with-editable", "--with-requirements", "-w", "--project", "--directory",
        "--extra", "--no-extra", "--group", "--only-group", "--no-group", "--env-file", "--index", "--default-index",
        "--index-url", "-i", "--extra-index-url", "--find-links", "-f", "--package", "--cache-dir", "--config-file",
        "--color", "--link-mode", "--refresh-package", "--reinstall-package", "--upgrade-package", "-P", "-C",
        "--python-platform", "--resolution", "--prerelease", "--exclude-newer", "--index-strategy",
    )
)  # fmt: skip
#: Managers of environments whose ``run`` starts a Python that their own first line does not name.
_RUNNERS = frozenset(("conda", "mamba", "micromamba", "poetry", "pipenv", "pdm", "hatch", "rye", "pixi"))
_ENV_VALUES = frozenset(("-u", "--unset", "-C", "--chdir"))
_SUDO_VALUES = frozenset(("-u", "-g", "-C", "-D", "-R", "-r", "-t", "-T", "-U", "-p", "--user", "--group", "--chdir"))


class NoPython(Exception):
    """The command line starts no Python that we can name, or the Python does not start; the text says why."""


@dataclasses.dataclass(frozen=True)
class Startup:
    """What one interpreter says of itself.

    ``sitecustomize``: the file it ran, None if none. ``candidates``: all files of that name on its path, in order.
    ``packages``: the directory where its own .pth files lie.
    """

    version: Tuple[int, ...]
    prefix: str
    base_prefix: str
    flags: Tuple[str, ...]
    sitecustomize: Optional[str]
    candidates: Tuple[str, ...]
    packages: str

    @property
    def is_venv(self) -> bool:
        return self.prefix != self.base_prefix

    @property
    def shadowed(self) -> Tuple[str, ...]:
        """The files of that name that do not run because of the one that does."""
        return tuple(path for path in self.candidates if path != self.sitecustomize)


# ------------------------------------------------------------------------------------------ which Python is started


def interpreter_of(argv: Sequence[str], path: str, python: Optional[str] = None) -> List[str]:
    """Return the words that start the Python of ``argv``, with its own flags: ``[.../python, "-I"]``.

    Follows a console script's first line (env, env -S, the shell line of pip and uv for long paths), ``uv run`` and
    ``env NAME=value``, which stays: what it sets decides what that Python finds. ``path`` is the PATH of the launch;
    ``python`` is known to be one whatever its name, also behind a program that starts it (numactl, nice). Raises
    NoPython.
    """
    words = list(argv)
    if not words:
        raise NoPython("an empty command line")
    name = os.path.basename(words[0])
    if _is_python(name) or words[0] == python:
        return [words[0], *_flags(words[1:])]
    if name == "sudo":
        command = _behind_sudo(words[1:])
        return [*words[: len(words) - len(command)], *interpreter_of(command, path, python)]
    if name == "env":
        settings, command = _behind_env(words[1:])
        return [*([words[0], *settings] if settings else []), *interpreter_of(command, path, python)]
    if name == "uv" and words[1:2] == ["run"]:
        return _behind_uv(words)
    if name == "uvx" or (name in _RUNNERS and words[1:2] == ["run"]):
        raise NoPython(f"{name} chooses the environment itself")
    file = words[0] if "/" in words[0] else shutil.which(words[0], path=path)
    if file is None:
        raise NoPython(f"{words[0]} is not on the PATH of the launch")
    try:
        return interpreter_of(_first_line(file), path, python)
    except NoPython:
        if python not in words:
            raise
        return [python, *_flags(words[words.index(python) + 1 :])]


def _is_python(name: str) -> bool:
    return re.fullmatch(r"(python|pypy)(\d+(\.\d+)?t?)?", name) is not None


def _flags(words: Sequence[str]) -> List[str]:
    """Return Python's own options: those before ``-c``, ``-m`` or the script."""
    found: List[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--" or word.startswith("--help"):
            break
        cut = re.match(r"-[A-Za-z]*?[cm]", word) if not word.startswith(("--", "-X", "-W")) else None
        if cut:
            letters = cut.group(0)[1:-1]
            return [*found, *([f"-{letters}"] if letters else [])]
        found.append(word)
        if word in _PYTHON_VALUES and rest:
            found.append(rest.pop(0))
    return found


def _behind_env(words: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Return what env is told to set or drop, and the command behind it."""
    settings: List[str] = []
    rest = list(words)
    while rest and (rest[0].startswith("-") or re.match(r"[A-Za-z_]\w*=", rest[0])):
        word = rest.pop(0)
        split = re.fullmatch(r"(?:-S|--split-string=)(.+)", word, re.DOTALL)
        if word in ("-S", "--split-string") and rest:
            rest = [*shlex.split(rest[0]), *rest[1:]]
        elif split:
            rest = [*shlex.split(split.group(1)), *rest]
        else:
            settings += [word, *([rest.pop(0)] if word in _ENV_VALUES and rest else [])]
    return settings, rest


def _behind_sudo(words: Sequence[str]) -> List[str]:
    rest = list(words)
    while rest and (rest[0].startswith("-") or re.match(r"[A-Za-z_]\w*=", rest[0])):
        if rest.pop(0) in _SUDO_VALUES and rest:
            rest.pop(0)
    return rest


def _behind_uv(words: List[str]) -> List[str]:
    """``uv run [options] command``: the same environment, with its Python in place of the command."""
    at = 2
    while at < len(words) and words[at].startswith("-") and words[at] not in ("--", "-m", "--module", "-"):
        at += 2 if words[at] in _UV_VALUES else 1
    head, rest = words[:at], words[at:]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if rest and _is_python(os.path.basename(rest[0])):
        return [*head, rest[0], *_flags(rest[1:])]
    # A console script of a managed environment: its first line holds no flags, as uv writes it.
    return [*head, "python"]


def _first_line(file: str) -> List[str]:
    try:
        with open(file, "rb") as script:
            lines = script.read(4096).decode("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise NoPython(f"{file}: {error.strerror}") from error
    if not lines or not lines[0].startswith("#!"):
        raise NoPython(f"{file} is neither Python nor a script that names it")
    interpreter, _, argument = lines[0][2:].strip().partition(" ")
    # pip and uv write '''exec' "/a long path/python" "$0" "$@" into the second line, for a shell to read.
    long = re.match(r"'''exec' (.*) \"\$0\" \"\$@\"", lines[1]) if len(lines) > 1 else None
    if os.path.basename(interpreter) in ("sh", "bash", "dash") and long:
        return shlex.split(long.group(1))
    # The kernel passes all behind the first blank as one word.
    words = [interpreter, *([argument.strip()] if argument.strip() else [])]
    if os.path.basename(interpreter) not in ("env",) and not _is_python(os.path.basename(interpreter)):
        raise NoPython(f"{file} is run by {interpreter}")
    return words


# --------------------------------------------------------------------------------------------- what it runs at start

_ASK = r"""
import json, os, sys
def found():
    for entry in sys.path:
        for tail in ("sitecustomize/__init__.py", "sitecustomize.py", "sitecustomize.pyc"):
            if entry and os.path.isfile(os.path.join(entry, tail)):
                yield os.path.join(entry, tail)
import sysconfig
flags = [("-I", "isolated"), ("-E", "ignore_environment"), ("-S", "no_site")]
if sys.path[:1] == [""]:
    del sys.path[0]
os.write(1, ("\n%s %s\n" % (sys.argv[1], json.dumps({
    "version": list(sys.version_info[:3]),
    "prefix": sys.prefix,
    "base_prefix": getattr(sys, "base_prefix", sys.prefix),
    "flags": [flag for flag, name in flags if getattr(sys.flags, name, 0)],
    "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    "candidates": list(found()),
    "packages": sysconfig.get_path("purelib"),
}))).encode("ascii"))
"""


def ask(python: Sequence[str], environ: Mapping[str, str], seconds: float = SECONDS) -> Startup:
    """Start ``python`` (words with flags) in ``environ`` and let it tell. Raises NoPython with its last words."""
    told = _told(python, environ, _ASK, (), "/", seconds)
    fields: Dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    return Startup(**fields)


# ------------------------------------------------------------------------------------------- what is installed for it


@dataclasses.dataclass(frozen=True)
class Installed:
    """What an interpreter has of one engine, found without importing it.

    ``version`` and ``place`` are what its metadata says, None without any. ``trouble``: why it could not be imported;
    empty where its code is there.
    """

    version: Optional[str]
    place: Optional[str]
    trouble: str


# The metadata of a package may outlive its code, and its directory what lay in it: then Python takes it for a
# namespace. A package is looked for, never imported: that would take seconds and may touch a GPU.
_INSTALLED = r"""
import json, os, sys
distribution, package, module, here = sys.argv[2:]
if not here and sys.path[:1] == [""]:
    del sys.path[0]
told = {"version": None, "place": None, "trouble": ""}
try:
    import importlib.metadata as metadata
    found = metadata.distribution(distribution)
    told["version"], told["place"] = found.version, str(getattr(found, "_path", ""))
except Exception as error:
    told["trouble"] = "%s: %s" % (type(error).__name__, error) if distribution else ""
def missing():
    import importlib.util
    spec = importlib.util.find_spec(package)
    if spec is None:
        return "there is no package " + package
    places = [str(place) for place in spec.submodule_search_locations or ()]
    if spec.origin is None or spec.origin == "namespace":
        return "package %s has no __init__.py in %s" % (package, ", ".join(places))
    for place in places:
        if os.path.isfile(place) or os.path.isfile(os.path.dirname(place)):
            return ""  # in an archive
    names = module.split(".")[1:]
    if names and not any(
        os.path.isdir(os.path.join(place, *names)) or os.path.isfile(os.path.join(place, *names) + tail)
        for place in places for tail in (".py", ".pyc")
    ):
        return "module %s is not in %s" % (module, ", ".join(places))
    return ""
if package and not told["trouble"]:
    try:
        told["trouble"] = missing()
    except Exception as error:
        told["trouble"] = "%s: %s" % (type(error).__name__, error)
os.write(1, ("\n%s %s\n" % (sys.argv[1], json.dumps(told))).encode("ascii"))
"""


def installed(
    python: Sequence[str],
    environ: Mapping[str, str],
    *,
    distribution: str = "",
    package: str = "",
    module: str = "",
    directory: Optional[str] = None,
    seconds: float = SECONDS,
) -> Installed:
    """Ask ``python`` (words with flags) in ``environ`` what it has of an engine, by each name that is given.

    ``distribution`` is what pip calls it, ``package`` what is imported, ``module`` one in there that will be run.
    ``directory`` is where the server works, whose files it may import too. Raises NoPython.
    """
    words = (distribution, package, module, "here" if directory else "")
    return Installed(**_told(python, environ, _INSTALLED, words, directory or "/", seconds))


def _told(
    python: Sequence[str], environ: Mapping[str, str], script: str, words: Sequence[str], directory: str, seconds: float
) -> Dict[str, Any]:
    # On stdout, because sudo closes all else; behind a word that no start-up file prints. Not in a pipe, which what a
    # start-up file leaves running would hold open for ever.
    word = f"lamplighter-{os.urandom(8).hex()}"
    with open(os.memfd_create("ask"), "w+b") as output:
        try:
            done = subprocess.run(
                [*python, "-c", script, word, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                cwd=directory,
                timeout=seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = getattr(error, "strerror", None) or f"no answer within {seconds:g} s"
            raise NoPython(f"{python[0]}: {why}") from error
        lines = os.pread(output.fileno(), 1 << 20, 0).decode("utf-8", "replace").splitlines()
    said = next((line[len(word) :] for line in lines if line.startswith(f"{word} ")), None)
    if said is None:
        last = [line.strip() for line in lines if line.strip()] or [f"exit status {done.returncode}"]
        raise NoPython(f"{python[0]} does not start: {last[-1]}")
    told: Dict[str, Any] = json.loads(said)
    return told


# ------------------------------------------------------------------------------------------------- which scope helps


@dataclasses.dataclass(frozen=True)
class Need:
    """Which scope of ``sitecustomize`` reaches this Python's workers, and why; None: no scope does."""

    scope: Optional[str]
    why: str


def needed_scope(startup: Startup) -> Need:
    """Say the mildest scope that reaches every worker of this Python, naming the file that shadows others."""
    if "-S" in startup.flags:
        return Need(None, "it runs with -S: no start-up file runs, in all workers too")
    runs = _what_runs(startup)
    if startup.flags:
        why = f"it runs with {startup.flags[0]}, which ignores PYTHONPATH, in all workers too"
        return Need("pth", f"{why}; {runs}" if runs else why)
    if runs:
        return Need("server", f"{runs}; a directory on PYTHONPATH comes before it")
    return Need("server", "a directory on PYTHONPATH comes first, and no other sitecustomize is there")


def _what_runs(startup: Startup) -> str:
    if startup.sitecustomize is None:
        return ""
    real = os.path.realpath(startup.sitecustomize)
    name = startup.sitecustomize if real == startup.sitecustomize else f"{startup.sitecustomize} ({real})"
    hidden = [path for path in startup.shadowed if os.path.realpath(path) != real]
    if hidden:
        return f"it runs {name}, which shadows {', '.join(hidden)}"
    if startup.is_venv and not real.startswith(os.path.realpath(startup.prefix) + os.sep):
        return f"it runs {name}, which would shadow one in the venv's own site-packages"
    return f"it runs {name}"
