"""The scenarios on a real GPU: ``scenarios.py MACHINE.json OUT NAME...``; run.sh calls it. `all` is all but warm.

Each deploys through `./inv` over SSH and compares what lamplighter says with witnesses of our own: nvidia-smi, a client
that asks for tokens, /proc. A failed check is a row in the table, not the end; the exit status is 1 when there is one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import (
    PORT,
    QUERY_APPS,
    SERVER,
    Bench,
    FirstToken,
    Memory,
    Outcome,
    alive,
    at_most,
    command_of,
    descendants,
    eventually,
    token,
    workers,
)

ORPHAN_SECONDS = 3.0
DEADLINE = float(os.environ.get("DEADLINE", "inf"))
HERE = Path(__file__).resolve().parent
SLOWER = float(os.environ.get("SLOWER", "1"))


def warm(bench: Bench) -> None:
    """Start the engine by hand in the background: kernels are compiled, and `deploy` finds a server to take over."""
    process = bench.by_hand({})
    (bench.base / "by-hand.pid").write_text(str(process.pid))
    bench.note(f"started by hand as pid {process.pid}")


def record(bench: Bench) -> None:
    """Record what nvidia-smi answers to every query that lamplighter sends."""
    sys.path.insert(0, bench.machine["project"])
    from lamplighter.node.gpu import gpus
    from lamplighter.node.health import facts

    queries = [value for value in vars(gpus).values() if isinstance(value, tuple) and value[:1] == ("nvidia-smi",)]
    queries += [gpus._query(fields) for fields in (facts.DETAILS, ("driver_version",))]
    with bench.fresh("queries.txt").open("w") as file:
        for words in [*queries, ("nvidia-smi", "-L"), ("nvidia-smi",)]:
            began = time.monotonic()
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=bench.smi_environment())
            file.write(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}")
            file.write(f"[rc={done.returncode} wall={time.monotonic() - began:.2f}s]\n")
    bench.check("all queries answered", len(queries) >= 5, f"{len(queries)} queries")


def deploy(bench: Bench) -> None:
    """(a) Deploy with CUDA graphs: phases seen and timed, ready against the true first token."""
    hand = _by_hand_pid(bench)
    if hand:
        found = eventually(lambda: token() or not alive({hand}), 200, 0.5)
        bench.note(f"the server started by hand: {'answers' if found is not True else 'has died'}")
    family = {hand, *descendants(hand)} if hand else set()
    first = FirstToken()
    first.start()
    outcome = bench.deploy()
    first.over.set()
    first.join(70)
    report = outcome.server()
    bench.check("exit 0, deployed", outcome.code == 0, report.get("message") or outcome.text[-500:])
    if hand:
        told = [event["message"] for event in outcome.events if str(event.get("message")).startswith("stopping pid")]
        bench.check(
            "the server started by hand was recognised and stopped", told and not alive(family), "; ".join(told)[:400]
        )
    spent = next((event["phase_seconds"] for event in outcome.events if event.get("phase_seconds")), {})
    bench.check("phases seen and timed", {"boot", "weights", "kv_cache", "graphs"} <= spent.keys(), json.dumps(spent))
    since = (report.get("serving") or {}).get("since")
    late = None if since is None or first.at is None else since - first.at
    bench.check(
        "ready within 1 s of the first token that another client got",
        late is not None and abs(late) < 1.0,
        f"ready {late:+.3f} s after it; ready_seconds {report.get('ready_seconds')}"
        if late is not None
        else "no token",
    )
    bench.check(
        "checks of verify",
        "passed" in outcome.stage("verify").get("message", ""),
        outcome.stage("verify").get("message"),
    )
    bench.check(
        "nvidia-smi shows the scheduler",
        any("scheduler" in name for name in bench.gpu_pids().values()),
        bench.gpu_pids(),
    )
    bench.note(f"stages: {json.dumps(report.get('durations'))}")


def environment(bench: Bench) -> None:
    """(f) The environment proof in the real scheduler."""
    outcome = bench.inv("env")
    found = (
        (outcome.lines[-1] if outcome.lines else {}).get("env", {}).get("hosts", {}).get("gpu", {}).get("servers", {})
    )
    proof = found.get(SERVER, {})
    titles = {worker["title"]: worker for worker in proof.get("workers", [])}
    scheduler = next((worker for title, worker in titles.items() if "scheduler" in title), {})
    bench.check("exit 0, every worker carries the variables", outcome.code == 0, proof.get("message"))
    bench.check(
        "the scheduler among them, read from its live memory",
        scheduler.get("verdict") == "carries" and scheduler.get("witness") == "memory",
        json.dumps(list(titles.values())),
    )


def reading(bench: Bench) -> None:
    """The tasks that only read, on a server that serves; their whole answers are among the raw outputs."""
    _ensure_serving(bench)
    bench.write_inventory(**{SERVER: bench.server()})
    for words in (["status"], ["verify"], ["check"], ["releases"], ["diagnose"]):
        outcome = bench.inv(*words, timeout=60)
        bench.check(f"{words[0]}: exit 0", outcome.code == 0, f"exit {outcome.code}: {_summary(outcome)}")


def _summary(outcome: Outcome) -> str:
    """What did not pass, or the beginning of the answer."""
    text = json.dumps(outcome.lines[-1]) if outcome.lines else outcome.text
    bad = [line.strip() for line in outcome.text.splitlines() if "FAIL" in line or "warn" in line.lower()]
    return "; ".join(bad)[:500] or text[:300]


def sitecustomize_only(bench: Bench) -> None:
    """(f) NCCL_* through sitecustomize only: the release's file, and a launcher whose environment has none of them."""
    _stop(bench)
    release = bench.node_root() / "servers" / SERVER / "current"
    process = bench.by_hand({"PYTHONPATH": str(release / "pysite"), "SPT_NOENV": "1"})
    (bench.base / "by-hand.pid").write_text(str(process.pid))

    def named() -> set[int]:
        return {pid for pid in workers(process.pid) if command_of(pid).startswith("sglang::scheduler")}

    pids = eventually(named, 90) or set()
    if not bench.check("a scheduler came up", pids, f"pids {sorted(pids)}"):
        return
    launcher = Path(f"/proc/{process.pid}/environ").read_bytes()
    bench.check(
        "the launcher's own environment has no NCCL_PROTO", b"NCCL_PROTO=" not in launcher, f"{len(launcher)} bytes"
    )
    sys.path.insert(0, bench.machine["project"])
    from lamplighter.node.system.processes import read_process
    from lamplighter.node.variables.memory import Unreadable, live_environment

    for pid in pids:
        try:
            seen = live_environment(read_process(pid))
        except Unreadable as reason:
            bench.check("the scheduler's live environment can be read", False, reason)
            continue
        wanted = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        got = {name: seen.get(name) for name in wanted}
        bench.check("the scheduler has them all, forced ones too", got == wanted, json.dumps(got))


def redeploy(bench: Bench) -> None:
    """(b) Redeploy: kill to FREED in seconds."""
    memory, first = Memory(bench), FirstToken()
    memory.start()
    first.start()
    outcome = bench.deploy(args={"max-running-requests": 64})
    for witness in (memory, first):
        witness.over.set()
        witness.join(70)
    report = outcome.server()
    bench.check("exit 0, deployed", outcome.code == 0, report.get("message") or outcome.text[-500:])
    times = report.get("durations") or {}
    stop = next(
        (event["t"] for event in outcome.events if event["event"] == "stage_start" and event["stage"] == "stop"), 0
    )
    freed = next((event["t"] for event in outcome.events if str(event.get("message")).startswith("FREED")), None)
    zero = memory.first_zero(stop)
    bench.check(
        "FREED was said when nvidia-smi read 0, not before",
        freed and zero and freed >= zero - 0.2,
        f"stop {times.get('stop')} s, free {times.get('free')} s; "
        f"TERM to 0 MiB {_less(zero, stop)} s, to FREED {_less(freed, stop)} s",
    )
    real = None if not (first.at and first.last) else first.at - first.last
    told = report.get("downtime_seconds")
    bench.check(
        "downtime as another client saw it",
        real is not None and told is not None and abs(real - told) < 2.5,
        f"told {told} s, seen {real} s",
    )
    bench.fresh("memory.json").write_text(json.dumps(memory.samples))


def orphans(bench: Bench) -> None:
    """(c) The launcher is SIGKILLed 3 s after its children start, on a node with nothing to go back to."""
    _stop(bench)
    left: set[int] = set()

    def shoot(event: dict[str, Any]) -> None:
        if event.get("stage") == "start" and event.get("pids"):
            threading.Thread(target=_shoot_launcher, args=(event["pids"][0], left), daemon=True).start()

    outcome = bench.deploy("orphaned", listen=shoot, timeouts={"stop": 30, "ready": 120}, port=PORT + 5)
    ended = time.time()
    report = outcome.server("orphaned")
    bench.check(
        "exit 6, nothing serving, and said so",
        outcome.code == 6 and not report.get("serving"),
        report.get("message") or outcome.text[-500:],
    )
    stopped = [event["message"] for event in outcome.events if str(event.get("message")).startswith("stopping pid")]
    bench.check(
        "orphans found and removed",
        left and not alive(left),
        f"pids {sorted(left)}, alive {sorted(alive(left))}: {'; '.join(stopped)[:400]}",
    )
    samples = _watch_memory(bench, 30)
    bench.check(
        "memory really free 30 s later, at every look",
        max(samples, default=1) == 0,
        f"{len(samples)} looks in {time.time() - ended:.0f} s, most {max(samples, default=-1)} MiB",
    )


def orphans_by_hand(bench: Bench) -> None:
    """(c) The same to a server that lamplighter did not start, and a deploy while its orphans hold nothing yet."""
    _stop(bench)
    process = bench.by_hand({})
    left: set[int] = set()
    _shoot_launcher(process.pid, left)
    process.wait(10)
    bench.note(f"orphans {sorted(left)}: {[command_of(pid)[:60] for pid in sorted(left)]}")
    memory = Memory(bench, 0.3)
    memory.start()
    outcome = bench.deploy()
    memory.over.set()
    report = outcome.server()
    bench.fresh("memory.json").write_text(json.dumps(memory.samples))
    bench.check(
        "it serves, and no orphan is left" if outcome.code == 0 else "it does not serve, and says who is in the way",
        (outcome.code == 0 and token() and not alive(left))
        or (outcome.code in (3, 5, 6, 7) and "pid" in json.dumps(report)),
        f"exit {outcome.code}: {report.get('message')} {report.get('evidence')}; orphans alive {sorted(alive(left))}",
    )
    for pid in alive(left):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def stranger(bench: Bench) -> None:
    """(d) A foreign torch process with 20 GiB: named and left; killed when it is listed."""
    _ensure_serving(bench)
    process = subprocess.Popen(
        bench.machine["trainer"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout
        bench.note(f"trainer is pid {process.pid}: {process.stdout.readline()!r}")
        outcome = bench.deploy(args={"max-running-requests": 32})
        report = outcome.server()
        bench.check(
            "exit 3, nothing touched", outcome.code == 3 and token(), report.get("message") or outcome.text[-500:]
        )
        named = f"{report.get('evidence')} {report.get('message')}"
        bench.check("named with pid and name", str(process.pid) in named and "trainer" in named, report.get("evidence"))
        bench.check("and left alone", process.poll() is None, f"hint: {report.get('hint')}")
        outcome = bench.deploy(args={"max-running-requests": 32}, stale={"kill": ["trainer"]})
        report = outcome.server()
        bench.check(
            "listed in stale.kill: deployed",
            outcome.code == 0 and token(),
            report.get("message") or outcome.text[-500:],
        )
        bench.check(
            "and the trainer is gone", eventually(lambda: process.poll() is not None, 5), outcome.said(str(process.pid))
        )
    finally:
        process.kill()
        process.wait()


def refusals(bench: Bench) -> None:
    """(e) What preflight refuses while the old server serves."""
    _ensure_serving(bench)
    _expect_refusal(bench, "model path wrong", "model_path", model="/models/is-not-there")
    with socket.create_server(("127.0.0.1", PORT + 1)):
        _expect_refusal(bench, "port taken", "port_in_use", port=PORT + 1)
    _expect_refusal(bench, "no such GPU", "gpu_unknown", gpus=[7])
    bench.check("the old server serves", token(), token())


def unknown_flag(bench: Bench) -> None:
    """(e) A flag that this version does not know, where the parser is not asked before the stop."""
    lint = {"ignore": [{"id": "L31", "reason": "what the start says of it is the question here"}]}
    _expect_rollback(bench, {"unknown_flag"}, args={"no-such-flag": 7}, lint=lint, parser="off")


def memory_fraction(bench: Bench) -> None:
    """(e) More memory than there is."""
    _expect_rollback(bench, {"gpu_oom", "kv_cache_too_small"}, args={"mem-fraction-static": 0.9995})


def too_many_ranks(bench: Bench) -> None:
    """(e) Tensor parallelism above the GPU count."""
    count = len(bench.smi(["-L"]).splitlines())
    _expect_rollback(bench, {"gpu_count"}, args={"tp": 2 * count})


def no_ninja(bench: Bench) -> None:
    """(e) The build tool is not on the PATH."""
    _ensure_serving(bench)
    tool = Path(bench.machine["python"]).parent / "ninja"
    aside = tool.with_name("ninja.aside")
    if tool.is_symlink():
        tool.rename(aside)
    try:
        _expect_rollback(
            bench,
            {"jit_toolchain"},
            back=lambda: aside.is_symlink() and aside.rename(tool),
            args={"max-running-requests": 48},
        )
    finally:
        if aside.is_symlink():
            aside.rename(tool)


def model_name(bench: Bench) -> None:
    """(e) A wrong model that preflight cannot know to be wrong: it is a name, not a path."""
    _expect_rollback(bench, {"model_path", "hub_offline"}, model="no-such/model")


def port_stolen(bench: Bench) -> None:
    """(e) The port is taken after preflight has seen it free, and given back when the new server has failed."""
    thief: list[socket.socket] = []

    def steal(event: dict[str, Any]) -> None:
        if event.get("event") == "stage_end" and event.get("stage") == "start" and not thief:
            thief.append(socket.create_server(("127.0.0.1", PORT)))
        if event.get("stage") == "rollback":
            for sock in thief:
                sock.close()

    try:
        _expect_rollback(bench, {"port_in_use"}, listen=steal, args={"max-running-requests": 40})
    finally:
        for sock in thief:
            sock.close()


def stopped_scheduler(bench: Bench) -> None:
    """(g) A scheduler that is stopped while it serves: the verdict, and then stop."""
    _ensure_serving(bench)
    pids = {pid for pid, name in bench.gpu_pids().items() if "scheduler" in name}
    if not bench.check("there is a scheduler to stop", pids, pids):
        return
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    bench.write_inventory(**{SERVER: bench.server(timeouts={"stop": 8})})
    outcome = bench.inv("verify", "--only", "answers", timeout=120)
    bench.check("verify fails with exit 8", outcome.code == 8, outcome.text[-600:])
    outcome = bench.inv("stop", timeout=120)
    report = outcome.server()
    bench.check(
        "stop works",
        outcome.code == 0 and not alive(pids),
        f"{report.get('message')} {json.dumps(report.get('durations'))}",
    )
    bench.check("memory is free", bench.used() == 0, f"{bench.used()} MiB")


def stalled_start(bench: Bench) -> None:
    """(g) A scheduler that is stopped while it starts: stalled, and rolled back."""
    _ensure_serving(bench)
    stopped: set[int] = set()

    def freeze(event: dict[str, Any]) -> None:
        if (
            event.get("stage") == "ready"
            and event.get("phase") in ("distributed", "weights", "kv_cache", "graphs")
            and not stopped
        ):
            for pid, name in bench.gpu_pids().items():
                stopped.add(pid)
                os.kill(pid, signal.SIGSTOP)
                bench.note(f"stopped pid {pid} ({name}) in phase {event['phase']}")

    outcome = bench.deploy(
        listen=freeze, args={"max-running-requests": 24}, timeouts={"stop": 8, "ready": 90, "stall": 15}
    )
    report = outcome.server()
    bench.check(
        "exit 9, rolled back",
        outcome.code == 9 and token(),
        f"{report.get('message')} {json.dumps(report.get('durations'))}",
    )
    bench.check(
        "told as a stall, with its evidence",
        "stall" in f"{report.get('cause')} {report.get('message')}",
        f"cause {report.get('cause')}: {report.get('evidence')}",
    )
    bench.check("the stopped process is gone", stopped and not alive(stopped), sorted(stopped))


def transformers(bench: Bench) -> None:
    """(h) `transformers serve` on the GPU: deployed, proven, redeployed, broken, rolled back, stopped."""
    _stop(bench)
    model = bench.machine["model"]
    python = bench.machine.get("transformers", {}).get("python", bench.machine["python"])
    version = _version_of(python, "transformers")
    base: dict[str, Any] = {
        "engine": "transformers", "engine_version": version, "served_name": None, "port": PORT + 10,
        "args": None, "timeouts": {"stop": 15, "ready": 120},
    }  # fmt: skip

    def put(args: dict[str, Any], **changes: Any) -> Outcome:
        theirs = bench.machine.get("transformers", {})
        wanted = {**bench.server(**base), **theirs, **changes, "args": {"device": bench.machine["device"], **args}}
        bench.write_inventory(hf={name: value for name, value in wanted.items() if value is not None})
        return bench.inv("deploy")

    first = FirstToken(PORT + 10, model)
    first.start()
    outcome = put({})
    first.over.set()
    report = outcome.server("hf")
    bench.check(
        f"transformers {version}: exit 0, deployed", outcome.code == 0, report.get("message") or outcome.text[-500:]
    )
    if outcome.code:
        bench.note(f"{report.get('cause')}: {report.get('evidence')}")
        return
    since = (report.get("serving") or {}).get("since")
    late = None if since is None or first.at is None else since - first.at
    bench.check(
        "ready within 1 s of the first token that another client got",
        late is not None and abs(late) < 1.0,
        f"{late} s; ready_seconds {report.get('ready_seconds')}",
    )
    bench.check("it holds the GPU", bench.gpu_pids(), bench.smi(QUERY_APPS))
    bench.check(
        "the variables are in the live process",
        "carry" in outcome.said("workers carry"),
        outcome.said("workers carry") or outcome.stage("confirm"),
    )
    outcome = put({"dtype": "bfloat16"})
    report = outcome.server("hf")
    bench.check("redeployed", outcome.code == 0, json.dumps(report.get("durations")))
    outcome = put({"no-such-flag": 7})
    report = outcome.server("hf")
    bench.check(
        "unknown flag: exit 3, nothing stopped",
        outcome.code == 3 and report.get("cause") == "unknown_flag" and token(PORT + 10, model),
        f"cause {report.get('cause')}: {report.get('evidence')}; {report.get('message')}",
    )
    outcome = put({}, model="/models/is-not-there")
    bench.check(
        "model path wrong: exit 3", outcome.code == 3 and token(PORT + 10, model), outcome.server("hf").get("message")
    )
    outcome = bench.inv("stop")
    bench.check(
        "stopped, memory free",
        outcome.code == 0 and bench.used() == 0,
        f"{json.dumps(outcome.server('hf').get('durations'))} {bench.used()} MiB",
    )


def two_ranks(bench: Bench) -> None:
    """(f) Two GPUs: what NCCL itself says, with values that reach the schedulers by the release alone."""
    outcome = bench.deploy(args={"tp": 2}, nccl_proof=True)
    report = outcome.server()
    bench.check("exit 0, deployed", outcome.code == 0, report.get("message") or outcome.text[-500:])
    told = [event["message"] for event in outcome.events if event.get("stage") == "confirm" and event.get("message")]
    bench.check("NCCL reads the variables", "NCCL" in " ".join(told), "; ".join(told))
    bench.check(
        "both schedulers hold memory",
        sum("scheduler" in name for name in bench.gpu_pids().values()) == 2,
        bench.gpu_pids(),
    )
    lint = {"ignore": [{"id": "L14", "reason": "what the start says of it is the question here"}]}
    outcome = bench.deploy(args={"tp": 2}, env={"NCCL_PROTO": "LLL"}, lint=lint)
    report = outcome.server()
    bench.check(
        "a bad NCCL_PROTO: refused or rolled back, with the cause",
        outcome.code in (3, 9) and token(),
        f"exit {outcome.code}, cause {report.get('cause')}: {report.get('evidence')}",
    )


def bad_words(bench: Bench) -> None:
    """What the engine's own parser refuses while the old server serves: each ended in the dark before."""
    _ensure_serving(bench)
    broken = bench.base / "broken-model"
    shutil.copytree(bench.machine["model"], broken, dirs_exist_ok=True)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch", "architectures": ["None"]}))
    site = Path(
        subprocess.run(
            [bench.machine["python"], "-c", "import sglang; print(sglang.__path__[0])"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
    ).parent  # fmt: skip
    lint = {"ignore": [{"id": "L31", "reason": "what the engine says of it is the question here"}]}
    _expect_parsed(bench, "unknown flag", args={"no-such-flag": 7}, lint=lint)
    _expect_parsed(bench, "a value of a wrong kind", args={"mem-fraction-static": "lots"})
    _expect_parsed(bench, "a value that is no choice", args={"attention-backend": "nonesuch"})
    _expect_parsed(bench, "wrong model config", model=str(broken))
    for package in ("orjson", "zmq"):
        (site / package).rename(site / f"{package}.aside")
        try:
            _expect_parsed(bench, f"{package} missing")
        finally:
            (site / f"{package}.aside").rename(site / package)


def downtime(bench: Bench) -> None:
    """Redeploys in turn, with all that comes before the stop and without: what the clients of the server lose."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {"prestart": "off", "prefetch": "off", "parser": "off"},
        "before the stop": {"stop": {"drain": 5}},
    }
    _compare(bench, ways, bench.server(args={"enable-metrics": True}))


def downtime_of_transformers(bench: Bench) -> None:
    """The same for `transformers serve`, whose counters nobody knows."""
    _stop(bench)
    ways: dict[str, dict[str, Any]] = {
        "plain": {"prestart": "off", "prefetch": "off", "parser": "off"},
        "before the stop": {},
    }
    wanted = bench.server(
        engine="transformers", engine_version=_version_of(bench.machine["python"], "transformers"), served_name=None
    )
    wanted = {name: value for name, value in wanted.items() if value is not None}
    _compare(bench, ways, {**wanted, "args": {"device": bench.machine["device"]}}, model=bench.machine["model"])


def cold_weights(bench: Bench) -> None:
    """A model of 8.8 GB, its files not in the page cache: loaded with and without being read ahead."""
    large = bench.base / "large-model"
    if not (large / "config.json").exists():
        words = [bench.machine["python"], str(HERE / "tiny_model.py"), str(large), "large"]
        subprocess.run(words, check=True, timeout=200)
    size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    bench.note(f"{size / 1e9:.1f} GB of weights")
    seen: dict[str, list[float]] = {"off": [], "auto": []}
    for _ in range(int(os.environ.get("ROUNDS", "2"))):
        for prefetch, times in seen.items():
            bench.deploy(prefetch="off", parser="off")
            subprocess.run(["sync"], check=True)
            Path("/proc/sys/vm/drop_caches").write_text("1\n")
            outcome = bench.deploy(model=str(large), prefetch=prefetch, parser="off")
            spent = next((event["phase_seconds"] for event in outcome.events if event.get("phase_seconds")), {})
            report = outcome.server()
            times.append(spent.get("weights", 0.0))
            bench.check(
                f"prefetch {prefetch}", outcome.code == 0,
                f"weights {spent.get('weights')} s, ready {report.get('ready_seconds')} s, downtime "
                f"{report.get('downtime_seconds')} s, prestart {(report.get('durations') or {}).get('prestart')} s; "
                + outcome.said("GiB of weights"),
            )  # fmt: skip
    off, auto = (statistics.median(times) for times in seen.values())
    bench.check("reading ahead pays", auto < off, f"weights: median {off:.1f} s without, {auto:.1f} s with")


def _compare(bench: Bench, ways: dict[str, dict[str, Any]], wanted: dict[str, Any], model: str = "tiny") -> None:
    """Redeploy in turn in each way, $ROUNDS times; a row for each, and the medians."""
    rounds = int(os.environ.get("ROUNDS", "5"))
    seen: dict[str, list[float]] = {name: [] for name in ways}
    bench.write_inventory(**{SERVER: wanted})
    if not bench.check("the first deploy", bench.inv("deploy").code == 0):
        return
    for _ in range(rounds):
        for name, settings in ways.items():
            bench.write_inventory(**{SERVER: {**wanted, **settings}})
            first = FirstToken(model=model, pause=0.25)  # it is idle now and then
            first.start()
            outcome = bench.inv("deploy")
            first.over.set()
            first.join(70)
            report = outcome.server()
            real = None if not (first.at and first.last) else first.at - first.last
            stages = {key: value for key, value in (report.get("durations") or {}).items() if value >= 0.05}
            bench.check(
                name, outcome.code == 0 and real is not None,
                f"downtime told {report.get('downtime_seconds')} s, seen {real} s, "
                f"ready {report.get('ready_seconds')} s; {json.dumps(stages)}",
            )  # fmt: skip
            if real is not None:
                seen[name].append(real)
    medians = {name: statistics.median(times) for name, times in seen.items() if times}
    told = ", ".join(f"{name} {value:.1f} s" for name, value in medians.items())
    plain, early = medians["plain"], medians["before the stop"]
    bench.check("downtime is less", early < plain, f"medians of {rounds}: {told}; ratio {early / plain:.2f}")


def _expect_parsed(bench: Bench, what: str, **server: Any) -> None:
    outcome = bench.deploy(**server)
    report = outcome.server()
    bench.check(
        f"{what}: exit 3, nothing stopped",
        outcome.code == 3 and outcome.stage("stop") == {} and token(),
        f"exit {outcome.code}, cause {report.get('cause')}: {report.get('evidence')}; {report.get('message')}; "
        f"{outcome.seconds:.1f} s",
    )


SCENARIOS = {  # the order of `all`, and seconds that each may take
    warm: 20, record: 20, orphans: 150, deploy: 330, environment: 30, reading: 120, redeploy: 120, refusals: 60,
    unknown_flag: 130, memory_fraction: 140, too_many_ranks: 150, no_ninja: 150, model_name: 140, port_stolen: 190,
    stranger: 170, stopped_scheduler: 170, stalled_start: 200, sitecustomize_only: 130, orphans_by_hand: 150,
    transformers: 240, bad_words: 240, downtime: 900, downtime_of_transformers: 500, cold_weights: 560, two_ranks: 300,
}  # fmt: skip
NOT_IN_ALL = {warm, two_ranks, downtime, downtime_of_transformers, cold_weights}


# ------------------------------------------------------------------------------------------------------- shared steps


def _by_hand_pid(bench: Bench) -> int | None:
    file = bench.base / "by-hand.pid"
    if not file.exists():
        return None
    pid = int(file.read_text())
    file.unlink()
    return pid if alive({pid}) else None


def _ensure_serving(bench: Bench) -> None:
    if token() is None:
        outcome = bench.deploy()
        bench.check("a server to begin with", outcome.code == 0, outcome.server().get("message") or outcome.text[-500:])


def _stop(bench: Bench) -> None:
    if (bench.node_root() / "servers" / SERVER / "server.json").exists():
        bench.write_inventory(**{SERVER: bench.server()})
        bench.inv("stop")


def _shoot_launcher(pid: int, left: set[int]) -> None:
    """SIGKILL a launcher 3 s after its first worker began; ``left`` gets the workers."""
    eventually(lambda: workers(pid) or not alive({pid}), 60, 0.02)
    time.sleep(ORPHAN_SECONDS)
    left |= descendants(pid)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _watch_memory(bench: Bench, seconds: float) -> list[int]:
    began = time.monotonic()
    samples = []
    while time.monotonic() - began < seconds:
        samples.append(bench.used())
        time.sleep(0.5)
    return samples


def _expect_refusal(bench: Bench, what: str, cause: str, **server: Any) -> None:
    outcome = bench.deploy(**server)
    report = outcome.server()
    bench.check(
        f"{what}: exit 3 with cause {cause}",
        outcome.code == 3 and report.get("cause") == cause,
        f"cause {report.get('cause')}: {report.get('message')} {report.get('evidence')}"
        if report
        else outcome.text[-500:],
    )


def _expect_rollback(bench: Bench, causes: set[str], back: Any = None, listen: Any = None, **server: Any) -> None:
    """Deploy what fails: the cause is told, the old server serves again. ``back`` repairs the node before that."""
    _ensure_serving(bench)

    def watch(event: dict[str, Any]) -> None:
        if back and event.get("stage") == "rollback":
            back()
        if listen:
            listen(event)

    outcome = bench.deploy(listen=watch, **server)
    report = outcome.server()
    if outcome.code == 3:
        bench.check(
            "refused before anything was touched, with the right cause",
            report.get("cause") in causes,
            f"cause {report.get('cause')}: {report.get('evidence')}",
        )
    else:
        bench.check("exit 9, rolled back", outcome.code == 9, report.get("message") or outcome.text[-500:])
        bench.check(
            "the right cause",
            report.get("cause") in causes,
            f"cause {report.get('cause')}: {report.get('evidence')}; hint: {report.get('hint')}",
        )
    bench.check(
        "the old server answers",
        token(),
        f"downtime {report.get('downtime_seconds')} s, {json.dumps(report.get('durations'))}",
    )


def _version_of(python: str, distribution: str) -> str:
    words = [python, "-c", f"import importlib.metadata as m; print(m.version('{distribution}'))"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def _less(later: float | None, earlier: float) -> str:
    return "?" if later is None else f"{later - earlier:.2f}"


def main() -> int:
    machine, out, *names = sys.argv[1:]
    known = {scenario.__name__: scenario for scenario in SCENARIOS}
    wanted = [name for name in known if known[name] not in NOT_IN_ALL] if names == ["all"] else names
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        print(f"no such scenario: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    described = json.loads(Path(machine).read_text())
    if os.environ.get("MACHINE_EXTRA"):
        described |= json.loads(Path(os.environ["MACHINE_EXTRA"]).read_text())
    bench = Bench(described, Path(out))
    began = time.monotonic()
    for name in wanted:
        bench.scenario = name
        left = DEADLINE - (time.monotonic() - began)
        if left < 30:
            bench.note("left out: no time")
            continue
        bench.note("begins")
        at = time.monotonic()
        try:
            with at_most(int(min(SCENARIOS[known[name]] * SLOWER, left, 1e6))):
                known[name](bench)
        except Exception as error:
            traceback.print_exc()
            bench.check("went through", False, f"{type(error).__name__}: {error}")
        bench.note(f"took {time.monotonic() - at:.0f} s")
        bench.save()
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
