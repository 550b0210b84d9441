"""Reads what a growing log gains: piece by piece, through truncation and rotation, in bounded time and memory.

Reads only. A file that cannot be read (yet) yields nothing. When the log grows faster than its reader is given, what
lies in between is skipped, counted in ``skipped``, and never taken for read.
"""

from __future__ import annotations

import os
from typing import Optional

#: Bytes that one call returns at most, and by how much the reader may be behind before it skips ahead.
READ_BYTES = 1 << 20
MOST_BEHIND = 64 << 20


class LogFile:
    """The log at ``path`` from byte ``offset`` on; with ``may_skip`` false none of it is ever skipped."""

    def __init__(self, path: str, offset: int = 0, *, may_skip: bool = True) -> None:
        self.path = path
        self.skipped = 0
        self._offset = offset
        self._fd: Optional[int] = None
        self._is_aligned = True
        self._may_skip = may_skip
        self._was_behind = False

    def new(self, *, closely: bool = True) -> bytes:
        """Return at most READ_BYTES not yet seen. After a skip they begin with a whole line.

        Not ``closely``: without a look for another file in the place of ours, which costs as much as the rest.
        """
        if self._fd is None and not self._open():
            return b""
        data = self._read()
        return data if data or not closely or not self._has_moved() else self._read()

    @property
    def behind(self) -> int:
        """Bytes that are there and have not been returned."""
        try:
            return max(0, os.fstat(self._fd).st_size - self._offset) if self._fd is not None else 0
        except OSError:
            return 0

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        return True

    def _read(self) -> bytes:
        assert self._fd is not None
        try:
            size = os.fstat(self._fd).st_size
            if size < self._offset:  # truncated: what is there now is new
                self._offset = 0
            elif size == self._offset:
                return b""
            is_behind = self._may_skip and size - self._offset > MOST_BEHIND
            if is_behind and self._was_behind:  # what comes right after the last piece is read in any case
                target = size - READ_BYTES
                self.skipped += target - self._offset
                self._offset = target
                self._is_aligned = False
            self._was_behind = is_behind
            data = os.pread(self._fd, READ_BYTES, self._offset)
        except OSError:
            return b""
        self._offset += len(data)
        if data and not self._is_aligned:
            self._is_aligned = True
            data = data[data.find(b"\n") + 1 :]
        return data

    def _has_moved(self) -> bool:
        """Go over to the file that has taken the path of ours, which is read to its end."""
        assert self._fd is not None
        try:
            there, ours = os.stat(self.path), os.fstat(self._fd)
        except OSError:
            return False  # renamed, and the next file is not there yet
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            return False
        self.close()
        self._offset = 0
        return self._open()
