"""A text stream that never hurts the run behind it.

A reader that went away, a stream that was closed and a character that the terminal's encoding lacks must not end a
deploy, nor leave a traceback: the node goes on, and the exit code still tells how it went.
"""

from __future__ import annotations

import contextlib
import os
from typing import TextIO

_PLAINER = str.maketrans({"\u2026": "...", "\u2501": "=", "\u2500": "-", "\u2713": "+", "\u2717": "x", "\u00b7": "-"})


class Output:
    """Wraps ``stream`` (None: closed since the start, as after ``>&-``); writing never raises."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._make_blocking()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "ascii"

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is gone")
        return self._stream.fileno()

    def line(self, text: str) -> None:
        """Write ``text`` and a line break, and flush: a log that is being followed shows it at once."""
        self.write(text + "\n")
        self.flush()

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._write_encodable(text)
            except (OSError, ValueError) as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _write_encodable(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            # Nothing was written: a text stream encodes before it buffers.
            plainer = text.translate(_PLAINER).encode(self.encoding, "backslashreplace")
            self._stream.write(plainer.decode(self.encoding))

    def _give_up(self, error: Exception) -> None:
        stream, self._stream = self._stream, None
        if isinstance(error, BrokenPipeError) and stream is not None:
            # What is buffered would break again when the interpreter flushes at exit (exit code 120 and a complaint).
            with contextlib.suppress(OSError, ValueError):
                number = stream.fileno()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)

    def _make_blocking(self) -> None:
        # A parent may have left the pipe non-blocking: a full one would then lose the middle of a line.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.set_blocking(self.fileno(), True)
