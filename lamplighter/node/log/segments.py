"""The parts of a line: where another process's prefix begins in it, who speaks, as which rank. Pure."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Optional

from lamplighter.node.log.rules import Rules, outside_quotes


class Segment(NamedTuple):
    """Part of a piece, from a prefix on; ``who`` is None without one and may be "" with one that names nobody.

    ``source``: whose stream of several that a carrier has put into one.
    """

    text: str
    body: str
    who: Optional[str]
    rank: Optional[int]
    source: str

    @property
    def is_indented(self) -> bool:
        return self.body[:1].isspace()


def cut(text: str, source: str, rules: Rules, is_ready: bool) -> Iterator[Segment]:
    """Cut a piece where another process's prefix begins in it; behind a ready server not in what clients sent."""
    starts = rules.prefixes_in(text)
    if is_ready:
        own = set(outside_quotes(text, (each.start for each in starts)))
        starts = [each for each in starts if each.start in own]
    if not starts or starts[0].start > 0:
        stop = starts[0].start if starts else len(text)
        yield Segment(text[:stop], text[:stop], None, rules.rank_in(text[:stop]), source)
    for index, prefix in enumerate(starts):
        stop = starts[index + 1].start if index + 1 < len(starts) else len(text)
        part = text[prefix.start : stop]
        yield Segment(part, text[prefix.end : stop], prefix.who, rules.rank_in(part), source)
