"""Follows Python's tracebacks through a log: whose each one is, which line ends it, and what is only its source.

Several processes write at once, so that each has a block of its own; a line without a prefix belongs to the block that
was begun last, of the same source. A traceback whose head was cut away begins with its first frame. Pure.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, Deque, Dict, List, Optional, Tuple

from lamplighter.node.log.rules import Rules
from lamplighter.node.log.segments import Segment

if TYPE_CHECKING:
    from lamplighter.node.log.findings import Match

#: Pieces read closely after the head of a traceback, and after its last line, where ranks and contexts are carried on.
BLOCK_PIECES = 400
BLOCK_REST = 40
MOST_BLOCKS = 64
MOST_PENDING = 8

#: What a segment is: none of a traceback's (GOES_ON: and it shows that the server outlived the last one), its head,
#: one of its frames with their source, the sentence that ends it, what this goes on with.
OUTSIDE, GOES_ON, HEAD, FRAME, END, REST = range(6)

_BARE = re.compile(r"^[\w.]+:?\s*$")


class Block:
    """One traceback: whose it is, its last lines, and whether its sentence has come."""

    def __init__(self, rank: Optional[int], who: str) -> None:
        self.rank = rank
        self.who = who
        self.ended = False
        self.is_bare = False
        self.source = ""
        self.lines: Deque[str] = collections.deque(maxlen=BLOCK_REST)
        #: What the source lines would say: it counts where the sentence says nothing.
        self.pending: List[Match] = []
        self._frames = 0
        self._is_after_frame = False

    def take(self, text: str, body: str, rules: Rules) -> int:
        """Take in the next line of it and say what this is."""
        self.lines.append(text)
        if self.ended:
            return REST
        if rules.is_frame(body):
            self._frames += 1
            self._is_after_frame = True
            return FRAME
        was_after_frame, self._is_after_frame = self._is_after_frame, False
        body = body.rstrip()
        if body[:1].isspace() or not body:
            self.source = body.strip() if body.strip(" ^~") else self.source
            return FRAME
        if rules.is_error(body) or (self._frames and rules.may_end(body)):
            self.ended = True
            self.is_bare = _BARE.match(body) is not None
            return END
        if was_after_frame:  # its indentation may have been lost on the way here
            self.source = body
            return FRAME
        return OUTSIDE

    @property
    def size(self) -> int:
        return sum(map(len, self.lines)) + sum(len(each.place.text) for each in self.pending)


class Tracebacks:
    """The open tracebacks of one start. ``closely``: how many more pieces are worth reading whatever they say."""

    def __init__(self, rules: Rules, closely: int = 0, begun: Optional[Block] = None) -> None:
        self.closely = closely
        self.any = begun is not None
        self._rules = rules
        self._latest: Dict[str, Optional[Block]] = {"": begun} if begun is not None else {}
        self._by_who: Dict[str, Block] = {begun.who: begun} if begun is not None and begun.who else {}
        self._chained = False

    def block_of(self, segment: Segment) -> Optional[Block]:
        """The traceback that a segment would go on with."""
        if segment.who is None:
            return self._latest.get(segment.source)
        return self._by_who.get(segment.source + segment.who)

    def latest(self, segment: Segment) -> Optional[Block]:
        return self._latest.get(segment.source)

    def follow(self, segment: Segment, text: str, is_head: bool, is_chain: bool) -> Tuple[int, Optional[Block]]:
        """Say what a segment is, and of which traceback. ``text`` is what is kept of it."""
        if is_head:
            return HEAD, self._open(segment)
        if is_chain:
            self._chained = True
        own = self.block_of(segment)
        if (own is None or own.ended) and self._rules.is_frame(segment.body) and not self._rules.is_quiet(segment.text):
            own = self._open(segment)  # its head was cut away
            return own.take(text, segment.body, self._rules), own
        if not self.closely:
            was_any = bool(self._latest)
            self._latest.clear()
            self._by_who.clear()
            return (GOES_ON if was_any else OUTSIDE), None
        if own is None or (segment.who == "" and own.ended):
            latest = self._latest.get(segment.source)
            if segment.who is not None and latest is not None and latest.ended:
                self._latest[segment.source] = None
                return GOES_ON, None
            return OUTSIDE, None
        part = own.take(text, segment.body, self._rules)
        if part == END:
            self.closely = min(self.closely, BLOCK_REST)
        if part == REST and self._rules.is_quiet(segment.text):
            return GOES_ON, own
        return part, own

    def _open(self, segment: Segment) -> Block:
        key = None if segment.who is None else segment.source + segment.who
        before = self._latest.get(segment.source)
        inherited = before.rank if before is not None and key is None and self._chained else None
        block = Block(segment.rank if segment.rank is not None else inherited, key or "")
        if key:
            if len(self._by_who) >= MOST_BLOCKS:
                self._by_who.pop(next(iter(self._by_who)))
            self._by_who[key] = block
        if len(self._latest) >= MOST_BLOCKS:
            self._latest.clear()
        self._latest[segment.source] = block
        self._chained = False
        self.any = True
        self.closely = BLOCK_PIECES
        return block

    def unended(self) -> List[Block]:
        """The tracebacks whose sentence has not come."""
        blocks = [*self._by_who.values(), *(each for each in self._latest.values() if each is not None)]
        return list({id(each): each for each in blocks if not each.ended}.values())

    @property
    def size(self) -> int:
        blocks = {id(each): each for each in [*self._by_who.values(), *self._latest.values()] if each is not None}
        return sum(each.size for each in blocks.values())
