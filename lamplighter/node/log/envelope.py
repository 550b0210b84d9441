"""What an unknown carrier puts in front of each line, learnt from the lines themselves.

Process managers, log stores, terminals and ``grep -n`` all write their own words before a server's. Where the server's
begin is seen in the lines that only it can have written: its own prefix, the head and the frames of a traceback. What
stands before them, with its numbers left open, is taken for an envelope once two lines agree on it. Pure.
"""

from __future__ import annotations

import collections
import re
from typing import Counter, Iterable, Optional, Pattern, Sequence, Tuple

from lamplighter.node.log.rules import Rules

MOST_LINES = 4000
MOST_CHARACTERS = 200
MOST_ENVELOPES = 16
#: So many lines must agree: one may be another process's line that begins in the middle of a progress bar.
FEWEST_LINES = 2
#: This share of lines that count up are numbered: a rank in front of each would not.
FEWEST_STEPS = 0.7

_DAY = "Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_BAR = re.compile(r"\d%|it/s\b|s/it\b")
_PART = re.compile(
    rf"(?P<day>\b(?:{_DAY})\b)"
    r"|(?P<hex>\b(?=[a-f]*\d)[0-9a-f]{7,}\b)|(?P<digits>\d+)|(?P<space>\s+)|(?P<rest>[^\d\s]+?(?=\d|\s|$|\b))"
)
_GREP_LINE = (re.compile(r"(?P<words>(\d{1,7})[:-])"),)
_GREP = re.compile(r"\d[:-]$")
_GREP_NUMBER = re.compile(r":?\d+[:-]$")
_NAME = re.compile(r"[A-Za-z]{2}")
_TIME = re.compile(rf".*\d{{4}}-\d\d-|.*\d\d:\d\d:\d\d|(?:{_DAY})\b")


class Envelopes:
    """What stands before each line: the carriers that ``rules`` know, in their order, then those ``learnt``.

    The numbers of ``grep -n`` come first: with a line's indentation they read as the rank of ``srun -l``.
    """

    def __init__(self, rules: Rules, learnt: Iterable[Pattern[str]] = ()) -> None:
        self.learnt = tuple(learnt)
        numbers = [each for each in self.learnt if each.match("7:")]
        self._patterns = (*numbers, *rules.envelopes, *(each for each in self.learnt if each not in numbers))

    def opened(self, text: str) -> Tuple[str, str]:
        """The line without its envelope, and the source that this names, "" for none."""
        start = 0
        source = ""
        for pattern in self._patterns:
            match = pattern.match(text, start)
            if match is not None:
                start = match.end()
                source += _source_in(match)
        return (text[start:] if start else text), source


def _source_in(match: re.Match[str]) -> str:
    groups = match.groupdict()
    if groups.get("words"):  # of one that was learnt: without times and line numbers, which differ in each line
        words = (_GREP_NUMBER.sub("", word) for word in groups["words"].split())
        return " ".join(word for word in words if _NAME.search(word) and not _TIME.match(word))
    return groups.get("source") or ""


def learn(text: str, rules: Rules) -> Tuple[Pattern[str], ...]:
    """The envelopes that the lines of ``text`` show, beside those that ``rules`` know; the longest first."""
    lines = re.split(r"[\r\n]+", text)[:MOST_LINES]
    known = Envelopes(rules, _GREP_LINE if _are_numbered(lines) else ())
    seen: Counter[str] = collections.Counter()
    for line in lines:
        envelope = _before_the_servers_words(known.opened(line)[0], rules)
        if envelope:
            seen[_shape(envelope)] += 1
    found = [shape for shape, count in seen.most_common(MOST_ENVELOPES) if count >= FEWEST_LINES]
    return (*known.learnt, *(re.compile(shape) for shape in sorted(found, key=len, reverse=True)))


def _are_numbered(lines: Sequence[str]) -> bool:
    """Whether each line begins with the number behind that of the line before it."""
    numbers = [int(match[2]) if (match := _GREP_LINE[0].match(line)) else -2 for line in lines if line]
    steps = sum(number == numbers[at] + 1 for at, number in enumerate(numbers[1:]))
    return steps > FEWEST_STEPS * len(numbers)


def _before_the_servers_words(line: str, rules: Rules) -> Optional[str]:
    at = rules.anchor_in(line)
    if not at or at > MOST_CHARACTERS:
        return None
    envelope = line[:at]
    is_quoted = envelope.count("'") % 2 or envelope.count('"') % 2  # what follows is what somebody else said
    return None if is_quoted or _BAR.search(envelope) or rules.says(envelope) else envelope


def _shape(envelope: str) -> str:
    """A pattern for it: numbers, dates and widths may vary, the spaces before the server's words may not.

    Words with a letter name the source, which tells apart the processes of two carriers' streams.
    """
    bare = envelope.rstrip()
    spaces = len(envelope) - len(bare)
    pieces = []
    for match in _PART.finditer(bare):
        kind, part = match.lastgroup, match.group()
        if kind == "day":
            pieces.append("[A-Z][a-z]{2}")
        elif kind == "hex":
            pieces.append("[0-9a-f]{7,}")
        elif kind == "digits":
            pieces.append(r"\d+")
        elif kind == "space":
            pieces.append(r"\s+" if match.start() else r"\s*")
        else:
            pieces.append(re.escape(part))
    if not bare:
        return re.escape(envelope)
    if not spaces and _GREP.search(bare):
        pieces[-1] = "[:-]"  # the lines around a hit of grep -n
    return rf"(?P<words>{''.join(pieces)}){re.escape(envelope[len(bare) :])}"
