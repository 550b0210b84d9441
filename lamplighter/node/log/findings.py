"""What a log has shown so far of each start: the failures in it with their places, and how long each phase took.

Pure. Which of several failures explains the others is a matter of weight: see ``Match.weight``.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
from typing import Counter, Dict, Iterable, List, Optional, Pattern, Set, Tuple

from lamplighter.node.events import PHASES
from lamplighter.node.log.rules import Memory, Rule, Rules, Signature
from lamplighter.node.log.tracebacks import Block, Tracebacks

MOST_MATCHES = 32
MOST_ADVICE = 6
ADVICE_CHARACTERS = 300
MOST_RANKS = 1024
#: Phases in which a server answers, as it does when it is ready.
ANSWERING = frozenset(PHASES[PHASES.index("http") :])
#: Counts the markers of all ranks.
ANY = -1


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """Seconds for which ``phase`` was the current one, all its visits together; None when the log tells no time."""

    phase: str
    seconds: Optional[float]


@dataclasses.dataclass(frozen=True)
class Place:
    order: int
    line: int
    text: str
    rank: Optional[int]
    rule: Optional[Rule] = None


@dataclasses.dataclass(frozen=True)
class Match:
    """A failure found. ``is_benign``: healthy starts have the wording, too, but this line ends a traceback."""

    signature: Signature
    place: Place
    is_quiet: bool
    markers: int
    phase_number: int
    memory: Optional[Memory]
    is_benign: bool = False

    def weight(self, was_survived: bool) -> float:
        """The lower, the more it explains: specific, general, vague, consequence; a warning last of all.

        What may be survived and was, to judge by the phases after it, stands behind what was not.
        """
        signature = self.signature
        weight = 1.0 * signature.general + 1.5 * signature.vague + 2.0 * signature.consequence
        return weight + 0.9 * was_survived + 10.0 * self.is_quiet


class Findings:
    """What was found before, or after, the ready line: the first match of each signature, and the first errors."""

    def __init__(self) -> None:
        self.matches: List[Match] = []
        self.wrapper: Optional[Place] = None
        self.error: Optional[Place] = None
        self.error_markers = 0
        self.consequence: Optional[Place] = None
        #: What a process wrote as it ended, and what was said outside of Python before the first word of an end.
        self.ended: Optional[Place] = None
        self.outside: Optional[Place] = None
        self.advice: List[Tuple[int, str]] = []
        self.stopping = False
        #: How often in a row a server that was ready said that no answer comes from its workers.
        self.silences: Counter[int] = collections.Counter()
        self.outlived = 0
        self.outlived_at = 0
        self._counts: Dict[Tuple[int, bool], int] = collections.defaultdict(int)

    @classmethod
    def both(cls, first: Findings, second: Findings) -> Findings:
        together = cls()
        together.matches = first.matches + second.matches
        together.wrapper = first.wrapper or second.wrapper
        together.error = first.error or second.error
        together.error_markers = first.error_markers if first.error else second.error_markers
        together.consequence = first.consequence or second.consequence
        together.ended = first.ended or second.ended
        together.outside = first.outside or second.outside
        together.advice = first.advice + second.advice
        return together

    def has(self, signature: Signature) -> bool:
        return self._counts[signature.index, False] > 0

    def is_full(self, signature: Signature, is_quiet: bool) -> bool:
        # A survivable match is a failure only while no phase follows it, so its latest one counts, too.
        many = signature.memory is not None or signature.survivable or signature.silence
        return self._counts[signature.index, is_quiet] >= (MOST_MATCHES if many else 1)

    def outlive(self, order: int) -> None:
        """Work of a server that was ready follows: nothing that was found was its end."""
        self.wrapper = None
        self.outside = None
        self.silences.clear()
        self.outlived += 1
        self.outlived_at = order

    def is_outlived(self, match: Match) -> bool:
        return match.place.order < self.outlived_at

    def add(self, match: Match) -> None:
        self._counts[match.signature.index, match.is_quiet] += 1
        self.matches.append(match)

    @property
    def is_telling(self) -> bool:
        return bool(self.matches or self.wrapper or self.error or self.consequence or self.ended)

    @property
    def size(self) -> int:
        places: List[Optional[Place]] = [each.place for each in self.matches]
        places += [self.wrapper, self.error, self.consequence, self.ended, self.outside]
        return sum(len(each.text) for each in places if each is not None) + sum(len(each) for _, each in self.advice)


class Start:
    """All that is known of one start of a server. ``begun``: the traceback that it begins with."""

    def __init__(self, rules: Rules, closely: int = 0, begun: Optional[Block] = None) -> None:
        self.phase: Optional[str] = None
        self.percent: Optional[float] = None
        self.ranks: Dict[int, str] = {}
        self.measures: Dict[str, float] = {}
        self.warnings: Dict[str, str] = {}
        self.before = Findings()
        self.after = Findings()
        self.is_ready = False
        #: What showed the phase that it has come to.
        self.phase_rule: Optional[Rule] = None
        #: Whether its first words are here: of an excerpt they are not.
        self.is_whole = False
        #: The last that is known of it is an error that ended a traceback.
        self.is_dying = False
        self.tracebacks = Tracebacks(rules, closely, begun)
        self.contexts: Dict[str, Place] = {}
        self.first_contexts: Dict[str, Tuple[int, Place]] = {}
        self.seen: Set[str] = set()
        self.clock = Clock(rules.times)
        self._markers: Counter[Optional[int]] = collections.Counter()

    @property
    def found(self) -> Findings:
        """Where what is found now belongs."""
        return self.after if self.is_ready else self.before

    @property
    def is_early(self) -> bool:
        return not self._markers[ANY] and not self.tracebacks.any

    @property
    def is_loading(self) -> bool:
        """Whether it is surely under way: an excerpt with nothing but answers may be of a server that was ready."""
        return not self.is_ready and bool(self.seen) and (self.is_whole or not self.seen <= ANSWERING)

    @property
    def phase_number(self) -> int:
        return PHASES.index(self.phase) if self.phase is not None else 0

    def progress(self, rank: Optional[int]) -> int:
        """Markers of phases that show ``rank`` go on: its own, and those that name none; all for None."""
        return self._markers[ANY] if rank is None else self._markers[rank] + self._markers[None]

    def mark(self, rank: Optional[int]) -> None:
        self._markers[ANY] += 1
        if rank is None or rank in self._markers or len(self._markers) < MOST_RANKS:
            self._markers[rank] += 1

    def note_context(self, pattern: str, place: Place) -> None:
        """Keep the last line that matches, and the first since the start went on."""
        self.contexts[pattern] = place
        markers = self._markers[ANY]
        first = self.first_contexts.get(pattern)
        if first is None or first[0] != markers:
            self.first_contexts[pattern] = (markers, place)

    def is_past(self, error: Optional[Place], markers: int) -> bool:
        """Whether the start went on after an error at which it had come to ``markers``."""
        return error is not None and markers != self.progress(error.rank)

    @property
    def size(self) -> int:
        return self.before.size + self.after.size + self.tracebacks.size


class Clock:
    """How long each phase lasted: by the reader's clock if it has one, else by the stamps in the log."""

    def __init__(self, patterns: List[Pattern[str]]) -> None:
        self._patterns = patterns
        self._spent: Dict[str, float] = {}
        self._current: Optional[str] = None
        self._since: Optional[float] = None
        self._is_live = False

    def start(self, at: float) -> None:
        if not self._is_live and self._current is None:
            self._is_live = True
            self._current, self._since = "boot", at
            self._spent["boot"] = 0.0

    def enter(self, phase: str, text: str, now: Optional[float]) -> None:
        moment = now if self._is_live else self._stamp(text)
        if phase != self._current:
            self._leave(moment)
            self._current = phase
            self._spent.setdefault(phase, 0.0)
            self._since = moment if moment is not None else self._since
        elif self._since is None:
            self._since = moment

    def times(self, tail: Iterable[str], now: Optional[float]) -> Tuple[PhaseTime, ...]:
        moment = now if self._is_live else None
        if not self._is_live:
            stamps = [stamp for stamp in map(self._stamp, tail) if stamp is not None]
            moment = stamps[-1] if stamps else None
        spent = dict(self._spent)
        if self._current is not None and moment is not None and self._since is not None:
            spent[self._current] += _elapsed(self._since, moment)
        has_time = self._since is not None
        return tuple(PhaseTime(phase, round(seconds, 3) if has_time else None) for phase, seconds in spent.items())

    def _leave(self, moment: Optional[float]) -> None:
        if self._current is not None and moment is not None and self._since is not None:
            self._spent[self._current] += _elapsed(self._since, moment)

    def _stamp(self, text: str) -> Optional[float]:
        for pattern in self._patterns:
            match = pattern.search(text)
            if match:
                parts = match.groupdict()
                try:
                    day = dt.datetime(
                        int(parts.get("year") or 2000),
                        int(parts["month"]),
                        int(parts["day"]),
                        tzinfo=dt.timezone.utc,
                    )
                except ValueError:
                    return None
                return day.timestamp() + int(parts["hour"]) * 3600 + int(parts["minute"]) * 60 + float(parts["second"])
        return None


def _elapsed(since: float, until: float) -> float:
    # A stamp without a year jumps back at New Year; ranks write a little out of order.
    seconds = until - since
    if seconds < -300 * 86400:
        seconds += 366 * 86400
    return max(0.0, seconds)
