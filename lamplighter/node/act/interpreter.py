"""Start-up files outside our root: how a server's variables reach a Python that ignores PYTHONPATH.

Two scopes, both opt-in. ``pth``: three files of ours in the site-packages of the server's Python. ``interpreter``: a
marked block at the end of the ``sitecustomize.py`` which that Python really imports (behind Debian's symlink a file in
/etc). Either runs the release's own ``sitecustomize.py``, and only where ``sys.prefix`` is the server's: other venves
and the base interpreter pass it by. Which release: the one that the launch script names, else, in a venv, the current
one. A payload that is missing or broken harms nobody.

Touches: these files, and ``<root>/servers/<name>/outside/``, where the original and what was done are written down
*before* anything is done. So whatever moment a run is killed at, ``remove`` gives back the bytes of before. Raises
OSError where the files may not be written, Refused where they are in no state to be edited.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from typing import Dict, Iterator, Optional, Tuple

from lamplighter.node.act import files, lock
from lamplighter.node.layout import ServerHome, read_json
from lamplighter.node.observe.startup import Startup

SCOPES = ("pth", "interpreter")

#: Names the directory of the release's sitecustomize.py; the launch script exports it.
PYSITE = "LAMPLIGHTER_PYSITE"

LOCK_SECONDS = 10.0

_HOOK = """\
def {function}(here, prefix, fallback):
    import os
    import sys
    try:
        if os.path.realpath(sys.prefix) != prefix:
            return
        directory = os.environ.get("{variable}") or fallback
        seen = getattr(sys, "_lamplighter_sitecustomize", None)
        if seen is None:
            seen = sys._lamplighter_sitecustomize = set()
        seen.add(os.path.realpath(here))
        payload = directory and os.path.join(directory, "sitecustomize.py")
        if not payload or os.path.realpath(payload) in seen or not os.path.isfile(payload):
            return
        external = sys.modules.get("_frozen_importlib_external")
        if external is None:
            with open(payload) as source:
                code = compile(source.read(), payload, "exec", 0, True)
        else:
            code = external.SourceFileLoader("sitecustomize", payload).get_code("sitecustomize")
        exec(code, {{"__name__": "lamplighter_hook", "__file__": payload}})
    except Exception:
        pass
"""


class Refused(Exception):
    """A start-up file is in no state to be edited; the text names it and says why."""


@dataclasses.dataclass(frozen=True)
class Outside:
    """One file outside our root, as it was before us. ``backup`` None: it was not there, so it goes when we go."""

    path: str
    kind: str  # "block" within a file of others, or a "file" of ours
    backup: Optional[str]


def install(scope: str, startup: Startup, home: ServerHome) -> Tuple[str, ...]:
    """Make the Python of ``startup`` run the server's sitecustomize.py; return the files that had to be changed.

    Doing it again changes nothing. Raises OSError, Refused, lock.Locked.
    """
    wanted = _wanted(scope, startup, home)
    changed = []
    for path, (kind, text) in wanted.items():
        with _locked(path):
            before = _read(path)
            after = _with_block(before, text, home.name) if kind == "block" else text.encode("ascii")
            if kind == "file" and before is not None and not _is_ours(before, home.name):
                raise Refused(f"{path} is there and not lamplighter's")
            if after == before:
                continue
            _write_down(home, path, kind, before)
            _replace(path, after)
            changed.append(path)
    return tuple(changed)


def files_of(scope: str, startup: Startup, home: ServerHome) -> Tuple[str, ...]:
    """Return the files that ``install`` would make or edit. Raises Refused."""
    return tuple(_wanted(scope, startup, home))


def remove(home: ServerHome, keep: Tuple[str, ...] = ()) -> Tuple[str, ...]:
    """Take away what ``install`` has put outside our root, but for the files ``keep``; return the files given back.

    A file that nobody else has changed since is, byte for byte, the one of before, with its mode and owner; changes of
    others stay in it. Also mends what a killed run left behind.
    """
    given_back = []
    for outside in recorded(home):
        if outside.path in keep:
            continue
        with _locked(outside.path):
            if _give_back(outside, home.name):
                given_back.append(outside.path)
            _forget(home, outside)
    return tuple(given_back)


def recorded(home: ServerHome) -> Tuple[Outside, ...]:
    """Return every file outside our root that this server has, or may have, changed; the last one first."""
    record = read_json(_record(home)) or {}
    found = [Outside(path, each["kind"], each["backup"]) for path, each in record.items()]
    return tuple(sorted(found, key=lambda outside: outside.path, reverse=True))


# ------------------------------------------------------------------------------------------------- what is wanted


def _wanted(scope: str, startup: Startup, home: ServerHome) -> Dict[str, Tuple[str, str]]:
    """Return path -> (kind, text), in the order of writing: a file that runs another comes after it."""
    function = "_lamplighter_" + re.sub(r"\W", "_", home.name)
    hook = _HOOK.format(function=function, variable=PYSITE)
    # Without a venv the prefix is that of all of the system's own tools: only what the launch script names runs there.
    fallback = os.path.join(home.current, "pysite") if startup.is_venv else None
    call = f"{{here}}, {os.path.realpath(startup.prefix)!a}, {fallback!a}"
    if scope == "interpreter":
        path = _imported_file(startup)
        body = f"{hook}\n\n{function}({call.format(here='__file__')})\ndel {function}\n"
        return {path: ("block", body)}
    module = function + hashlib.sha256(home.name.encode()).hexdigest()[:6]
    stem = os.path.join(startup.packages, module)
    head = _head(home.name)
    start = f"\n\ndef start():\n    {function}({call.format(here='__file__')})\n"
    return {
        f"{stem}.py": ("file", f"{head}{hook}{start}"),
        # Python 3.15 runs this one, and then not the import line beside it; older ones know only the import line.
        f"{stem}.start": ("file", f"{head}{module}:start\n"),
        f"{stem}.pth": ("file", f"{head}import {module}; {module}.start()\n"),
    }


def _imported_file(startup: Startup) -> str:
    """Return the real path of the sitecustomize that runs; a new one in site-packages where none does."""
    if startup.sitecustomize is None:
        if startup.candidates:
            raise Refused(f"{startup.candidates[0]} is there and does not run: mend it first")
        return os.path.join(os.path.realpath(startup.packages), "sitecustomize.py")
    path = os.path.realpath(startup.sitecustomize)
    if not path.endswith(".py"):
        raise Refused(f"{path} is compiled: there is no source to put a block into")
    return path


def _head(server: str) -> str:
    return f"# lamplighter: start-up file of server {server}; `inv undeploy` removes it\n"


def _is_ours(data: bytes, server: str) -> bool:
    return data.startswith(_head(server).encode("ascii"))


# --------------------------------------------------------------------------------- the block within a file of others


def _with_block(before: Optional[bytes], body: str, server: str) -> bytes:
    """Append the block, at the end because a file's docstring, coding and __future__ lines must stay in front."""
    rest = _without_block(before or b"", server)
    joint = "" if not rest or rest.endswith(b"\n") else "+"  # a newline of ours is taken away again
    begin, end = _marks(server)
    block = f"{begin}{joint}\n# `inv undeploy` removes this block.\n{body}{end}\n"
    return rest + (b"\n" if joint else b"") + block.encode("ascii")


def _without_block(data: bytes, server: str) -> bytes:
    begin, end = (re.escape(mark.encode("ascii")) for mark in _marks(server))
    block = re.compile(rb"(?ms)(\n?)^" + begin + rb"(\+?)\n.*?^" + end + rb"\n")
    return block.sub(lambda found: b"" if found.group(2) else found.group(1), data)


def _marks(server: str) -> Tuple[str, str]:
    return f"# >>> lamplighter {server} >>>", f"# <<< lamplighter {server} <<<"


# ------------------------------------------------------------------------------------- writing, and giving back


def _write_down(home: ServerHome, path: str, kind: str, before: Optional[bytes]) -> None:
    """Keep the original and the intent, durably, before the edit. Only the first original is one."""
    record = read_json(_record(home)) or {}
    if path in record:
        return
    backup = None
    if before is not None and kind == "block":
        backup = os.path.join(_directory(home), _short(path))
        files.make_directory(_directory(home))
        files.write_file(backup, _without_block(before, home.name))
    files.make_directory(_directory(home))
    files.write_json(_record(home), {**record, path: {"kind": kind, "backup": backup}})


def _forget(home: ServerHome, outside: Outside) -> None:
    record = read_json(_record(home)) or {}
    record.pop(outside.path, None)
    files.write_json(_record(home), record)
    if outside.backup is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(outside.backup)


def _give_back(outside: Outside, server: str) -> bool:
    """Undo one file; say whether there was anything to undo."""
    _sweep(outside.path)
    data = _read(outside.path)
    if data is None:
        return False
    if outside.kind == "file":
        if not _is_ours(data, server):
            return False
        os.unlink(outside.path)
        _drop_bytecode(outside.path)
    else:
        rest = _without_block(data, server)
        if rest == data:
            return False
        if rest or outside.backup is not None:
            _replace(outside.path, rest)
            return True
        os.unlink(outside.path)
        _drop_bytecode(outside.path)
    files.sync_directory(os.path.dirname(outside.path))
    return True


def _replace(path: str, data: bytes) -> None:
    """Put ``data`` at ``path`` at once, with the mode, owner and attributes of the file that is there."""
    directory, name = os.path.split(path)
    _sweep(path)
    temp = os.path.join(directory, f"{files.TEMP_PREFIX}{name}.{os.getpid()}")
    try:
        state: Optional[os.stat_result] = os.stat(path)
    except FileNotFoundError:
        state = None
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            _take_after(path, fd, state)
            os.fsync(fd)
        os.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    files.sync_directory(directory)


def _take_after(path: str, fd: int, state: Optional[os.stat_result]) -> None:
    if state is None:
        os.fchmod(fd, 0o644)  # every user of the interpreter reads it
        return
    made = os.fstat(fd)
    if (made.st_uid, made.st_gid) != (state.st_uid, state.st_gid):
        os.fchown(fd, state.st_uid, state.st_gid)
    os.fchmod(fd, state.st_mode & 0o7777)
    with contextlib.suppress(OSError):  # SELinux labels; many file systems have none
        for name in os.listxattr(path):
            os.setxattr(fd, name, os.getxattr(path, name))


def _sweep(path: str) -> None:
    """Remove what a killed run left half-written beside ``path``. Only under its lock."""
    directory, name = os.path.split(path)
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory):
            if re.fullmatch(re.escape(f"{files.TEMP_PREFIX}{name}.") + r"\d+", entry):
                os.unlink(os.path.join(directory, entry))


def _drop_bytecode(path: str) -> None:
    directory, name = os.path.split(path)
    cache = os.path.join(directory, "__pycache__")
    stem = os.path.splitext(name)[0]
    with contextlib.suppress(OSError):
        for entry in os.listdir(cache):
            if entry.startswith(f"{stem}.") and entry.endswith(".pyc"):
                os.unlink(os.path.join(cache, entry))


def _read(path: str) -> Optional[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Two servers may share an interpreter: one edit of a file at a time."""
    held = lock.acquire(f"start-up file {path}", lock.shared_path(f"startup-{_short(path)}"), LOCK_SECONDS)
    try:
        yield
    finally:
        held.release()


def _short(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _directory(home: ServerHome) -> str:
    return os.path.join(home.path, "outside")


def _record(home: ServerHome) -> str:
    return os.path.join(_directory(home), "record.json")
