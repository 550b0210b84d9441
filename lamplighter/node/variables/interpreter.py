"""Start-up files outside our root: how a server's variables reach a Python that ignores PYTHONPATH.

Two scopes, both opt-in. ``pth``: three files of ours in the site-packages of the server's Python. ``interpreter``: a
marked block at the end of the ``sitecustomize.py`` which that Python really imports (behind Debian's symlink a file in
/etc). Either runs the release's own ``sitecustomize.py``, and only where ``sys.prefix`` is the server's: other venves
and the base interpreter pass it by. Which release: the one that the launch script names, else, in a venv, the current
one. A payload that is missing or broken does no harm. A server that moves to another Python has a block for each of the
two until the new one serves, so that the old one can come back.

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
from typing import Callable, Collection, Dict, Iterator, Optional, Tuple

from lamplighter.node.layout import ServerHome, read_json
from lamplighter.node.start.startup import Startup, needed_scope
from lamplighter.node.system import files, lock

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
    """One file outside our root that we have changed or made. ``backup``: the original of a file of others."""

    path: str
    kind: str  # "block" within a file of others, or a "file" of ours
    backup: Optional[str]


@dataclasses.dataclass(frozen=True)
class Place:
    """One thing of ours outside our root: the block for one Python (``tag``) in a file, or a whole file (no tag)."""

    path: str
    tag: str = ""


def install(scope: str, startup: Startup, home: ServerHome) -> Tuple[str, ...]:
    """Make the Python of ``startup`` run the server's sitecustomize.py; return the files that had to be changed.

    Doing it again changes nothing. Raises OSError, Refused, lock.Locked.
    """
    changed = []
    for place, text in _wanted(scope, startup, home).items():
        with _locked(place.path):
            before = _read(place.path)
            after = _with(place, before, text, home)
            if after == before:
                continue
            _write_down(home, place, before)
            _replace(place.path, after)
            changed.append(place.path)
    return tuple(changed)


def places_of(scope: str, startup: Startup, home: ServerHome) -> Tuple[Place, ...]:
    """Return what ``install`` would make. Raises Refused."""
    return tuple(_wanted(scope, startup, home))


def missing(scope: str, startup: Startup, home: ServerHome) -> Tuple[Place, ...]:
    """Return what ``install`` would make that is not there, or not as it would be. Raises OSError, Refused."""
    found = []
    for place, text in _wanted(scope, startup, home).items():
        before = _read(place.path)
        if _with(place, before, text, home) != before:
            found.append(place)
    return tuple(found)


def present(home: ServerHome) -> Tuple[Place, ...]:
    """Return what of this server lies outside our root now. Raises OSError."""
    found = []
    for outside in recorded(home):
        data = _read(outside.path)
        if data is not None and outside.kind == "file":
            found.append(Place(outside.path))
        elif data is not None:
            tags = (each["tag"].decode("ascii", "replace") for each in _BLOCK.finditer(data))
            found += [Place(outside.path, tag) for tag in tags if _is_of(home, tag)]
    return tuple(found)


def remove(home: ServerHome, keep: Collection[Place] = ()) -> Tuple[str, ...]:
    """Take away what ``install`` has put outside our root, but for ``keep``; return the files that were changed.

    A file that only we have changed is then, byte for byte, the one of before, with its mode and owner; changes of
    others stay in it. Also fixes what a killed run left behind. Raises OSError, Refused, lock.Locked; then what could
    not be undone stays recorded.
    """
    given_back = []
    for outside in recorded(home):
        kept = {place.tag for place in keep if place.path == outside.path}
        with _locked(outside.path):
            try:
                if _give_back(home, outside, kept):
                    given_back.append(outside.path)
            except Refused as error:
                raise Refused(f"{error}; the original is {outside.backup}") from error
            if not kept:
                _forget(home, outside)
    return tuple(given_back)


def recorded(home: ServerHome) -> Tuple[Outside, ...]:
    """Return every file outside our root that this server has, or may have, changed; the last one first."""
    record = read_json(_record(home)) or {}
    found = [Outside(path, each["kind"], each["backup"]) for path, each in record.items()]
    return tuple(sorted(found, key=lambda outside: outside.path, reverse=True))


# ------------------------------------------------------------------------------------------------- what is wanted


def _wanted(scope: str, startup: Startup, home: ServerHome) -> Dict[Place, str]:
    """Return the text of each place, in the order of writing: a file that runs another comes after it."""
    need = needed_scope(startup)
    if need.scope is None:
        raise Refused(f"{startup.prefix}: {need.why}")
    function = "_lamplighter_" + re.sub(r"\W", "_", home.name)
    hook = _HOOK.format(function=function, variable=PYSITE)
    # Without a venv the prefix is that of all of the system's own tools: only what the launch script names runs there.
    fallback = os.path.join(home.current, "pysite") if startup.is_venv else None
    prefix = os.path.realpath(startup.prefix)
    call = f"{function}(__file__, {prefix!a}, {fallback!a})"
    if scope == "interpreter":
        return {Place(_imported_file(startup), f"{home.path!a} in {prefix!a}"): f"{hook}\n\n{call}\ndel {function}\n"}
    module = function + hashlib.sha256(os.fsencode(home.path)).hexdigest()[:6]
    stem = os.path.join(startup.packages, module)
    head = _head(home)
    return {
        Place(f"{stem}.py"): f"{head}{hook}\n\ndef start():\n    {call}\n",
        # Python 3.15 runs this one, and then not the import line beside it; older ones know only the import line.
        Place(f"{stem}.start"): f"{head}{module}:start\n",
        Place(f"{stem}.pth"): f"{head}import {module}; {module}.start()\n",
    }


def _imported_file(startup: Startup) -> str:
    """Return the real path of the sitecustomize that runs; a new one in site-packages where none does."""
    if startup.sitecustomize is None:
        if startup.candidates:
            raise Refused(f"{startup.candidates[0]} is there and does not run: fix it first")
        return os.path.join(os.path.realpath(startup.packages), "sitecustomize.py")
    path = os.path.realpath(startup.sitecustomize)
    if not path.endswith(".py"):
        raise Refused(f"{path} is compiled: there is no source to put a block into")
    return path


def _head(home: ServerHome) -> str:
    return f"# lamplighter: start-up file of {home.path!a}; `inv undeploy` removes it\n"


def _is_ours(data: bytes, home: ServerHome) -> bool:
    return data.startswith(_head(home).encode("ascii"))


# --------------------------------------------------------------------------------- the block within a file of others

#: ``sign`` says what else goes with a block: ``+`` the line end in front of it, ``*`` the file itself.
_BLOCK = re.compile(
    rb"(?m)^# >>> lamplighter (?P<tag>[^\r\n]+) >>>(?P<sign>[+*]?)(?P<text>\r?\n"
    rb"(?:(?!# (?:>>>|<<<) lamplighter )[^\n]*\n)*"
    rb"# <<< lamplighter (?P=tag) <<<\r?(?:\n|\Z))"
)
_MARK = re.compile(rb"(?m)^# (?:>>>|<<<) lamplighter (?P<tag>[^\r\n]+) (?:>>>|<<<)")


def _is_of(home: ServerHome, tag: str) -> bool:
    return tag.startswith(f"{home.path!a} in ")


def _with(place: Place, before: Optional[bytes], text: str, home: ServerHome) -> bytes:
    """Return the content of the file that holds ``text``, ours or a block in another's. Raises Refused."""
    if place.tag:
        return _with_block(place, before, text)
    if before is not None and not _is_ours(before, home):
        raise Refused(f"{place.path} is there and not lamplighter's")
    return text.encode("ascii")


def _with_block(place: Place, before: Optional[bytes], body: str) -> bytes:
    """Append the block, at the end because a file's docstring, coding and __future__ lines must stay in front."""
    tag = place.tag.encode("ascii")
    text = b"\n# `inv undeploy` removes this block.\n" + body.encode("ascii") + b"# <<< lamplighter " + tag + b" <<<\n"
    rest = _without_blocks(place.path, before, lambda other: other == place.tag)
    if before is not None and [block["text"] for block in _BLOCK.finditer(before) if block["tag"] == tag] == [text]:
        return before
    sign = b"*" if rest is None else b"+" if rest and not rest.endswith(b"\n") else b""
    return (rest or b"") + (b"\n" if sign == b"+" else b"") + b"# >>> lamplighter " + tag + b" >>>" + sign + text


def _without_blocks(path: str, data: Optional[bytes], goes: Callable[[str], bool]) -> Optional[bytes]:
    """Return ``data`` without the blocks whose tag ``goes``; None where there is no file without them.

    Raises Refused where such a block is not whole: what belongs to it cannot be told then.
    """
    found = True
    while data is not None and found:
        found = False
        for block in _BLOCK.finditer(data):
            if goes(block["tag"].decode("ascii", "replace")):
                data, found = _cut(data, block), True
                break
    for mark in _MARK.finditer(data or b""):
        tag = mark["tag"].decode("ascii", "replace")
        if goes(tag):
            raise Refused(f"{path} holds a block of lamplighter that is not whole: remove the lines of {tag} by hand")
    return data


def _cut(data: bytes, block: re.Match[bytes]) -> Optional[bytes]:
    """Cut one block out. A block right behind it inherits its sign: that one now stands next to what the sign means."""
    head, tail, sign = data[: block.start()], data[block.end() :], block["sign"]
    heir = _BLOCK.match(tail)
    if sign and heir and not heir["sign"]:
        return head + tail[: heir.start("sign")] + sign + tail[heir.start("sign") :]
    if sign == b"*" and not head and not tail:
        return None
    return head[:-1] if sign == b"+" and not tail else head + tail


# ------------------------------------------------------------------------------------- writing, and giving back


def _write_down(home: ServerHome, place: Place, before: Optional[bytes]) -> None:
    """Keep the original and the intent, durably, before the edit. Only the first original is one."""
    record = read_json(_record(home)) or {}
    if place.path in record:
        return
    backup = None
    files.make_directory(_directory(home))
    if before is not None and place.tag:
        backup = os.path.join(_directory(home), _short(place.path))
        files.write_file(backup, before)
    kind = "block" if place.tag else "file"
    files.write_json(_record(home), {**record, place.path: {"kind": kind, "backup": backup}})


def _forget(home: ServerHome, outside: Outside) -> None:
    record = read_json(_record(home)) or {}
    record.pop(outside.path, None)
    files.write_json(_record(home), record)
    if outside.backup is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(outside.backup)


def _give_back(home: ServerHome, outside: Outside, kept: Collection[str]) -> bool:
    """Undo one file but for the blocks ``kept`` ("": all of a file of ours); say whether there was anything to undo."""
    _sweep(outside.path)
    data = _read(outside.path)
    if data is None or (outside.kind == "file" and (kept or not _is_ours(data, home))):
        return False
    rest = None
    if outside.kind == "block":
        rest = _without_blocks(outside.path, data, lambda tag: _is_of(home, tag) and tag not in kept)
        if rest == data:
            return False
    if rest is not None:
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
        os.rmdir(cache)  # where ours was all that lay there


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
