"""The environment proof: do the variables reach the server's Python, and the workers that it will spawn?

Runs while the old server still serves. It starts a short-lived Python through the release's own launch script, touches
no GPU and leaves at most the byte code of our own file behind. facts: an export is lost where a server assigns the
variable itself; a venv's own sitecustomize is shadowed on Debian; -I, -E and -S lose ours and are copied to every
worker; an error in a sitecustomize file leaves a running server without its variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import subprocess
import time
from typing import Any, Collection, Mapping, Optional, Sequence

SECRET = "(secret)"  # noqa: S105 - what stands in place of one
RECORDS = "LAMPLIGHTER_RECORDS"

#: Output kept of the probe, bytes: enough for any start-up error.
OUTPUT_LIMIT = 20_000
#: Of an answer, bytes: two environments as JSON; the kernel bounds one to 2 MiB where the stack is 8 MiB.
ANSWER_LIMIT = 24 << 20


@dataclasses.dataclass(frozen=True)
class Difference:
    """``name`` does not arrive as planned. None: not set. ``name`` may be ``sitecustomize``: then these are files."""

    name: str
    expected: Optional[str]
    parent: Optional[str]
    child: Optional[str]
    reason: str


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the server's interpreter (parent) and its spawn child saw; a secret's value is never in here.

    ``sitecustomize`` is the file that the interpreter really ran, ``candidates`` all that were on its path, in order.
    """

    ok: bool
    parent: dict[str, Optional[str]]
    child: dict[str, Optional[str]]
    differences: tuple[Difference, ...]
    sitecustomize: Optional[str]
    seconds: float
    message: str
    candidates: tuple[str, ...] = ()


def prove_before(
    launch: str,
    python: Sequence[str],
    expected: Mapping[str, str],
    deadline: float,
    *,
    secret_names: Collection[str] = (),
    environ: Optional[Mapping[str, str]] = None,
    scope: str = "server",
) -> Proof:
    """Compare ``expected`` with what arrives in ``python`` (interpreter and flags) under ``launch``, and in its child.

    ``deadline`` is seconds; then the probe's process group is killed. ``environ`` is what the launch will start from,
    ours if None. ``scope`` is the way that our sitecustomize.py is meant to take. Never raises for what the probe does:
    whatever goes wrong is a Proof that is not ok and says why.
    """
    began = time.monotonic()
    launch = os.path.abspath(launch)
    attempt = _run_probe(launch, list(python), sorted(expected), began + deadline, environ)
    judge = _Judge(launch, dict(expected), frozenset(secret_names), attempt, scope, list(python))
    differences = judge.differences()
    failure = judge.failure(python, deadline)
    return Proof(
        ok=not failure and not differences,
        parent=judge.shown(attempt.parent),
        child=judge.shown(attempt.child),
        differences=differences,
        sitecustomize=attempt.parent.get("sitecustomize"),
        seconds=round(time.monotonic() - began, 3),
        message=failure or judge.summary(differences),
        candidates=tuple(attempt.parent.get("candidates", ())),
    )


# What the server's interpreter runs, and its child after it. Any Python that can run a server must take it: old syntax.
# What arrived is read before anything else is imported.
PROBE = r"""
import os, sys
def look(names):
    live = os.environb
    def text(value):
        return None if value is None else value.decode("utf-8", "surrogateescape")
    found, pth = [], []
    for entry in sys.path:
        for tail in ("sitecustomize/__init__.py", "sitecustomize.py", "sitecustomize.pyc"):
            if entry and os.path.isfile(os.path.join(entry, tail)):
                found.append(os.path.join(entry, tail))
        if os.path.basename(entry) in ("site-packages", "dist-packages") and os.path.isdir(entry):
            pth += [os.path.join(entry, each) for each in sorted(os.listdir(entry)) if each.endswith(".pth")]
    def file_of(module):
        return getattr(sys.modules.get(module), "__file__", None)
    flags = [("-I", "isolated"), ("-E", "ignore_environment"), ("-S", "no_site")]
    return {
        "variables": {name: text(live.get(name.encode("utf-8", "surrogateescape"))) for name in names},
        "sitecustomize": file_of("sitecustomize"),
        "usercustomize": file_of("usercustomize"),
        "ran": sorted(getattr(sys, "_lamplighter_sitecustomize", ())),
        "flags": [flag for flag, name in flags if getattr(sys.flags, name, 0)],
        "path": text(live.get(b"PYTHONPATH")),
        "candidates": found,
        "pth": pth,
    }
"""

# The child is a real one of multiprocessing: `exec` is a function that spawn can hand over without a file to import.
PROBE_PARENT = r"""
def main():
    names, mark = sys.argv[2:], ""
    channel, inode = [int(number) for number in sys.argv[1].split(":")[:2]]
    seen = look(names)
    try:
        is_there = os.fstat(channel).st_ino == inode
    except OSError:
        is_there = False
    if not is_there:
        channel, mark = 1, "\n" + sys.argv[1]
    import json
    def tell(who, said):
        line = (mark + json.dumps({who: said}) + "\n").encode("ascii")
        while line:
            line = line[os.write(channel, line):]
    tell("parent", seen)
    import multiprocessing
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(False)
    child = spawn.Process(target=exec, args=(source + "\nsender.send(look(names))", {"sender": sender, "names": names}))
    child.start()
    sender.close()
    try:
        seen = receiver.recv()
    except EOFError:
        child.join()
        tell("died", child.exitcode)
    else:
        tell("child", seen)
        child.join()
main()
"""


@dataclasses.dataclass
class _Attempt:
    """What came of one run of the probe: reports of parent and child (empty if none), exit statuses, all output."""

    parent: dict[str, Any] = dataclasses.field(default_factory=dict)
    child: dict[str, Any] = dataclasses.field(default_factory=dict)
    died: Optional[int] = None
    status: Optional[int] = None
    timed_out: bool = False
    output: str = ""

    @property
    def complete(self) -> bool:
        return bool(self.parent and self.child)


def _run_probe(
    launch: str, python: list[str], names: list[str], until: float, environ: Optional[Mapping[str, str]]
) -> _Attempt:
    # The answer comes through a pipe of its own: what start-up files print on stdout cannot spoil it, and no value of
    # a secret gets near a disk. Where that is closed (sudo does), on stdout after a word that nobody else knows.
    answer, channel = os.pipe()
    word = f"{channel}:{os.fstat(channel).st_ino}:{os.urandom(8).hex()}:"
    source = f"source = {PROBE!r}\nexec(source)\n{PROBE_PARENT}"
    environment = {
        name: value for name, value in (os.environ if environ is None else environ).items() if name != RECORDS
    }
    try:
        process = subprocess.Popen(
            [launch, *python, "-c", source, word, *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(channel,),
            cwd=os.path.dirname(launch),  # `-c` puts it on sys.path: a release holds no module
            env=environment,
            start_new_session=True,
        )
        return _listen(process, answer, until, word.encode("ascii"))
    except OSError as error:
        return _Attempt(status=126, output=f"{launch}: {error.strerror}")
    finally:
        os.close(answer)
        os.close(channel)


def _listen(process: subprocess.Popen[bytes], answer: int, until: float, word: bytes) -> _Attempt:
    """Read both pipes until the answer is complete, the probe has ended or time is up; then end its group."""
    attempt, replies, output = _Attempt(), bytearray(), bytearray()
    assert process.stdout is not None
    noise = process.stdout.fileno()
    with selectors.DefaultSelector() as selector, process.stdout:
        for fd, buffer in ((answer, replies), (noise, output)):
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, buffer)
        while not attempt.complete and not attempt.timed_out:
            ended = _has_ended(process.pid)
            for key, _ in selector.select(0 if ended else min(0.02, max(0.0, until - time.monotonic()))):
                _drain(key.fd, key.data, selector)
            _parse(replies, attempt)
            _parse(_take_answers(output, word), attempt)
            if ended:
                break
            attempt.timed_out = time.monotonic() >= until
        attempt.status = _end_group(process, attempt)
        _drain(noise, output)
    _take_answers(output, word)
    output = output.partition(b"\n" + word)[0]  # a cut one holds secrets, too
    attempt.output = bytes(output[:OUTPUT_LIMIT]).decode("utf-8", "replace")
    return attempt


def _has_ended(pid: int) -> bool:
    """Say whether ``pid`` has ended, and leave it a zombie: so its group id cannot pass to someone else."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(process: subprocess.Popen[bytes], attempt: _Attempt) -> Optional[int]:
    """End what is left of the probe's group; return the probe's own exit status, None if it was we who ended it."""
    ended = _has_ended(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    return status if ended else None


def _drain(fd: int, buffer: bytearray, selector: Optional[selectors.BaseSelector] = None) -> None:
    for _ in range(256):  # who writes all the time must not keep us from the clock
        try:
            piece = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not piece:
            if selector is not None:
                selector.unregister(fd)
            return
        if len(buffer) < ANSWER_LIMIT:
            buffer += piece


def _take_answers(output: bytearray, word: bytes) -> bytearray:
    """Take the lines that begin with ``word``, whole ones, out of ``output``: they hold values of secrets."""
    answers = bytearray()
    while True:
        at = output.find(b"\n" + word)
        end = output.find(b"\n", at + 1)
        if at < 0 or end < 0:
            return answers
        answers += output[at + 1 + len(word) : end + 1]
        del output[at : end + 1]


def _parse(replies: bytearray, attempt: _Attempt) -> None:
    """Take over the whole lines of ``replies`` and remove them from it."""
    whole = replies.rfind(b"\n") + 1
    lines = bytes(replies[:whole]).splitlines()
    del replies[:whole]
    for line in lines:
        said = json.loads(line)
        attempt.parent = said.get("parent", attempt.parent)
        attempt.child = said.get("child", attempt.child)
        attempt.died = said.get("died", attempt.died)


class _Judge:
    """Turns what was seen into differences, each with its reason, and one message."""

    def __init__(
        self,
        launch: str,
        expected: dict[str, str],
        secrets: frozenset[str],
        attempt: _Attempt,
        scope: str,
        python: list[str],
    ) -> None:
        self._release = os.path.dirname(launch)
        self._file = os.path.join(self._release, "pysite", "sitecustomize.py")
        self._expected = expected
        self._secrets = secrets
        self._attempt = attempt
        self._scope = scope
        self._python = python
        if "PYTHONPATH" in expected and scope == "server":  # the launch script puts ours in front of it
            expected["PYTHONPATH"] = ":".join(filter(None, [os.path.dirname(self._file), expected["PYTHONPATH"]]))

    def shown(self, seen: Mapping[str, Any]) -> dict[str, Optional[str]]:
        """Return the variables that one process saw, secrets masked; empty if it did not answer."""
        return {name: self._mask(name, value) for name, value in seen.get("variables", {}).items()}

    def differences(self) -> tuple[Difference, ...]:
        parent, child = self._attempt.parent, self._attempt.child
        if not parent:
            return ()
        found = []
        files = [seen.get("sitecustomize") for seen in (parent, child or parent)]
        reason = next((self._why_not_ours(seen) for seen in (parent, child) if seen and not self._is_ours(seen)), "")
        if reason:
            found.append(Difference("sitecustomize", self._file, files[0], files[1], reason))
        for name, value in sorted(self._expected.items()):
            seen = [each["variables"].get(name) for each in (parent, child) if each]
            if any(each != value for each in seen):
                found.append(
                    Difference(
                        name,
                        self._mask(name, value),
                        self._mask(name, seen[0]),
                        self._mask(name, seen[-1]) if child else None,
                        reason or self._why_other(name),
                    )
                )
        return tuple(found)

    def failure(self, python: Sequence[str], deadline: float) -> str:
        """Return why the probe itself did not come to its end, empty if it did."""
        attempt = self._attempt
        if attempt.complete:
            return ""
        words = self._last_words()
        if attempt.timed_out:
            stage = "its spawn child gave no answer" if attempt.parent else "no answer"
            return f"{python[0]}: {stage} within {deadline:g} s; its process group was killed" + (
                words and f": {words}"
            )
        if attempt.parent:
            how = "" if attempt.died is None else f" (exit status {attempt.died})"
            return f"{python[0]} started, but its spawn child did not{how}" + (words and f": {words}")
        if attempt.status in (126, 127):
            return f"the interpreter {python[0]} cannot be started: {words or f'exit status {attempt.status}'}"
        if "init_import_s" in attempt.output:  # init_import_site; Python 3.8: init_import_size
            return f"{python[0]} died in a start-up file, and so would every worker: {words}"
        status = attempt.status or 0
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{python[0]} {how} before it could look at its environment" + (words and f": {words}")

    def summary(self, differences: Sequence[Difference]) -> str:
        if not differences:
            return f"{len(self._expected)} variables arrive in the server's Python and in its spawn child"
        return "; ".join(_sentence(each) for each in differences)

    def _is_ours(self, seen: Mapping[str, Any]) -> bool:
        # Not the module's file: another one may be loaded that chains to ours.
        return self._scope == "none" or os.path.realpath(self._file) in seen["ran"]

    def _why_not_ours(self, seen: Mapping[str, Any]) -> str:
        error = self._site_error()
        flags = [flag for flag in seen["flags"] if flag != "-E" or "-I" not in seen["flags"]]
        if "-S" in flags or (flags and self._scope == "server"):
            effect = "no start-up file runs" if "-S" in flags else "PYTHONPATH is ignored"
            return f"Python runs with {' '.join(flags)}: {effect}, in all workers too"
        if self._scope != "server":
            instead = f", {seen['sitecustomize']} runs" if seen.get("sitecustomize") else ""
            return f"the start-up file of scope {self._scope} did not run it{instead}" + (error and f": {error}")
        if seen["path"] is None and os.path.basename(self._python[0]) == "sudo":
            return "dropped by sudo: it keeps neither PYTHONPATH nor, without --preserve-env, the other variables"
        if seen.get("sitecustomize"):
            return f"shadowed by {seen['sitecustomize']}"
        if error:
            return f"{next(iter(seen['candidates']), 'sitecustomize')} failed: {error}"
        if not os.path.isfile(self._file):
            return f"{self._file} is missing"
        if not os.access(self._file, os.R_OK):
            return f"{self._file} cannot be read"
        return f"not loaded; PYTHONPATH is {seen['path']!r}"

    def _why_other(self, name: str) -> str:
        """Find who changed a variable although our file ran: the start-up files that write its name."""
        parent = self._attempt.parent
        own = os.path.realpath(self._file)
        files = [os.path.join(self._release, "env"), *parent["candidates"], parent["usercustomize"], *parent["pth"]]
        suspects = [file for file in files if file and os.path.realpath(file) != own and _mentions(file, name)]
        if suspects:
            return f"overwritten: {' and '.join(suspects)} mentions it"
        error = self._site_error()
        if error:
            return f"a chained sitecustomize failed: {error}"
        if name in parent["variables"] and parent["variables"][name] is None:
            return "not set by the launch script and its env file, or removed by a start-up file"
        return "overwritten by another start-up file (.pth, sitecustomize, usercustomize)"

    def _site_error(self) -> str:
        """Return the text of an error in sitecustomize, as Python or our own file printed it; empty if none."""
        lines = self._scrubbed().splitlines()
        for number, line in enumerate(lines):
            if line.startswith("Error in sitecustomize"):
                return lines[number + 1].strip() if number + 1 < len(lines) else line
            if line.startswith("lamplighter sitecustomize: "):
                return line.split(": ", 1)[1]
        return ""

    def _last_words(self) -> str:
        """Return what tells most of the probe's output: the last exception, else the last line that is not empty."""
        lines = [line.strip() for line in self._scrubbed().splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"\w*(Error|Exception|Exit|Interrupt)\b", line)]
        return (errors or lines or [""])[-1]

    def _scrubbed(self) -> str:
        text = self._attempt.output
        for name in self._secrets:
            value = self._expected.get(name, "")
            if len(value) >= 4:
                text = text.replace(value, SECRET)
        return text

    def _mask(self, name: str, value: Optional[str]) -> Optional[str]:
        if value is None or name not in self._secrets:
            return value
        return SECRET if value == self._expected[name] else f"{SECRET[:-1]}, another one)"


def _mentions(file: str, name: str) -> bool:
    """Say whether a start-up file holds the word ``name``. A .pth file runs only its lines that begin with import."""
    try:
        with open(file, encoding="utf-8", errors="replace") as source:
            text = source.read(1_000_000)
    except OSError:
        return False
    if file.endswith(".pth"):
        text = "\n".join(line for line in text.splitlines() if line.startswith(("import ", "import\t")))
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", text) is not None


def _sentence(difference: Difference) -> str:
    def said(value: Optional[str]) -> str:
        return "not set" if value is None else value if value.startswith(SECRET[:-1]) else repr(value)

    if difference.name == "sitecustomize":
        return f"our sitecustomize.py does not run: {difference.reason}"
    seen = f"{said(difference.parent)} in the server's Python and {said(difference.child)} in its spawn child"
    if difference.parent == difference.child:
        seen = said(difference.parent)
    return f"{difference.name} should be {said(difference.expected)}, is {seen} ({difference.reason})"
