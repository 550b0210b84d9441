"""Paths and files of this machine as its users write them: what is read is a file of sane size, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from io import BufferedReader
from pathlib import Path

#: Bytes of a file that people write by hand: a key, a known_hosts, an ssh_config.
FILE_LIMIT = 16 << 20


def at_home(path: str) -> Path:
    """``path`` with a leading ``~`` or ``~user`` replaced; that of an unknown user stays, as in a shell.

    Never raises: who opens the file tells that it is not there, with its name and where that was written.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def refuse_other_than_file(path: Path) -> os.stat_result:
    """Raise OSError, with the path and what it is, for anything but a regular file; nothing is opened.

    A FIFO would be waited for without end, and a device has none. /dev/null may stand for an empty file.
    """
    found = path.stat()
    if stat.S_ISREG(found.st_mode) or is_null(found):
        return found
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = "FIFO" if stat.S_ISFIFO(found.st_mode) else "socket" if stat.S_ISSOCK(found.st_mode) else "device"
    raise OSError(errno.EINVAL, f"is a {kind}, and no file", str(path))


def is_null(found: os.stat_result) -> bool:
    """Whether that is /dev/null, by whatever name."""
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3)


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; one that would wait, as /proc/kmsg does, has nothing. Raises OSError."""
    refuse_other_than_file(path)
    return open(path, "rb", opener=_without_waiting)


def _without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


def read_file(path: Path, limit: int = FILE_LIMIT) -> bytes:
    """Return the content of a regular file of ``limit`` bytes at most. Raises OSError, which names the path."""
    with open_file(path) as file:
        content = file.read(limit + 1) or b""
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit >> 20} MiB, and is not what it is taken for", str(path))
    return content


def replace_file(path: Path, content: bytes) -> None:
    """Give ``path`` this content, all of it or none; its mode stays, a link to it too. Raises OSError."""
    place = Path(os.path.realpath(path))
    try:
        mode = stat.S_IMODE(place.stat().st_mode)
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        mode = 0o666 & ~umask
    new = place.parent / f".lamplighter-{secrets.token_hex(8)}"
    try:
        with new.open("xb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        new.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
