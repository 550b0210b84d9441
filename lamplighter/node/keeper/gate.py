"""The gate at which a launcher waits that was started while the old server still serves.

It has imported by then what its engine lists, which takes most of the time until its first word, and has touched no
GPU. Our sitecustomize.py waits in it: for a lock on a file that the run holds. A run that opens the gate says so in the
file first. One that ends without, by whatever way, lets the lock go as well, and then what waits ends by itself. So
nothing is left behind by a run that was killed.

facts: of SGLang's start on an H200, 9 s of 24 were these imports; a waiting launcher holds no GPU memory, but may have
``/dev/nvidia*`` open.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from typing import Any, Optional, Sequence

OPENED = b"\ngo\n"


class Gate:
    """One gate, closed and locked from its making on. ``path`` goes to the launcher, see ``Order.gate``."""

    def __init__(self, path: str, modules: Sequence[str]) -> None:
        """Make the gate for a launcher that is to import ``modules``. Raises OSError."""
        self.path = path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._reached)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._fd, "\n".join(modules).encode())

    @property
    def _reached(self) -> str:
        return f"{self.path}.reached"

    def reached(self) -> Optional[list[str]]:
        """Return None until somebody waits here; then what could not be imported, mostly nothing."""
        try:
            with open(self._reached, encoding="utf-8") as file:
                told: Any = json.load(file)
        except (OSError, ValueError):
            return None
        return [str(each) for each in told] if isinstance(told, list) else None

    def open(self) -> None:
        """Let go who waits. Raises OSError, and then the gate stays closed."""
        os.write(self._fd, OPENED)
        self.close()

    def close(self) -> None:
        """Give the gate up: who waits there ends by itself, unless it was opened. Doing it twice changes nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
