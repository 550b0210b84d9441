"""A limit to what templates may use up of this machine, in computing time and in memory.

Counted is the time that this process computes, so that neither a busy machine nor a slow program of a vault is taken
for an endless loop. Signals reach the main thread alone: elsewhere, and where the system has no such limits (memory
outside Linux), they do not hold.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

SECONDS = 2.0
MEBIBYTES = 256
_SIZE = Path("/proc/self/statm")


class TooLongError(BaseException):
    """The time is up. No Exception: what somebody else's code catches must not swallow it."""


class Limits:
    """Holds while ``limited`` is open; a second one within the first changes nothing."""

    def __init__(self) -> None:
        self._is_open = False
        self._soft = resource.RLIM_INFINITY

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Raises TooLongError when the time is up; for memory Python itself raises MemoryError."""
        if self._is_open:
            yield
            return
        self._is_open = True
        self._soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        wanted = _address_space() + (MEBIBYTES << 20)
        is_lower = self._soft != resource.RLIM_INFINITY and self._soft < wanted
        try:
            with _time(), _memory(self._soft if is_lower or not _SIZE.exists() else wanted):
                yield
        finally:
            self._is_open = False

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """The memory as it was, for a program that is started here and would inherit the limit."""
        with _memory(self._soft) if self._is_open else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def _time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, SECONDS)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:  # the signal may have come on the line above
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


def _stop(_: int, __: FrameType | None) -> None:
    raise TooLongError


@contextlib.contextmanager
def _memory(soft: int) -> Iterator[None]:
    before, highest = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (soft, highest))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, highest))


def _address_space() -> int:
    """Bytes that this process has mapped; 0 where the system does not tell."""
    try:
        return int(_SIZE.read_text("ascii").split()[0]) * resource.getpagesize()
    except OSError:
        return 0
