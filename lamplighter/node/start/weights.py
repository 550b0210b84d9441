"""The weights of a model, read into the page cache before they are asked for.

The server that serves is not to notice: no more is read than fits beside its own weights into the memory that the node
can spare, and not faster than ``RATE``. Reads only. facts: of the H200 machine's disk, 1.3 GiB/s cold against 6.3 GiB/s
from the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import mmap
import os
import threading
import time
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from lamplighter.node.system import memory

#: Bytes a second at most: a share of a fast disk, so that others get theirs.
RATE = 1 << 30
PIECE = 8 << 20
#: Of what is available so much stays untouched, for whatever the servers and others ask for meanwhile.
SPARE_SHARE, SPARE_BYTES = 0.1, 2 << 30


@dataclass(frozen=True)
class Weights:
    """The files of a model, with their sizes, and how many of their bytes the page cache has."""

    files: Tuple[Tuple[str, int], ...]
    cached: int

    @property
    def size(self) -> int:
        return sum(size for _, size in self.files)

    @property
    def missing(self) -> int:
        return max(0, self.size - self.cached)


def look(model: str, patterns: Sequence[str]) -> Weights:
    """Find the weights of a model on this node: a directory's files of these names, or a file. None: no such path."""
    path = os.path.expanduser(model)
    names = [path] if os.path.isfile(path) else []
    if os.path.isdir(path):
        found = (name for name in sorted(os.listdir(path)) if any(fnmatch.fnmatch(name, each) for each in patterns))
        names = [os.path.join(path, name) for name in found]
    files: List[Tuple[str, int]] = []
    cached = 0
    for name in names:
        with contextlib.suppress(OSError), open(name, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            cached += sum(cached_bytes(file.fileno(), place, size) for place in range(0, size, PIECE))
            files.append((name, size))
    return Weights(tuple(files), cached)


def cached_bytes(fd: int, place: int, size: int) -> int:
    """Return how many bytes the page cache has of the piece of a file that begins at ``place``; 0 if it cannot be told.

    facts: a read with RWF_NOWAIT has the page brought, so asking that way changes the answer. mincore(2) only tells
    who could write the file, and says of all others' that they are there.
    """
    if not _may_be_told(fd):
        return 0
    length = min(PIECE, size - place)
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, place)
    if address in (None, _FAILED):
        return 0
    pages = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
    try:
        if _libc.mincore(address, length, pages) != 0:
            return 0
    finally:
        _libc.munmap(address, length)
    return min(length, sum(page & 1 for page in pages) * mmap.PAGESIZE)


def _may_be_told(fd: int) -> bool:
    return os.geteuid() in (0, os.fstat(fd).st_uid)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value


def room_beside(serving: int) -> int:
    """Return how many bytes may be read without pushing out ``serving`` bytes that the page cache has for a server."""
    available = memory.available_bytes() or 0
    return max(0, available - serving - max(SPARE_BYTES, int(available * SPARE_SHARE)))


class ReadAhead:
    """Reads what the page cache does not have of ``weights``, up to ``room`` bytes, in a thread of its own."""

    def __init__(self, weights: Weights, room: int) -> None:
        self.weights = weights
        self.wanted = min(weights.missing, room)
        self.read = 0
        self.seconds = 0.0
        self.trouble = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="read-ahead", daemon=True)
        self._began = time.monotonic()
        self._thread.start()

    @property
    def is_at_work(self) -> bool:
        return self._thread.is_alive()

    @property
    def seconds_left(self) -> Optional[float]:
        """Return an estimate by the rate so far; None before there is one."""
        spent = time.monotonic() - self._began
        return (self.wanted - self.read) * spent / self.read if self.read and spent > 1 else None

    def close(self) -> None:
        """End it, at the latest after the piece that it reads: a disk that hangs is not waited for."""
        self._is_over.set()
        self._thread.join(1.0)

    def _work(self) -> None:
        try:
            for name, size in self.weights.files:
                self._take(name, size)
        except OSError as error:  # whoever loads the model will say so, too
            self.trouble = f"{error.filename or 'a weight file'}: {error.strerror}"
        self.seconds = time.monotonic() - self._began

    def _take(self, name: str, size: int) -> None:
        piece = bytearray(PIECE)
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for place in range(0, size, PIECE):
                if self._is_over.is_set() or self.read >= self.wanted:
                    return
                if cached_bytes(fd, place, size) < min(PIECE, size - place):
                    self.read += os.preadv(fd, [piece], place)
                    ahead = self.read / RATE - (time.monotonic() - self._began)
                    self._is_over.wait(max(0.0, ahead))
        finally:
            os.close(fd)
