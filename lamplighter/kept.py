"""What pure functions came to, kept from one command to the next by the digest of all that went into them.

Below ``$XDG_CACHE_HOME/lamplighter``, or ``~/.cache/lamplighter``; it may be removed at any time. What is not there, is
not as it was written, or could be another user's, is worked out again, and so is all of it where nothing can be kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lamplighter.paths import at_home, read_file
from lamplighter.project import PROJECT

#: Files that are kept, the ones used last.
MOST = 64
#: The versions of the libraries that may have a say.
LOCK = PROJECT / "requirements.lock"


def kept(kind: str, said: object, files: Iterable[Path], make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns, which JSON can hold, and which ``said`` and the content of ``files`` decide alone.

    ``said`` is JSON, too. The versions of Python and of the libraries count as said. Raises what ``make`` raises, each
    time anew.
    """
    try:
        file = _directory() / f"{kind}-{_digest(said, files)}.json"
    except OSError:  # whoever reads the file tells what is wrong with it
        return make()
    found = _read(file)
    if found is None:
        found = json.dumps(made := make())
        _write(file, found)
        return made
    return json.loads(found)


def _digest(said: object, files: Iterable[Path]) -> str:
    total = hashlib.sha256(json.dumps([sys.version, said], sort_keys=True).encode())
    for path in [*files, *([LOCK] if LOCK.exists() else [])]:
        content = read_file(path)
        total.update(b"\0%s\0%d\0" % (os.fsencode(path), len(content)) + content)
    return total.hexdigest()


def _directory() -> Path:
    """Where results are kept, made if it is not there. Raises OSError where others could write to it, or nobody can."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    place = (Path(base) if base.startswith("/") else at_home("~/.cache")) / "lamplighter"
    if not place.is_absolute():
        raise FileNotFoundError("no home directory")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_others(os.lstat(place), stat.S_ISDIR)
    return place


def _refuse_others(found: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError("could be another user's")


def _read(file: Path) -> str | None:
    """What was kept; None where nothing was, or not by us, or not whole."""
    try:
        number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as opened:
            _refuse_others(os.fstat(number), stat.S_ISREG)
            mark, _, content = opened.read().partition(b"\n")
            os.utime(number)
    except OSError:
        return None
    return content.decode() if mark == _mark(content) else None


def _write(file: Path, text: str) -> None:
    content = text.encode()
    new = file.with_name(f".{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        try:
            new.touch(0o600)
            new.write_bytes(_mark(content) + b"\n" + content)
            new.replace(file)
        except OSError:
            new.unlink()
            raise
        _forget(file.parent)


def _mark(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _forget(directory: Path) -> None:
    """Remove what was not used for longest, also what a command that was killed has left half-written."""
    by_use = sorted(directory.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
    for each in by_use[MOST:]:
        each.unlink()
