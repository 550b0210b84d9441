"""Locks that heal themselves: flock, held by the life of the worker.

Nothing has to be cleaned up after a crash or a reboot, and a lock file is never unlinked (a waiter may hold the old
one open). Python's descriptors are close-on-exec, so neither the server nor any tool inherits a lock. GPU and port
locks lie in ``/run/lock/lamplighter``, which all users of the node share; a server's lock lies in its own home.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from typing import Any, Callable, Optional

#: Shared by all users of the node, mode 1777. The first one counts whose parent everybody may write to: this is so for
#: root as well, who could have the first anywhere. facts: /run/lock is 1777 on Debian and Ubuntu, root's alone on RHEL.
SHARED_DIRECTORIES = ("/run/lock/lamplighter", "/tmp/lamplighter.lock")  # noqa: S108

#: Seconds in which those who only look let go: ``holder_of`` shares the lock for an instant, and may be paused in it.
PATIENCE = 30.0
#: How often, every 10 ms, the holder's note is read until it is whole: it may just be writing it.
NOTE_TRIES = 20


class Locked(Exception):
    """Somebody else holds the lock: ``what`` it guards, ``holder`` as its worker wrote it down (may be empty)."""

    def __init__(self, what: str, holder: dict[str, Any]) -> None:
        super().__init__(what)
        self.what = what
        self.holder = holder


class Lock:
    """One exclusive lock; ``note`` tells others who holds it and how far it is."""

    def __init__(self, what: str, fd: int) -> None:
        self.what = what
        self._fd = fd

    def note(self, holder: dict[str, Any]) -> None:
        """Write down who holds the lock. Best effort: a full disk must not end a run."""
        data = json.dumps(holder).encode()
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)


def shared_path(name: str) -> str:
    """Return the path of a lock that all users of the node share; makes its directory. Raises OSError.

    Which directory it is depends on the node alone, never on who asks: two users must meet.
    """
    for directory in SHARED_DIRECTORIES:
        if _is_everybodys(os.path.dirname(directory)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            if not _is_everybodys(directory):  # new, or its maker was killed before the next line
                os.chmod(directory, 0o1777)  # noqa: S103 - every user of the node locks here
            return os.path.join(directory, name)
    raise OSError(errno.ENOENT, "no directory for locks that all users may write to")


def _is_everybodys(directory: str) -> bool:
    try:
        return os.stat(directory).st_mode & 0o002 != 0
    except OSError:
        return False


def acquire(what: str, path: str, wait: float = 0.0, heed: Callable[[], None] = lambda: None) -> Lock:
    """Take the lock at ``path`` within ``wait`` seconds, or raise Locked with its holder. Raises OSError too.

    ``heed`` is called while it waits; what it raises ends the waiting.
    """
    fd = _open(path)
    try:
        _take(what, fd, wait, heed)
    except BaseException:
        os.close(fd)
        raise
    return Lock(what, fd)


def _take(what: str, fd: int, wait: float, heed: Callable[[], None]) -> None:
    began = time.monotonic()
    while not _try(fd, fcntl.LOCK_EX):
        is_held = not _try(fd, fcntl.LOCK_SH)  # else it is shared, so somebody only looks
        if not is_held:
            fcntl.flock(fd, fcntl.LOCK_UN)
        if time.monotonic() >= began + (wait if is_held else max(wait, PATIENCE)):
            raise Locked(what, _read_holder(fd))
        heed()
        time.sleep(0.01)


def holder_of(path: str) -> Optional[dict[str, Any]]:
    """Return what the holder of the lock at ``path`` wrote down; None when it is free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _try(fd, fcntl.LOCK_SH) else _read_holder(fd)
    finally:
        os.close(fd)


def _try(fd: int, kind: int) -> bool:
    """Take the lock if it is to be had. Raises OSError where locks cannot be taken at all."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _open(path: str) -> int:
    # Without O_CREAT first: fs.protected_regular refuses O_CREAT on another user's file in a sticky directory.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(3):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags)
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(fd, 0o666)
            return fd
    raise OSError(errno.EAGAIN, "lock file comes and goes", path)


def _read_holder(fd: int) -> dict[str, Any]:
    for _ in range(NOTE_TRIES):
        with contextlib.suppress(OSError, ValueError):
            value = json.loads(os.pread(fd, 65536, 0))
            if isinstance(value, dict):
                return value
        time.sleep(0.01)
    return {}
