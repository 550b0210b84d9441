"""Files that survive a crash: who reads one, at whatever moment, sees the old content or the new, never half.

Each write is temp + fsync + rename + fsync of the directory. A leftover temp file begins with ``TEMP_PREFIX`` and is
swept by the next run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
from typing import Any, Callable, Optional, Union

TEMP_PREFIX = ".tmp-"
_WRITER = re.compile(r"\.(\d+)(?:\.old|\.gone)?$")
AT_FDCWD = -100
RENAME_EXCHANGE = 2


class Room:
    """Room set aside for records that must not be lost: ``give_back`` frees some, and tells whether it did."""

    give_back: Callable[[], bool] = staticmethod(lambda: False)


def write_file(path: str, content: Union[str, bytes], mode: int = 0o600) -> None:
    """Replace ``path`` with ``content`` at once and durably. Raises OSError; the old content is then still there.

    On a full disk it is tried once more if there is room to give back.
    """
    try:
        _write_file(path, content, mode)
    except OSError as error:
        if error.errno != errno.ENOSPC or not Room.give_back():
            raise
        _write_file(path, content, mode)


def _write_file(path: str, content: Union[str, bytes], mode: int) -> None:
    directory, name = os.path.split(path)
    temp = os.path.join(directory, f"{TEMP_PREFIX}{name}.{os.getpid()}")
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(temp, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    sync_directory(directory)


def read_text(path: str, most: int = -1) -> Optional[str]:
    """Return what `write_file` wrote to ``path``, ``most`` characters of it; None where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            return file.read(most)
    except OSError:
        return None


def writers_of(path: str) -> list[int]:
    """Return the pids of those who began to write the file ``path`` and have not ended that."""
    directory, name = os.path.split(path)
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    found = (writer_of(each) for each in names if each.startswith(f"{TEMP_PREFIX}{name}."))
    return [pid for pid in found if pid is not None]


def writer_of(temporary: str) -> Optional[int]:
    """Return the pid of the process that made the temporary file or directory of this name."""
    found = _WRITER.search(temporary)
    return int(found.group(1)) if found else None


def try_to_write(directory: str) -> None:
    """See whether a file can be made in ``directory``; leaves none there. Raises OSError."""
    probe = os.path.join(directory, f"{TEMP_PREFIX}probe.{os.getpid()}")
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.close(fd)
    os.unlink(probe)


def write_json(path: str, value: Any) -> None:
    """Replace ``path`` with ``value`` as JSON, at once and durably, readable by its owner alone."""
    write_file(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def point(link: str, target: str) -> None:
    """Make the symbolic link ``link`` point to ``target`` at once and durably."""
    directory, name = os.path.split(link)
    temp = os.path.join(directory, f"{TEMP_PREFIX}{name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temp)
    os.symlink(target, temp)
    os.rename(temp, link)
    sync_directory(directory)


def make_directory(path: str) -> None:
    """Make ``path`` and the parents that it lacks, each private to its owner, durably."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent:
        make_directory(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    sync_directory(parent)


def set_aside(path: str, run_id: str) -> Optional[str]:
    """Where a directory stands in place of the file ``path``, rename it to ``path.before-RUN``; return that name.

    None where there is nothing to do. Raises OSError.
    """
    if not os.path.isdir(path) or os.path.islink(path):
        return None
    aside = f"{path}.before-{run_id}"
    os.rename(os.path.join(path, ""), aside)  # with the slash at its end it moves no file that has come there meanwhile
    return aside


def place_directory(fresh: str, target: str) -> None:
    """Put the complete directory ``fresh`` at ``target`` at once; one already there is removed.

    The two change places, so that the name is never empty; only on a file system that cannot do this (some network
    ones) there is a moment without, after which a crash leaves neither.
    """
    parent = os.path.dirname(target)
    if _exchange(fresh, target):
        shutil.rmtree(fresh, ignore_errors=True)
    elif os.path.lexists(target):
        aside = os.path.join(parent, f"{TEMP_PREFIX}{os.path.basename(target)}.{os.getpid()}.old")
        os.rename(target, aside)
        os.rename(fresh, target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(fresh, target)
    sync_directory(parent)


def _exchange(one: str, other: str) -> bool:
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:  # a C library older than glibc 2.28
        return False
    return bool(renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)


def remove_tree(path: str) -> None:
    """Remove a directory: first out of sight by a rename, so that a crash leaves no half of it under its name."""
    aside = os.path.join(os.path.dirname(path), f"{TEMP_PREFIX}{os.path.basename(path)}.{os.getpid()}.gone")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def sweep_temporaries(directory: str, only: Callable[[str], bool] = lambda name: True) -> None:
    """Remove what a killed run left half-written in ``directory``. Only under the lock that guards its writers.

    Where several locks guard the writers, ``only`` tells by a file's name whether its writer is gone.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name.startswith(TEMP_PREFIX) and only(name):
                path = os.path.join(directory, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.unlink(path)


def sync_directory(path: str) -> None:
    """Make renames in ``path`` durable."""
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
