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
import datetime as dt
import re
from typing import Any, BinaryIO, Deque, Dict, Iterable, Iterator, List, Mapping, Optional, Pattern, Set, Tuple, Union

from lamplighter.node.events import PHASES

WINDOW_BYTES = 64 * 1024
OVERLAP_BYTES = 4 * 1024
SLICE_BYTES = 1024 * 1024
TAIL_PIECES = 60
TEXT_CHARACTERS = 2000
#: Pieces read closely after the head of a traceback, and after its last line, where ranks and contexts are carried on.
BLOCK_PIECES = 400
BLOCK_REST = 40
MOST_PIDS = 4096
MOST_BLOCKS = 64
MOST_RANKS = 1024
MOST_MATCHES = 32
MOST_SHAPES = 2000
DETECT_BYTES = 256 * 1024

_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_GIB = {
    "bytes": 2.0**-30,
    "KB": 2.0**-20,
    "KiB": 2.0**-20,
    "MB": 2.0**-10,
    "MiB": 2.0**-10,
    "GB": 1.0,
    "GiB": 1.0,
    "TB": 2.0**10,
    "TiB": 2.0**10,
}


@dataclasses.dataclass(frozen=True)
class LogEvent:
    """News from a log: a new ``phase`` or ``percent``, a ``ready_line``, a ``failure``, or the last ``line``."""

    kind: str
    phase: Optional[str]
    percent: Optional[float]
    rank: Optional[int]
    text: str


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """Seconds for which ``phase`` was the current one, all its visits together; None when the log tells no time."""

    phase: str
    seconds: Optional[float]


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

    Of an engine and one that extends it, with the same marks, the former is meant.
    """
    best: Optional[str] = None
    best_score = (0, 0)
    for name, rules in engines.items():
        hits = sum(min(3, sum(1 for _ in re.finditer(mark, text))) for mark in rules.get("detect", ()))
        score = (hits, -len(rules.get("ancestors", ())))
        if hits and (best is None or score > best_score):
            best, best_score = name, score
    return best


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
        self._rules = _Rules(engine)
        self._partial = bytearray()
        self._continued = False
        self._line = 1
        self._order = 0
        self._tail: Deque[str] = collections.deque(maxlen=TAIL_PIECES)
        self._bar_open = False
        self._before = _Findings()
        self._after = _Findings()
        self._is_ready = False
        self._markers = 0
        self._seen: Set[str] = set()
        self._contexts: Dict[str, _Place] = {}
        self._clock = _Clock(self._rules.times)
        self._closely = 0
        self._block: Optional[_Block] = None
        self._blocks: Dict[str, _Block] = {}
        self._chained = False
        self._any_traceback = False
        self._finished = False
        self._dying = False
        self._stage: Optional[Tuple[bool, bool, int]] = None
        self._done: Set[int] = set()
        self._active: List[_Interest] = []
        self._dull: Set[bytes] = set()
        self._events: List[LogEvent] = []
        self._now: Optional[float] = None

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
        found = sum(each.size for each in (self._before, self._after))
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
        was_ready = self._is_ready
        for number, line in enumerate(lines):
            if self._is_ready != was_ready:
                interests = self._rules.interests  # after the ready line each signature is looked for anew
            is_last = number == len(lines) - 1
            pieces = line.split(b"\r")
            for index, piece in enumerate(pieces):
                if index < len(pieces) - 1:
                    self._whole(piece, interests, b"\r")
                elif not is_last:
                    self._whole(piece, interests, b"\n")
            if not is_last:
                self._line += 1

    def _whole(self, piece: bytes, interests: List[_Interest], end: bytes) -> None:
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

    def _interests(self, region: bytes) -> List[_Interest]:
        """What can match in these bytes at all, by the plain text that each pattern needs.

        Lines that differ in digits alone have one *shape*; shapes in which nothing can match are remembered, so that a
        flood of such lines costs next to nothing.
        """
        stage = (self._is_ready, self._is_early, len(self._done) + len(self.warnings) + len(self.measures))
        if stage != self._stage:
            self._stage = stage
            self._dull.clear()
            self._active = [each for each in self._rules.interests if self._is_wanted(each)]
        shapes = set(_shape(_clean(region)).replace(b"\r", b"\n").split(b"\n"))
        fresh = shapes - self._dull
        text = b"\n".join(fresh)
        found = [each for each in self._active if each.shape is None or each.shape in text]
        if len(self._dull) > MOST_SHAPES:
            self._dull.clear()
        for shape in fresh:
            if len(shape) < TEXT_CHARACTERS and not any(each.shape is None or each.shape in shape for each in found):
                self._dull.add(shape)
        return found

    def _is_wanted(self, interest: _Interest) -> bool:
        if self._is_ready and interest.only_before_ready:
            return False
        if interest.kind == _WARNING and interest.name in self.warnings:
            return False
        if interest.kind == _MEASURE and interest.name in self.measures:
            return False
        signature = interest.signature
        return signature is None or not (signature.index in self._done or (signature.early and not self._is_early))

    @property
    def _is_early(self) -> bool:
        return not self._markers and not self._any_traceback

    # -- one piece

    def _piece(self, raw: bytes, interests: List[_Interest], end: Optional[bytes]) -> None:
        clean = _clean(raw)
        if end is not None and not self._continued:
            self._remember(clean, end)
        elif end is None and not self._continued:
            self._remember(clean[:TEXT_CHARACTERS], b"\n")
        self._order += 1
        # Whether a pattern is still wanted is asked again here: how the log was cut into regions must not matter.
        hits = [each for each in interests if (each.needs is None or each.needs in clean) and self._is_wanted(each)]
        if self._closely:
            self._closely -= 1
        elif not hits:
            return
        if not clean.strip():
            return
        text = clean.decode("utf-8", "replace")
        if not self._is_ready and len(self.own_pids) < MOST_PIDS:
            self._note_pids(text, hits)
        if not self._closely and all(each.kind == _PID for each in hits):
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

    def _note_pids(self, text: str, hits: List[_Interest]) -> None:
        for each in hits:
            if each.kind == _PID:
                for match in each.regex.finditer(text):
                    self.own_pids.add(int(match.group("pid")))

    def _segments(self, text: str) -> Iterator[_Segment]:
        """Cut a piece where another process's prefix begins in it, and name who speaks and as which rank."""
        starts = self._rules.prefixes_in(text)
        if not starts or starts[0].start > 0:
            stop = starts[0].start if starts else len(text)
            yield _Segment(text[:stop], text[:stop], None, self._rules.rank_in(text[:stop]))
        for index, prefix in enumerate(starts):
            stop = starts[index + 1].start if index + 1 < len(starts) else len(text)
            part = text[prefix.start : stop]
            yield _Segment(part, text[prefix.end : stop], prefix.who, self._rules.rank_in(part))

    def _segment(self, segment: _Segment, hits: List[_Interest]) -> None:
        if not segment.text.strip():
            return
        by_kind: Dict[int, List[_Interest]] = collections.defaultdict(list)
        for each in hits:
            by_kind[each.kind].append(each)
        self._follow_traceback(segment, by_kind[_HEAD], by_kind[_CHAIN])
        rank = segment.rank
        if rank is None and segment.who is None and self._block is not None:
            rank = self._block.rank
        if not self._is_ready:
            self._mark_phase(segment, by_kind[_PHASE])
            self._mark_percent(segment, by_kind[_PERCENT])
        for each in by_kind[_MEASURE]:
            match = each.regex.search(segment.text)
            if match is not None and each.name not in self.measures:
                self.measures[each.name] = float(match.group("value").replace(",", ""))
        if self._rules.is_benign(segment.text):
            return
        findings = self._after if self._is_ready else self._before
        place = _Place(self._order, self._line, _around(segment.text, 0), rank)
        for each in by_kind[_WARNING]:
            if each.name not in self.warnings and each.regex.search(segment.text):
                self.warnings[each.name] = place.text
        for each in by_kind[_STOPPING]:
            if each.regex.search(segment.text):
                findings.stopping = True
        for each in by_kind[_CONTEXT]:
            if each.regex.search(segment.text):
                self._contexts[each.regex.pattern] = place
        is_quiet = self._rules.is_quiet(segment.text)
        if by_kind[_FAILURE]:
            self._find_failures(segment, rank, by_kind[_FAILURE], findings, is_quiet)
        if not is_quiet and not findings.stopping:
            for each in by_kind[_WRAPPER]:
                if each.regex.search(segment.text):
                    if findings.wrapper is None:
                        findings.wrapper = place
                        self._tell("failure", rank, place.text)
                    break

    # -- tracebacks

    def _follow_traceback(self, segment: _Segment, heads: List[_Interest], chains: List[_Interest]) -> None:
        who = segment.who
        if any(each.regex.search(segment.text) for each in heads):
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
        place = _Place(self._order, self._line, _around(segment.text, 0), rank)
        self._dying = True
        if self._rules.is_consequence(body):
            findings.consequence = findings.consequence or place
        else:
            findings.error = findings.error or place

    # -- phases

    def _mark_phase(self, segment: _Segment, interests: List[_Interest]) -> None:
        last: Tuple[int, Optional[str]] = (-1, None)
        for each in interests:
            if each.after and each.after not in self._seen:
                continue
            for match in each.regex.finditer(segment.text):
                last = max(last, (match.start(), each.name))
        phase = last[1]
        if phase is None:
            return
        self._markers += 1
        self._dying = False
        self._seen.add(phase)
        if phase == "ready":
            self._tell("ready_line", segment.rank, segment.text)
            if self._denial(self._before) is not None:
                phase = "http"
            else:
                self._is_ready = True
                self._done = set()
        if segment.rank is not None and (segment.rank in self.ranks or len(self.ranks) < MOST_RANKS):
            self.ranks[segment.rank] = phase
        self._clock.enter(phase, segment.text, self._now)
        if phase != self.phase:
            self.phase = phase
            self.percent = None
            self._tell("phase", segment.rank, segment.text)

    def _mark_percent(self, segment: _Segment, interests: List[_Interest]) -> None:
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
        interests: List[_Interest],
        findings: _Findings,
        is_quiet: bool,
    ) -> None:
        for each in interests:
            signature = each.signature
            if signature is None or findings.is_full(signature, is_quiet):
                continue
            match = each.regex.search(segment.text)
            if match is None or (signature.unless is not None and signature.unless.search(segment.text)):
                continue
            if signature.block is not None and not self._in_block(segment, signature.block):
                continue
            text = _around(segment.text, match.start())
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
            findings.add(
                _Match(signature, _Place(self._order, self._line, text, rank), is_quiet, self._markers, memory)
            )

    def _in_block(self, segment: _Segment, pattern: Pattern[str]) -> bool:
        block = self._block if segment.who is None else self._blocks.get(segment.who)
        return block is not None and any(pattern.search(line) for line in block.lines)

    def _denial(self, findings: _Findings) -> Optional[_Match]:
        """A failure beside which a ready line is a lie: the port belongs to another server, which answered for us."""
        found = [each for each in findings.matches if each.signature.cause in self._rules.denies and not each.is_quiet]
        return found[0] if found else None

    def _tell(self, kind: str, rank: Optional[int], text: str) -> None:
        self._events.append(LogEvent(kind, self.phase, self.percent, rank, text.strip()[:TEXT_CHARACTERS]))

    # -- the answer

    def diagnosis(self, exited: bool = False) -> Diagnosis:
        """What the log says so far. ``exited``: the server is known to have ended, and must not have."""
        is_ready = self._is_ready and self._denial(self._after) is None
        findings = self._after if is_ready else _Findings.both(self._before, self._after)
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
        if not candidates:
            place = findings.error or findings.consequence or findings.wrapper
            return self._answer("failed", phase, place=place)
        best = min(candidates, key=self._rank_of_cause)
        signature = best.signature
        return self._answer("failed", phase, signature.cause, best.place, self._rules.hints.get(signature.cause, ""))

    def _answer(
        self,
        outcome: str,
        phase: str,
        cause: Optional[str] = None,
        place: Optional[_Place] = None,
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

    def _candidates(self, findings: _Findings) -> List[_Match]:
        found = [each for each in findings.matches if each.memory is None or each.memory.accuses_others(self.own_pids)]
        telling = {each.place.order for each in found if not each.signature.vague}
        return [each for each in found if not (each.signature.vague and each.place.order in telling)]

    def _rank_of_cause(self, match: _Match) -> Tuple[float, int, int]:
        return match.weight(self._markers), match.place.order, match.signature.index

    def _is_strong(self, match: _Match) -> bool:
        """Whether the match alone shows a failure: not a mere warning, nor something the start went on after."""
        return not match.is_quiet and not match.was_survived(self._markers)


# -- parts of the reading


@dataclasses.dataclass(frozen=True)
class _Place:
    order: int
    line: int
    text: str
    rank: Optional[int]


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Part of a piece, from a prefix on; ``who`` is None without one and may be "" with one that names nobody."""

    text: str
    body: str
    who: Optional[str]
    rank: Optional[int]


@dataclasses.dataclass(frozen=True)
class _Prefix:
    start: int
    end: int
    who: str


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


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What an out-of-memory line says, in GiB; ``others`` are (pid, size) of the processes it names."""

    wanted: float
    free: float
    others: Tuple[Tuple[int, float], ...]
    names_itself: bool
    at_least: float

    def accuses_others(self, own_pids: Set[int]) -> bool:
        """Whether other processes hold so much that without them the request would have fitted."""
        held = sum(size for pid, size in self.others if pid not in own_pids)
        return self.names_itself and held >= self.at_least and self.free + held >= self.wanted


class _MemoryRule:
    def __init__(self, rule: Mapping[str, Any]) -> None:
        self._wanted = re.compile(rule["wanted"])
        self._free = re.compile(rule["free"])
        self._others = re.compile(rule["others"])
        self._itself = re.compile(rule["itself"])
        self._at_least = float(rule["at_least"])

    def read(self, text: str) -> _Memory:
        others = tuple((int(match.group("pid")), _gib(match)) for match in self._others.finditer(text))
        wanted, free = self._wanted.search(text), self._free.search(text)
        return _Memory(
            wanted=_gib(wanted) if wanted else float("inf"),
            free=_gib(free) if free else 0.0,
            others=others[:MOST_BLOCKS],
            names_itself=self._itself.search(text) is not None,
            at_least=self._at_least,
        )


@dataclasses.dataclass(frozen=True)
class _Signature:
    index: int
    cause: str
    general: bool
    vague: bool
    consequence: bool
    survivable: bool
    early: bool
    after: Optional[str]
    unless: Optional[Pattern[str]]
    block: Optional[Pattern[str]]
    memory: Optional[_MemoryRule]


@dataclasses.dataclass(frozen=True)
class _Match:
    signature: _Signature
    place: _Place
    is_quiet: bool
    markers: int
    memory: Optional[_Memory]

    def weight(self, markers: int) -> float:
        """The lower, the more it explains: specific, general, vague, consequence; a warning last of all.

        What may be survived and was, to judge by the phases after it, stands behind what was not.
        """
        signature = self.signature
        weight = 1.0 * signature.general + 1.5 * signature.vague + 2.0 * signature.consequence
        return weight + 0.9 * self.was_survived(markers) + 10.0 * self.is_quiet

    def was_survived(self, markers: int) -> bool:
        return self.signature.survivable and self.markers != markers


class _Findings:
    """What was found before, or after, the ready line: the first match of each signature, and the first errors."""

    def __init__(self) -> None:
        self.matches: List[_Match] = []
        self.wrapper: Optional[_Place] = None
        self.error: Optional[_Place] = None
        self.consequence: Optional[_Place] = None
        self.stopping = False
        self._counts: Dict[Tuple[int, bool], int] = collections.defaultdict(int)

    @classmethod
    def both(cls, first: _Findings, second: _Findings) -> _Findings:
        together = cls()
        together.matches = first.matches + second.matches
        together.wrapper = first.wrapper or second.wrapper
        together.error = first.error or second.error
        together.consequence = first.consequence or second.consequence
        return together

    def has(self, signature: _Signature) -> bool:
        return self._counts[signature.index, False] > 0

    def is_full(self, signature: _Signature, is_quiet: bool) -> bool:
        # A survivable match is a failure only while no phase follows it, so its latest one counts, too.
        many = signature.memory is not None or signature.survivable
        return self._counts[signature.index, is_quiet] >= (MOST_MATCHES if many else 1)

    def add(self, match: _Match) -> None:
        self._counts[match.signature.index, match.is_quiet] += 1
        self.matches.append(match)

    @property
    def size(self) -> int:
        places = [each.place for each in self.matches]
        return sum(len(each.text) for each in [*places, self.wrapper, self.error, self.consequence] if each is not None)


class _Clock:
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


# -- the wording, made ready for searching

_PHASE, _PERCENT, _FAILURE, _WRAPPER, _CONTEXT, _HEAD, _CHAIN, _STOPPING, _PID, _WARNING, _MEASURE = range(11)


@dataclasses.dataclass(frozen=True)
class _Interest:
    """A pattern and bytes that must occur for it to match, as they are and without digits; None: it may match any."""

    kind: int
    regex: Pattern[str]
    needs: Optional[bytes]
    shape: Optional[bytes]
    name: str = ""
    after: Optional[str] = None
    signature: Optional[_Signature] = None

    @property
    def only_before_ready(self) -> bool:
        return self.kind in (_PHASE, _PERCENT, _PID)


class _Rules:
    """A compiled engine.yml as regular expressions. Raises re.error for a pattern this Python cannot read."""

    def __init__(self, engine: Mapping[str, Any]) -> None:
        self.interests: List[_Interest] = []
        self.hints: Dict[str, str] = {}
        self.denies = frozenset((engine.get("ready") or {}).get("unless", ()))
        self.times = [re.compile(each) for each in engine.get("time", ())]
        self._prefixes = [re.compile(each) for each in engine.get("prefix", ())]
        self._ranks = [re.compile(each) for each in engine.get("rank", ())]
        self._errors = [re.compile(each) for each in engine.get("error", ())]
        self._benign = _Needed(engine.get("benign", ()))
        self._quiet = _Needed(engine.get("quiet", ()))
        self._idle = _Needed(engine.get("idle", ()))
        self.warning_hints = {entry["id"]: str(entry.get("hint", "")) for entry in engine.get("warnings", ())}
        for entry in engine.get("warnings", ()):
            for pattern in entry["patterns"]:
                self._add(_WARNING, pattern, entry["id"])
        for name, patterns in (engine.get("measures") or {}).items():
            for pattern in patterns:
                self._add(_MEASURE, pattern, name)
        self._never = _Needed([*engine.get("consequences", ()), *engine.get("wrappers", ())])
        for phase in engine.get("phases", ()):
            for pattern in phase["patterns"]:
                self._add(_PHASE, pattern, phase["name"], phase.get("after"))
        for kind, key in (
            (_PERCENT, "percent"),
            (_WRAPPER, "wrappers"),
            (_CHAIN, "chain"),
            (_STOPPING, "stopping"),
            (_PID, "pids"),
        ):
            for pattern in engine.get(key, ()):
                self._add(kind, pattern)
        if engine.get("traceback"):
            self._add(_HEAD, engine["traceback"])
        contexts: Set[str] = set()
        for index, entry in enumerate(engine.get("failures", ())):
            signature = _signature(index, entry)
            if entry.get("hint"):
                self.hints.setdefault(signature.cause, entry["hint"])
            if signature.after is not None and signature.after not in contexts:
                contexts.add(signature.after)
                self._add(_CONTEXT, signature.after)
            for pattern in entry["patterns"]:
                self._add(_FAILURE, pattern, signature=signature)
        self.hints.update(engine.get("hints") or {})

    def _add(
        self,
        kind: int,
        pattern: str,
        name: str = "",
        after: Optional[str] = None,
        signature: Optional[_Signature] = None,
    ) -> None:
        needs = needed_text(pattern)
        shape = None if needs is None else _shape(needs)
        self.interests.append(_Interest(kind, re.compile(pattern), needs, shape, name, after, signature))

    def prefixes_in(self, text: str) -> List[_Prefix]:
        """Where prefixes begin and end in a piece, in order, none inside another."""
        found = []
        for pattern in self._prefixes:
            found += [
                _Prefix(match.start(), match.end(), match.groupdict().get("who") or "")
                for match in pattern.finditer(text)
                if match.end() > match.start()
            ]
        found.sort(key=lambda each: (each.start, -each.end))
        kept: List[_Prefix] = []
        for each in found:
            if not kept or each.start >= kept[-1].end:
                kept.append(each)
        return kept

    def rank_in(self, text: str) -> Optional[int]:
        for pattern in self._ranks:
            match = pattern.search(text)
            if match:
                return int(match.group("rank")[:9])
        return None

    def is_error(self, body: str) -> bool:
        return any(pattern.search(body) for pattern in self._errors)

    def is_benign(self, text: str) -> bool:
        return self._benign.any_in(text)

    def is_idle(self, text: str) -> bool:
        return self._idle.any_in(text)

    def is_quiet(self, text: str) -> bool:
        return self._quiet.any_in(text)

    def is_consequence(self, text: str) -> bool:
        return self._never.any_in(text)


class _Needed:
    """Patterns of which any may match; each is tried only where the text that it needs occurs."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = []
        for pattern in patterns:
            needs = needed_text(pattern)
            self._patterns.append((None if needs is None else needs.decode("utf-8"), re.compile(pattern)))

    def any_in(self, text: str) -> bool:
        return any((needs is None or needs in text) and regex.search(text) for needs, regex in self._patterns)


def needed_text(pattern: str) -> Optional[bytes]:
    """The longest plain text that every match of a pattern contains; None if fewer than two characters are sure.

    Understands the usual: escapes, classes, groups, quantifiers. Whatever stands in a group counts as unsure.
    """
    if "(?i" in pattern or "(?x" in pattern:
        return None
    runs = [""]
    depth = index = 0
    while index < len(pattern):
        character = pattern[index]
        following = pattern[index + 1 : index + 2]
        if character == "[":
            index = _end_of_class(pattern, index)
            runs.append("")
        elif character == "\\":
            index += 1
            if depth == 0 and following and not following.isalnum():
                runs[-1] += following
            else:
                runs.append("")
        elif character in "()":
            depth += 1 if character == "(" else -1
            runs.append("")
        elif depth:
            pass
        elif character == "|":
            return None
        elif character in "?*{":
            runs[-1] = runs[-1][:-1]
            runs.append("")
            if character == "{":
                index = max(index, pattern.find("}", index))
        elif character in "+.^$":
            runs.append("")
        else:
            runs[-1] += character
        index += 1
    longest = max(runs, key=len)
    return longest.encode("utf-8") if len(longest) >= 2 else None


def _end_of_class(pattern: str, start: int) -> int:
    index = start + 1
    if pattern[index : index + 1] == "^":
        index += 1
    if pattern[index : index + 1] == "]":
        index += 1
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index


def _signature(index: int, entry: Mapping[str, Any]) -> _Signature:
    return _Signature(
        index=index,
        cause=entry["id"],
        general=bool(entry.get("general")),
        vague=bool(entry.get("vague")),
        consequence=bool(entry.get("consequence")),
        survivable=bool(entry.get("survivable")),
        early=bool(entry.get("early")),
        after=entry.get("after"),
        unless=re.compile(entry["unless"]) if entry.get("unless") else None,
        block=re.compile(entry["block"]) if entry.get("block") else None,
        memory=_MemoryRule(entry["memory"]) if entry.get("memory") else None,
    )


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


def _shape(text: bytes) -> bytes:
    return text.translate(None, b"0123456789")


def _around(text: str, at: int) -> str:
    """The line as evidence: whole if it is not too long, else the part around the match."""
    text = text.strip() if len(text) <= TEXT_CHARACTERS else text
    if len(text) <= TEXT_CHARACTERS:
        return text
    start = max(0, min(at - TEXT_CHARACTERS // 4, len(text) - TEXT_CHARACTERS))
    return text[start : start + TEXT_CHARACTERS].strip()


def _percent(match: re.Match[str]) -> Optional[float]:
    groups = match.groupdict()
    if groups.get("percent"):
        return min(100.0, float(groups["percent"]))
    if groups.get("done") and groups.get("total") and float(groups["total"]) > 0:
        return min(100.0, 100.0 * float(groups["done"]) / float(groups["total"]))
    return None


def _gib(match: re.Match[str]) -> float:
    try:
        return float(match.group("size")) * _GIB.get(match.group("unit"), 0.0)
    except ValueError:
        return 0.0


def _elapsed(since: float, until: float) -> float:
    # A stamp without a year jumps back at New Year; ranks write a little out of order.
    seconds = until - since
    if seconds < -300 * 86400:
        seconds += 366 * 86400
    return max(0.0, seconds)
