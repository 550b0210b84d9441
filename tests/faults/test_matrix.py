"""What the wire, the disk, the kernel and other people can do to a deploy, at each stage: no cell ends dark unsaid.

One row a fault (FAULTS), one column a stage. In each cell an old server serves, a deploy of a new release is held at
the beginning of the stage, the fault strikes, the deploy goes on. Asserted: the exit code, whose token comes out
afterwards, that all that was said of what serves is what an independent client finds, at the end and 10 s later, that
nothing is left behind, and that where the node was left dark one plain deploy ends ``deployed``. A row names three
stages that tell most, or says why it has fewer; they are tried on a plain node and on one with systemd in turn.
``./inv dev.soak`` tries every stage on both kinds of node.

A cell waits most of the time, so several are played at once, each on a node of its own (tests/faults/crew.py).
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from lab.arguments import PHASES
from lamplighter.node.events import STAGES, Exit
from tests.driver import Done, eventually
from tests.faults import puppet
from tests.faults.conftest import note_cell
from tests.faults.crew import Crew
from tests.faults.ground import HOME, PATIENCE, PORT, ROOT, Ground
from tests.faults.words import claims_of, denials
from tests.nodes.fixtures import GPU_DIRECTORY
from tests.nodes.park import NodePark, why_no_systemd

SOAK = bool(os.environ.get("LAMPLIGHTER_SOAK"))
#: While the launcher waits at its gate.
WAITING = ("stop", "free", "start")
BEFORE, LATE = STAGES[: STAGES.index("free")], STAGES[STAGES.index("ready") :]
#: Seconds after the end at which what was said must still be so.
LATER = 10

Process = subprocess.Popen  # of the control side
#: Exit codes and what answers afterwards: old, new, none.
Ends = tuple[set[int], set[str]]

FINE: Ends = ({Exit.OK}, {"new"})
REFUSED: Ends = ({Exit.REFUSED}, {"old"})
BACK: Ends = ({Exit.ROLLED_BACK}, {"old"})
#: Nothing can be started, neither the new nor the old one, and that is said.
DARK_START: Ends = ({Exit.CRASHED}, {"none"})
DARK: Ends = ({Exit.NOT_FREED}, {"none"})


@dataclass(frozen=True)
class Fault:
    """One row. ``strike`` does it and returns the exit code to judge, that of the ground's last command, or None for
    the deploy's own.
    """

    name: str
    strike: Callable[[Ground, Any], int | None]
    ends: Callable[[str], Ends]
    stages: tuple[str, ...] = ("prove", "free", "ready")
    all_stages: tuple[str, ...] = STAGES
    #: Why fewer than three stages make sense.
    few: str = ""
    mend: Callable[[Ground], None] = lambda ground: None
    old: Mapping[str, Any] = field(default_factory=dict)
    new: Mapping[str, Any] = field(default_factory=dict)
    hold: Mapping[str, Any] = field(default_factory=dict)
    by_hand: bool = False
    #: A full disk may cost events; the numbers of the others still rise.
    loses_events: bool = False
    #: What was struck is the disk: what could not be removed is left to the next run.
    leaves_files: bool = False
    transport: str = "auto"

    def cells(self) -> Iterator[tuple[str, str]]:
        if SOAK:
            yield from ((stage, kind) for stage in self.all_stages for kind in ("plain", "systemd"))
            return
        for number, stage in enumerate(self.stages, len(self.name)):  # so that no stage is left to one kind of node
            yield stage, ("plain", "systemd")[number % 2]


def always(ends: Ends) -> Callable[[str], Ends]:
    return lambda stage: ends


def split(before: Ends, after: Ends, at: str = "free") -> Callable[[str], Ends]:
    """``before`` for the stages before ``at``, ``after`` from it on."""
    return lambda stage: before if STAGES.index(stage) < STAGES.index(at) else after


def by_stage(ends: Mapping[str, Ends], default: Ends) -> Callable[[str], Ends]:
    return lambda stage: ends.get(stage, default)


# -- the control side and the wire


def kill_control(ground: Ground, process: Any) -> int:
    process.kill()
    process.wait()
    ground.release()
    return attached(ground)


def attached(ground: Ground) -> int:
    return ground.run("attach", "--json").code


def interrupt_control(ground: Ground, process: Any) -> int:
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == Exit.DETACHED
    ground.release()
    return attached(ground)


def cut_for_five_seconds(ground: Ground, process: Any) -> None:
    ground.node.cut()
    time.sleep(5)  # the fault itself takes that long
    ground.node.heal()


def cut_for_good(ground: Ground, process: Any) -> int:
    ground.node.cut()
    ground.release()
    assert process.wait(PATIENCE) == Exit.DETACHED
    ground.node.heal()
    return attached(ground)


def stop_sshd(ground: Ground, process: Any) -> None:
    ground.node.stop_sshd()


def kill_sessions(ground: Ground, process: Any) -> None:
    ground.node.kill_sessions()


def kill_relay(ground: Ground, process: Any) -> None:
    table = ground.node.processes().items()
    relays = [pid for pid, words in table if "sys.stdin.buffer.read(" in words and "sh -c" not in words]
    assert relays
    for pid in relays:
        ground.node.exec(["kill", "-9", str(pid)])


def cancel(ground: Ground, process: Any) -> None:
    """From another machine, as it were: another command."""
    canceller = subprocess.Popen(
        ground.driver.command("cancel", "--json", "--host", "gpu"),
        env=ground.driver.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        eventually(lambda: ground.node.sh(f"ls {HOME}/runs/$(ls {HOME}/runs | tail -1)/cancel.json || true"), PATIENCE)
        ground.release()
        assert canceller.wait(PATIENCE) == process.wait(PATIENCE)
    finally:
        canceller.kill()
        canceller.wait()


# -- the node


def cancel_on_a_full_disk(ground: Ground, process: Any) -> None:
    ground.node.fill_disk()
    cancel(ground, process)


def kill_worker(ground: Ground, process: Any) -> None:
    ground.node.exec(["kill", "-9", str(ground.held_worker())])


def kill_server(ground: Ground, process: Any) -> None:
    """All of it at once, as a kernel out of memory, or a person, may do."""
    pids = [str(pid) for pid, words in ground.node.processes().items() if "lab/launch_server.py" in words]
    ground.node.exec(["kill", "-9", *pids])
    eventually(lambda: not ground.launchers())


def waiting_launcher(ground: Ground) -> str:
    """The pid of the launcher that waits at its gate: the kernel would take it first."""
    pids = [str(pid) for pid, words in ground.node.processes().items() if "lab/launch_server.py" in words]
    waiting = [pid for pid in pids if ground.node.read(f"/proc/{pid}/oom_score_adj").strip() == "1000"]
    assert len(waiting) == 1, pids
    return waiting[0]


def kill_at_gate(ground: Ground, process: Any) -> None:
    """As the kernel does it that is out of memory."""
    pid = waiting_launcher(ground)
    ground.node.exec(["kill", "-9", pid])
    eventually(lambda: int(pid) not in ground.node.processes())


def freeze_at_gate(ground: Ground, process: Any) -> None:
    ground.node.exec(["kill", "-STOP", waiting_launcher(ground)])


def touch_gpu_at_gate(ground: Ground, process: Any) -> None:
    ground.python(
        "from lab import ledger; g, p = sys.argv[1:]; "
        "u = ledger.read_json(g + '/board.json')['gpus'][0]['uuid']; ledger.allocate(g, int(p), u, 500, 'python3')",
        GPU_DIRECTORY, waiting_launcher(ground),
    )  # fmt: skip


def on_the_way_to_the_gate(what: str) -> Callable[[Ground, Any], None]:
    """Have the launch's program do ``what`` once, where it would become the launcher."""

    def order(ground: Ground, process: Any) -> None:
        hide_program(ground, process)
        once = f'#!/bin/sh\nrm /root/once 2>/dev/null && exec {what}\nexec /usr/local/bin/hidden "$@"\n'
        ground.node.sh("touch /root/once")
        ground.node.write("/usr/local/bin/lamplighter-demo-server", once, mode="755")

    return order


def reboot(ground: Ground, process: Any) -> None:
    ground.node.reboot()
    ground.release()


def fill_disk(ground: Ground, process: Any) -> None:
    ground.node.fill_disk()


def freeze_root(ground: Ground, process: Any) -> None:
    """What is open for writing stays so; a real remount would be refused because of that."""
    ground.node.sh(f"mount --bind {ROOT} {ROOT} && mount -o remount,bind,ro {ROOT}")


def thaw_root(ground: Ground) -> None:
    ground.node.sh(f"umount -l {ROOT}")


def hide_smi(ground: Ground, process: Any) -> None:
    ground.node.sh("mv /usr/local/bin/nvidia-smi /usr/local/bin/nvidia-smi.hidden")


def show_smi(ground: Ground) -> None:
    ground.node.sh("mv /usr/local/bin/nvidia-smi.hidden /usr/local/bin/nvidia-smi")


def smi(**states: Any) -> Callable[[Ground, Any], None]:
    return lambda ground, process: ground.inject(**states)


def normal_smi(ground: Ground) -> None:
    ground.inject()


def take_gpu(ground: Ground, process: Any) -> None:
    """A trainer of somebody else takes memory of the first GPU."""
    ground.node.exec(["bash", "-c", "(exec -a /usr/bin/trainer sleep 3600) >/dev/null 2>&1 </dev/null &"])

    def trainers() -> list[str]:
        return [str(pid) for pid, words in ground.node.processes().items() if words == "/usr/bin/trainer 3600"]

    pid = eventually(trainers)[0]
    ground.python(
        "from lab import ledger; g, p = sys.argv[1:]; "
        "u = ledger.read_json(g + '/board.json')['gpus'][0]['uuid']; ledger.allocate(g, int(p), u, 9000, 'trainer')",
        GPU_DIRECTORY, pid,
    )  # fmt: skip


def leave_gpu(ground: Ground) -> None:
    ground.node.sh("pkill -KILL -f '^/usr/bin/trainer'; while pgrep -f '^/usr/bin/trainer'; do sleep 0.1; done")


def take_port(ground: Ground, process: Any) -> None:
    ground.node.sh(f"setsid /usr/bin/python3 -m http.server --bind 127.0.0.1 {PORT} >/dev/null 2>&1 </dev/null &")
    eventually(lambda: "http.server" in " ".join(ground.node.processes().values()))
    eventually(lambda: f":{PORT:04X} 00000000:0000 0A" in ground.node.read("/proc/net/tcp"))


def leave_port(ground: Ground) -> None:
    ground.node.sh("pkill -KILL -f '[h]ttp.server'; while pgrep -f '[h]ttp.server'; do sleep 0.1; done")


def take_port_elsewhere(ground: Ground, process: Any) -> None:
    """In a network of its own, as a container has one."""
    ground.node.sh(
        f"setsid unshare -n /usr/bin/python3 -m http.server --bind 0.0.0.0 {PORT} >/dev/null 2>&1 </dev/null &"
    )
    eventually(lambda: "http.server" in " ".join(ground.node.processes().values()))


def leave_port_elsewhere(ground: Ground) -> None:
    assert "http.server" in " ".join(ground.node.processes().values()), "a bystander was ended"
    leave_port(ground)


def freeze_server(ground: Ground, process: Any) -> None:
    """All of it is stopped, as by a debugger or a driver that does not return; it keeps port and GPUs."""
    pids = [str(pid) for pid, words in ground.node.processes().items() if is_of_server(words)]
    assert pids
    ground.node.exec(["kill", "-STOP", *pids])


def is_of_server(words: str) -> bool:
    return "lab/launch_server.py" in words or words.startswith("sglang::")


def upgrade_python(ground: Ground, process: Any) -> None:
    """As a package manager does it: a new file in the place of the one that runs."""
    ground.node.sh("python=$(readlink -f /usr/bin/python3) && cp -a $python $python.new && mv -f $python.new $python")


def flood_log(ground: Ground, process: Any) -> None:
    """A gigabyte at once, which takes no room."""
    ground.node.sh(f"truncate -s +1G {HOME}/runs/$(ls {HOME}/runs | tail -1)/server.log")


def deploy_again(ground: Ground, process: Any) -> None:
    other = ground.run("deploy", "--json")
    assert other.code == Exit.LOCKED, other
    assert "is locked by run" in other.server("gpu", "demo")["message"]


def nothing(ground: Ground, process: Any) -> None:
    """The fault lies in the server itself."""


def break_old_release(ground: Ground, process: Any) -> None:
    ground.node.sh("rm -rf /root/old-model")


def mend_old_release(ground: Ground) -> None:
    ground.node.sh("mkdir -p /root/old-model")


def lose_weights(ground: Ground, process: Any) -> None:
    """The hub's cache is cleared: what lies in the model's directory are links to nothing."""
    ground.node.sh("ln -s /root/blobs/0123 /root/old-model/model.safetensors")


def find_weights(ground: Ground) -> None:
    ground.node.sh("rm -f /root/old-model/model.safetensors")


def fill_shm(ground: Ground, process: Any) -> None:
    ground.node.sh("cat /dev/zero >/dev/shm/of-others 2>/dev/null || true")


def empty_shm(ground: Ground) -> None:
    ground.node.sh("rm -f /dev/shm/of-others")


def take_derived_port(ground: Ground, process: Any) -> None:
    ground.node.sh(f"setsid /usr/bin/python3 -m http.server {NCCL_PORT} >/dev/null 2>&1 </dev/null &")
    eventually(lambda: f":{NCCL_PORT:04X} 00000000:0000 0A" in ground.node.read("/proc/net/tcp"))


def hide_program(ground: Ground, process: Any) -> None:
    ground.node.sh("mv /usr/local/bin/lamplighter-demo-server /usr/local/bin/hidden")


def show_program(ground: Ground) -> None:
    ground.node.sh("mv /usr/local/bin/hidden /usr/local/bin/lamplighter-demo-server")


NCCL_PORT = 18765
OLD_MODEL = {"model": "/root/old-model", "served_name": "demo-model"}
WARNS = {"rc": 14, "stderr": "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n"}
LIES = {"fields": {"*": {"memory.used": "[N/A]", "memory.total": "[Unknown Error]"}}}
KILLED: Callable[[str], Ends] = by_stage(
    {"ready": ({1}, {"new"}), "confirm": ({1}, {"new"}), "commit": ({1}, {"new"})}
    | dict.fromkeys(BEFORE, ({1}, {"old"})),
    ({1}, {"none"}),
)

#: `commit` is held after its last look for an order to cancel: what is committed is not taken back.
CANCELLED: Callable[[str], Ends] = by_stage(
    {"commit": FINE} | dict.fromkeys(BEFORE, ({Exit.INTERRUPTED}, {"old"})),
    BACK,
)

IN_THE_SERVER = "the fault lies in the server, so it strikes at its own stage wherever the deploy is held"

FAULTS = (
    Fault("control killed -9", kill_control, always(FINE)),
    Fault("control TERM", interrupt_control, always(FINE), ("stage", "stop", "confirm")),
    Fault("wire cut for 5 s", cut_for_five_seconds, always(FINE)),
    Fault("wire cut for good", cut_for_good, always(FINE)),
    *(
        Fault(f"{name} under ssh itself", strike, always(FINE), transport="openssh")
        for name, strike in (
            ("control killed -9", kill_control),
            ("wire cut for 5 s", cut_for_five_seconds),
            ("wire cut for good", cut_for_good),
            ("session's sshd killed", kill_sessions),
        )
        if SOAK
    ),
    Fault("sshd killed", stop_sshd, always(FINE), mend=lambda ground: ground.node.start_sshd()),
    Fault("session's sshd killed", kill_sessions, always(FINE)),
    Fault("relay killed", kill_relay, always(FINE), ("prove", "stop", "ready")),
    Fault("worker killed -9", kill_worker, KILLED, ("prove", "stop", "free", "ready", "commit")),
    Fault("node rebooted", reboot, always(({1}, {"none", "old", "new"})), ("prove", "free", "ready")),
    Fault(
        "disk full", fill_disk,
        by_stage({"preflight": REFUSED, "stage": REFUSED, "lock": REFUSED},
                 ({Exit.OK, Exit.DEGRADED, Exit.REFUSED, Exit.ROLLED_BACK}, {"old", "new"})),
        ("preflight", "stop", "start", "commit"),
        mend=lambda ground: ground.node.free_disk(), loses_events=True,
    ),
    Fault(
        "root read-only", freeze_root,
        by_stage(dict.fromkeys(BEFORE, REFUSED) | {"free": DARK_START, "start": DARK_START},
                 ({Exit.DEGRADED}, {"new"})),
        ("stage", "stop", "start", "commit"), mend=thaw_root, leaves_files=True,
    ),
    Fault(
        "nvidia-smi missing", hide_smi,
        by_stage(dict.fromkeys(BEFORE, REFUSED) | {"free": DARK}, ({Exit.DEGRADED}, {"new"})),
        ("preflight", "free", "ready"), mend=show_smi,
    ),
    Fault(
        "nvidia-smi hangs", smi(hang=True),
        by_stage(dict.fromkeys(BEFORE, REFUSED) | {"free": DARK}, ({Exit.DEGRADED}, {"new"})),
        ("preflight", "free", "ready"), ("preflight", "free", "ready"), mend=normal_smi,
    ),
    Fault(
        "nvidia-smi lies", smi(**LIES),
        by_stage(dict.fromkeys(BEFORE, REFUSED) | {"free": DARK}, ({Exit.DEGRADED}, {"new"})),
        ("preflight", "free", "ready"), mend=normal_smi,
    ),
    Fault(
        "nvidia-smi warns at every call", smi(**WARNS),
        by_stage(dict.fromkeys(BEFORE, REFUSED) | {"free": DARK}, ({Exit.DEGRADED}, {"new"})),
        ("preflight", "free", "ready"), mend=normal_smi,
    ),
    Fault("same, and the warning is accepted", smi(**WARNS), always(FINE), ("preflight", "free", "ready"),
          mend=normal_smi, new={"gpu_warnings": {"accept": ["infoROM is corrupted"]}}),
    Fault("GPU never freed", smi(used={"0": 50000}), always(DARK), ("prove", "stop", "free"), ("prove", "stop", "free"),
          mend=normal_smi),
    Fault("foreign process grabs GPU", take_gpu, split(REFUSED, DARK), ("stop", "free", "start"),
          ("preflight", "stop", "free", "start"), mend=leave_gpu),
    Fault("foreign process grabs port", take_port, always(DARK), ("free", "start"), ("free", "start"), mend=leave_port,
          few="before `free` the old server has the port, after `start` the new one"),
    Fault("clock jumps a day ahead", nothing, always(FINE), ("preflight", "free", "ready"), hold={"jump": 86400}),
    Fault("clock jumps a day back", nothing, always(FINE), ("prove", "free", "ready"), hold={"jump": -86400}),
    *(
        Fault(f"launcher {name} at its gate", strike, always(FINE), WAITING, WAITING)
        for name, strike in (("killed", kill_at_gate), ("frozen", freeze_at_gate))
    ),
    Fault("launcher at its gate touches a GPU", touch_gpu_at_gate, always(FINE), ("stop", "free"), ("stop", "free"),
          few="after `free` it may"),
    *(
        Fault(f"launcher {name} before its gate", on_the_way_to_the_gate(what), always(FINE), ("prestart",),
              ("prestart",), mend=show_program, few=IN_THE_SERVER)
        for name, what in (("dies", "false"), ("hangs", "sleep 100000"))
    ),
    Fault("new server killed", kill_server, always(BACK), LATE, LATE),
    Fault("old server frozen", freeze_server, always(FINE), ("preflight", "prove", "stop"), BEFORE),
    Fault("new server frozen", freeze_server, always(BACK), LATE, LATE, old={"timeouts": {"ready": 60}},
          new={"timeouts": {"ready": 20}}),
    Fault("nvidia-smi takes 6 s", smi(slow=6), always(FINE), ("free",), ("preflight", "free", "ready"), mend=normal_smi,
          few="each takes a minute, and between the old server and the new one it counts most"),
    Fault("port taken in another network", take_port_elsewhere, always(FINE), ("preflight", "free", "ready"),
          mend=leave_port_elsewhere),
    Fault("Python upgraded", upgrade_python, always(FINE), ("prove", "free", "commit")),
    Fault("log of 1 GB", flood_log, always(FINE), LATE, LATE),
    Fault("concurrent deploy", deploy_again, always(FINE), ("preflight", "free", "confirm"), STAGES[1:]),
    Fault("cancelled from elsewhere", cancel, CANCELLED, ("prove", "free", "ready")),
    Fault("cancelled on a full disk", cancel_on_a_full_disk, CANCELLED, ("stop", "free", "ready"),
          ("prove", "stop", "free", "start", "ready", "confirm"),
          mend=lambda ground: ground.node.free_disk(), loses_events=True),
    Fault("server started by hand, first deploy", nothing, always(FINE), ("ready",), ("prove", "free", "ready"),
          by_hand=True, few=IN_THE_SERVER),
    Fault("same, and the new one dies", nothing, always(BACK), ("ready",), ("ready",), by_hand=True,
          new={"args": {"lab-fail": "die:weights"}}, few=IN_THE_SERVER),
    Fault("old server ignores TERM", nothing, always(FINE), ("stop",), ("stop",),
          old={"args": {"lab-fail": "ignore-term"}, "timeouts": {"stop": 1}}, new={"timeouts": {"stop": 1}},
          few=IN_THE_SERVER),
    Fault("old release fails in rollback", break_old_release, always(({Exit.CRASHED}, {"none"})),
          ("stop", "start", "ready"), ("stop", "free", "start", "ready"), old=OLD_MODEL,
          new={"args": {"lab-fail": "die:weights"}}, mend=mend_old_release),
    *(
        Fault(name, nothing, always(BACK), ("ready",), ("ready",), new={"args": {"lab-fail": fault}},
              few=IN_THE_SERVER)
        for name, fault in (
            ("new server forbids every question", "forbid"), ("new server rejects every question", "reject"),
            ("new server listens on ::1 alone", "bind-v6"), ("launcher forks and exits", "fork"),
        )
    ),
    Fault("one token, then silence", nothing, always(BACK), ("ready",), ("ready",),
          new={"args": {"lab-fail": "silent"}}, few=IN_THE_SERVER),
    *(
        Fault(name, strike, always(REFUSED), ("lock", "preflight"), ("lock", "preflight"), mend=mend, old=old, new=new,
              few="it is asked once, before anything is touched")
        for name, strike, mend, old, new in (
            ("old model gone", break_old_release, mend_old_release, OLD_MODEL, {}),
            ("old model's weights gone", lose_weights, find_weights, OLD_MODEL, {}),
            ("/dev/shm filled", fill_shm, empty_shm, {}, {}),
            ("derived port held", take_derived_port, leave_port, {}, {"args": {"nccl-port": NCCL_PORT}}),
            ("program gone", hide_program, show_program, {}, {}),
        )
    ),
    *(
        Fault(f"new server dies in {phase}", nothing, always(BACK), ("ready",), ("ready",),
              new={"args": {"lab-fail": f"die:{phase}"}}, few=IN_THE_SERVER)
        for phase in (PHASES if SOAK else ("boot", "weights", "graphs", "ready"))
    ),
)  # fmt: skip
CELLS = [
    pytest.param(fault, stage, kind, id=f"{fault.name}-{stage}-{kind}")
    for fault in FAULTS
    for stage, kind in fault.cells()
]


@pytest.fixture(scope="module")
def played(
    park: NodePark, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Mapping[tuple[str, str, str], Future[str]]]:
    """The chosen cells, each with the result that it will have."""
    cells = [
        tuple(item.callspec.params[name] for name in ("fault", "stage", "kind"))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_fault"
    ]
    with Crew(park, tmp_path_factory.mktemp("inventories"), without_systemd=why_no_systemd() is not None) as crew:
        yield {
            (fault.name, stage, kind): crew.play(
                kind, lambda ground, fault=fault, stage=stage: try_cell(ground, fault, stage)
            )
            for fault, stage, kind in cells
        }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("fault", "stage", "kind"), CELLS)
def test_fault(
    played: Mapping[tuple[str, str, str], Future[str]],
    require: Any,
    request: pytest.FixtureRequest,
    fault: Fault,
    stage: str,
    kind: str,
) -> None:
    if kind == "systemd":
        require("systemd", why_no_systemd())
    if "jump" in fault.hold and puppet.faketime() is None:
        require("netns", "libfaketime is not installed")
    note_cell(request, fault.name, stage, kind, "FAILED")
    note_cell(request, fault.name, stage, kind, played[fault.name, stage, kind].result())


def test_a_row_has_three_stages_or_says_why_not() -> None:
    for fault in FAULTS:
        assert (len(fault.stages) >= 3) == (not fault.few), fault.name


def try_cell(ground: Ground, fault: Fault, stage: str) -> Generator[float, None, str]:
    """Play one cell; what came of it, for the table. Yields the seconds to let pass."""
    if fault.old is OLD_MODEL:
        mend_old_release(ground)
    ground.transport = fault.transport
    old = ground.start_by_hand() if fault.by_hand else ground.settle(**fault.old)
    ground.configure(**fault.new)
    ages = {old: "old", str(ground.age): "new", "none": "none"}
    codes, answers = fault.ends(stage)
    try:
        with ground.holding(stage, **fault.hold) as process:
            if ground.node.systemd:  # else the end of the login could be the worker's too
                assert "/lamplighter-run-" in ground.node.read(f"/proc/{ground.held_worker()}/cgroup")
            code = fault.strike(ground, process)
            ground.release()
            own = Done(0, *process.communicate(timeout=PATIENCE))
            judged = ground.last if code is not None else dataclasses.replace(own, code=process.returncode)
        assert judged is not None
        assert code in (None, judged.code), "the strike has judged a command that the ground did not run"
        code, told = judged.code, own.stdout
        assert code in codes, f"exit {code}, not {sorted(codes)}\n{told}"
        ground.learn(judged)
        claims = claims_of(judged)
        lies = denials(claims, ground.look(), ground.ages, "at the end")
        over = time.monotonic()
        if "new" in answers and code == Exit.INTERNAL:
            eventually(lambda: ages[ground.answer()] in answers, PATIENCE)  # it is on its way up, and nobody stops it
        answer = ages[ground.answer()]
        assert answer in answers, f"{answer} answers, not {sorted(answers)}\n{told}"
        yield max(0.0, over + LATER - time.monotonic())
        lies += denials(claims, ground.look(), ground.ages, f"{LATER} s later")
        assert not lies, "\n".join([*lies, str(judged.report), judged.stderr])
    finally:
        fault.mend(ground)
    if code != Exit.INTERNAL and not fault.leaves_files:  # else the killed run has left what the next one repairs
        assert ground.trouble(gaps=fault.loses_events) == []
        assert ground.launchers() == (answer != "none"), ground.node.processes()
    ground.serving = {"old": old, "new": str(ground.age), "none": "none"}[answer]
    after = ""
    if answer == "none" or code in (Exit.INTERNAL, Exit.INTERRUPTED) or fault.leaves_files:
        ground.configure()
        done = ground.deploy()
        assert done.code == Exit.OK, f"the next plain deploy: {done}"
        ground.learn(done)
        found = ground.look()
        assert denials(claims_of(done), found, ground.ages, "after the next plain deploy") == []
        assert found.age == str(ground.age)
        assert ground.trouble() == []
        assert ground.launchers() == 1
        ground.serving = str(ground.age)
        after = ", then deployed"
    return f"{code}, {answer} serves{after}" if answer != "none" else f"{code}, nothing serves{after}"


def test_a_read_only_root_is_refused(park: NodePark, tmp_path: Any, request: pytest.FixtureRequest) -> None:
    """At rest alone: while a server or a worker writes there, the kernel refuses to make it read-only."""
    ground = Ground.make(park, "faults-ro", tmp_path, systemd=False)
    try:
        for stage in ("before the first deploy", "before a later one"):
            ground.configure()
            ground.node.read_only()
            done = ground.deploy()
            assert done.code == Exit.REFUSED, done
            assert "Read-only file system" in done.stdout
            assert "Traceback" not in done.stdout + done.stderr
            if stage == "before a later one":
                assert "no run can keep its journal there" in done.stdout, done
                for verb, says in {"status": "stopped", "releases": "good", "logs": "", "attach": "stopped"}.items():
                    told = ground.run(verb)
                    assert told.code == Exit.OK, told
                    assert says in told.stdout, told
            assert ground.answer() == "none"
            ground.node.read_only(False)
            assert ground.deploy().code == Exit.OK
            assert ground.trouble() == []
            assert ground.run("stop", "--json").code == Exit.OK
            note_cell(request, "root read-only", stage, "plain", "3, nothing serves, then deployed")
    finally:
        park.forget(ground.node.name)
