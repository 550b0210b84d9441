"""Weighs what a log has shown of its last start: how it ended, of what, and which line and which rule prove it.

The cause is the earliest error that explains the others, over all ranks: a specific id before a general one, both
before what is only a consequence; lines that merely wrap another error, and lines known to be benign, are never it.
Pure.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Set, Tuple

from lamplighter.node.log.findings import Findings, Match, PhaseTime, Place, Start
from lamplighter.node.log.rules import Rule, Rules

#: Ranks are in step: what lies this many phases back was not the end of one of them, whoever wrote it.
PHASES_APART = 2
#: An engine's advice stands this near to the error that it belongs to, in pieces of the log.
ADVICE_APART = 60
MOST_ADVICE = 900
CAUSE_ABOVE = "the cause stands above what was given: give the whole log, from the first line of this start"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What a log says: ``outcome`` is ready, failed or running; ``cause`` an id of the engine's table, or None.

    ``evidence`` is the line that proves the cause (without a known cause: the first error), ``line`` its number counted
    in newlines from 1, ``rank`` the rank that it or the head of its traceback names, ``hint`` one next step, in which
    ``{server}`` stands for the server's name, with what the engine itself advises. ``rule`` decided. ``cause_above``:
    the log begins in the middle of a start, and what it has is only what follows from a cause before that.
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
    cause_above: bool = False
    rule: Optional[Rule] = None

    def hint_for(self, server: str) -> str:
        """The hint with the server's name filled in."""
        return self.hint.replace("{server}", server)

    def to_json(self, server: Optional[str] = None) -> Dict[str, Any]:
        """JSON-safe; with ``server`` its name is filled into the hint."""
        answer = dataclasses.asdict(self)
        answer["phases"] = [dataclasses.asdict(each) for each in self.phases]
        answer["hint"] = self.hint if server is None else self.hint_for(server)
        return answer


class Verdict:
    """The judgement of one start. ``is_over``: the log will not grow; ``exited``: the server is known to have ended,
    and must not have; ``own_pids``: processes of its own, which an out-of-memory line accuses of nothing.
    """

    def __init__(self, start: Start, rules: Rules, own_pids: Set[int], *, is_over: bool, exited: bool) -> None:
        self._start = start
        self._rules = rules
        self._own_pids = own_pids
        self.is_ready = start.is_ready and denial(start.after, rules) is None
        self._found = start.after if self.is_ready else Findings.both(start.before, start.after)
        self._candidates = self._telling()
        self._failed = exited or self._found.wrapper is not None or self._shows_an_end(is_over)

    @property
    def phase(self) -> str:
        return "ready" if self.is_ready else "http" if self._start.is_ready else (self._start.phase or "boot")

    @property
    def is_fatal(self) -> bool:
        """Whether no server survives what was found, whatever its processes do."""
        shown = (each for each in self._candidates if _shows_a_failure(each) and not each.signature.survivable)
        return self._found.wrapper is not None or any(shown)

    def said(self, diagnosis: Diagnosis) -> Diagnosis:
        """``diagnosis`` with the outcome, and for a failure all that explains it."""
        if not self._failed:
            outcome = "ready" if self.is_ready else "running"
            return dataclasses.replace(diagnosis, outcome=outcome, phase=self.phase, rule=self._start.phase_rule)
        best = self._best()
        place = best.place if best is not None else self._unknown()
        is_weak = best is None or best.signature.consequence or best.signature.vague
        is_above = is_weak and self._first_error is None and not self._start.is_whole
        return dataclasses.replace(
            diagnosis,
            outcome="failed",
            phase=self.phase,
            cause=best.signature.cause if best is not None else None,
            evidence=place.text if place is not None else "",
            line=place.line if place is not None else None,
            rank=place.rank if place is not None else None,
            hint=self._hint(best, place, is_above),
            cause_above=is_above,
            rule=place.rule if place is not None else None,
        )

    # -- whether it failed

    def _shows_an_end(self, is_over: bool) -> bool:
        if self.is_ready:
            return any(map(self._is_silent, self._candidates))
        return any(map(self._is_strong, self._candidates)) or (
            is_over and (self._start.is_dying or (self._found.ended is not None and self._start.phase is not None))
        )

    def _is_silent(self, match: Match) -> bool:
        """Whether a server that was ready has said often enough that no answer comes, or was stopped for that."""
        signature = match.signature
        if not signature.silence or match.place.order <= self._found.outlived_at:
            return False
        return self._found.stopping or self._found.silences[signature.index] >= signature.silence

    def _is_strong(self, match: Match) -> bool:
        """Whether the match alone shows a failure: not a mere warning, nor something the start went on after."""
        return _shows_a_failure(match) and not self._was_survived(match)

    # -- what explains it

    def _telling(self) -> List[Match]:
        found = [each for each in self._found.matches if self._counts(each)]
        telling = {each.place.order for each in found if not each.signature.vague}
        return [each for each in found if not (each.signature.vague and each.place.order in telling)]

    def _counts(self, match: Match) -> bool:
        if match.memory is not None and not match.memory.accuses_others(self._own_pids):
            return False
        if match.signature.silence and match.place.order <= self._found.outlived_at:
            return False
        return not (match.is_benign and match.markers != self._start.progress(match.place.rank))

    @property
    def _first_error(self) -> Optional[Place]:
        """The first error that ended a traceback, if the start did not go on after it."""
        error = self._found.error
        return None if self._start.is_past(error, self._found.error_markers) else error

    def _best(self) -> Optional[Match]:
        candidates = [each for each in self._candidates if not self._is_over(each)]
        if not candidates:
            return None
        best = min(candidates, key=self._rank_of_cause)
        error = self._first_error
        if error is None or not self._gives_way(best, error):
            return next((each for each in candidates if _says_more(each, best)), best)
        known = [each for each in candidates if each.place.order == error.order]
        return min(known, key=self._rank_of_cause) if known else None

    def _unknown(self) -> Optional[Place]:
        """The proof of a failure whose cause no rule knows."""
        found = self._found
        error = self._first_error
        if error is not None:
            return error
        if found.outside is not None:
            return found.outside
        return found.consequence or found.wrapper or found.ended or found.error

    def _rank_of_cause(self, match: Match) -> Tuple[float, int, int]:
        return match.weight(self._was_survived(match)), match.place.order, match.signature.index

    def _is_over(self, match: Match) -> bool:
        """Whether nothing can come of it any more."""
        is_far = match.signature.early or self._start.phase_number - match.phase_number >= PHASES_APART
        return is_far and self._was_survived(match)

    def _was_survived(self, match: Match) -> bool:
        """Whether the start went on after it: a rank's own start, where one is named.

        What counts only before the first traceback is survived by one: the server's program ran.
        """
        signature = match.signature
        went_on = match.markers != self._start.progress(match.place.rank) or (
            signature.early and self._start.tracebacks.any
        )
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

    # -- what to do next

    def _hint(self, best: Optional[Match], place: Optional[Place], is_above: bool) -> str:
        hints = []
        if best is not None:
            hints.append(best.signature.advice or self._rules.hints.get(best.signature.cause, ""))
        if is_above:
            hints.append(CAUSE_ABOVE)
        advice = self._advice(place)
        if advice:
            hints.append(f"the engine itself says: {advice}")
        return "; ".join(each for each in hints if each)

    def _advice(self, place: Optional[Place]) -> str:
        """What the engine advises beside the line that proves the failure, else near it."""
        if place is None:
            return ""
        beside = self._rules.advice_in(place.text)
        listed = [text for order, text in self._found.advice if abs(order - place.order) <= ADVICE_APART]
        return " ".join(dict.fromkeys(beside or listed))[:MOST_ADVICE].replace("{", "(").replace("}", ")")


def _shows_a_failure(match: Match) -> bool:
    """Whether it is more than a warning, and may be one by itself."""
    return not (match.is_quiet or match.is_benign or match.signature.passive)


def _says_more(match: Match, best: Match) -> bool:
    """Whether a later match has the line of the best in its evidence: what a library said, and who died of it."""
    is_same = match.signature.cause == best.signature.cause and not match.is_quiet
    return is_same and match.place.order > best.place.order and best.place.text in match.place.text


def denial(found: Findings, rules: Rules) -> Optional[Match]:
    """A failure beside which a ready line is a lie: the port belongs to another server, which answered for us."""
    for each in found.matches:
        if each.signature.cause in rules.denies and not each.is_quiet and not found.is_outlived(each):
            return each
    return None
