"""What of a flood of lines is worth looking at, and the last lines of it. Pure, bounded."""

from __future__ import annotations

import collections
import re
from typing import Callable, Deque, Dict, Iterable, List, Set, Tuple

from lamplighter.node.log.rules import Interest, Rules, shape_of

TAIL_PIECES = 60
TEXT_CHARACTERS = 2000
MOST_SHAPES = 2000

_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")


def plain(raw: bytes) -> bytes:
    """The bytes without colours."""
    return _COLOUR.sub(b"", raw) if b"\x1b" in raw else raw


class Sieve:
    """Which patterns can match in a piece at all, by the plain text that each needs.

    Lines that differ in digits alone have one *shape*, for which the answer is remembered, so that a flood of such
    lines costs next to nothing.
    """

    def __init__(self, rules: Rules) -> None:
        self._known: Dict[bytes, Tuple[Interest, ...]] = {}
        self._all = tuple(rules.interests)
        #: Those that can match in a long piece of the region that is being read.
        self._possible = self._all

    def is_worth_reading(self, region: bytes, is_wanted: Callable[[Interest], bool]) -> bool:
        """Whether any piece of a region may match a pattern that is wanted."""
        clean = plain(region)
        shapes = set(shape_of(clean).replace(b"\r", b"\n").split(b"\n"))
        long = {each for each in shapes if len(each) >= TEXT_CHARACTERS}
        self._possible = _occurring(self._all, clean) if long else self._all
        self._learn(shapes - long)
        return bool(long) or any(is_wanted(each) for shape in shapes for each in self._known[shape])

    def _learn(self, shapes: Set[bytes]) -> None:
        if len(self._known) > MOST_SHAPES:
            self._known.clear()
        fresh = [each for each in shapes if each not in self._known]
        if fresh:
            text = b"\n".join(fresh)
            found = [each for each in self._all if each.shape is None or each.shape in text]
            for shape in fresh:
                self._known[shape] = tuple([each for each in found if each.shape is None or each.shape in shape])

    def end_region(self) -> None:
        self._possible = self._all

    def interests(self, clean: bytes) -> Tuple[Interest, ...]:
        """The patterns that can match in a piece without colours."""
        possible = self._possible
        if len(clean) < TEXT_CHARACTERS:
            possible = self._known.get(shape_of(clean), possible)
        return _occurring(possible, clean)

    @property
    def size(self) -> int:
        return sum(map(len, self._known))


def _occurring(interests: Iterable[Interest], text: bytes) -> Tuple[Interest, ...]:
    return tuple([each for each in interests if each.needs is None or each.needs in text])


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
