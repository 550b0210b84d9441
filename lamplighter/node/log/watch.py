r"""Reads a server's log as it grows, or afterwards: the phase of the start, and the first cause of a failure.

Knows no server's wording: all of that is data, the compiled ``engine.yml``. Standard library only, Python >= 3.9; the
node uses it live and the control machine offline. Bytes in, events out: any bytes, in pieces of any size, in bounded
memory. Pure: touches nothing on the node.

A *piece* is what stands between ``\r`` or ``\n``, colours stripped. A progress bar leaves its last piece open, and
another process's line may begin in the middle of it, so that pieces are cut again where a prefix begins (*segments*)
and patterns are searched, never anchored. A piece of any length is read in overlapping windows.

A file may hold several starts, one behind the other: the last is the one that counts.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from lamplighter.node.events import PHASES
from lamplighter.node.log.envelope import Envelopes, learn
from lamplighter.node.log.findings import ADVICE_CHARACTERS, MOST_ADVICE, MOST_RANKS, Findings, Match, Place, Start
from lamplighter.node.log.rules import (
    ALIKE_CHARACTERS,
    CHAIN,
    CONTEXT,
    ENDING,
    FAILURE,
    LIST,
    MEASURE,
    MOST_ALIKE,
    PERCENT,
    PHASE,
    PID,
    START,
    STOPPING,
    VERSION,
    WARNING,
    WORK,
    WRAPPER,
    Interest,
    Rules,
    outside_quotes,
    without_numbers,
)
from lamplighter.node.log.rules import HEAD as HEAD_LINE
from lamplighter.node.log.segments import Segment, cut
from lamplighter.node.log.sieve import TAIL_PIECES, TEXT_CHARACTERS, Sieve, Tail, plain
from lamplighter.node.log.tracebacks import END, FRAME, GOES_ON, MOST_PENDING, REST, Block
from lamplighter.node.log.verdict import Diagnosis, Verdict, denial

WINDOW_BYTES = 64 * 1024
OVERLAP_BYTES = 4 * 1024
SLICE_BYTES = 1024 * 1024
REGION_BYTES = 32 * 1024
WARNING_CHARACTERS = 400
MOST_PIDS = 4096
#: The words of an end and lines of the server's other processes may cross; what so many follow is no cause.
MOST_CROSSING = 50
#: How far above the words of an end a library outside of Python may have said why, and the items of an advice.
OUTSIDE_PIECES = 12
ADVICE_PIECES = 8
ABOVE_PIECES = 1000

ByKind = Mapping[int, Sequence[Interest]]


@dataclasses.dataclass(frozen=True)
class LogEvent:
    """News from a log: a new ``phase`` or ``percent``, a ``ready_line``, a ``failure``, or the last ``line``."""

    kind: str
    phase: Optional[str]
    percent: Optional[float]
    rank: Optional[int]
    text: str


class LogWatch:
    """Follows one log. Feed it bytes as they come; ask for ``phase``, ``percent``, ``tail`` or a ``diagnosis`` anytime.

    ``engine`` is a compiled engine.yml, ``version`` the engine's if it is told (else the log may tell it), ``own_pids``
    are processes known to be the server's (more may be added to the attribute): an out-of-memory line that names one of
    them accuses nobody else. ``is_whole``: the log is known to begin with a start, so that no cause can stand above it.
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        version: Optional[str] = None,
        own_pids: Iterable[int] = (),
        *,
        is_whole: bool = False,
    ) -> None:
        self.engine = engine
        self.version = version
        self.own_pids: Set[int] = set(own_pids)
        self._is_version_told = version is not None
        self._rules = Rules(engine)
        self._envelopes = Envelopes(self._rules)
        self._sieve = Sieve(self._rules)
        self._tail = Tail(self._rules)
        self._known_segments: Dict[Tuple[bytes, bool], Tuple[Segment, ...]] = {}
        self._partial = bytearray()
        self._continued = False
        self._line = 1
        self._order = 0
        self._finished = False
        self._start = Start(self._rules)
        self._start.is_whole = is_whole
        self._starts = 0
        self._earlier: Optional[Start] = None
        self._advised_until = 0
        self._events: List[LogEvent] = []
        self._now: Optional[float] = None

    # -- what is known now

    @property
    def phase(self) -> Optional[str]:
        return self._start.phase

    @property
    def percent(self) -> Optional[float]:
        return self._start.percent

    @property
    def ranks(self) -> Dict[int, str]:
        return self._start.ranks

    @property
    def measures(self) -> Dict[str, float]:
        """What a server says of itself: the first of each."""
        return self._start.measures

    @property
    def warnings(self) -> Dict[str, str]:
        """What a person should know of a server although it got ready: the first line of each."""
        return self._start.warnings

    @property
    def last_line(self) -> str:
        return self._tail.last

    @property
    def lines_of_work(self) -> int:
        return self._tail.lines_of_work

    def tail(self, count: int) -> List[str]:
        """The last ``count`` lines (at most TAIL_PIECES), each update of a progress bar replacing the one before."""
        return self._tail.lines[-count:] if count > 0 else []

    @property
    def slowest(self) -> Optional[Tuple[int, str]]:
        """The rank that is furthest behind and its phase; None while no line names a rank."""
        if not self.ranks:
            return None
        rank = min(self.ranks, key=lambda each: (PHASES.index(self.ranks[each]), each))
        return rank, self.ranks[rank]

    @property
    def is_fatal(self) -> bool:
        """Whether the log shows a failure that no server survives, before it is ready, whatever its processes do."""
        return not self._start.is_ready and self._verdict(exited=False).is_fatal

    @property
    def has_error(self) -> bool:
        """Whether the log has an error of the server's own: one that nothing else's death explains."""
        return self._start.before.error is not None or self._start.after.error is not None

    def hint_of(self, cause: str) -> str:
        """The next step that the engine has for a cause, "" without one; ``{server}`` stands for the server's name."""
        return self._rules.hints.get(cause, "")

    def hint(self, warning: str) -> str:
        """The next step for one of ``warnings``, in which ``{server}`` stands for the server's name."""
        return self._rules.warning_hints.get(warning, "")

    def diagnosis(self, exited: bool = False) -> Diagnosis:
        """What the log says so far. ``exited``: the server is known to have ended, and must not have."""
        said = Diagnosis(
            engine=self.engine.get("name"),
            version=self.version,
            outcome="running",
            phase="boot",
            phases=self._start.clock.times(self._tail.lines, self._now),
        )
        return self._verdict(exited).said(said)

    def _verdict(self, exited: bool) -> Verdict:
        return Verdict(self._start, self._rules, self.own_pids, is_over=self._finished, exited=exited)

    # -- feeding

    def learn(self, text: str) -> None:
        """Learn from the beginning of a log what stands before each of its lines. To be called before ``feed``."""
        self._envelopes = Envelopes(self._rules, learn(text, self._rules))

    def feed(self, data: bytes, at: Optional[float] = None) -> List[LogEvent]:
        """Take in more of the log and return the news. ``at`` (seconds of any steady clock) times the phases better
        than the log's own stamps, which some engines do not print.
        """
        self._events = []
        self._now = at
        self._finished = False
        if at is not None:
            self._start.clock.start(at)
        before = self.last_line
        for start in range(0, len(data), SLICE_BYTES):
            self._take(data[start : start + SLICE_BYTES])
        if self.last_line != before:
            self._tell("line", None, self.last_line)
        return self._events

    def finish(self) -> None:
        """Read the last piece too, though nothing ends it. To be called when the log will not grow."""
        if self._partial or self._continued:
            rest = bytes(self._partial)
            self._partial.clear()
            self._piece(rest, b"")
            self._continued = False
        for block in self._start.tracebacks.unended():
            self._add_pending(block, "")
        self._finished = True

    def forget_partial(self) -> None:
        """Drop the line begun: the rest of it will not come, since part of the log was skipped."""
        self._partial.clear()
        self._continued = False
        self._start.tracebacks.closely = 0

    def _take(self, data: bytes) -> None:
        buffer = self._partial
        buffer += data
        end = max(buffer.rfind(b"\n"), buffer.rfind(b"\r")) + 1
        if end:
            for region in _regions(bytes(buffer[:end])):
                self._region(region)
            del buffer[:end]
        while len(buffer) > WINDOW_BYTES:
            window = bytes(buffer[:WINDOW_BYTES])
            del buffer[: WINDOW_BYTES - OVERLAP_BYTES]
            self._piece(window, None)
            self._continued = True

    def _region(self, region: bytes) -> None:
        """Read whole pieces. Where no pattern's plain text occurs and no traceback is open, only the tail matters."""
        is_worth = self._sieve.is_worth_reading(region, self._is_wanted)
        if not is_worth and not self._start.tracebacks.closely and not self._continued:
            self._skim(region)
            return
        lines = region.split(b"\n")
        for number, line in enumerate(lines):
            is_last = number == len(lines) - 1
            pieces = line.split(b"\r")
            for index, piece in enumerate(pieces):
                if index < len(pieces) - 1 and self._is_said_again(piece, pieces[index + 1]):
                    self._tail.remember(plain(piece), b"\r", self._line)
                    self._order += 1
                elif index < len(pieces) - 1:
                    self._whole(piece, b"\r")
                elif not is_last:
                    self._whole(piece, b"\n")
            if not is_last:
                self._line += 1
        self._sieve.end_region()

    def _is_said_again(self, piece: bytes, following: bytes) -> bool:
        """Whether the next state of a progress bar says all that this one does, with other numbers."""
        if self._start.tracebacks.closely or self._continued or without_numbers(piece) != without_numbers(following):
            return False
        clean = plain(piece)
        if not all(each.is_bar for each in self._interests(clean)):
            return False
        text = clean.decode("utf-8", "replace")
        return self._rules.rank_in(text) is None and not self._rules.prefixes_in(text)

    def _whole(self, piece: bytes, end: bytes) -> None:
        while len(piece) > WINDOW_BYTES:
            self._piece(piece[:WINDOW_BYTES], None)
            piece = piece[WINDOW_BYTES - OVERLAP_BYTES :]
            self._continued = True
        self._piece(piece, end)
        self._continued = False

    def _skim(self, region: bytes) -> None:
        self._line += region.count(b"\n")
        recent = region.rsplit(b"\n", 8 * TAIL_PIECES)
        if len(recent) > 8 * TAIL_PIECES:
            recent = recent[1:]
        first = self._line - len(recent) + 1
        for number, line in enumerate(recent):
            pieces = line.split(b"\r")
            for index, piece in enumerate(pieces):
                if index < len(pieces) - 1:
                    self._tail.remember(plain(piece), b"\r", first + number)
                elif number < len(recent) - 1:
                    self._tail.remember(plain(piece), b"\n", first + number)

    def _interests(self, clean: bytes) -> List[Interest]:
        return [each for each in self._sieve.interests(clean) if self._is_wanted(each)]

    def _is_wanted(self, interest: Interest) -> bool:
        start = self._start
        if start.is_ready and interest.only_before_ready:
            return False
        if interest.kind == WARNING and interest.name in start.warnings:
            return False
        if interest.kind == MEASURE and interest.name in start.measures:
            return False
        if interest.kind == WORK:
            return self._is_doubted
        if interest.kind == VERSION:
            return self.version is None
        signature = interest.signature
        if signature is not None and signature.only == "serving" and not start.is_ready:
            return False
        return signature is None or not signature.early or start.is_early or start.is_ready

    @property
    def _is_doubted(self) -> bool:
        """Whether work of a server that was ready would tell something: that it goes on, or, in an excerpt, that it
        had been ready.
        """
        if self._start.is_ready:
            return self._start.after.is_telling
        return self._earlier is not None or self._is_excerpt

    @property
    def _is_excerpt(self) -> bool:
        return not self._start.is_whole and not self._start.progress(None)

    # -- one piece

    def _piece(self, raw: bytes, end: Optional[bytes]) -> None:
        clean = plain(raw)
        if end is not None and not self._continued:
            self._tail.remember(clean, end, self._line)
        elif end is None and not self._continued:
            self._tail.remember(clean[:TEXT_CHARACTERS], b"\n", self._line)
        start = self._start
        if self._continued and start.is_ready:
            return  # so long a line is what a client sent, and where its quotes began was read before
        self._order += 1
        hits = self._interests(clean)
        if start.tracebacks.closely:
            start.tracebacks.closely -= 1
        elif not hits:
            return
        if not clean.strip():
            return
        segments = self._segments(clean)
        beginnings, by_kind = [each for each in hits if each.may_begin], _by_kind(hits)
        if PID in by_kind and not start.is_ready and len(self.own_pids) < MOST_PIDS:
            self._note_pids("".join(each.text for each in segments), by_kind[PID])
        if not start.tracebacks.closely and by_kind.keys() <= {PID}:
            return
        for segment in segments:
            self._segment(segment, beginnings, by_kind)

    def _segments(self, clean: bytes) -> Tuple[Segment, ...]:
        """The parts of a piece without its envelope. Ranks that fail alike write the same lines."""
        known, is_ready = self._known_segments, self._start.is_ready
        found = known.get((clean, is_ready))
        if found is None:
            text, source = self._envelopes.opened(clean.decode("utf-8", "replace"))
            found = tuple(cut(text, source, self._rules, is_ready))
            if len(clean) <= ALIKE_CHARACTERS:
                if len(known) >= MOST_ALIKE:
                    known.clear()
                known[clean, is_ready] = found
        return found

    def _note_pids(self, text: str, interests: Sequence[Interest]) -> None:
        for each in interests:
            for match in each.regex.finditer(text):
                self.own_pids.add(int(match.group("pid")))

    def _segment(self, segment: Segment, beginnings: Sequence[Interest], by_kind: ByKind) -> None:
        if not segment.body.strip():
            return
        if any(self._begins(segment, each) for each in beginnings):
            self._begin_another(segment)
            by_kind = _by_kind(self._interests(segment.text.encode()))
        for each in by_kind.get(WORK, ()):
            if self._find(each, segment.text) is not None:
                self._go_on(segment, each)
                break
        part, block = self._follow_traceback(segment, by_kind)
        rank = segment.rank
        if rank is None and segment.who is None:
            latest = self._start.tracebacks.latest(segment)
            rank = latest.rank if latest is not None else None
        if part == FRAME and block is not None:
            self._read_source(segment, rank, block, by_kind.get(FAILURE, ()))
            return
        if by_kind:
            self._note_what_it_says(segment, by_kind)
        if part == END and block is not None:
            self._note_sentence(segment, block)
        if by_kind or self._order <= self._advised_until:
            self._note_troubles(segment, rank, by_kind, part == END)
        if part == END and block is not None and block.is_bare:
            self._add_pending(block, segment.body.strip())

    def _note_what_it_says(self, segment: Segment, by_kind: ByKind) -> None:
        """Versions, phases, percents and measures."""
        start = self._start
        for each in by_kind.get(VERSION, ()):
            match = each.regex.search(segment.text)
            if match is not None and self.version is None:
                self.version = match.group("version")
        if not start.is_ready:
            self._mark_phase(segment, by_kind.get(PHASE, ()))
            self._mark_percent(segment, by_kind.get(PERCENT, ()))
        for each in by_kind.get(MEASURE, ()):
            match = each.regex.search(segment.text)
            if match is not None and each.name not in start.measures:
                start.measures[each.name] = float(match.group("value").replace(",", ""))

    def _note_troubles(self, segment: Segment, rank: Optional[int], by_kind: ByKind, is_sentence: bool) -> None:
        """Ends, warnings, failures and what wraps them. Of benign lines only the sentence of a traceback counts."""
        start, found, text = self._start, self._start.found, segment.text
        place = Place(self._order, self._line, _around(text, 0), rank)
        for each in by_kind.get(ENDING, ()):
            if found.ended is None and not found.stopping and self._find(each, text) is not None:
                found.ended = dataclasses.replace(place, rule=each.rule)
        is_benign = self._rules.is_benign(text)
        if is_benign and not is_sentence:
            return
        for each in by_kind.get(WARNING, ()):
            match = None if each.name in start.warnings else each.regex.search(text)
            if match is not None:
                start.warnings[each.name] = _around(text, match.start(), WARNING_CHARACTERS)
        for each in by_kind.get(STOPPING, ()):
            if self._find(each, text) is not None:
                found.stopping = True
        for each in by_kind.get(CONTEXT, ()):
            at = self._find(each, text)
            if at is not None:
                start.note_context(each.regex.pattern, place)
        self._note_advice(segment, by_kind.get(LIST, ()))
        is_quiet = self._rules.is_quiet(text)
        for failure in self._failures(segment, rank, by_kind.get(FAILURE, ()), is_quiet, is_benign):
            if not found.has(failure.signature) and not (is_quiet or is_benign):
                self._tell("failure", failure.place.rank, failure.place.text)
            found.add(failure)
            found.silences[failure.signature.index] += 1
        if not is_quiet and not found.stopping:
            self._note_wrapper(place, text, by_kind.get(WRAPPER, ()))

    def _note_wrapper(self, place: Place, text: str, interests: Sequence[Interest]) -> None:
        found = self._start.found
        for each in interests:
            if self._find(each, text) is not None:
                if found.wrapper is None:
                    found.wrapper = dataclasses.replace(place, rule=each.rule)
                    found.outside = self._said_outside(place)
                    self._tell("failure", place.rank, place.text)
                return

    def _said_outside(self, place: Place) -> Optional[Place]:
        """The last line above the words of an end in which a library outside of Python tells of an error."""
        for line, text in self._tail.before(OUTSIDE_PIECES):
            own, _ = self._envelopes.opened(text)
            rule = self._rules.outside_rule(own)
            if rule is not None and not self._rules.is_no_cause(own):
                return Place(place.order, line, _around(own, 0), place.rank, rule)
        return None

    def _note_advice(self, segment: Segment, lists: Sequence[Interest]) -> None:
        """Keep the items of a list in which the engine says what to try."""
        if any(self._find(each, segment.text) is not None for each in lists):
            self._advised_until = self._order + ADVICE_PIECES
            self._start.tracebacks.closely = max(self._start.tracebacks.closely, ADVICE_PIECES)
        elif self._order <= self._advised_until and self._rules.is_advice_item(segment.body):
            advice = self._start.found.advice
            if len(advice) < MOST_ADVICE:
                advice.append((self._order, segment.body.strip()[:ADVICE_CHARACTERS]))

    def _find(self, interest: Interest, text: str) -> Optional[int]:
        """Where it first matches what is the server's own word: in quotes a client may have sent it."""
        first = interest.regex.search(text)
        if first is None or not self._start.is_ready:
            return None if first is None else first.start()
        return next(outside_quotes(text, (each.start() for each in interest.regex.finditer(text))), None)

    # -- several starts

    def _begins(self, segment: Segment, interest: Interest) -> bool:
        """Whether another start begins here: it says so, or behind a ready server what only a beginning can say.

        What a traceback shows, or an early failure, is another start's only where that server did not tell its own end.
        """
        could_be = self._start.is_ready and self._start.after.wrapper is None
        if interest.kind == START:
            is_possible = could_be or not self._rules.is_frame(segment.body)
        else:
            is_early = interest.signature is not None and interest.signature.early
            latest = self._start.tracebacks.latest(segment)
            # A shell, an interpreter that cannot start: they know nothing of an engine's prefix.
            is_possible = could_be and is_early and segment.who is None and (latest is None or latest.ended)
        if not is_possible or self._rules.is_benign(segment.text):
            return False
        begins = self._find(interest, segment.text) is not None
        if begins and interest.kind == START:
            self._start.is_whole = True
        return begins

    def _begin_another(self, segment: Segment) -> None:
        """A start is written behind an earlier one: what that one came to is not this one's."""
        start = self._start
        if start.phase in (None, "boot") and not start.before.is_telling:
            return
        if start.is_ready:
            self._earlier = start
        block = start.tracebacks.latest(segment) if segment.is_indented else None
        self._starts += 1
        self._start = Start(self._rules, start.tracebacks.closely, block)
        self._start.is_whole = True
        if not self._is_version_told:
            self.version = None

    def _go_on(self, segment: Segment, work: Interest) -> None:
        """A server that was ready is at work: what came since was neither its end nor another start."""
        start = self._start
        if not start.is_ready:
            if self._earlier is not None:
                self._take_up_earlier(segment)
            elif work.name == "ready":  # the log begins behind its ready line
                self._enter("ready", segment)
                start.is_ready = True
                start.phase_rule = work.rule
            return
        start.after.outlive(self._order)
        if start.after.outlived > MOST_CROSSING:
            stopping = start.after.stopping
            start.after = Findings()
            start.after.stopping = stopping

    def _take_up_earlier(self, segment: Segment) -> None:
        assert self._earlier is not None
        closely = self._start.tracebacks.closely
        self._start, self._earlier = self._earlier, None
        self._start.tracebacks.closely = closely
        self._starts += 1
        self._tell("phase", None, segment.text)

    # -- tracebacks

    def _follow_traceback(self, segment: Segment, by_kind: ByKind) -> Tuple[int, Optional[Block]]:
        start = self._start
        part, block = start.tracebacks.follow(
            segment,
            segment.text[:TEXT_CHARACTERS],
            is_head=any(self._find(each, segment.text) is not None for each in by_kind.get(HEAD_LINE, ())),
            is_chain=any(each.regex.search(segment.text) for each in by_kind.get(CHAIN, ())),
        )
        if part == GOES_ON and not self._tells_of_an_end(segment, by_kind):
            start.is_dying = False
        if part == REST and start.found.error is not None and start.found.error.order == self._order - 1:
            self._continue_sentence(segment)
        return part, block

    def _tells_of_an_end(self, segment: Segment, by_kind: ByKind) -> bool:
        """Whether the line belongs to an end: it is no sign that the server goes on behind its traceback."""
        ends = (*by_kind.get(ENDING, ()), *by_kind.get(WRAPPER, ()), *by_kind.get(STOPPING, ()))
        return self._rules.is_benign(segment.text) or any(self._find(each, segment.text) is not None for each in ends)

    def _continue_sentence(self, segment: Segment) -> None:
        """An exception's first line may only announce what the next one says, which is indented, or follows a colon."""
        error = self._start.found.error
        goes_on = error is not None and (segment.is_indented or error.text.endswith(":"))
        if error is None or not goes_on or not segment.body.strip(" ^~|"):
            return
        text = f"{error.text} {segment.body.strip()}"[:TEXT_CHARACTERS]
        self._start.found.error = dataclasses.replace(error, text=text)

    def _note_sentence(self, segment: Segment, block: Block) -> None:
        """Keep the first error that no signature may know: it is what we can show where the cause has no id."""
        start, found = self._start, self._start.found
        body = segment.body.rstrip()
        rank = segment.rank if segment.rank is not None else block.rank
        text = _around(segment.text, 0)
        if block.is_bare and block.source:
            text = f"{block.source[: TEXT_CHARACTERS // 4]} … {text}"
        place = Place(self._order, self._line, text, rank, self._rules.sentence_rule(body))
        is_consequence = self._rules.is_consequence(body)
        if self._earlier is not None and start.phase is None and is_consequence:
            self._take_up_earlier(segment)  # it was told to end: that is no start
            return
        start.is_dying = True
        if is_consequence:
            found.consequence = found.consequence or place
        elif found.error is None or start.is_past(found.error, found.error_markers):
            found.error, found.error_markers = place, start.progress(rank)

    def _read_source(self, segment: Segment, rank: Optional[int], block: Block, interests: Sequence[Interest]) -> None:
        """A source line proves nothing, unless the sentence below it says nothing."""
        if interests and len(block.pending) < MOST_PENDING:
            block.pending += self._failures(segment, rank, interests, self._rules.is_quiet(segment.text), False)

    def _add_pending(self, block: Block, sentence: str) -> None:
        for match in block.pending:
            place = match.place
            if sentence:
                place = dataclasses.replace(place, order=self._order, text=f"{place.text} … {sentence}")
            if not self._start.found.is_full(match.signature, match.is_quiet):
                self._start.found.add(dataclasses.replace(match, place=place))
        block.pending = []

    # -- phases

    def _mark_phase(self, segment: Segment, interests: Sequence[Interest]) -> None:
        start = self._start
        last: Tuple[int, Optional[Interest]] = (-1, None)
        for each in interests:
            if each.after and each.after not in start.seen:
                continue
            for match in each.regex.finditer(segment.text):
                if match.start() > last[0]:
                    last = match.start(), each
        if last[1] is None:
            return
        phase = last[1].name
        start.phase_rule = last[1].rule
        start.mark(segment.rank)
        start.is_dying = False
        start.found.ended = None
        start.seen.add(phase)
        if phase == PHASES[0]:
            start.is_whole = True
        if PHASES.index(phase) >= PHASES.index("http"):
            self._earlier = None  # from here on it answers itself
        if phase == "ready":
            self._tell("ready_line", segment.rank, segment.text)
            if denial(start.before, self._rules) is not None:
                phase = "http"
            else:
                start.is_ready = True
        if segment.rank is not None and (segment.rank in start.ranks or len(start.ranks) < MOST_RANKS):
            start.ranks[segment.rank] = phase
        self._enter(phase, segment)

    def _enter(self, phase: str, segment: Segment) -> None:
        start = self._start
        start.clock.enter(phase, segment.text, self._now)
        if phase != start.phase:
            start.phase = phase
            start.percent = None
            self._tell("phase", segment.rank, segment.text)

    def _mark_percent(self, segment: Segment, interests: Sequence[Interest]) -> None:
        found: Tuple[int, Optional[float]] = (-1, None)
        for each in interests:
            for match in each.regex.finditer(segment.text):
                percent = _percent(match)
                if percent is not None and match.start() > found[0]:
                    found = (match.start(), percent)
        if found[1] is not None and found[1] != self._start.percent:
            self._start.percent = found[1]
            self._tell("percent", segment.rank, segment.text)

    # -- failures

    def _failures(
        self, segment: Segment, rank: Optional[int], interests: Sequence[Interest], is_quiet: bool, is_benign: bool
    ) -> List[Match]:
        """The failures that a line tells of: one of each signature that has room for it."""
        start = self._start
        told: Dict[int, Match] = {}
        for each in interests:
            signature = each.signature
            if signature is None or signature.index in told or start.found.is_full(signature, is_quiet):
                continue
            at = self._find(each, segment.text)
            if at is None or not self._holds(each, segment):
                continue
            text, own_rank = self._evidence(each, segment, at, rank)
            if text is None:
                continue
            memory = None if signature.memory is None else signature.memory.read(segment.text)
            place = Place(self._order, self._line, text, own_rank, each.rule)
            progress, phase = start.progress(own_rank), start.phase_number
            told[signature.index] = Match(signature, place, is_quiet, progress, phase, memory, is_benign)
        return list(told.values())

    def _holds(self, interest: Interest, segment: Segment) -> bool:
        """Whether what the signature asks for beside its pattern is true here."""
        signature, start = interest.signature, self._start
        assert signature is not None
        if signature.unless is not None and signature.unless.search(segment.text):
            return False
        if signature.early and start.is_ready:
            return False  # it would have been another start's
        if signature.only == "loading" and not start.is_loading:
            return False
        if signature.only == "serving" and not start.is_ready:
            return False
        if signature.block is not None:
            block = start.tracebacks.block_of(segment)
            return block is not None and any(signature.block.search(line) for line in block.lines)
        return True

    def _evidence(
        self, interest: Interest, segment: Segment, at: int, rank: Optional[int]
    ) -> Tuple[Optional[str], Optional[int]]:
        """The line, behind that which says more, if it was seen, and the rank; None where one that it needs was not."""
        signature, start = interest.signature, self._start
        assert signature is not None
        text = _around(segment.text, at)
        context = None
        if signature.after is not None:
            context = start.contexts.get(signature.after)
            if context is None:
                return None, rank
        elif signature.above is not None and signature.above in start.contexts:
            markers, first = start.first_contexts[signature.above]
            last = start.contexts[signature.above]
            context = first if markers == start.progress(None) else last
            context = context if self._order - context.order <= ABOVE_PIECES else None
        elif signature.native:
            context = self._said_outside(Place(self._order, self._line, text, rank))
        if context is not None:
            rank = rank if rank is not None else context.rank
            if context.order != self._order or signature.native:
                text = f"{context.text} … {text}"
        return text, rank

    def _tell(self, kind: str, rank: Optional[int], text: str) -> None:
        self._events.append(LogEvent(kind, self.phase, self.percent, rank, text.strip()[:TEXT_CHARACTERS]))


def _by_kind(hits: Iterable[Interest]) -> ByKind:
    by_kind: Dict[int, List[Interest]] = {}
    for each in hits:
        by_kind.setdefault(each.kind, []).append(each)
    return by_kind


def _regions(data: bytes) -> Iterator[bytes]:
    """Cut whole pieces into regions of some REGION_BYTES, at their ends."""
    start = 0
    while start < len(data):
        end = start + REGION_BYTES
        if end < len(data):
            newline = data.find(b"\n", end)
            end = newline + 1 if newline >= 0 else len(data)
        yield data[start:end]
        start = end


def _around(text: str, at: int, most: int = TEXT_CHARACTERS) -> str:
    """The line as evidence: whole if it is not too long, else the part around the match."""
    text = text.strip() if len(text) <= TEXT_CHARACTERS else text
    if len(text) <= most:
        return text
    start = max(0, min(at - most // 4, len(text) - most))
    return text[start : start + most].strip()


def _percent(match: re.Match[str]) -> Optional[float]:
    groups = match.groupdict()
    if groups.get("percent"):
        return min(100.0, float(groups["percent"]))
    if groups.get("done") and groups.get("total") and float(groups["total"]) > 0:
        return min(100.0, 100.0 * float(groups["done"]) / float(groups["total"]))
    return None
