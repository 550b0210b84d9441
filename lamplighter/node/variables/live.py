"""The proof in the running server: what does every worker's environment hold now, and what does NCCL say that it uses?

Reads other processes, their records and the log; changes nothing. The best witness of a worker is its live memory; else
the record that our sitecustomize left at its start; else what the kernel kept from its exec. Where none speaks, the
worker is *inconclusive*, never guilty. A secret's value is in nothing that leaves this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import time
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from lamplighter.node.gpu import gpus
from lamplighter.node.keeper import ownership
from lamplighter.node.layout import ReleaseDirectory, read_json
from lamplighter.node.plan import Plan
from lamplighter.node.start import ground, startup
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Process
from lamplighter.node.variables import memory, nccl
from lamplighter.node.variables.before import SECRET
from lamplighter.node.versions import is_version_in

CARRIES, DIFFERS, INCONCLUSIVE = "carries", "differs", "inconclusive"
MEMORY, RECORD, EXEC, NOTHING = "memory", "record", "exec", "nothing"

NCCL_SAYS = "NCCL says that it uses another value"

Version = Callable[[], Optional[str]]

#: A Python that is younger may not have run its start-up files yet.
SETTLED_SECONDS = 5.0

#: The tracker of shared memory: a Python of the server that computes nothing.
_TRACKER = re.compile(r"multiprocessing\.resource_tracker import")


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a release gives to its server. ``managed`` names stand in its sitecustomize.py, and so in the records."""

    values: Mapping[str, str]
    secrets: frozenset[str]
    managed: frozenset[str]
    forced: frozenset[str]
    digest: str

    def shown(self, name: str, value: Optional[str]) -> Optional[str]:
        if value is None or name not in self.secrets:
            return value
        return SECRET if value == self.values[name] else f"{SECRET[:-1]}, another one)"


@dataclasses.dataclass(frozen=True)
class Difference:
    """``name`` in one worker: ``found`` now (None: not set), and by whom it was changed, as far as can be said."""

    pid: int
    title: str
    name: str
    expected: Optional[str]
    found: Optional[str]
    by: str

    def __str__(self) -> str:
        return f"{self.title} (pid {self.pid}): {self.what}: {self.by}"

    @property
    def what(self) -> str:
        def said(value: Optional[str]) -> str:
            return "not set" if value is None else value if value.startswith(SECRET[:-1]) else repr(value)

        return f"{self.name} is {said(self.found)}, not {said(self.expected)}"


@dataclasses.dataclass(frozen=True)
class Worker:
    """One worker's verdict, by which witness; ``proven`` variables, and why the rest of them could not be read."""

    pid: int
    title: str
    verdict: str
    witness: str
    proven: int
    reason: str


@dataclasses.dataclass(frozen=True)
class LiveProof:
    """Delivery: every worker's verdict and every difference. Use: what NCCL said, empty unless asked for.

    ``advice`` is what to do about the differences, empty where there are none.
    """

    workers: Tuple[Worker, ...]
    differences: Tuple[Difference, ...]
    variables: int
    message: str
    use: str = ""
    advice: str = ""

    @property
    def is_proven(self) -> bool:
        return not self.differences and _state(self.workers) == CARRIES

    def to_json(self) -> Dict[str, Any]:
        return {
            "state": DIFFERS if self.differences else _state(self.workers),
            "message": self.message,
            "variables": self.variables,
            "workers": [dataclasses.asdict(worker) for worker in self.workers],
            "differences": [dataclasses.asdict(difference) for difference in self.differences],
            "nccl": self.use,
            "advice": self.advice,
        }


def expected_of(release: ReleaseDirectory) -> Expected:
    """Read from the release itself what its launch gives to the server; secrets and GPUs come from its env file."""
    plan = (release.read_request() or {}).get("server") or {}
    entries = {name: entry for name, entry in (plan.get("env") or {}).items() if name != "PYTHONPATH"}
    words = plan.get("argv_secrets") or {}  # for the command line alone, the launch script takes them away again
    node_side = {name: value for name, value in release.read_environment().items() if name not in words}
    scope = (plan.get("sitecustomize") or {}).get("scope", "server")
    managed = frozenset(entries) if scope != "none" else frozenset()
    return Expected(
        {**{name: entry["value"] for name, entry in entries.items()}, **node_side},
        frozenset(plan.get("secrets") or ()),
        managed - node_side.keys(),
        frozenset(name for name, entry in entries.items() if entry["mode"] == "force") & managed,
        release.digest,
    )


def version_of(plan: Plan, release: ReleaseDirectory) -> Version:
    """Return a way to learn the engine's version; asking its interpreter takes a second, so only who needs it asks.

    It is asked in the environment that ``release`` gives to its server.
    """

    @functools.lru_cache(maxsize=1)
    def ask() -> Optional[str]:
        distribution = plan.engine.get("distribution")
        if plan.engine_version or not distribution:
            return plan.engine_version
        try:
            return ground.installed(ground.start_of(plan, release)).version
        except (startup.NoPython, ground.NoAnswer):
            return None

    return ask


def gpu_holders(uuids: Sequence[str]) -> Set[int]:
    """Return the pids that have memory of the GPUs ``uuids``; where nvidia-smi lists none, who has a device open."""
    if not uuids:
        return set()
    verdict = gpus.judge(gpus.take_sample(), uuids, {}, processes.is_pid_alive)
    return set(verdict.holders) or set(gpus.device_holders().by_pid)


def workers_of(
    members: Sequence[Process], holders: Collection[int], engine: Mapping[str, Any], main: Optional[int] = None
) -> List[Process]:
    """Choose those that must carry the variables: who holds a GPU; where none does, who computes on the CPU.

    ``main`` is the pid of the server's main process: it counts only where there is no other, whatever it is. facts:
    SGLang writes variables in its launcher, after start-up files and before it spawns; the workers' sitecustomize has
    the last word.
    """
    living = [process for process in sorted(members, key=lambda member: member.pid) if not process.is_dead]
    on_gpus = [process for process in living if process.pid in holders]
    on_cpu = [process for process in living if _is_worker(process, engine)]
    alone = [process for process in living if process.pid == main]
    return on_gpus or [process for process in on_cpu if process.pid != main] or on_cpu or alone


def prove_live(
    workers: Sequence[Process],
    expected: Expected,
    records: str,
    engine: Mapping[str, Any],
    version: Version,
    nccl_log: Optional[str] = None,
) -> LiveProof:
    """Compare every worker's environment with what is expected; ``nccl_log`` is a log in which NCCL tells its own."""
    verdicts: List[Worker] = []
    differences: List[Difference] = []
    for process in workers:
        verdict, found = _judge(process, expected, records, engine, version)
        while found and processes.is_alive(process.identity) and processes.age_seconds(process) < SETTLED_SECONDS:
            time.sleep(0.1)  # it has not come to its sitecustomize yet
            verdict, found = _judge(process, expected, records, engine, version)
        if verdict.witness != MEMORY and not processes.is_alive(process.identity):
            continue  # a helper that has ended meanwhile; a worker that has is the readiness check's affair
        verdicts.append(verdict)
        differences += found
    use = ""
    if nccl_log is not None:
        use, disagreeing = _use(workers, expected, nccl_log)
        differences += disagreeing
    message = _message(verdicts, differences, len(expected.values))
    advice = _advice(differences, expected)
    return LiveProof(tuple(verdicts), tuple(differences), len(expected.values), message, use, advice)


def not_proven(workers: Sequence[Process], reason: str) -> LiveProof:
    """Return the proof of nothing: what the workers should carry is not known, for ``reason``."""
    verdicts = [Worker(process.pid, process.title, INCONCLUSIVE, NOTHING, 0, reason) for process in workers]
    return LiveProof(tuple(verdicts), (), 0, reason)


# -------------------------------------------------------------------------------------------------- one worker


@dataclasses.dataclass(frozen=True)
class _Testimony:
    """What a witness says: values it knows for certain (None: not set), names that it found as planned, the rest."""

    witness: str
    values: Mapping[str, Optional[str]]
    as_planned: frozenset[str]
    changed: frozenset[str]
    reason: str


def _judge(
    process: Process, expected: Expected, records: str, engine: Mapping[str, Any], version: Version
) -> Tuple[Worker, List[Difference]]:
    record = _read_record(process, records, expected)
    said = _listen(process, expected, record)
    found = [
        Difference(
            process.pid,
            process.title,
            name,
            expected.shown(name, value),
            expected.shown(name, said.values.get(name)) if name in said.values else "another value",
            _who(name, said, record, engine, version),
        )
        for name, value in sorted(expected.values.items())
        if name in said.changed or (name in said.values and not _agrees(name, value, said.values[name]))
    ]
    wrong = {difference.name for difference in found}
    proven = {name for name in expected.values if name in said.as_planned or name in said.values} - wrong
    missing = sorted(expected.values.keys() - proven - wrong)
    # A record knows what our file manages. What else the launch exports (GPUs, secrets) cannot be lost in between.
    unknown = [name for name in missing if said.witness != RECORD or name in expected.managed]
    reason = f"{', '.join(missing)} not seen: {said.reason}" if missing else ""
    verdict = DIFFERS if found else INCONCLUSIVE if unknown else CARRIES
    return Worker(process.pid, process.title, verdict, said.witness, len(proven), reason), found


def _listen(process: Process, expected: Expected, record: Optional[Dict[str, Any]]) -> _Testimony:
    names = expected.values.keys()
    try:
        live = memory.live_environment(process)
    except memory.Unreadable as error:
        reason = str(error)
    else:
        return _Testimony(MEMORY, {name: live.get(name) for name in names}, frozenset(), frozenset(), "")
    # From exec: a value that is there was given, one that is not may have been wiped by a process title.
    given = processes.environ(process.pid) or {}
    told = {name: given[name] for name in names if name in given}
    if record is not None:
        managed = expected.managed & set(record["names"])
        changed = frozenset(record["differ"]) & managed
        others = {name: value for name, value in told.items() if name not in managed}
        return _Testimony(RECORD, others, managed - changed, changed, reason)
    # Without a record it is not known whether a forced variable was set right after the exec.
    certain: Dict[str, Optional[str]] = {
        name: value
        for name, value in told.items()
        if name not in expected.forced or _agrees(name, expected.values[name], value)
    }
    return _Testimony(EXEC if certain else NOTHING, certain, frozenset(), frozenset(), reason)


def _read_record(process: Process, records: str, expected: Expected) -> Optional[Dict[str, Any]]:
    record = read_json(os.path.join(records, f"{process.pid}.json"))
    if record is None or record.get("start") != process.start or record.get("digest") != expected.digest:
        return None
    return record


def _agrees(name: str, expected: str, found: Optional[str]) -> bool:
    if name == "CUDA_VISIBLE_DEVICES" and expected and found:
        # A server may give each worker some of its GPUs.
        return set(found.split(",")) <= set(expected.split(","))
    return expected == found


def _who(
    name: str, said: _Testimony, record: Optional[Dict[str, Any]], engine: Mapping[str, Any], version: Version
) -> str:
    known = [
        entry["effect"]
        for entry in engine.get("overwrites") or ()
        if entry["name"] == name and is_version_in(version(), entry["versions"])
    ]
    at_start = ""
    if said.witness == MEMORY and record is not None:
        fine = name in record["names"] and name not in record["differ"]
        at_start = "changed by the server after its start" if fine else "already so when the process started"
    if known:
        writes = f"{engine.get('name', 'the engine')} writes it itself ({known[0]})"
        return f"{writes}, {at_start}" if at_start else writes
    return at_start or "changed by the server or by a start-up file"


# ------------------------------------------------------------------------------------------------------- all of them


def _message(workers: Sequence[Worker], differences: Sequence[Difference], variables: int) -> str:
    if not workers:
        return "no worker was found to look at"
    good = [worker for worker in workers if worker.verdict == CARRIES]
    least = min((worker.proven for worker in good), default=variables)
    parts = [f"{len(good)}/{len(workers)} workers carry {least}/{variables} variables"]
    alike: Dict[Tuple[str, str], List[Difference]] = {}
    for difference in differences:
        alike.setdefault((difference.what, difference.by), []).append(difference)
    for (what, by), group in alike.items():
        pids = ", ".join(str(each.pid) for each in group)
        parts.append(str(group[0]) if len(group) == 1 else f"{what}, in {len(group)} workers (pid {pids}): {by}")
    silent: Dict[str, List[str]] = {}
    for worker in workers:
        if worker.verdict == INCONCLUSIVE:
            silent.setdefault(worker.reason, []).append(str(worker.pid))
    parts += [f"pid {', '.join(pids)} inconclusive: {reason}" for reason, pids in silent.items()]
    if good and least < variables:
        parts.append(next(worker.reason for worker in good if worker.proven == least))
    return "; ".join(parts)


def _advice(differences: Sequence[Difference], expected: Expected) -> str:
    by_nccl = {each.name for each in differences if each.by == NCCL_SAYS}
    delivered_wrong = {each.name for each in differences if each.by != NCCL_SAYS}
    forced = delivered_wrong & expected.forced
    plain = (delivered_wrong & expected.managed) - forced
    kinds = (
        (plain, "give {} mode: force, which wins over what a server writes before it starts its workers"),
        (forced, "{} is forced already: the server writes it after that, or forks from where it wrote it"),
        (delivered_wrong - plain - forced, "{} reaches workers by the launch script alone"),
        (by_nccl, "NCCL reads {} in another way than it is written: look for it in the log"),
    )
    parts = [text.format(", ".join(sorted(names))) for names, text in kinds if names]
    return "; ".join([*parts, "drop a variable if the server's own value is right"]) if parts else ""


def _state(workers: Sequence[Worker]) -> str:
    verdicts = {worker.verdict for worker in workers}
    return CARRIES if verdicts == {CARRIES} else INCONCLUSIVE


def _is_worker(process: Process, engine: Mapping[str, Any]) -> bool:
    """Tell a Python that computes (main process, spawned or titled worker) from tools: compilers, shells, trackers."""
    command = " ".join(process.argv)
    if _TRACKER.search(command):
        return False
    look = engine.get("processes") or {}
    if any(re.search(pattern, process.title) or re.search(pattern, process.comm) for pattern in look.get("titles", ())):
        return True
    if ownership.MULTIPROCESSING.search(command) or any(re.search(p, command) for p in look.get("entry_points", ())):
        return True
    program = os.path.basename((process.exe or "").replace(" (deleted)", "") or process.title)
    return re.match(r"(python|pypy)\d*(\.\d+)?t?$", program) is not None


def _use(workers: Sequence[Process], expected: Expected, path: str) -> Tuple[str, List[Difference]]:
    """Compare what NCCL logged with what was delivered; a variable that it has not read yet is no difference."""
    wanted = {
        name: value
        for name, value in expected.values.items()
        if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")
    }
    if not wanted:
        return "no NCCL variable is set, so NCCL has none to confirm", []
    said: Dict[int, Dict[str, str]] = {}
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as log:
        said = nccl.variables(log)
    speaking = [process for process in workers if process.pid in said]
    if not speaking:
        return "NCCL has said nothing about variables in the log: delivery is proven above, use is not", []
    disagreeing = [
        Difference(process.pid, process.title, name, value, said[process.pid][name], NCCL_SAYS)
        for process in speaking
        for name, value in sorted(wanted.items())
        if name in said[process.pid] and not nccl.is_same(value, said[process.pid][name])
    ]
    silent = sorted({name for process in speaking for name in wanted if name not in said[process.pid]})
    read = sorted(wanted.keys() - set(silent))
    parts = [f"NCCL itself names {', '.join(read) or 'none of them'} in {len(speaking)} workers"]
    if silent:
        parts.append(f"not in all: {', '.join(silent)} (with one rank NCCL_PROTO and NCCL_ALGO are not read)")
    return "; ".join(parts), disagreeing
