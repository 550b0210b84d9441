"""The watch over a start, on real processes that do as they are told: ready, dead, failed, hung, somebody else's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lamplighter.node.keeper.launcher import Launched
from lamplighter.node.layout import LaunchFiles, ReleaseDirectory
from lamplighter.node.log.file import LogFile
from lamplighter.node.plan import Plan
from lamplighter.node.start import readiness
from lamplighter.node.start.probe import Answer, Port, find_api_key
from lamplighter.node.start.readiness import NotReady, Ready
from lamplighter.node.system import processes
from tests.node.living import Living, process_of, until

PROJECT = Path(__file__).resolve().parents[2]

#: Runs each line of its stdin. `serve` opens the port; `answers` says how it answers.
SERVER = r"""
import http.server, json, os, signal, socket, subprocess, sys, threading, time
answers = {"model": "m", "generate": 200, "health": 200, "slow": 0, "key": None, "title": "x", "say": {}}
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def refused(self):
        wanted = answers["key"]
        return wanted and self.headers.get("Authorization") != f"Bearer {wanted}"
    def do_GET(self):
        if self.path == "/health": return self.reply(answers["health"], {})
        if self.refused(): return self.reply(401, {})
        self.reply(200, {"data": [{"id": answers["model"]}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        while answers["generate"] is None: time.sleep(0.02)
        if self.refused(): return self.reply(401, {})
        said = {"choices": [{"text": "hi"}], "usage": {"completion_tokens": 1}, "created": time.time()}
        self.reply(answers["generate"], {**said, **answers["say"]})
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET
def serve(port, host="127.0.0.1", certificate=None):
    if ":" in host: Server.address_family = socket.AF_INET6
    server = Server((host, port), Handler)
    if certificate:
        import ssl
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); context.load_cert_chain(certificate)
        Server.handle_error = lambda *_: None
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    say(f"serving {port}")
def say(text): print(text, flush=True)
def child(title):
    return subprocess.Popen([title, "600"], executable="/bin/sleep")
print("begun", flush=True)
for line in sys.stdin:
    exec(line)
time.sleep(600)
"""

ENGINE: dict[str, Any] = {
    "faults": yaml.safe_load((PROJECT / "roles/node/faults.yml").read_text()),
    "name": "zebra",
    "settle": 0.6,
    "api_key_flag": "--api-key",
    "api_key_env": "ZEBRA_KEY",
    "identity": {"source": "models", "path": "/v1/models", "field": "data.*.id", "equals": ["{served_name}"]},
    "generate": {"kind": "completion", "path": "/v1/completions", "body": {"prompt": "x"}},
    "processes": {"titles": [], "entry_points": [], "needed_workers": ["^zebra::worker"]},
    "stall": {"boot": 600, "weights": 600},
    "phases": [
        {"name": "weights", "patterns": ["loading stripes"]},
        {"name": "ready", "patterns": ["ready to gallop"]},
    ],
    "percent": [r"(?P<percent>\d+)% of stripes"],
    "rank": [r"rank (?P<rank>\d+):"],
    "failures": [
        {"id": "gpu_oom", "patterns": ["out of stripes"], "hint": "lower servers.{server}.args.stripes"},
        {"id": "import_error", "patterns": ["no such module"], "survivable": True, "hint": "install it"},
    ],
    "wrappers": ["a child failed"],
    "idle": ["still waiting"],
    "warnings": [{"id": "fallback", "patterns": ["falling back to"], "hint": "see servers.{server}.args"}],
    "measures": {"kv_tokens": [r"pool of (?P<value>[\d,]+) tokens"]},
}


class Start:
    """A server under watch; ``do`` lets it do something, ``verdict`` waits for what the watch says."""

    def __init__(self, living: Living, directory: Path) -> None:
        self.port = living.port()
        self.launch = LaunchFiles(str(directory), "new")
        self.told: list[dict[str, Any]] = []
        self.warned: list[tuple[str, str]] = []
        self._living = living
        self.log = Path(self.launch.log)
        with self.log.open("wb") as output:
            self.child = living.start(
                [sys.executable, "-c", SERVER],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert until(lambda: b"begun" in self.log.read_bytes())
        self.main = process_of(self.child.pid).identity
        self.verdicts: list[Ready | NotReady | BaseException] = []
        self.at = 0.0

    def do(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{line}\n".encode())
        self.child.stdin.flush()

    def give_birth(self, name: str, title: str) -> None:
        """Let it start a child; return when that shows its title."""
        self.do(f"{name} = child({title!r})")
        assert until(lambda: title in [each.title for each in processes.descendants([self.child.pid])])

    def say(self, text: str) -> None:
        self.do(f"say({text!r})")

    def plan(self, engine: dict[str, Any] | None = None, **given: Any) -> Plan:
        timeouts = {"stop": 5, "free": 5, "ready": 600, "stall": "by phase", **given.pop("timeouts", {})}
        data = {
            "name": "kimi", "engine": "zebra", "engine_version": None, "model": "m", "served_name": "m",
            "host": "127.0.0.1", "port": self.port, "gpus": [], "python": "python3", "argv": [], "env": {},
            "launcher": "detached", "stale": {"policy": "engine", "kill": []}, "timeouts": timeouts, "keep_releases": 5,
            "gpus_unified": "refuse", "allow": [], "sitecustomize": {"scope": "server"},
        }  # fmt: skip
        return Plan.load({"server": {**data, **given}, "engine": {**ENGINE, **(engine or {})}})

    def watch(self, engine: dict[str, Any] | None = None, api_key: str | None = None, **given: Any) -> None:
        """Begin to watch, in a thread."""
        plan = self.plan(engine, **given)

        def progress(message: str, **fields: Any) -> None:
            self.told.append({"message": message, **fields})

        def warn(*words: str) -> None:
            self.warned.append((words[0], words[1]))

        def run() -> None:
            found: Ready | NotReady | BaseException
            try:
                launched = Launched(self.main, None)
                found = readiness.watch(plan, self.launch, launched, api_key, progress, warn=warn)
            except BaseException as error:
                found = error
            self.at = time.monotonic()
            self.verdicts.append(found)

        threading.Thread(target=run, daemon=True).start()

    def verdict(self, seconds: float = 120.0) -> Ready | NotReady:
        assert until(lambda: self.verdicts, seconds), "no verdict"
        found = self.verdicts[0]
        assert not isinstance(found, BaseException), found
        return found

    def failed(self, cause: str, seconds: float = 120.0) -> NotReady:
        found = self.verdict(seconds)
        assert isinstance(found, NotReady)
        assert found.diagnosis.cause == cause, found
        return found

    def is_undecided(self, seconds: float) -> bool:
        """Whether no verdict comes within ``seconds``."""
        return not until(lambda: self.verdicts, seconds)


@pytest.fixture
def start(living: Living, tmp_path: Path) -> Iterator[Start]:
    made = Start(living, tmp_path)
    yield made
    with contextlib.suppress(OSError):
        if made.child.stdin is not None:
            made.child.stdin.close()


# -- ready


def test_ready_when_it_has_answered_and_no_line_said_so(start: Start) -> None:
    start.watch()
    start.say("loading stripes")
    start.say("pool of 1,234 tokens")
    start.say("falling back to spots")
    start.do(f"serve({start.port})")
    found = start.verdict()
    assert isinstance(found, Ready)
    assert abs(found.answered_at - time.time()) < 60
    assert found.measures == {"kv_tokens": 1234.0}
    assert found.warnings == (("falling back to spots", "see servers.{server}.args"),)
    assert "weights" in found.phases
    assert sum(found.phases.values()) >= found.seconds - 0.01, "a second of the start is in no phase"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "::1"])
def test_any_address(start: Start, address: str) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    start.watch(host=address)
    start.do(f"serve({start.port}, {address!r})")
    assert isinstance(start.verdict(), Ready)


def test_an_endpoint_that_answers_is_not_enough(start: Start) -> None:
    start.do("answers['generate'] = None")
    start.watch()
    start.do(f"serve({start.port})")
    start.say("ready to gallop")
    assert start.is_undecided(1.0)
    start.do("answers['generate'] = 200")
    assert isinstance(start.verdict(), Ready)


def test_another_model_is_not_waited_for(start: Start) -> None:
    start.do("answers['model'] = 'other'")
    start.watch()
    start.do(f"serve({start.port})")
    assert "serves other, not m" in start.failed("wrong_model").message


def test_a_stale_server_on_the_port_is_not_ours(start: Start, living: Living, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Start(living, tmp_path / "other")
    other.do(f"serve({start.port})")
    assert until(lambda: b"serving" in other.log.read_bytes())
    start.watch()
    assert until(lambda: start.warned)  # while it loads: that one may go away yet
    assert f"was taken by pid {other.child.pid}" in start.warned[0][0]
    assert not start.verdicts
    start.say("ready to gallop")
    found = start.failed("port_in_use")
    assert len(start.warned) == 1
    assert f"pid {other.child.pid}" in found.diagnosis.evidence
    assert not found.crashed


def test_an_answer_to_a_question_from_before_the_port_was_ours_counts_for_nothing() -> None:
    """It may be somebody else's, who has gone since."""
    watch: Any = SimpleNamespace(
        port=Port(True, ()), _ours_since=10.0, _model_proven=False, _refusal="", _vetoes=0, main=None,
        _look_at_port=lambda now, again: None, _read_log=lambda now: None, _ready=lambda answer: answer,
    )  # fmt: skip
    before, after = Answer(ok=True, model_proven=True, asked_at=9.9), Answer(ok=True, asked_at=10.0)
    assert readiness._Watch._judge_answer(watch, before, 11.0) is None
    assert not watch._model_proven
    assert readiness._Watch._judge_answer(watch, after, 11.0) is after


def test_a_model_is_asked_for_once(start: Start) -> None:
    start.do("old = Handler.do_GET; Handler.do_GET = lambda self: (say('models?'), old(self))")
    start.do("post = Handler.do_POST; Handler.do_POST = lambda self: (say('a token?'), post(self))")
    start.do("answers['generate'] = 503")
    start.watch()
    start.do(f"serve({start.port})")
    assert until(lambda: start.log.read_bytes().count(b"a token?") > 3)
    assert start.log.read_bytes().count(b"models?") == 1
    assert not start.verdicts
    start.do("answers['generate'] = 200")
    assert isinstance(start.verdict(), Ready)


def test_a_certificate_that_nobody_vouches_for_is_taken_only_when_told(start: Start, tmp_path: Path) -> None:
    start.watch(tls="self-signed")
    start.do(f"serve({start.port}, certificate={str(certificate(tmp_path))!r})")
    assert isinstance(start.verdict(), Ready)


@pytest.mark.parametrize(
    ("told", "talks", "said"),
    [
        ("verify", True, "its certificate is not trusted"),
        ("none", True, "it talks HTTPS"),
        ("self-signed", False, "this is not TLS"),
    ],
)
def test_how_it_talks_is_not_guessed(start: Start, tmp_path: Path, told: str, talks: bool, said: str) -> None:
    start.watch(tls=told)
    start.do(f"serve({start.port}, certificate={str(certificate(tmp_path)) if talks else None!r})")
    found = start.failed("tls")
    assert said in found.message
    assert "servers.kimi.tls" in found.diagnosis.hint_for("kimi")


def certificate(directory: Path) -> Path:
    """A file with a key and its own signature, for 127.0.0.1."""
    made = directory / "server.pem"
    if not made.exists():
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(directory / "k"), "-out", str(made)]
        subprocess.run(command, check=True, capture_output=True)
        made.write_text(made.read_text() + (directory / "k").read_text())
    return made


# -- keys


def test_the_key_is_sent_and_never_said(start: Start) -> None:
    start.do("answers['key'] = 'sk-lamp-1'")
    start.watch(api_key="sk-lamp-1")
    start.say("server_args=(api_key='sk-lamp-1') out of order")
    start.do(f"serve({start.port})")
    assert isinstance(start.verdict(), Ready)
    assert "sk-lamp-1" not in json.dumps(start.told)


def test_a_wrong_key_is_not_waited_for(start: Start) -> None:
    start.do("answers['key'] = 'sk-lamp-1'")
    start.watch(api_key="sk-lamp-2")
    start.do(f"serve({start.port})")
    assert "401" in start.failed("api_key").message


def test_where_the_key_comes_from(start: Start, tmp_path: Path) -> None:
    release = ReleaseDirectory(str(tmp_path))
    assert find_api_key(start.plan(), release) is None
    assert find_api_key(start.plan(argv=["z", "--api-key", "one"]), release) == "one"
    assert find_api_key(start.plan(argv=["z", "--api-key=two"]), None) == "two"
    for last in (["--api-key", "two"], ["--api-key=two"], ["--api_key", "two"]):  # the last one holds
        assert find_api_key(start.plan(argv=["z", "--api-key", "one", *last]), None) == "two"
    env = {"ZEBRA_KEY": {"value": "three", "mode": "default"}}
    assert find_api_key(start.plan(env=env), release) == "three"
    (tmp_path / "env").write_text("export A='x y'\nexport ZEBRA_KEY='fo\"ur'\n")
    assert find_api_key(start.plan(env=env), release) == 'fo"ur'


# -- dead, failed, hung


def test_death_is_told_at_once_with_the_last_words(start: Start) -> None:
    start.watch()
    start.say("loading stripes")
    start.say("rank 3: out of stripes")
    assert until(lambda: any(event["phase"] == "weights" for event in start.told))
    start.do("os._exit(7)")
    start.child.wait()
    died = time.monotonic()
    found = start.failed("gpu_oom")
    assert found.crashed
    assert (found.diagnosis.rank, found.diagnosis.phase) == (3, "weights")
    assert start.at - died < 60  # no clock of a start has run out by then


def test_the_phase_is_that_of_its_death_whatever_its_orphans_write(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain, go = readiness._Watch._drain, tmp_path / "go"

    def drained(watch: readiness._Watch, quiet_seconds: float) -> None:
        if quiet_seconds:  # its death has been noticed: now they write
            go.touch()
        drain(watch, quiet_seconds)

    monkeypatch.setattr(readiness._Watch, "_drain", drained)
    monkeypatch.setattr(readiness, "QUIET_SECONDS", 30.0)  # until the orphan has ended, however late it begins
    monkeypatch.setattr(readiness, "DRAIN_SECONDS", 60.0)
    start.say("loading stripes")
    assert until(lambda: b"loading" in start.log.read_bytes())
    start.watch()
    orphan = "import os, sys, time; os.close(0)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    orphan += "for _ in range(10): print('rank 0: ready to gallop', flush=True); time.sleep(0.05)"
    start.do(f"subprocess.Popen([sys.executable, '-c', {orphan!r}, {str(go)!r}])")
    start.do("os._exit(9)")
    found = start.failed("crashed")
    assert found.diagnosis.phase == "weights"
    assert any("gallop" in line for line in found.log_tail)


def test_a_fatal_line_ends_the_watch_though_the_launcher_hangs_on(start: Start) -> None:
    start.watch({"settle": 5})
    start.say("loading stripes")
    start.say("a child failed")
    start.do("time.sleep(0.2)")
    start.say("rank 1: out of stripes")  # the cause comes after the first sign of failure
    found = start.failed("gpu_oom")
    assert found.crashed
    assert "hangs on" in found.message
    assert start.child.poll() is None


def test_what_may_be_survived_is_no_verdict(start: Start) -> None:
    start.watch()
    start.say("no such module")
    assert start.is_undecided(1.5)
    start.do(f"serve({start.port})")
    assert isinstance(start.verdict(), Ready)


def test_a_fatal_word_is_put_off_while_the_start_goes_on(start: Start) -> None:
    start.watch({"settle": 4})
    start.say("out of stripes")
    for percent in range(1, 24):
        start.do("time.sleep(0.25)")
        start.say(f"{percent}% of stripes")
    assert start.is_undecided(5.0)
    start.do(f"serve({start.port})")
    assert isinstance(start.verdict(), Ready)


def test_a_needed_worker_that_dies_ends_the_watch(start: Start) -> None:
    start.give_birth("worker", "zebra::worker_TP0")
    start.give_birth("other", "zebra::helper")
    start.watch()
    assert until(lambda: start.told)  # before it tells anything it looks at all processes
    start.do("other.kill(); other.wait()")
    assert start.is_undecided(1.0)  # nobody needs that one
    start.do("worker.kill(); worker.wait()")
    found = start.failed("worker_died")
    assert "zebra::worker_TP0" in found.message
    assert found.crashed


def test_a_worker_that_has_just_come_and_reached_a_phase_is_seen_to_die(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "MEMBERS_SECONDS", 3600.0)
    start.watch()
    assert until(lambda: start.told)  # the one look that its own time gives it
    start.give_birth("worker", "zebra::worker_TP0")
    start.say("loading stripes")
    assert until(lambda: any(each.get("phase") == "weights" for each in start.told))
    start.do("worker.kill(); worker.wait()")
    start.failed("worker_died")


@pytest.mark.parametrize(("last_words", "cause"), [("", "worker_died"), ("RuntimeError: no oats", "crashed")])
def test_a_launcher_that_says_what_it_died_of_did_not_follow_its_worker(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_words: str, cause: str
) -> None:
    note, noted = readiness._Crew.note_ended, tmp_path / "noted"

    def note_ended(crew: readiness._Crew, descriptors: Collection[int]) -> None:
        note(crew, descriptors)
        if crew.dead is not None:
            noted.touch()

    monkeypatch.setattr(readiness._Crew, "note_ended", note_ended)
    start.give_birth("worker", "zebra::worker_TP0")
    start.watch({"traceback": "Traceback", "error": [r"^\w+Error: "], "settle": 60})
    assert until(lambda: start.told)  # before it tells anything it looks at all processes
    if last_words:
        start.say(f"Traceback (most recent call last):\n  File 'x'\n{last_words}")
    start.do("worker.kill(); worker.wait()")
    start.do(f"while not os.path.exists({str(noted)!r}): time.sleep(0.01)")
    start.do("time.sleep(0.5); os._exit(1)")
    found = start.failed(cause)
    assert found.diagnosis.evidence == last_words


def test_a_hung_engine_is_known_by_its_own_health(start: Start) -> None:
    start.do("answers.update(generate=None, health=503)")
    start.watch({"health": {"path": "/health", "timeout": 5, "veto_status": [503]}})
    start.do(f"serve({start.port})")
    assert start.is_undecided(1.5)  # warming up: it may say so
    start.say("ready to gallop")
    assert "/health answers 503" in start.failed("engine_hung").message


def test_health_alone_never_makes_it_ready(start: Start) -> None:
    start.do("answers.update(generate=500)")
    start.watch({"health": {"path": "/health", "timeout": 5, "veto_status": [503]}})
    start.do(f"serve({start.port})")
    start.say("ready to gallop")
    assert start.is_undecided(1.5)


# -- what it will go on saying

HEALTH = {"health": {"path": "/health", "timeout": 5, "veto_status": [503]}}


@pytest.mark.parametrize(
    ("answers", "cause", "says"),
    [
        ({"generate": 400}, "rejected", "HTTP 400"),
        ({"generate": 403}, "forbidden", "HTTP 403"),
        ({"generate": 404}, "rejected", "HTTP 404"),
        ({"generate": 422}, "rejected", "HTTP 422"),
        ({"generate": 307}, "rejected", "HTTP 307"),
        ({"say": {"choices": [], "usage": None}}, "rejected", "has no token in it"),
        ({"say": {"error": "no such adapter"}}, "rejected", "no such adapter"),
    ],
)
@pytest.mark.parametrize("is_up", ["its ready line", "its health"])
def test_a_refusal_that_lasts_is_told_at_once(
    start: Start, answers: dict[str, Any], cause: str, says: str, is_up: str
) -> None:
    start.do(f"answers.update({answers!r}, health={503 if is_up == 'its ready line' else 200})")
    start.watch(HEALTH if is_up == "its health" else None)
    start.do(f"serve({start.port})")
    if is_up == "its ready line":
        assert start.is_undecided(1.5)  # it may still begin
        start.say("ready to gallop")
    found = start.failed(cause)
    assert not found.crashed
    assert says in found.message + found.diagnosis.evidence
    assert found.diagnosis.hint


@pytest.mark.parametrize("status", [429, 502, 503, 500])
def test_a_refusal_that_may_pass_is_waited_for(start: Start, status: int) -> None:
    start.do(f"answers.update(generate={status})")
    start.watch()
    start.do(f"serve({start.port})")
    start.say("ready to gallop")
    assert start.is_undecided(2.0)
    start.do("answers.update(generate=200)")
    assert isinstance(start.verdict(), Ready)


def test_what_is_no_refusal_for_an_engine_stands_in_its_data(start: Start) -> None:
    start.do("answers.update(generate=400)")
    start.watch({"refusals": {"transient": [400]}})
    start.do(f"serve({start.port})")
    start.say("ready to gallop")
    assert start.is_undecided(2.0)
    start.do("answers.update(generate=200)")
    assert isinstance(start.verdict(), Ready)


def test_refusals_that_differ_are_no_last_word(start: Start) -> None:
    start.do("Handler.do_POST = lambda self: self.reply(400, {'error': 'wait' + '.' * (int(time.time() * 4) % 8)})")
    start.watch()
    start.do(f"serve({start.port})")
    start.say("ready to gallop")
    assert start.is_undecided(2.5)


def test_a_model_list_that_is_refused_is_a_refusal(start: Start) -> None:
    start.do("Handler.do_GET = lambda self: self.reply(404, {'detail': 'Not Found'})")
    start.watch()
    start.do(f"serve({start.port})")
    start.say("ready to gallop")
    assert "HTTP 404" in start.failed("rejected").message


@pytest.mark.parametrize(("asked", "bound"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1"), ("127.0.0.2", "127.0.0.1")])
def test_one_that_listens_where_it_is_not_asked_is_told(start: Start, asked: str, bound: str) -> None:
    if ":" in asked + bound and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    start.watch(host=asked)
    start.do(f"serve({start.port}, {bound!r})")
    found = start.failed("bound_elsewhere")
    assert f"nothing answers at {asked} port {start.port}" in found.message
    assert f"it listens on {bound} port {start.port}" in found.message


def test_one_that_listens_on_another_port_is_told_once_it_says_that_it_is_ready(start: Start, living: Living) -> None:
    other = living.port()
    start.watch()
    start.do(f"serve({other})")
    assert start.is_undecided(1.5)
    start.say("ready to gallop")
    assert f"it listens on 127.0.0.1 port {other}" in start.failed("bound_elsewhere").message


@pytest.mark.parametrize("leaves", ["sleep", ""])
def test_a_launch_program_that_does_not_stay_is_told(start: Start, living: Living, leaves: str) -> None:
    """As `docker run -d` and daemons do; what it has started may be ours or not."""
    if leaves:
        start.give_birth("worker", "zebra::worker_TP0")
        (child,) = processes.descendants([start.child.pid])
        living.keep(child.pid)
    start.watch()
    Path(start.launch.exit).write_text('{"code": 0, "signal": null}')
    start.do("os._exit(0)")
    found = start.failed("launcher_left")
    assert found.crashed
    assert "ended in phase boot (exit status 0), and " in found.message
    assert ("goes on without it: zebra::worker_TP0 (pid " if leaves else "left nothing of ours") in found.message
    assert "docker run without -d" in found.diagnosis.hint


# -- the two clocks


def test_silence_is_a_stall_and_names_the_last_sign_of_life(start: Start) -> None:
    start.say("loading stripes")
    assert until(lambda: b"loading" in start.log.read_bytes())
    start.watch(timeouts={"stall": 1.5})
    found = start.failed("stalled")
    assert "stalled in phase weights" in found.message
    assert "loading stripes" in found.message
    assert not found.crashed


def test_waiting_said_aloud_is_no_life_and_a_moving_bar_is(start: Start) -> None:
    start.watch(timeouts={"stall": 4})
    for percent in range(24):
        start.say(f"{percent}% of stripes")
        start.do("time.sleep(0.25)")
    assert start.is_undecided(5.0)
    start.do("[(say('still waiting'), time.sleep(0.1)) for _ in range(3000)]")
    start.failed("stalled")


def test_the_cap_holds_whatever_moves(start: Start) -> None:
    start.watch(timeouts={"ready": 1.5})
    start.do("[(say(f'{n}% of stripes'), time.sleep(0.1)) for n in range(50)]")
    found = start.failed("timeout")
    assert "not ready after 2 s, in phase boot" in found.message
    assert "timeouts.ready" in found.diagnosis.hint


# -- floods


def test_a_flood_is_read_past_and_its_first_failure_kept(start: Start) -> None:
    start.say("rank 2: out of stripes")
    assert until(lambda: b"stripes" in start.log.read_bytes())
    with start.log.open("ab") as log:
        for _ in range(120):
            log.write(b"nothing to see here, line after line\n" * 30_000)
    start.watch()  # only now: what is too much to be read must not depend on how fast it is written
    start.do("os._exit(1)")
    found = start.failed("gpu_oom")
    assert found.diagnosis.rank == 2
    assert "were skipped" in found.message


def test_ranks_that_differ_are_told(start: Start) -> None:
    start.watch()
    start.say("rank 0: loading stripes")
    start.say("rank 1: ready to gallop")
    assert until(lambda: any(event.get("ranks") for event in start.told))
    told = next(event for event in start.told if event.get("ranks"))
    assert told["ranks"] == {"0": "weights", "1": "ready"}
    assert told["rank"] == 0


def test_a_failure_within_a_flood_is_found_afterwards(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "READ_AGAIN_SECONDS", 60.0)
    with start.log.open("ab") as log:
        for part in range(120):
            log.write(b"nothing to see here, line after line\n" * 30_000)
            if part == 60:
                log.write(b"rank 2: out of stripes\n")
    start.watch()
    start.do("os._exit(1)")
    found = start.failed("gpu_oom")
    assert found.diagnosis.rank == 2


# -- the log as a file


def read_all(log: LogFile) -> bytes:
    return b"".join(iter(log.new, b""))


def test_a_log_that_is_not_there_yet_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(str(path))
    assert log.new() == b""
    path.write_bytes(b"one\n")
    assert read_all(log) == b"one\n"
    with path.open("ab") as more:
        more.write(b"two\n")
    assert read_all(log) == b"two\n"
    log.close()


def test_truncated_and_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    log = LogFile(str(path), 4)
    assert read_all(log) == b"two\n"
    os.truncate(path, 0)
    with path.open("ab") as more:
        more.write(b"x\n")
    assert read_all(log) == b"x\n"
    with path.open("ab") as more:
        more.write(b"last of the old\n")
    path.rename(tmp_path / "log.1")
    assert read_all(log) == b"last of the old\n"
    path.write_bytes(b"first of the new\n")
    assert read_all(log) == b"first of the new\n"
    log.close()


def test_too_far_behind_it_skips_to_a_line_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        for number in range(90):
            file.write(b"%03d\n" % number * (1 << 18))
    log = LogFile(str(path))
    assert log.new()[:4] == b"000\n"
    data = log.new()
    assert data[:4] in (b"088\n", b"089\n")
    assert log.skipped > 80 << 20
    whole = LogFile(str(path), may_skip=False)
    assert sum(map(len, iter(whole.new, b""))) == 90 << 20
    assert whole.skipped == 0
    log.close()
    whole.close()


def test_a_boot_that_writes_nothing_is_told_of_and_its_last_line_is_no_news() -> None:
    told: list[tuple[str, Any]] = []
    teller = readiness._Teller(
        lambda message, **fields: told.append((message, fields.get("line"))), str, (), 0.0, is_python=True
    )
    watched: Any = SimpleNamespace(phase=None, percent=None, last_line="server_args=...", slowest=None, ranks={})
    for now, silent in ((1.0, 0.0), (3.0, 2.0), (4.5, 3.5), (5.0, 4.0), (8.0, 7.0), (9.0, 0.0)):
        teller.tell(watched, (), now, silent)
    imports = "imports: its Python processes load packages; nothing new in its log for"
    boot = ("boot", "server_args=...")
    assert told == [boot, (f"{imports} 3 s", None), (f"{imports} 6 s", None), boot]
    watched.phase = "weights"
    teller.tell(watched, (), 20.0, 11.0)
    assert told[-1] == ("weights", "server_args=...")  # a load may take its time
