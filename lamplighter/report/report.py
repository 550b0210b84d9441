"""Events folded into one report: what happened to each server, and the exit code that says it.

Pure. A node may be newer than we are: an unknown event, a missing field or a value of another type is skipped, never
an exception. Events may come twice (attach repeats them): each (run, seq) counts once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamplighter.errors import LamplighterError
from lamplighter.exits import meaning_of
from lamplighter.node import events
from lamplighter.node.events import Exit
from lamplighter.report.wording import number, text, whole

#: Lines of a server's log that a report keeps.
LOG_TAIL = 15

_EXIT_OF_OUTCOME = {
    "deployed": Exit.OK,
    "unchanged": Exit.OK,
    "stopped": Exit.OK,
    "started": Exit.OK,
    "undeployed": Exit.OK,
    "rolled_back": Exit.ROLLED_BACK,
    "refused": Exit.REFUSED,
    "unreachable": Exit.UNREACHABLE,
    "detached": Exit.DETACHED,
}

#: Stages before the old server is stopped.
_TOUCHES_NOTHING = events.STAGES[: events.STAGES.index("stop")]


@dataclass(frozen=True)
class Serving:
    """What answers on the server's port."""

    release: str | None
    pid: int | None
    port: int | None
    model: str | None
    since: float | None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Stage:
    """One stage of a run; ``ok`` and ``seconds`` are None while it goes on."""

    name: str
    seconds: float | None = None
    ok: bool | None = None
    skipped: str | None = None
    message: str = ""


@dataclass(frozen=True)
class Failure:
    """One thing that failed in a run; a failed rollback adds a second one."""

    stage: str | None
    phase: str | None
    message: str
    cause: str | None
    evidence: str
    hint: str
    log_tail: tuple[str, ...]


@dataclass(frozen=True)
class Warned:
    """Something the operator should know that did not stop the run."""

    stage: str | None
    message: str
    hint: str


@dataclass(frozen=True)
class ServerReport:
    """What happened to one server. ``to_json`` is the contract; the fields after ``run`` are for people."""

    outcome: str
    exit_code: int
    stage: str | None = None
    phase: str | None = None
    cause: str | None = None
    evidence: str = ""
    message: str = ""
    hint: str = ""
    release: str | None = None
    serving: Serving | None = None
    durations: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ready_seconds: float | None = None
    downtime_seconds: float | None = None
    began: float | None = None
    ended: float | None = None
    run: str | None = None
    verb: str | None = None
    serving_text: str = ""
    stages: tuple[Stage, ...] = ()
    failures: tuple[Failure, ...] = ()
    warnings: tuple[Warned, ...] = ()
    log_tail: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "stage": self.stage,
            "phase": self.phase,
            "cause": self.cause,
            "evidence": self.evidence,
            "message": self.message,
            "hint": self.hint,
            "release": self.release,
            "serving": self.serving.to_json() if self.serving else None,
            "durations": dict(self.durations),
            "ready_seconds": self.ready_seconds,
            "downtime_seconds": self.downtime_seconds,
            "began": self.began,
            "ended": self.ended,
            "run": self.run,
        }


@dataclass(frozen=True)
class HostReport:
    """The servers of one host; ``error`` is what kept us from speaking of any server (the host was unreachable)."""

    servers: Mapping[str, ServerReport]
    error: ServerReport | None = None

    def to_json(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"servers": {name: server.to_json() for name, server in self.servers.items()}}
        if self.error:
            answer["error"] = self.error.to_json()
        return answer


@dataclass(frozen=True)
class Report:
    """What happened, over all hosts; ``error`` is what ended the command itself (a mistake in the inventory)."""

    exit_code: int
    outcome: str
    hosts: Mapping[str, HostReport]
    error: ServerReport | None = None
    timings: Sequence[Mapping[str, Any]] | None = None
    """Where the time went, for who asked."""

    @classmethod
    def fold(cls, items: Iterable[Mapping[str, Any]]) -> Report:
        """The report of ``items``, in the order in which they came."""
        fold = Fold()
        for event in items:
            fold.add(event)
        return fold.report()

    def parts(self) -> list[tuple[str, ServerReport]]:
        """Every server (``host/server``), host error (``host``) and the command's own error (empty name)."""
        found = [("", self.error)] if self.error else []
        for host, report in self.hosts.items():
            found += [(f"{host}/{name}", server) for name, server in report.servers.items()]
            found += [(host, report.error)] if report.error else []
        return found

    def to_json(self) -> dict[str, Any]:
        """``{"report": {...}}``, the last line of ``--json``."""
        body: dict[str, Any] = {"exit_code": self.exit_code, "outcome": self.outcome}
        if self.error:
            body["error"] = self.error.to_json()
        body["hosts"] = {name: host.to_json() for name, host in self.hosts.items()}
        if self.timings is not None:
            body["timings"] = list(self.timings)
        return {"report": body}


def is_of_a_run(event: Mapping[str, Any]) -> bool:
    """True for the events that tell how a run goes; beats, logs and answers of reading verbs do not."""
    kind = event.get("event")
    return isinstance(kind, str) and kind in _TAKE


class Seen:
    """Remembers which numbered events were here already."""

    def __init__(self) -> None:
        self._keys: set[tuple[str | None, str | None, str | None, int]] = set()

    def is_new(self, event: Mapping[str, Any]) -> bool:
        """True the first time; always true for events without a number (beats, our own)."""
        sequence = whole(event.get("seq"))
        if sequence is None:
            return True
        key = (text(event.get("host")), text(event.get("server")), text(event.get("run")), sequence)
        if key in self._keys:
            return False
        self._keys.add(key)
        return True


class Fold:
    """Takes events and our own facts as they come; ``report`` may be asked at any time."""

    def __init__(self) -> None:
        self._seen = Seen()
        self._hosts: dict[str, _Host] = {}
        self._error: ServerReport | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event of a node; what it does not understand it leaves alone."""
        if not isinstance(event, Mapping) or not self._seen.is_new(event):
            return
        kind = event.get("event")
        if not isinstance(kind, str) or kind not in _TAKE:
            return
        host = self._host(text(event.get("host")) or "?")
        host.error = None  # the host speaks, so it was reached after all
        host.run(text(event.get("server")) or "?", text(event.get("run"))).take(event)

    def add_error(self, host: str | None, server: str | None, error: LamplighterError) -> None:
        """Take an error of the control side about one server, a whole host, or (no host) the command itself.

        An error about a host goes to its servers whose runs have not ended; a run that ended keeps its own result.
        An error about a server that was just put into service (its verification broke off) makes that one degraded.
        """
        fact = _from_error(error)
        if host is None:
            self._error = fact
            return
        known = self._host(host)
        if server is not None:
            known.error = None
            known.current(server).take_error(fact)
            return
        unended = [run for run in known.runs() if run.end is None]
        for run in unended:
            run.take_error(fact)
        if not unended and not (known.servers and fact.exit_code == Exit.DETACHED):
            known.error = fact

    def add_degraded(
        self, host: str, server: str, message: str, *, cause: str, evidence: str = "", hint: str = ""
    ) -> None:
        """A verification, hook or gate of the control side failed on a server that serves; a worse result stays."""
        self._host(host).current(server).degrade(cause, message, evidence, hint)

    def add_gone(
        self, host: str, server: str, message: str, code: Exit, *, cause: str, evidence: str = "", hint: str = ""
    ) -> None:
        """A server that was put into service serves no more: it has died (6), or does not answer (7).

        A worse result stays.
        """
        self._host(host).current(server).lose(code, cause, message, evidence, hint)

    def add_way_back(self, host: str, server: str) -> None:
        """The last run was there to undo the one before it, whose checks failed: both are one result from now on."""
        self._host(host).join_last_runs(server)

    def add_no_way_back(self, host: str, server: str, error: LamplighterError) -> None:
        """The run that was to undo the last one has not begun."""
        self._host(host).current(server).stay(_from_error(error))

    def is_put_into_service(self, host: str, server: str) -> bool:
        """Whether the run on ``server`` has ended with what was asked for in service: a deploy, or a rollback."""
        known = self._hosts.get(host)
        if known is None or server not in known.servers:
            return False
        told = known.current(server).report()
        return told.outcome == "deployed" or (told.outcome == "rolled_back" and told.exit_code != Exit.ROLLED_BACK)

    def report(self) -> Report:
        hosts = {name: host.report(name) for name, host in self._hosts.items()}
        unjudged = Report(exit_code=Exit.OK, outcome="", hosts=hosts, error=self._error)
        exit_code, outcome = _judge([part for _, part in unjudged.parts()])
        return dataclasses.replace(unjudged, exit_code=exit_code, outcome=outcome)

    def _host(self, name: str) -> _Host:
        return self._hosts.setdefault(name, _Host())


def _judge(parts: list[ServerReport]) -> tuple[int, str]:
    if not parts:
        return int(Exit.INTERNAL), "failed"  # nothing was heard of anything: never a success
    codes = {part.exit_code for part in parts}
    outcomes = {part.outcome for part in parts}
    if codes == {Exit.OK} and len(outcomes) > 1:
        outcomes.discard("unchanged")
    return (
        codes.pop() if len(codes) == 1 else int(Exit.MIXED),
        outcomes.pop() if len(outcomes) == 1 else "mixed",
    )


class _Host:
    def __init__(self) -> None:
        self.servers: dict[str, dict[str | None, _Run]] = {}  # by server, then by run in the order of appearance
        self.error: ServerReport | None = None

    def run(self, server: str, run: str | None) -> _Run:
        return self.servers.setdefault(server, {}).setdefault(run, _Run(run))

    def current(self, server: str) -> _Run:
        runs = self.servers.get(server)
        return list(runs.values())[-1] if runs else self.run(server, None)

    def join_last_runs(self, server: str) -> None:
        runs = self.servers.get(server, {})
        if len(runs) > 1:
            _, second = runs.popitem()
            list(runs.values())[-1].take_way_back(second.report())

    def runs(self) -> list[_Run]:
        return [self.current(server) for server in self.servers]

    def report(self, name: str) -> HostReport:
        servers = {
            server: _with_next_step(self.current(server).report(), f" --host {name} --server {server}")
            for server in self.servers
        }
        return HostReport(servers, self.error and _with_next_step(self.error, f" --host {name}"))


class _Run:
    """One run on one server, as far as it was heard of."""

    def __init__(self, identity: str | None) -> None:
        self.identity = identity
        self.verb: str | None = None
        self.release: str | None = None
        self.phase: str | None = None
        self.phase_of_stage: str | None = None
        self.stages: list[Stage] = []
        self.failures: list[Failure] = []
        self.warnings: list[Warned] = []
        self.began: float | None = None
        self.ended: float | None = None
        self.end: ServerReport | None = None
        self.error: ServerReport | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Take any event of the run."""
        stamp = number(event.get("t"))
        self.began = stamp if self.began is None else self.began
        self.ended = stamp if event.get("event") == events.END else self.ended
        _TAKE[event["event"]](self, event)

    def take_run(self, event: Mapping[str, Any]) -> None:
        self.verb = text(event.get("verb")) or self.verb
        self.release = text(event.get("release")) or self.release

    def take_stage_start(self, event: Mapping[str, Any]) -> None:
        self.phase_of_stage = None  # a rollback has phases, too
        self.stages.append(Stage(text(event.get("stage")) or "?"))

    def take_stage_end(self, event: Mapping[str, Any]) -> None:
        ended = Stage(
            name=text(event.get("stage")) or "?",
            seconds=number(event.get("seconds")),
            ok=event.get("ok") is not False,
            skipped=text(event.get("skipped")),
            message=text(event.get("message")) or "",
        )
        for index in reversed(range(len(self.stages))):
            if self.stages[index].name == ended.name and self.stages[index].ok is None:
                self.stages[index] = ended
                return
        self.stages.append(ended)

    def take_progress(self, event: Mapping[str, Any]) -> None:
        self.phase = text(event.get("phase")) or self.phase
        self.phase_of_stage = text(event.get("phase")) or self.phase_of_stage

    def take_warning(self, event: Mapping[str, Any]) -> None:
        warned = Warned(text(event.get("stage")), text(event.get("message")) or "", text(event.get("hint")) or "")
        if (warned.message, warned.hint) not in {(known.message, known.hint) for known in self.warnings}:
            self.warnings.append(warned)

    def take_failure(self, event: Mapping[str, Any]) -> None:
        stage = text(event.get("stage"))
        self.failures.append(
            Failure(
                stage=stage,
                phase=text(event.get("phase")) or (self.phase_of_stage if stage == self._stage() else None),
                message=text(event.get("message")) or "",
                cause=text(event.get("cause")),
                evidence=text(event.get("evidence")) or "",
                hint=text(event.get("hint")) or "",
                log_tail=_tail(event.get("log_tail")),
            )
        )

    def take_end(self, event: Mapping[str, Any]) -> None:
        outcome, exit_code = _ending(event)
        first = self.failures[0] if self.failures else None
        durations = event.get("durations")
        self.error = None  # contact was lost and found again: the node has the last word
        self.end = ServerReport(
            outcome=outcome,
            exit_code=exit_code,
            stage=text(event.get("stage")) or (first.stage if first else self._stage()),
            phase=text(event.get("phase")) or (first.phase if first else self.phase),
            cause=text(event.get("cause")) or (first.cause if first else None),
            evidence=text(event.get("evidence")) or (first.evidence if first else ""),
            message=text(event.get("message")) or (first.message if first else ""),
            hint=text(event.get("hint")) or (first.hint if first else ""),
            release=text(event.get("release")) or self.release,
            serving=_serving(event.get("serving")),
            serving_text=text(event.get("serving_unknown")) or "",
            durations=_durations(durations) if isinstance(durations, Mapping) else self._durations(),
            ready_seconds=number(event.get("ready_seconds")),
            downtime_seconds=number(event.get("downtime_seconds")),
            log_tail=_tail(event.get("log_tail")) or next((f.log_tail for f in self.failures if f.log_tail), ()),
        )

    def take_error(self, fact: ServerReport) -> None:
        if self.end is None:
            self.error = fact
        elif fact.exit_code != Exit.DETACHED:
            self.degrade(None, fact.message, fact.evidence, fact.hint)

    def degrade(self, cause: str | None, message: str, evidence: str, hint: str) -> None:
        before = self.report()
        if before.exit_code == Exit.OK:
            self.end = self._judged_anew(before, Exit.DEGRADED, cause, message, evidence, hint)

    def lose(self, code: Exit, cause: str, message: str, evidence: str, hint: str) -> None:
        before = self.report()
        if before.exit_code in (Exit.OK, Exit.DEGRADED):
            found = self._judged_anew(before, code, cause, message, evidence, hint)
            self.end = dataclasses.replace(found, outcome="failed", serving=None)

    def _judged_anew(
        self, before: ServerReport, code: Exit, cause: str | None, message: str, evidence: str, hint: str
    ) -> ServerReport:
        """What the last stage found after the run had ended well."""
        return dataclasses.replace(
            before,
            exit_code=int(code),
            stage=self._stage(),
            phase=None,
            cause=cause,
            message=message,
            evidence=evidence,
            hint=hint,
        )

    def take_way_back(self, second: ServerReport) -> None:
        """Take what came of putting the release before back, after this run had ended well and its checks had not."""
        first = self.report()
        is_back = second.exit_code in (Exit.OK, Exit.DEGRADED)
        self.ended = second.ended or self.ended
        spent = round(sum(second.durations.values()), 3)
        self.stages.append(Stage("rollback", spent, is_back, message=second.message))
        self.failures += second.failures
        self.warnings += second.warnings
        if is_back:
            old = second.serving.release if second.serving else None
            end = dataclasses.replace(
                first,
                outcome="rolled_back",
                exit_code=int(Exit.ROLLED_BACK),
                message=f"{first.message}; rolled back: release {old or '?'} is serving again",
            )
        elif second.exit_code == Exit.ROLLED_BACK:  # the one that went before would not start: this one was put back
            end = dataclasses.replace(
                first,
                outcome="deployed",
                exit_code=int(Exit.DEGRADED),
                message=f"{first.message}; the release before did not come back: {second.message}",
            )
        elif second.outcome == "refused" or second.exit_code == Exit.LOCKED:
            self.stay(second)
            return
        else:
            end = dataclasses.replace(
                first,
                outcome=second.outcome,
                exit_code=second.exit_code,
                message=f"{first.message}; rolling back failed: {second.message}",
                log_tail=second.log_tail,
            )
        known = [dark for dark in (first.downtime_seconds, second.downtime_seconds) if dark is not None]
        self.end = dataclasses.replace(
            end,
            hint=second.hint,
            serving=second.serving,
            serving_text=second.serving_text,
            downtime_seconds=round(sum(known), 3) if known else None,
        )

    def stay(self, refusal: ServerReport) -> None:
        """Keep the result of the checks, and say why the release before was not put back."""
        first = self.report()
        message = f"{first.message}; not rolled back: {refusal.message}"
        self.end = dataclasses.replace(first, message=message, hint=refusal.hint or first.hint)

    def report(self) -> ServerReport:
        known = self.end or self._unended()
        return dataclasses.replace(
            known,
            durations={**known.durations, **self._after_the_end()},
            began=self.began,
            ended=self.ended,
            run=self.identity,
            verb=self.verb,
            stages=tuple(self.stages),
            failures=tuple(self.failures),
            warnings=tuple(self.warnings),
        )

    def _after_the_end(self) -> dict[str, float]:
        """Seconds of the stages that the control side adds behind the node's own."""
        return {name: taken for name, taken in self._durations().items() if name not in events.STAGES}

    def _unended(self) -> ServerReport:
        known = self.error or ServerReport(
            outcome="detached",
            exit_code=int(Exit.DETACHED),
            message="no end of the run was seen; it goes on on the node",
        )
        if self._is_left_alone(known.exit_code):
            known = dataclasses.replace(known, outcome="detached", exit_code=int(Exit.DETACHED))
        first = self.failures[0] if self.failures else None
        return dataclasses.replace(
            known,
            stage=self._stage(),
            phase=self.phase,
            cause=known.cause or (first.cause if first else None),
            evidence=known.evidence or (first.evidence if first else ""),
            release=self.release,
            durations=self._durations(),
            log_tail=first.log_tail if first else (),
        )

    def _is_left_alone(self, code: int) -> bool:
        """True when an error that promises "nothing was touched" met a run that goes on without us."""
        if code in (Exit.INTERRUPTED, Exit.TERMINATED):
            return any(stage.name not in _TOUCHES_NOTHING for stage in self.stages)
        return code == Exit.UNREACHABLE and bool(self.stages or self.verb)

    def _stage(self) -> str | None:
        return self.stages[-1].name if self.stages else None

    def _durations(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for stage in self.stages:
            if stage.seconds is not None:
                total[stage.name] = round(total.get(stage.name, 0.0) + stage.seconds, 3)
        return total


# Answers of reading verbs, beats and logs are no runs: they say nothing about how a run ended.
_TAKE = {
    events.RUN: _Run.take_run,
    events.STAGE_START: _Run.take_stage_start,
    events.STAGE_END: _Run.take_stage_end,
    events.PROGRESS: _Run.take_progress,
    events.WARNING: _Run.take_warning,
    events.FAILURE: _Run.take_failure,
    events.END: _Run.take_end,
}


def _ending(event: Mapping[str, Any]) -> tuple[str, int]:
    """Outcome and exit code of an end event. A code that the shell would wrap (256 reads as success) is no code."""
    outcome = text(event.get("outcome"))
    code = whole(event.get("exit_code"))
    if code is None or not 0 <= code <= 255:
        code = int(_EXIT_OF_OUTCOME.get(outcome or "", Exit.INTERNAL))
    return outcome or _outcome_of(code), code


def _outcome_of(code: int) -> str:
    return meaning_of(code).outcome


def _with_next_step(part: ServerReport, on: str) -> ServerReport:
    step = meaning_of(part.exit_code).next_step
    if part.exit_code == Exit.INTERNAL and part.cause is None:  # nobody else is to blame
        step = f"this is a defect of lamplighter; {step}"
    return part if part.hint else dataclasses.replace(part, hint=step.format(on=on))


def _from_error(error: LamplighterError) -> ServerReport:
    what = f"{error.origin}: {error.what}" if error.origin else error.what
    return ServerReport(
        outcome=_outcome_of(error.exit_code),
        exit_code=int(error.exit_code),
        message=what,
        evidence=error.why,
        hint=error.next_step,
        serving_text=error.serving,
    )


def _serving(value: object) -> Serving | None:
    if not isinstance(value, Mapping):
        return None
    return Serving(
        release=text(value.get("release")),
        pid=whole(value.get("pid")),
        port=whole(value.get("port")),
        model=text(value.get("model")),
        since=number(value.get("since")),
    )


def _durations(value: Mapping[Any, Any]) -> dict[str, float]:
    found = {str(stage): number(seconds) for stage, seconds in value.items()}
    return {stage: seconds for stage, seconds in found.items() if seconds is not None}


def _tail(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.splitlines()
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(str(line) for line in value[-LOG_TAIL:])
