"""A compiled engine.yml made ready for searching: what a log may say, and what of it is worth looking for where.

Each pattern goes with the plain text that every match of it contains, so that a flood of lines costs little. Standard
library only. Raises re.error for a pattern that this Python cannot read.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import (
    Any,
    Callable,
    Dict,
    Generic,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Pattern,
    Set,
    Tuple,
    TypeVar,
)

MOST_OTHERS = 64
#: Answers that are remembered of each question, and the longest text of which one is.
MOST_ALIKE = 500
ALIKE_CHARACTERS = 400
#: What Python writes before each frame of a traceback.
FRAME_INDENT = "  "

#: Text in quotes, as Python writes it, or up to the end where the quote is not closed there.
_QUOTED = re.compile(r"""(?<![\w'"])(?:'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z))""")

#: Escapes of a kind of character, how often something stands there, the names of groups, and any digit.
_NAMES_NO_DIGIT = re.compile(r"\\[^\dxuN]|\{\d*,?\d*\}|\(\?P<\w+>|0-9")
_DIGIT = re.compile(r"\d")
_ALIKE = bytes.maketrans(b"123456789", b"000000000")
Answer = TypeVar("Answer")

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

PHASE, PERCENT, FAILURE, WRAPPER, CONTEXT, HEAD, CHAIN, STOPPING, PID, WARNING, MEASURE, START, WORK = range(13)
FRAME, VERSION, ENDING, LIST = range(13, 17)

#: Where in engine.yml the patterns of a kind stand, as far as they may decide what is said.
KEYS = {PHASE: "phases", WORK: "phases", FAILURE: "failures", WRAPPER: "wrappers", ENDING: "ending"}


@functools.lru_cache(maxsize=4096)
def compiled(pattern: str) -> Pattern[str]:
    """Engines share most of their wording, and re itself remembers less than one of them has."""
    return re.compile(pattern)


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule that decided: a ``pattern`` under ``key`` of an engine.yml; ``id`` is that of a failure or a phase."""

    key: str
    id: str
    pattern: str


@dataclasses.dataclass(frozen=True)
class Prefix:
    start: int
    end: int
    who: str


@dataclasses.dataclass(frozen=True)
class Memory:
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


class MemoryRule:
    def __init__(self, rule: Mapping[str, Any]) -> None:
        self._wanted = compiled(rule["wanted"])
        self._free = compiled(rule["free"])
        self._others = compiled(rule["others"])
        self._itself = compiled(rule["itself"])
        self._at_least = float(rule["at_least"])

    def read(self, text: str) -> Memory:
        others = tuple((int(match.group("pid")), _gib(match)) for match in self._others.finditer(text))
        wanted, free = self._wanted.search(text), self._free.search(text)
        return Memory(
            wanted=_gib(wanted) if wanted else float("inf"),
            free=_gib(free) if free else 0.0,
            others=others[:MOST_OTHERS],
            names_itself=self._itself.search(text) is not None,
            at_least=self._at_least,
        )


@dataclasses.dataclass(frozen=True)
class Signature:
    index: int
    cause: str
    general: bool
    vague: bool
    consequence: bool
    survivable: bool
    early: bool
    after: Optional[str]
    above: Optional[str]
    unless: Optional[Pattern[str]]
    block: Optional[Pattern[str]]
    memory: Optional[MemoryRule]
    only: Optional[str]
    silence: int
    native: bool
    passive: bool
    advice: str


@dataclasses.dataclass(frozen=True)
class Interest:
    """A pattern and bytes that must occur for it to match, as they are and without digits; None: it may match any."""

    kind: int
    regex: Pattern[str]
    needs: Optional[bytes]
    shape: Optional[bytes]
    name: str = ""
    after: Optional[str] = None
    signature: Optional[Signature] = None
    #: Whether each state of a progress bar says the same, but for its numbers.
    is_bar: bool = False

    @property
    def may_begin(self) -> bool:
        """Whether it may tell of another start."""
        return self.kind == START or (self.signature is not None and self.signature.early)

    @property
    def only_before_ready(self) -> bool:
        return self.kind in (PHASE, PERCENT, PID, VERSION, ENDING)

    @property
    def rule(self) -> Rule:
        cause = self.signature.cause if self.signature is not None else self.name
        return Rule(KEYS.get(self.kind, ""), cause, self.regex.pattern)


class Rules:
    """A compiled engine.yml as regular expressions. Raises re.error for a pattern this Python cannot read."""

    def __init__(self, engine: Mapping[str, Any]) -> None:
        self.interests: List[Interest] = []
        self.hints: Dict[str, str] = {}
        self.denies = frozenset((engine.get("ready") or {}).get("unless", ()))
        self.times = [compiled(each) for each in engine.get("time", ())]
        self._prefixes = [(needed_text(each), compiled(each)) for each in engine.get("prefix", ())]
        self._ranks = [compiled(each) for each in engine.get("rank", ())]
        self._errors = [compiled(each) for each in engine.get("error", ())]
        self._sentences = [compiled(each) for each in engine.get("sentence", ())]
        self._outside = [compiled(each) for each in engine.get("outside", ())]
        self._frame = compiled(engine["frame"]) if engine.get("frame") else None
        self._traceback = compiled(engine["traceback"]) if engine.get("traceback") else None
        self._advice = [compiled(each) for each in engine.get("advice", ())]
        self._advice_item = compiled(engine["advice_item"]) if engine.get("advice_item") else None
        self.envelopes = [compiled(each) for each in engine.get("envelope", ())]
        self._places_of_prefixes = _remembered(self._find_prefixes, engine.get("prefix", ()))
        self._place_of_rank = _remembered(self._find_rank, engine.get("rank", ()))
        self._benign = _Needed(engine.get("benign", ()))
        self._quiet = _Needed(engine.get("quiet", ()))
        self._idle = _Needed(engine.get("idle", ()))
        self.warning_hints = {entry["id"]: str(entry.get("hint", "")) for entry in engine.get("warnings", ())}
        for entry in engine.get("warnings", ()):
            for pattern in entry["patterns"]:
                self._add(WARNING, pattern, entry["id"])
        for name, patterns in (engine.get("measures") or {}).items():
            for pattern in patterns:
                self._add(MEASURE, pattern, name)
        self._never = _Needed([*engine.get("consequences", ()), *engine.get("wrappers", ())])
        for phase in engine.get("phases", ()):
            for pattern in phase["patterns"]:
                kind = WORK if phase.get("after") == "ready" else PHASE
                self._add(kind, pattern, phase["name"], phase.get("after"))
        for kind, key in (
            (PERCENT, "percent"),
            (WRAPPER, "wrappers"),
            (CHAIN, "chain"),
            (STOPPING, "stopping"),
            (PID, "pids"),
            (START, "starts"),
            (VERSION, "version"),
            (ENDING, "ending"),
            (LIST, "advice_list"),
        ):
            for pattern in engine.get(key, ()):
                self._add(kind, pattern)
        for kind, key in ((HEAD, "traceback"), (FRAME, "frame")):
            if engine.get(key):
                self._add(kind, engine[key])
        contexts: Set[str] = set()
        for index, entry in enumerate(engine.get("failures", ())):
            signature = _signature(index, entry)
            if entry.get("hint"):
                self.hints.setdefault(signature.cause, entry["hint"])
            for context in (signature.after, signature.above):
                if context is not None and context not in contexts:
                    contexts.add(context)
                    self._add(CONTEXT, context)
            for pattern in entry["patterns"]:
                self._add(FAILURE, pattern, signature=signature)
        self.hints.update(engine.get("hints") or {})

    def _add(
        self,
        kind: int,
        pattern: str,
        name: str = "",
        after: Optional[str] = None,
        signature: Optional[Signature] = None,
    ) -> None:
        needs = needed_text(pattern)
        shape = None if needs is None else shape_of(needs)
        is_bar = kind in (PHASE, PERCENT) and is_alike(pattern)
        self.interests.append(Interest(kind, compiled(pattern), needs, shape, name, after, signature, is_bar))

    def prefixes_in(self, text: str) -> List[Prefix]:
        """Where prefixes begin and end in a piece, in order, none inside another."""
        return [Prefix(start, end, text[begin:stop]) for start, end, begin, stop in self._places_of_prefixes(text)]

    def _find_prefixes(self, text: str) -> List[Tuple[int, int, int, int]]:
        """Where each begins and ends, and where in it who speaks is named."""
        found: List[Tuple[int, int, int, int]] = []
        for needs, pattern in self._prefixes:
            if needs is not None and needs.decode("utf-8") not in text:
                continue
            for match in pattern.finditer(text):
                if match.end() > match.start():
                    who = match.span("who") if match.groupdict().get("who") else (0, 0)
                    found.append((*match.span(), *who))
        found.sort(key=lambda each: (each[0], -each[1]))
        kept: List[Tuple[int, int, int, int]] = []
        for each in found:
            if not kept or each[0] >= kept[-1][1]:
                kept.append(each)
        return kept

    def rank_in(self, text: str) -> Optional[int]:
        start, end = self._place_of_rank(text)
        return int(text[start:end][:9]) if end else None

    def _find_rank(self, text: str) -> Tuple[int, int]:
        for pattern in self._ranks:
            match = pattern.search(text)
            if match:
                return match.span("rank")
        return 0, 0

    def is_error(self, body: str) -> bool:
        return any(pattern.search(body) for pattern in self._errors)

    def may_end(self, body: str) -> bool:
        """Whether the line below a traceback's frames is the sentence that ends it, whatever the exception's name."""
        return any(pattern.search(body) for pattern in self._sentences)

    def is_frame(self, body: str) -> bool:
        return self._frame is not None and self._frame.match(body.lstrip()) is not None

    def sentence_rule(self, body: str) -> Optional[Rule]:
        """The rule by which a line is the sentence that ends a traceback."""
        return _first_rule("error", self._errors, body) or _first_rule("sentence", self._sentences, body)

    def outside_rule(self, text: str) -> Optional[Rule]:
        """The rule by which a library outside of Python tells of an error in this line."""
        return _first_rule("outside", self._outside, text)

    def advice_in(self, text: str) -> List[str]:
        """What a line advises to do, sentence by sentence."""
        return [match.group().strip() for pattern in self._advice for match in pattern.finditer(text)]

    def is_advice_item(self, body: str) -> bool:
        return self._advice_item is not None and self._advice_item.search(body) is not None

    def anchor_in(self, text: str) -> Optional[int]:
        """Where the engine's own words begin in a line, by what only they can be; None where nothing shows it."""
        found = [each.start for each in self.prefixes_in(text)[:1]]
        head = self._traceback.search(text) if self._traceback is not None else None
        frame = self._frame.search(text) if self._frame is not None else None
        if head is not None:
            found.append(head.start())
        if frame is not None and text[: frame.start()].endswith(FRAME_INDENT):
            found.append(frame.start() - len(FRAME_INDENT))
        return min(found) if found else None

    def says(self, text: str) -> bool:
        """Whether any rule has something to say of it."""
        return any(each.regex.search(text) is not None for each in self.interests)

    def is_benign(self, text: str) -> bool:
        return self._benign.any_in(text)

    def is_idle(self, text: str) -> bool:
        return self._idle.any_in(text)

    def is_quiet(self, text: str) -> bool:
        return self._quiet.any_in(text)

    def is_no_cause(self, text: str) -> bool:
        return self.is_benign(text) or self.is_quiet(text) or self.is_consequence(text)

    def is_consequence(self, text: str) -> bool:
        return self._never.any_in(text)


def _first_rule(key: str, patterns: Iterable[Pattern[str]], text: str) -> Optional[Rule]:
    return next((Rule(key, "", each.pattern) for each in patterns if each.search(text)), None)


class _Needed:
    """Patterns of which any may match; each is tried only where the text that it needs occurs."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = list(patterns)
        self._counting = [_needed(each) for each in patterns if not is_alike(each)]
        alike = [_needed(each) for each in patterns if is_alike(each)]
        self._is_alike = _Remembered(lambda text: _any_in(alike, text))

    def any_in(self, text: str) -> bool:
        return self._is_alike(text) or _any_in(self._counting, text)


def _needed(pattern: str) -> Tuple[Optional[str], Pattern[str]]:
    needs = needed_text(pattern)
    return None if needs is None else needs.decode("utf-8"), compiled(pattern)


def _any_in(patterns: List[Tuple[Optional[str], Pattern[str]]], text: str) -> bool:
    for needs, regex in patterns:  # noqa: SIM110 (asked of every line read closely: a generator costs twice)
        if (needs is None or needs in text) and regex.search(text):
            return True
    return False


class _Remembered(Generic[Answer]):
    """A question whose answer is the same for texts that differ in their digits, not in the number of them.

    A flood repeats a few lines with other numbers in them: each is asked once. Bounded.
    """

    def __init__(self, ask: Callable[[str], Answer]) -> None:
        self._ask = ask
        self._known: Dict[bytes, Answer] = {}

    def __call__(self, text: str) -> Answer:
        if len(text) > ALIKE_CHARACTERS:
            return self._ask(text)
        key = without_numbers(text.encode("utf-8", "surrogatepass"))
        if key not in self._known:
            if len(self._known) >= MOST_ALIKE:
                self._known.clear()
            self._known[key] = self._ask(text)
        return self._known[key]


def _remembered(ask: Callable[[str], Answer], patterns: Iterable[str]) -> Callable[[str], Answer]:
    """``ask``, remembered if all digits are alike to the ``patterns`` that answer it."""
    return _Remembered(ask) if all(map(is_alike, patterns)) else ask


@functools.lru_cache(maxsize=4096)
def is_alike(pattern: str) -> bool:
    """Whether all digits are alike to a pattern: it names none, but for how often something stands there."""
    return not _DIGIT.search(_NAMES_NO_DIGIT.sub("", pattern))


@functools.lru_cache(maxsize=4096)
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


def _signature(index: int, entry: Mapping[str, Any]) -> Signature:
    return Signature(
        index=index,
        cause=entry["id"],
        general=bool(entry.get("general")),
        vague=bool(entry.get("vague")),
        consequence=bool(entry.get("consequence")),
        survivable=bool(entry.get("survivable")),
        early=bool(entry.get("early")),
        after=entry.get("after"),
        above=entry.get("above"),
        unless=compiled(entry["unless"]) if entry.get("unless") else None,
        block=compiled(entry["block"]) if entry.get("block") else None,
        memory=MemoryRule(entry["memory"]) if entry.get("memory") else None,
        only=entry.get("only"),
        silence=int(entry.get("silence") or 0),
        native=bool(entry.get("native")),
        passive=bool(entry.get("passive")),
        advice=str(entry.get("advice") or ""),
    )


def outside_quotes(text: str, places: Iterable[int]) -> Iterator[int]:
    """Those of ``places``, which ascend, that do not stand in quotes."""
    quotes = iter(_quotes_in(text))
    quote = next(quotes, None)
    for place in places:
        while quote is not None and quote[1] <= place:
            quote = next(quotes, None)
        if quote is None or place <= quote[0]:
            yield place


@functools.lru_cache(maxsize=8)
def _quotes_in(text: str) -> Tuple[Tuple[int, int], ...]:
    return tuple(match.span() for match in _QUOTED.finditer(text))


def without_numbers(text: bytes) -> bytes:
    """The text with each digit as 0: where the digits stand, not which they are."""
    return text.translate(_ALIKE)


def shape_of(text: bytes) -> bytes:
    return text.translate(None, b"0123456789")


def _gib(match: re.Match[str]) -> float:
    try:
        return float(match.group("size")) * _GIB.get(match.group("unit"), 0.0)
    except ValueError:
        return 0.0
