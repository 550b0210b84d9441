r"""Reads a server's log as it grows, or afterwards: the phase of the start, and the first cause of a failure.

Knows no server's wording: all of that is data, the compiled ``engine.yml``. Standard library only, Python >= 3.9; the
node uses it live and the control machine offline. Bytes in, events out: any bytes, in pieces of any size, in bounded
memory. Pure: touches nothing on the node.

A *piece* is what stands between ``\r`` or ``\n``, colours stripped. A progress bar leaves its last piece open, and
another process's line may begin in the middle of it, so that pieces are cut again where a prefix begins (*segments*)
and patterns are searched, never anchored. A piece of any length is read in overlapping windows.

The cause is the earliest error that explains the others, over all ranks: a specific id before a general one, both
before what is only a consequence; lines that merely wrap another error, and lines known to be benign, are never it.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import (
    Any,
    BinaryIO,
    Counter,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Pattern,
    Set,
    Tuple,
    Union,
)

from lamplighter.node.events import PHASES
from lamplighter.node.log.findings import Clock, Findings, Match, PhaseTime, Place
from lamplighter.node.log.rules import (
    CHAIN,
    CONTEXT,
    FAILURE,
    HEAD,
    MEASURE,
    PERCENT,
    PHASE,
    PID,
    START,
    STOPPING,
    WARNING,
    WORK,
    WRAPPER,
    Interest,
    Rules,
    outside_quotes,
    shape_of,
)

WINDOW_BYTES = 64 * 1024
OVERLAP_BYTES = 4 * 1024
SLICE_BYTES = 1024 * 1024
TAIL_PIECES = 60
TEXT_CHARACTERS = 2000
WARNING_CHARACTERS = 400
#: Pieces read closely after the head of a traceback, and after its last line, where ranks and contexts are carried on.
BLOCK_PIECES = 400
BLOCK_REST = 40
MOST_PIDS = 4096
MOST_BLOCKS = 64
MOST_RANKS = 1024
MOST_SHAPES = 2000
#: Counts the markers of all ranks.
ANY = -1
DETECT_BYTES = 256 * 1024
#: The words of an end and lines of the server's other processes may cross; what so many follow is no cause.
MOST_CROSSING = 50
#: Ranks are in step: what lies this many phases back was not the end of one of them, whoever wrote it.
PHASES_APART = 2

#: What a LogWatch knows of one start.
_OF_A_START = (
    *("phase", "percent", "ranks", "measures", "warnings", "_before", "_after", "_is_ready", "_markers", "_seen"),
    *("_contexts", "_clock", "_block", "_blocks", "_chained", "_any_traceback", "_dying"),
)

_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclasses.dataclass(frozen=True)
class LogEvent:
    """News from a log: a new ``phase`` or ``percent``, a ``ready_line``, a ``failure``, or the last ``line``."""

    kind: str
    phase: Optional[str]
    percent: Optional[float]
    rank: Optional[int]
    text: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What a log says: ``outcome`` is ready, failed or running; ``cause`` an id of the engine's table, or None.

    ``evidence`` is the line that proves the cause (without a known cause: the first error), ``line`` its number counted
    in newlines from 1, ``rank`` the rank that it or the head of its traceback names, ``hint`` one next step, in which
    ``{server}`` stands for the server's name.
    """

    engine: Optional[str]
    version: Optional[str]
    outcome: str
    phase: str
    cause: Optional[str] = None
    evidence: str = ""
    line: Optional[int] = None
    rank: Optional[int] = None
    hint: str = ""
    phases: Tuple[PhaseTime, ...] = ()

    def hint_for(self, server: str) -> str:
        """The hint with the server's name filled in."""
        return self.hint.replace("{server}", server)

    def to_json(self, server: Optional[str] = None) -> Dict[str, Any]:
        """JSON-safe; with ``server`` its name is filled into the hint."""
        answer = dataclasses.asdict(self)
        answer["phases"] = [dataclasses.asdict(each) for each in self.phases]
        answer["hint"] = self.hint if server is None else self.hint_for(server)
        return answer


def diagnose_log(
    stream: Union[bytes, BinaryIO],
    engines: Mapping[str, Mapping[str, Any]],
    engine: Optional[str] = None,
    version: Optional[str] = None,
) -> Diagnosis:
    """Diagnose a whole log. Engine and version are told, or guessed from the log; ``engines`` is name -> compiled.

    Raises KeyError for an engine that is not among ``engines``.
    """
    blocks = _blocks(stream)
    head = b""
    first: List[bytes] = []
    for block in blocks:
        first.append(block)
        head += block[: DETECT_BYTES - len(head)]
        if len(head) >= DETECT_BYTES:
            break
    text = _COLOUR.sub(b"", head).decode("utf-8", "replace")
    name = engine if engine is not None else guess_engine(text, engines)
    # An unknown engine is read with the wording that knows most: the others share the general signatures.
    rules = engines[name] if name is not None else max(engines.values(), key=lambda each: len(each.get("failures", ())))
    watch = LogWatch(rules, version if version is not None else guess_version(text, rules))
    for block in first:
        watch.feed(block)
    for block in blocks:
        watch.feed(block)
    watch.finish()
    return dataclasses.replace(watch.diagnosis(), engine=name)


def guess_engine(text: str, engines: Mapping[str, Mapping[str, Any]]) -> Optional[str]:
    """The engine whose marks are found most often in the beginning of a log; None without any.

    Of an engine and one that extends it, with the same marks, the former is meant; of several starts, the last, unless
    it died before it left any.
    """
    latest = _last_start(text, engines)
    found = _most_marked(text[latest:], engines) if latest is not None else None
    return found if found is not None else _most_marked(text, engines)


def _most_marked(text: str, engines: Mapping[str, Mapping[str, Any]]) -> Optional[str]:
    best: Optional[str] = None
    best_score = (0, 0)
    for name, rules in engines.items():
        hits = sum(min(3, sum(1 for _ in re.finditer(mark, text))) for mark in rules.get("detect", ()))
        score = (hits, -len(rules.get("ancestors", ())))
        if hits and (best is None or score > best_score):
            best, best_score = name, score
    return best


def _last_start(text: str, engines: Mapping[str, Mapping[str, Any]]) -> Optional[int]:
    """Where the last start of a log with several begins."""
    found = {
        match.start()
        for rules in engines.values()
        for pattern in rules.get("starts", ())
        for match in re.finditer(pattern, text)
        if _is_own_word(text, match.start())
    }
    return max(found) if len(found) > 1 else None


def _is_own_word(text: str, place: int) -> bool:
    start = text.rfind("\n", 0, place) + 1
    line = text[start : start + WINDOW_BYTES].partition("\n")[0]
    return next(outside_quotes(line, [place - start]), None) is not None


def guess_version(text: str, rules: Mapping[str, Any]) -> Optional[str]:
    """The engine's version as the beginning of its log tells it; None where it does not."""
    for pattern in rules.get("version", ()):
        match = re.search(pattern, text)
        if match:
            return match.group("version")
    return None


class LogWatch:
    """Follows one log. Feed it bytes as they come; ask for ``phase``, ``percent``, ``tail`` or a ``diagnosis`` anytime.

    ``engine`` is a compiled engine.yml, ``own_pids`` are processes known to be the server's (more may be added to the
    attribute): an out-of-memory line that names one of them accuses nobody else.
    """

    def __init__(self, engine: Mapping[str, Any], version: Optional[str] = None, own_pids: Iterable[int] = ()) -> None:
        self.engine = engine
        self.version = version
        self.own_pids: Set[int] = set(own_pids)
        self.phase: Optional[str] = None
        self.percent: Optional[float] = None
        self.last_line = ""
        self.ranks: Dict[int, str] = {}
        #: Lines that show the server at work: not those that our own questions, or mere waiting, leave in the log.
        self.lines_of_work = 0
        #: What a server says of itself, and what of it a person should know although it got ready: the first of each.
        self.measures: Dict[str, float] = {}
        self.warnings: Dict[str, str] = {}
        self._rules = Rules(engine)
        self._partial = bytearray()
        self._continued = False
        self._line = 1
        self._order = 0
        self._tail: Deque[str] = collections.deque(maxlen=TAIL_PIECES)
        self._bar_open = False
        self._forget_findings()
        self._closely = 0
        self._finished = False
        self._starts = 0
        self._earlier: Optional[Dict[str, Any]] = None
        self._stage: Optional[Tuple[object, ...]] = None
        self._active: List[Interest] = []
        self._dull: Set[bytes] = set()
        self._events: List[LogEvent] = []
        self._now: Optional[float] = None

    def _forget_findings(self) -> None:
        self._before = Findings()
        self._after = Findings()
        self._is_ready = False
        self._markers: Counter[Optional[int]] = collections.Counter()
        self._seen: Set[str] = set()
        self._contexts: Dict[str, Place] = {}
        self._clock = Clock(self._rules.times)
        self._block: Optional[_Block] = None
        self._blocks: Dict[str, _Block] = {}
        self._chained = False
        self._any_traceback = False
        self._dying = False

    # -- feeding

    def feed(self, data: bytes, at: Optional[float] = None) -> List[LogEvent]:
        """Take in more of the log and return the news. ``at`` (seconds of any steady clock) times the phases better
        than the log's own stamps, which some engines do not print.
        """
        self._events = []
        self._now = at
        self._finished = False
        if at is not None:
            self._clock.start(at)
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
            self._piece(rest, self._interests(rest), b"")
            self._continued = False
        self._finished = True

    def tail(self, count: int) -> List[str]:
        """The last ``count`` lines (at most TAIL_PIECES), each update of a progress bar replacing the one before."""
        return list(self._tail)[-count:] if count > 0 else []

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
        if self._is_ready:
            return False
        findings = self._before
        strong = (each for each in self._candidates(findings) if not each.is_quiet and not each.signature.survivable)
        return findings.wrapper is not None or any(strong)

    @property
    def has_error(self) -> bool:
        """Whether the log has an error of the server's own: one that nothing else's death explains."""
        return self._before.error is not None or self._after.error is not None

    def hint_of(self, cause: str) -> str:
        """The next step that the engine has for a cause, "" without one; ``{server}`` stands for the server's name."""
        return self._rules.hints.get(cause, "")

    def forget_partial(self) -> None:
        """Drop the line begun: the rest of it will not come, since part of the log was skipped."""
        self._partial.clear()
        self._continued = False
        self._closely = 0

    def hint(self, warning: str) -> str:
        """The next step for one of ``warnings``, in which ``{server}`` stands for the server's name."""
        return self._rules.warning_hints.get(warning, "")

    @property
    def buffered(self) -> int:
        """Bytes and characters held now: bounded, however long the log."""
        texts = sum(map(len, self._tail)) + sum(block.size for block in self._blocks.values())
        kept = [self._before, self._after, *(self._earlier or {}).values()]
        found = sum(each.size for each in kept if isinstance(each, Findings))
        shapes = sum(map(len, self._dull))
        return len(self._partial) + texts + found + shapes + (self._block.size if self._block else 0)

    def _take(self, data: bytes) -> None:
        buffer = self._partial
        buffer += data
        end = max(buffer.rfind(b"\n"), buffer.rfind(b"\r")) + 1
        if end:
            region = bytes(buffer[:end])
            del buffer[:end]
            self._region(region)
        while len(buffer) > WINDOW_BYTES:
            window = bytes(buffer[:WINDOW_BYTES])
            del buffer[: WINDOW_BYTES - OVERLAP_BYTES]
            self._piece(window, self._interests(window), None)
            self._continued = True

    def _region(self, region: bytes) -> None:
        """Read whole pieces. Where no pattern's plain text occurs and no traceback is open, only the tail matters."""
        interests = self._interests(region)
        if not interests and not self._closely and not self._continued:
            self._skim(region)
            return
        lines = region.split(b"\n")
        was = self._is_ready, self._is_doubted, self._starts
        for number, line in enumerate(lines):
            if (self._is_ready, self._is_doubted, self._starts) != was:
                interests = self._rules.interests  # each signature is looked for anew
            is_last = number == len(lines) - 1
            pieces = line.split(b"\r")
            for index, piece in enumerate(pieces):
                if index < len(pieces) - 1:
                    self._whole(piece, interests, b"\r")
                elif not is_last:
                    self._whole(piece, interests, b"\n")
            if not is_last:
                self._line += 1

    def _whole(self, piece: bytes, interests: List[Interest], end: bytes) -> None:
        while len(piece) > WINDOW_BYTES:
            self._piece(piece[:WINDOW_BYTES], interests, None)
            piece = piece[WINDOW_BYTES - OVERLAP_BYTES :]
            self._continued = True
        self._piece(piece, interests, end)
        self._continued = False

    def _skim(self, region: bytes) -> None:
        self._line += region.count(b"\n")
        recent = region.rsplit(b"\n", 8 * TAIL_PIECES)
        if len(recent) > 8 * TAIL_PIECES:
            recent = recent[1:]
        for number, line in enumerate(recent):
            pieces = line.split(b"\r")
            for index, piece in enumerate(pieces):
                if index < len(pieces) - 1:
                    self._remember(_clean(piece), b"\r")
                elif number < len(recent) - 1:
                    self._remember(_clean(piece), b"\n")

    def _interests(self, region: bytes) -> List[Interest]:
        """What can match in these bytes at all, by the plain text that each pattern needs.

        Lines that differ in digits alone have one *shape*; shapes in which nothing can match are remembered, so that a
        flood of such lines costs next to nothing.
        """
        told = len(self.warnings) + len(self.measures)
        stage = (self._is_ready, self._is_doubted, self._is_early, told, self._starts)
        if stage != self._stage:
            self._stage = stage
            self._dull.clear()
            self._active = [each for each in self._rules.interests if self._is_wanted(each)]
        shapes = set(shape_of(_clean(region)).replace(b"\r", b"\n").split(b"\n"))
        fresh = shapes - self._dull
        text = b"\n".join(fresh)
        found = [each for each in self._active if each.shape is None or each.shape in text]
        if len(self._dull) > MOST_SHAPES:
            self._dull.clear()
        for shape in fresh:
            if len(shape) < TEXT_CHARACTERS and not any(each.shape is None or each.shape in shape for each in found):
                self._dull.add(shape)
        return found

    def _is_wanted(self, interest: Interest) -> bool:
        if self._is_ready and interest.only_before_ready:
            return False
        if interest.kind == WARNING and interest.name in self.warnings:
            return False
        if interest.kind == MEASURE and interest.name in self.measures:
            return False
        if interest.kind == WORK:
            return self._is_doubted
        signature = interest.signature
        return signature is None or not signature.early or self._is_early or self._is_ready

    @property
    def _is_doubted(self) -> bool:
        """Whether work of a server that was ready would tell something."""
        return self._after.is_telling if self._is_ready else self._earlier is not None

    @property
    def _is_early(self) -> bool:
        return not self._markers[ANY] and not self._any_traceback

    # -- one piece

    def _piece(self, raw: bytes, interests: List[Interest], end: Optional[bytes]) -> None:
        clean = _clean(raw)
        if end is not None and not self._continued:
            self._remember(clean, end)
        elif end is None and not self._continued:
            self._remember(clean[:TEXT_CHARACTERS], b"\n")
        if self._continued and self._is_ready:
            return  # so long a line is what a client sent, and where its quotes began was read before
        self._order += 1
        # Whether a pattern is still wanted is asked again here: how the log was cut into regions must not matter.
        hits = [each for each in interests if (each.needs is None or each.needs in clean) and self._is_wanted(each)]
        if self._closely:
            self._closely -= 1
        elif not hits:
            return
        if not clean.strip():
            return
        text = self._rules.unpacked(clean.decode("utf-8", "replace"))
        if not self._is_ready and len(self.own_pids) < MOST_PIDS:
            self._note_pids(text, hits)
        if not self._closely and all(each.kind == PID for each in hits):
            return
        for segment in self._segments(text):
            self._segment(segment, hits)

    def _remember(self, clean: bytes, end: bytes) -> None:
        text = clean[: 4 * TEXT_CHARACTERS].decode("utf-8", "replace").rstrip()[:TEXT_CHARACTERS]
        if text:
            if self._bar_open and self._tail:
                self._tail.pop()
            self._tail.append(text)
            self.last_line = text
            if not self._rules.is_idle(text):
                self.lines_of_work += 1
            self._bar_open = end == b"\r"
        elif end == b"\n":
            self._bar_open = False

    def _note_pids(self, text: str, hits: List[Interest]) -> None:
        for each in hits:
            if each.kind == PID:
                for match in each.regex.finditer(text):
                    self.own_pids.add(int(match.group("pid")))

    def _segments(self, text: str) -> Iterator[_Segment]:
        """Cut a piece where another process's prefix begins in it, and name who speaks and as which rank."""
        starts = self._rules.prefixes_in(text)
        if self._is_ready:
            own = set(outside_quotes(text, (each.start for each in starts)))
            starts = [each for each in starts if each.start in own]
        if not starts or starts[0].start > 0:
            stop = starts[0].start if starts else len(text)
            yield _Segment(text[:stop], text[:stop], None, self._rules.rank_in(text[:stop]))
        for index, prefix in enumerate(starts):
            stop = starts[index + 1].start if index + 1 < len(starts) else len(text)
            part = text[prefix.start : stop]
            yield _Segment(part, text[prefix.end : stop], prefix.who, self._rules.rank_in(part))

    def _segment(self, segment: _Segment, hits: List[Interest]) -> None:
        if not segment.text.strip():
            return
        if any(self._begins(segment, each) for each in hits):
            self._begin_anew(segment)
            hits = [each for each in self._rules.interests if self._is_wanted(each)]
        by_kind: Dict[int, List[Interest]] = collections.defaultdict(list)
        for each in hits:
            by_kind[each.kind].append(each)
        if any(self._find(each, segment.text) is not None for each in by_kind[WORK]):
            self._go_on(segment)
        self._follow_traceback(segment, by_kind[HEAD], by_kind[CHAIN])
        rank = segment.rank
        if rank is None and segment.who is None and self._block is not None:
            rank = self._block.rank
        if not self._is_ready:
            self._mark_phase(segment, by_kind[PHASE])
            self._mark_percent(segment, by_kind[PERCENT])
        for each in by_kind[MEASURE]:
            match = each.regex.search(segment.text)
            if match is not None and each.name not in self.measures:
                self.measures[each.name] = float(match.group("value").replace(",", ""))
        if self._rules.is_benign(segment.text):
            return
        findings = self._after if self._is_ready else self._before
        place = Place(self._order, self._line, _around(segment.text, 0), rank)
        for each in by_kind[WARNING]:
            match = None if each.name in self.warnings else each.regex.search(segment.text)
            if match is not None:
                self.warnings[each.name] = _around(segment.text, match.start(), WARNING_CHARACTERS)
        for each in by_kind[STOPPING]:
            if self._find(each, segment.text) is not None:
                findings.stopping = True
        for each in by_kind[CONTEXT]:
            if each.regex.search(segment.text):
                self._contexts[each.regex.pattern] = place
        is_quiet = self._rules.is_quiet(segment.text)
        if by_kind[FAILURE]:
            self._find_failures(segment, rank, by_kind[FAILURE], findings, is_quiet)
        if not is_quiet and not findings.stopping:
            for each in by_kind[WRAPPER]:
                if self._find(each, segment.text) is not None:
                    if findings.wrapper is None:
                        findings.wrapper = place
                        self._tell("failure", rank, place.text)
                    break

    def _find(self, interest: Interest, text: str) -> Optional[int]:
        """Where it first matches what is the server's own word: in quotes a client may have sent it."""
        found = (each.start() for each in interest.regex.finditer(text))
        return next(outside_quotes(text, found) if self._is_ready else found, None)

    def _begins(self, segment: _Segment, interest: Interest) -> bool:
        """Whether another start begins here: it says so, or behind a ready server what only a beginning can say.

        What a traceback shows, or an early failure, is another start's only where that server did not tell its own end.
        """
        could_be = self._is_ready and self._after.wrapper is None
        if interest.kind == START:
            is_possible = could_be or not segment.is_indented
        else:
            is_early = interest.signature is not None and interest.signature.early
            is_possible = could_be and is_early and (self._block is None or self._block.ended)
        if not is_possible or self._rules.is_benign(segment.text):
            return False
        return self._find(interest, segment.text) is not None

    def _begin_anew(self, segment: _Segment) -> None:
        """A start is written behind an earlier one: what that one came to is not this one's."""
        if self.phase in (None, "boot") and not self._before.is_telling:
            return
        if self._is_ready:
            self._earlier = {name: getattr(self, name) for name in _OF_A_START}
        block = self._block if segment.is_indented else None
        self._starts += 1
        self.phase, self.percent = None, None
        self.ranks, self.measures, self.warnings = {}, {}, {}
        self._forget_findings()
        if block is not None:  # the traceback that the start begins with
            self._block, self._any_traceback = block, True
            self._blocks = {block.who: block} if block.who else {}

    def _go_on(self, segment: _Segment) -> None:
        """A server that was ready is at work: what came since was neither its end nor another start."""
        if not self._is_ready:
            self._take_up_earlier(segment)
            return
        self._after.outlive(self._order)
        if self._after.outlived > MOST_CROSSING:
            stopping = self._after.stopping
            self._after = Findings()
            self._after.stopping = stopping

    def _take_up_earlier(self, segment: _Segment) -> None:
        vars(self).update(self._earlier or {})
        self._earlier = None
        self._starts += 1
        self._tell("phase", None, segment.text)

    # -- tracebacks

    def _follow_traceback(self, segment: _Segment, heads: List[Interest], chains: List[Interest]) -> None:
        who = segment.who
        if any(self._find(each, segment.text) is not None for each in heads):
            self._any_traceback = True
            inherited = self._block.rank if self._block is not None and who is None and self._chained else None
            block = _Block(segment.rank if segment.rank is not None else inherited, who or "")
            if who:
                if len(self._blocks) >= MOST_BLOCKS:
                    self._blocks.pop(next(iter(self._blocks)))
                self._blocks[who] = block
            self._block = block
            self._chained = False
            self._closely = BLOCK_PIECES
            return
        if any(each.regex.search(segment.text) for each in chains):
            self._chained = True
        if not self._closely:
            self._block = None
            self._blocks.clear()
            self._dying = False
            return
        own = self._block if who is None else self._blocks.get(who)
        if own is None or (who == "" and own.ended):
            if who is not None and self._block is not None and self._block.ended:
                self._block = None
                self._dying = False
            return
        if own.ended and self._rules.is_quiet(segment.text):
            self._dying = False
        own.add(segment.text)
        body = segment.body.rstrip()
        if body[:1].strip() and self._rules.is_error(body):
            own.ended = True
            self._closely = min(self._closely, BLOCK_REST)
            self._note_error(segment, body, own.rank)

    def _note_error(self, segment: _Segment, body: str, block_rank: Optional[int]) -> None:
        """Keep the first error that no signature may know: it is what we can show where the cause has no id."""
        findings = self._after if self._is_ready else self._before
        if self._rules.is_benign(segment.text):
            return
        rank = segment.rank if segment.rank is not None else block_rank
        place = Place(self._order, self._line, _around(segment.text, 0), rank)
        if self._earlier is not None and self.phase is None and self._rules.is_consequence(body):
            self._take_up_earlier(segment)  # it was told to end: that is no start
            return
        self._dying = True
        if self._rules.is_consequence(body):
            findings.consequence = findings.consequence or place
        elif findings.error is None or self._is_past(findings):
            findings.error, findings.error_markers = place, self._progress(rank)

    def _is_past(self, findings: Findings) -> bool:
        """Whether the start went on after the error kept."""
        return findings.error is not None and findings.error_markers != self._progress(findings.error.rank)

    # -- phases

    def _mark_phase(self, segment: _Segment, interests: List[Interest]) -> None:
        last: Tuple[int, Optional[str]] = (-1, None)
        for each in interests:
            if each.after and each.after not in self._seen:
                continue
            for match in each.regex.finditer(segment.text):
                last = max(last, (match.start(), each.name))
        phase = last[1]
        if phase is None:
            return
        self._markers[ANY] += 1
        if segment.rank is None or segment.rank in self._markers or len(self._markers) < MOST_RANKS:
            self._markers[segment.rank] += 1
        self._dying = False
        self._seen.add(phase)
        if PHASES.index(phase) >= PHASES.index("http"):
            self._earlier = None  # from here on it answers itself
        if phase == "ready":
            self._tell("ready_line", segment.rank, segment.text)
            if self._denial(self._before) is not None:
                phase = "http"
            else:
                self._is_ready = True
        if segment.rank is not None and (segment.rank in self.ranks or len(self.ranks) < MOST_RANKS):
            self.ranks[segment.rank] = phase
        self._clock.enter(phase, segment.text, self._now)
        if phase != self.phase:
            self.phase = phase
            self.percent = None
            self._tell("phase", segment.rank, segment.text)

    def _mark_percent(self, segment: _Segment, interests: List[Interest]) -> None:
        found: Tuple[int, Optional[float]] = (-1, None)
        for each in interests:
            for match in each.regex.finditer(segment.text):
                percent = _percent(match)
                if percent is not None and match.start() > found[0]:
                    found = (match.start(), percent)
        if found[1] is not None and found[1] != self.percent:
            self.percent = found[1]
            self._tell("percent", segment.rank, segment.text)

    # -- failures

    def _find_failures(
        self,
        segment: _Segment,
        rank: Optional[int],
        interests: List[Interest],
        findings: Findings,
        is_quiet: bool,
    ) -> None:
        for each in interests:
            signature = each.signature
            if signature is None or findings.is_full(signature, is_quiet):
                continue
            at = self._find(each, segment.text)
            if at is None or (signature.unless is not None and signature.unless.search(segment.text)):
                continue
            if signature.block is not None and not self._in_block(segment, signature.block):
                continue
            text = _around(segment.text, at)
            if signature.after is not None:
                context = self._contexts.get(signature.after)
                if context is None:
                    continue
                if context.order != self._order:
                    text = f"{context.text} … {text}"
                rank = rank if rank is not None else context.rank
            if not is_quiet and not findings.has(signature):
                self._tell("failure", rank, text)
            memory = None if signature.memory is None else signature.memory.read(segment.text)
            place = Place(self._order, self._line, text, rank)
            findings.add(Match(signature, place, is_quiet, self._progress(rank), self._phase_number, memory))

    def _in_block(self, segment: _Segment, pattern: Pattern[str]) -> bool:
        block = self._block if segment.who is None else self._blocks.get(segment.who)
        return block is not None and any(pattern.search(line) for line in block.lines)

    def _denial(self, findings: Findings) -> Optional[Match]:
        """A failure beside which a ready line is a lie: the port belongs to another server, which answered for us."""
        for each in findings.matches:
            if each.signature.cause in self._rules.denies and not each.is_quiet and not findings.is_outlived(each):
                return each
        return None

    def _tell(self, kind: str, rank: Optional[int], text: str) -> None:
        self._events.append(LogEvent(kind, self.phase, self.percent, rank, text.strip()[:TEXT_CHARACTERS]))

    # -- the answer

    def diagnosis(self, exited: bool = False) -> Diagnosis:
        """What the log says so far. ``exited``: the server is known to have ended, and must not have."""
        is_ready = self._is_ready and self._denial(self._after) is None
        findings = self._after if is_ready else Findings.both(self._before, self._after)
        phase = "ready" if is_ready else "http" if self._is_ready else (self.phase or "boot")
        candidates = self._candidates(findings)
        if is_ready:
            failed = exited or findings.wrapper is not None
        else:
            failed = (
                exited
                or findings.wrapper is not None
                or any(map(self._is_strong, candidates))
                or (self._finished and self._dying)
            )
        if not failed:
            return self._answer("ready" if is_ready else "running", phase)
        candidates = [each for each in candidates if not self._is_over(each)]
        if not candidates:
            place = findings.error or findings.consequence or findings.wrapper
            return self._answer("failed", phase, place=place)
        best = min(candidates, key=self._rank_of_cause)
        error = findings.error
        if error is not None and not self._is_past(findings) and self._gives_way(best, error):
            known = [each for each in candidates if each.place.order == error.order]
            if not known:
                return self._answer("failed", phase, place=error)
            best = min(known, key=self._rank_of_cause)
        cause = best.signature.cause
        return self._answer("failed", phase, cause, best.place, self._rules.hints.get(cause, ""))

    def _answer(
        self,
        outcome: str,
        phase: str,
        cause: Optional[str] = None,
        place: Optional[Place] = None,
        hint: str = "",
    ) -> Diagnosis:
        return Diagnosis(
            engine=self.engine.get("name"),
            version=self.version,
            outcome=outcome,
            phase=phase,
            cause=cause,
            evidence=place.text if place else "",
            line=place.line if place else None,
            rank=place.rank if place else None,
            hint=hint,
            phases=self._clock.times(self._tail, self._now),
        )

    def _candidates(self, findings: Findings) -> List[Match]:
        found = [each for each in findings.matches if each.memory is None or each.memory.accuses_others(self.own_pids)]
        telling = {each.place.order for each in found if not each.signature.vague}
        return [each for each in found if not (each.signature.vague and each.place.order in telling)]

    def _rank_of_cause(self, match: Match) -> Tuple[float, int, int]:
        return match.weight(self._was_survived(match)), match.place.order, match.signature.index

    def _is_over(self, match: Match) -> bool:
        """Whether nothing can come of it any more."""
        is_far = match.signature.early or self._phase_number - match.phase_number >= PHASES_APART
        return is_far and self._was_survived(match)

    @property
    def _phase_number(self) -> int:
        return PHASES.index(self.phase) if self.phase is not None else 0

    def _progress(self, rank: Optional[int]) -> int:
        """Markers of phases that show ``rank`` go on: its own, and those that name none; all for None."""
        return self._markers[ANY] if rank is None else self._markers[rank] + self._markers[None]

    def _was_survived(self, match: Match) -> bool:
        """Whether the start went on after it: a rank's own start, where one is named.

        What counts only before the first traceback is survived by one: the server's program ran.
        """
        signature = match.signature
        went_on = match.markers != self._progress(match.place.rank) or (signature.early and self._any_traceback)
        return signature.survivable and went_on

    def _gives_way(self, match: Match, error: Place) -> bool:
        """Whether a traceback's own error explains more: one before what is only a consequence, one after what the
        start went on after, any but itself for a mere warning.
        """
        place = match.place
        if match.is_quiet:
            return error.order != place.order
        if self._was_survived(match):
            return error.order > place.order
        return match.signature.consequence and error.order < place.order

    def _is_strong(self, match: Match) -> bool:
        """Whether the match alone shows a failure: not a mere warning, nor something the start went on after."""
        return not match.is_quiet and not self._was_survived(match)


# -- parts of the reading


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Part of a piece, from a prefix on; ``who`` is None without one and may be "" with one that names nobody."""

    text: str
    body: str
    who: Optional[str]
    rank: Optional[int]

    @property
    def is_indented(self) -> bool:
        return self.body[:1].isspace()


class _Block:
    """One traceback: whose it is, its last lines, and whether its error line has come."""

    def __init__(self, rank: Optional[int], who: str) -> None:
        self.rank = rank
        self.who = who
        self.ended = False
        self.lines: Deque[str] = collections.deque(maxlen=BLOCK_REST)

    def add(self, text: str) -> None:
        self.lines.append(text[:TEXT_CHARACTERS])

    @property
    def size(self) -> int:
        return sum(map(len, self.lines))


def _blocks(stream: Union[bytes, BinaryIO]) -> Iterator[bytes]:
    if isinstance(stream, (bytes, bytearray, memoryview)):
        for start in range(0, len(stream), SLICE_BYTES):
            yield bytes(stream[start : start + SLICE_BYTES])
        return
    while True:
        block = stream.read(SLICE_BYTES)
        if not block:
            return
        yield block


def _clean(raw: bytes) -> bytes:
    return _COLOUR.sub(b"", raw) if b"\x1b" in raw else raw


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
