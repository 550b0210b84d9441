"""The stage ``prestart``: what the new server needs and no GPU is done while the old one serves.

The engine's own parser takes the words or refuses them; the launcher imports, and waits at its gate; the weights are
read into the page cache: all at once, since nobody is waiting yet. Only the parser can refuse. Where the rest cannot be
done the journal says why, and the server is started plainly.
"""

from __future__ import annotations

import os
import time
from typing import Optional, Union

from lamplighter.node.events import Exit
from lamplighter.node.gpu import gpus
from lamplighter.node.health import census
from lamplighter.node.keeper import launcher, ownership
from lamplighter.node.keeper.early import Waiting
from lamplighter.node.layout import LaunchFiles
from lamplighter.node.plan import Plan
from lamplighter.node.stages import environment, swap
from lamplighter.node.stages.values import Prestarted, Staged
from lamplighter.node.start import ground, weights, words
from lamplighter.node.system import memory
from lamplighter.node.worker import Run, Skipped, StageFailure

POLL_SECONDS = 0.05
#: Between two looks at what it takes to wait: memory.
LOOK_SECONDS = 0.5
TELL_SECONDS = 2.0
#: A node with less than this is short of memory: what waits is given up for what serves.
LEAST_MEMORY = 512 << 20
#: Scopes whose sitecustomize.py runs once the whole path of its Python is known, as an import needs it.
SCOPES = ("server", "interpreter")


def prepare(run: Run, staged: Staged, launch: LaunchFiles) -> Union[Skipped, Prestarted]:
    """Do what can be done before the stop; return what is staged, with the launcher that waits, if one does.

    Raises StageFailure where the engine's parser refuses the words of the launch; nothing is left behind then.
    """
    claims = census.find_claims(staged.plan, run.home, staged.uuids, run.request["host"])
    if not any(claim.kind in (ownership.OURS, ownership.STALE) for claim in claims):
        return Skipped("nothing serves that could be spared the wait")
    work = _Work(run, staged)
    try:
        work.begin(launch)
        work.finish()
    except BaseException:
        work.dismiss()
        raise
    finally:
        work.close()
    return Prestarted(staged.plan, staged.uuids, staged.release, work.waiting)


class _Work:
    """The three at work, each None where it is not, or is over."""

    def __init__(self, run: Run, staged: Staged) -> None:
        self.run = run
        self.staged = staged
        self.began = time.monotonic()
        self.python = environment.known_interpreter(staged)
        self.parser: Optional[words.Parser] = None
        self.waiting: Optional[Waiting] = None
        self.ahead: Optional[weights.ReadAhead] = None
        self._is_there = False
        self._told_at = self._looked_at = 0.0

    @property
    def plan(self) -> Plan:
        return self.staged.plan

    def begin(self, launch: LaunchFiles) -> None:
        self._ask_parser()
        why = self._start_early(launch)
        if why:
            self.run.progress(f"the launcher is started after the stop: {why}")
        self._read_ahead()

    def finish(self) -> None:
        """Wait until each has ended, or waits at the gate."""
        while True:
            self.run.heed()
            is_busy = [self._watch_parser(), self._watch_launcher(), self._watch_ahead()]
            if not any(is_busy):
                return
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        for each in (self.parser, self.ahead):
            if each is not None:
                each.close()

    def dismiss(self) -> None:
        if self.waiting is not None:
            self.waiting.dismiss(self.run.progress)
            self.waiting = None

    # -- the words

    def _ask_parser(self) -> None:
        plan = self.plan
        if not plan.engine.get("parser") or plan.parser == "off":
            return
        if self.python is None:
            self.run.progress(
                "the words are not parsed before the stop: the command line does not tell which Python runs"
            )
            return
        argv = words.words_of(plan.argv, plan.argv_secrets)
        script, bare = self.staged.release.launch_script, launcher.bare_environment()
        try:
            self.parser = words.Parser(plan.engine, [script, *self.python], argv, bare, os.path.dirname(script))
            self.run.progress(f"{plan.engine['name']}'s own parser reads the words")
        except OSError as error:
            self.run.progress(f"the words are not parsed before the stop: {error}")

    def _watch_parser(self) -> bool:
        verdict = self.parser.poll() if self.parser is not None else None
        if self.parser is None or verdict is None:
            return self.parser is not None
        self.parser.close()
        self.parser = None
        if verdict.refusal is not None:
            found = words.refusal(verdict, self.plan)
            raise StageFailure(
                Exit.REFUSED,
                found.message,
                cause=found.id,
                evidence=found.evidence,
                hint=found.hint,
                log_tail=list(verdict.tail),
            )
        if verdict.unsure:
            self.run.progress(
                f"{self.plan.engine['name']}'s own parser cannot tell whether it takes the words: {verdict.unsure}"
            )
        else:
            self.run.progress(f"{self.plan.engine['name']}'s own parser takes the words, in {verdict.seconds:.1f} s")
        return False

    # -- the launcher

    def _start_early(self, launch: LaunchFiles) -> str:
        """Start the launcher; return why that cannot be, or ""."""
        plan, rule = self.plan, self.plan.engine.get("prestart")
        if plan.prestart == "off":
            return f"servers.{plan.name}.prestart is off"
        if not rule:
            return f"roles/{plan.engine['name']} has no prestart"
        if plan.sitecustomize.scope not in SCOPES:
            return f"with sitecustomize.scope {plan.sitecustomize.scope} nothing would wait in it"
        if self.python is None and not rule["behind_shell"]:
            return "the command line does not tell which Python runs"
        wanted = (rule["memory_mib"] << 20) + weights.SPARE_BYTES
        available = memory.available_bytes()
        if available is None or available < wanted:
            return f"the node has {(available or 0) >> 20} MiB of memory to spare, and {wanted >> 20} are wanted for it"
        order = swap.order_of(self.run, self.staged, launch)
        try:
            self.waiting = Waiting(plan.launcher, order, self.run.home, rule["modules"])
        except (launcher.LaunchFailed, OSError) as error:
            return f"the launcher failed: {error}"
        packages = ", ".join(dict.fromkeys(module.partition(".")[0] for module in rule["modules"]))
        self.run.progress(
            f"imports: the new launcher (pid {self.waiting.pid}) loads {packages}; the old server serves on"
        )
        return ""

    def _watch_launcher(self) -> bool:
        if self.waiting is None:
            return False
        missing = self.waiting.reached() if not self._is_there else []
        why = self._why_not(self.waiting)
        if why:
            swap.give_up(self.run, self.waiting, why)
            self.waiting = None
            return False
        if missing is None:
            return True
        if not self._is_there:
            self._is_there = True
            spent = time.monotonic() - self.began
            self.run.progress(
                f"the launcher waits at its gate, in {spent:.1f} s: pid {self.waiting.pid}", pids=[self.waiting.pid]
            )
            for each in missing:
                self.run.progress(f"it could not import {each}")
        return False

    def _why_not(self, waiting: Waiting) -> str:
        trouble = waiting.trouble()
        if trouble:
            return trouble
        limit = self.plan.engine["prestart"]["seconds"]
        if not self._is_there and waiting.reached() is None and time.monotonic() - self.began > limit:
            return f"it had not come to its gate after {limit:.0f} s"
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return ""
        self._looked_at = time.monotonic()
        available = memory.available_bytes()
        if available is not None and available < LEAST_MEMORY:
            return f"the node has only {available >> 20} MiB of memory left"
        return swap.gpu_touched_by(waiting, gpus.take_sample()) if self._is_there and self.plan.uses_gpus else ""

    # -- the weights

    def _read_ahead(self) -> None:
        plan = self.plan
        patterns = (plan.engine.get("needs") or {}).get("weights") or ()
        start = ground.start_of(plan, self.staged.release)
        if plan.prefetch == "off" or not patterns or not start.model.startswith(("/", "~")):
            return
        found = weights.look(start.model, patterns)
        served = self._model_that_serves()
        own = weights.look(served, patterns).cached if served and served != start.model else 0
        room = weights.room_beside(own + found.cached)
        if not found.missing:
            if found.size:
                self.run.progress(f"the page cache has the weights already, {_gib(found.size)}")
            return
        if room < found.missing:
            self.run.progress(f"memory has room for {_gib(room)} of the {_gib(found.missing)} of weights on disk")
        if room:
            self.ahead = weights.ReadAhead(found, room)

    def _model_that_serves(self) -> str:
        current = self.run.home.current_release()
        known = current.read_plan() if current is not None else None
        return known.model if known is not None else ""

    def _watch_ahead(self) -> bool:
        ahead = self.ahead
        if ahead is None:
            return False
        spent = time.monotonic() - self.began
        if ahead.is_at_work and spent < self.plan.timeouts.ready:
            if spent - self._told_at >= TELL_SECONDS:
                self._told_at = spent
                left = ahead.seconds_left
                more = f", {left:.0f} s left" if left is not None else ""
                self.run.progress(f"reading the weights ahead: {_gib(ahead.read)} of {_gib(ahead.wanted)}{more}")
            return True
        ahead.close()
        self.ahead = None
        trouble = f" ({ahead.trouble})" if ahead.trouble else ""
        self.run.progress(f"read {_gib(ahead.read)} of weights into the page cache, in {spent:.1f} s{trouble}")
        return False


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
