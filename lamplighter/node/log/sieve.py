"""What of a flood of lines is worth looking at, and the last lines of it. Pure, bounded."""

from __future__ import annotations

import collections
import re
from typing import Callable, Deque, List, Optional, Set, Tuple

from lamplighter.node.log.rules import Interest, Rules, shape_of

TAIL_PIECES = 60
TEXT_CHARACTERS = 2000
MOST_SHAPES = 2000

_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")


def plain(raw: bytes) -> bytes:
    """The bytes without colours."""
    return _COLOUR.sub(b"", raw) if b"\x1b" in raw else raw


class Sieve:
    """Which patterns can match in a region of bytes at all, by the plain text that each needs.

    Lines that differ in digits alone have one *shape*; shapes in which nothing can match are remembered, so that a
    flood of such lines costs next to nothing. ``stage`` tells when other patterns are wanted than before.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._stage: Optional[Tuple[object, ...]] = None
        self._wanted: List[Interest] = []
        self._dull: Set[bytes] = set()

    def interests(
        self, region: bytes, stage: Tuple[object, ...], is_wanted: Callable[[Interest], bool]
    ) -> List[Interest]:
        if stage != self._stage:
            self._stage = stage
            self._dull.clear()
            self._wanted = [each for each in self._rules.interests if is_wanted(each)]
        shapes = set(shape_of(plain(region)).replace(b"\r", b"\n").split(b"\n"))
        fresh = shapes - self._dull
        text = b"\n".join(fresh)
        found = [each for each in self._wanted if each.shape is None or each.shape in text]
        if len(self._dull) > MOST_SHAPES:
            self._dull.clear()
        for shape in fresh:
            if len(shape) < TEXT_CHARACTERS and not any(each.shape is None or each.shape in shape for each in found):
                self._dull.add(shape)
        return found

    def is_dull(self, clean: bytes) -> bool:
        """Whether nothing can match in a piece that was part of such a region."""
        return shape_of(clean) in self._dull

    @property
    def size(self) -> int:
        return sum(map(len, self._dull))


class Tail:
    """The last lines, each update of a progress bar in the place of the one before."""

    def __init__(self, rules: Rules) -> None:
        self.last = ""
        #: Lines that show the server at work: not those that our own questions, or mere waiting, leave in the log.
        self.lines_of_work = 0
        self._rules = rules
        self._lines: Deque[Tuple[int, str]] = collections.deque(maxlen=TAIL_PIECES)
        self._is_bar_open = False

    def remember(self, clean: bytes, end: bytes, line: int) -> None:
        text = clean[: 4 * TEXT_CHARACTERS].decode("utf-8", "replace").rstrip()[:TEXT_CHARACTERS]
        if text:
            if self._is_bar_open and self._lines:
                self._lines.pop()
            self._lines.append((line, text))
            self.last = text
            if not self._rules.is_idle(text):
                self.lines_of_work += 1
            self._is_bar_open = end == b"\r"
        elif end == b"\n":
            self._is_bar_open = False

    @property
    def lines(self) -> List[str]:
        return [text for _, text in self._lines]

    def before(self, count: int) -> List[Tuple[int, str]]:
        """At most ``count`` lines before the last one, with their numbers, the nearest first."""
        return list(self._lines)[-count - 1 : -1][::-1]

    @property
    def size(self) -> int:
        return sum(len(text) for _, text in self._lines)
