"""The nvidia-smi stand-in: what an H200 node answered, call by call, and the odd states."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab import control, ledger, node
from lamplighter.node.gpu import gpus
from lamplighter.node.health import facts

RECORDINGS = Path(__file__).parents[1] / "recordings" / "h200" / "nvidia-smi"
BOARDS = {
    "one-gpu": [("GPU-5b1c9f0e-7a42-4d1b-9e63-2f8c0a7d4410", "0-15", 36, 36, 76.24)],
    "two-gpus": [
        ("GPU-5b1c9f10-7a42-4d1b-9e63-2f8c0a7d4411", "0-31", 34, 37, 78.48),
        ("GPU-5b1c9f11-7a42-4d1b-9e63-2f8c0a7d4412", "0-31", 35, 39, 79.41),
    ],
}
QUERY_GPU = ["--query-gpu=index,uuid,memory.total,memory.used,temperature.gpu,pstate", "--format=csv,noheader,nounits"]
QUERY_APPS = ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"]


def recorded_calls(name: str) -> list[tuple[str, str, int]]:
    """(command line, output, exit status) of a recording, but for loops that print times."""
    text = (RECORDINGS / f"{name}.txt").read_text()
    calls = re.findall(r"^\$ (.*)\n((?:.*\n)*?)\[rc=(\d+) wall=[\d.]+s\]\n", text, re.MULTILINE)
    return [(command, output, int(rc)) for command, output, rc in calls if "for i in" not in command]


def masked(text: str) -> str:
    """Without what differs from one moment to the next: times, power, temperature."""
    text = re.sub(r"^\w{3} \w{3} [ \d]\d [\d:]+ 20\d\d", "DATE", text, flags=re.MULTILINE)
    text = re.sub(r"^20\d\d/\d\d/\d\d [\d:.]+", "TIME", text, flags=re.MULTILINE)
    text = re.sub(r"\d+\.\d\d(?=( W)?,)", "P", text)
    text = re.sub(r" +\d+W /", " W /", text)
    text = re.sub(r" +\d+C ", " C ", text)
    return re.sub(r"^( {4}\d)( +\d+){21} $", r"\1 DMON", text, flags=re.MULTILINE)


def with_board(directory: Path, name: str) -> Path:
    """A node with the GPUs of a recording."""
    root = node.prepare("recorded", directory)
    board = node.board(root, len(BOARDS[name]))
    for gpu, (uuid, cpus, temperature, memory_temperature, watts) in zip(board["gpus"], BOARDS[name], strict=True):
        gpu |= {"uuid": uuid, "temperature": temperature, "memory_temperature": memory_temperature, "watts": watts}
        board["cpus"] = cpus
    (root / "gpu" / "board.json").write_text(json.dumps(board))
    return root


@pytest.fixture(scope="module", params=sorted(BOARDS))
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, with_board(tmp_path_factory.mktemp("a node"), request.param)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    return node.prepare("box", tmp_path)


def smi(root: Path, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [root / "bin" / "nvidia-smi", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={}, check=False)


def test_every_recorded_call_is_answered_as_recorded(recorded: tuple[str, Path]) -> None:
    name, root = recorded
    bash = shutil.which("bash")
    assert bash, "the recorded command lines are bash"
    calls = recorded_calls(name)
    assert len(calls) > 25
    for command, output, rc in calls:
        if "-lms" in command:
            continue  # the next test
        environment = {"PATH": f"{root / 'bin'}:/usr/bin:/bin"}
        # One call sets another PATH, to show that nothing of the environment matters.
        line = command.replace("PATH=/usr/bin:/bin nvidia-smi", '"$(command -v nvidia-smi)"')
        line = line.replace("$(command -v nvidia-smi)", '"$(command -v nvidia-smi)"').replace('""', '"')
        done = subprocess.run([bash, "-c", line], capture_output=True, text=True, env=environment, check=False)
        printed = done.stdout if done.stdout.endswith("\n") or not done.stdout else f"{done.stdout}\n"
        assert (command, masked(printed), done.returncode, done.stderr) == (command, masked(output), rc, "")


def queries_we_send() -> list[tuple[str, ...]]:
    found = [value for value in vars(gpus).values() if isinstance(value, tuple) and value[:1] == ("nvidia-smi",)]
    assert len(found) >= 3
    return [*found, *(gpus._query(fields) for fields in (facts.DETAILS, ("driver_version",)))]


def steady(text: str) -> str:
    """Without temperature and state, and the clocks' reasons, which are what they are at the moment."""
    return re.sub(r"0x[0-9a-f]{16}", "REASONS", re.sub(r"\b\d\d, P\d$", "T, P", text.strip(), flags=re.MULTILINE))


@pytest.mark.parametrize("is_serving", [True, False], ids=["serving", "idle"])
@pytest.mark.parametrize("query", queries_we_send(), ids=lambda query: query[1][8:60])
def test_every_query_that_we_send_is_answered_as_recorded(
    query: tuple[str, ...], is_serving: bool, tmp_path: Path
) -> None:
    root = with_board(tmp_path, "one-gpu")
    calls = recorded_calls("serving-one-gpu" if is_serving else "idle-one-gpu")
    recorded = {command: (output, rc) for command, output, rc in calls}
    assert " ".join(query) in recorded, "a query without a recording: run tests/gpu/scenarios.py record on a GPU"
    output, rc = recorded[" ".join(query)]
    # 16 MiB more than the process holds were in use: here it is 10, with the same columns.
    output = output.replace("101620", "101614")
    with control.stranger(root, 101_604, name="sglang::scheduler") as process:
        if not is_serving:
            control.free(root, process.pid)
        done = smi(root, *query[1:])
    said = done.stdout.replace(f", {process.pid}, ", ", 11267, ")
    assert (steady(said), done.returncode, done.stderr) == (steady(output), rc, "")


def test_a_loop_prints_again_and_again(recorded: tuple[str, Path]) -> None:
    name, root = recorded
    command = [root / "bin" / "nvidia-smi", "--query-gpu=timestamp,index,memory.used", "--format=csv,noheader,nounits"]
    with subprocess.Popen([*command, "-lms", "20"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(6)]
        process.kill()
    assert [masked(line) for line in lines] == [
        f"TIME, {index}, 0\n" for _ in range(6 // len(BOARDS[name])) for index in range(len(BOARDS[name]))
    ]


def test_the_long_query_prints_lines_of_the_real_one(recorded: tuple[str, Path]) -> None:
    name, root = recorded
    real = masked((RECORDINGS / f"query-{name}.txt").read_text())
    printed = smi(root, "-q").stdout
    assert printed.count("GPU UUID") == len(BOARDS[name])
    strange = [line for line in printed.splitlines() if line not in real.splitlines() and "Timestamp" not in line]
    assert strange == []


def test_it_starts_fast_because_it_imports_little(box: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import lab.nvidia_smi; "
        f"lab.nvidia_smi.answer({QUERY_GPU!r}, {str(box / 'gpu')!r}); print(*sys.modules)"
    )
    command = [sys.executable, "-I", "-S", "-c", program, str(node.PROJECT)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "lab.ledger" in loaded
    assert not {"re", "json", "typing", "pathlib", "enum", "dataclasses", "contextlib"} & set(loaded)


def test_a_process_that_holds_memory_is_listed_by_its_argv0_and_counted(box: Path) -> None:
    with control.stranger(box, 102918, gpu=1, name="/opt/llm/venv/bin/python3") as process:
        uuid = control.uuids(box)[1]
        assert smi(box, *QUERY_APPS).stdout == f"{uuid}, {process.pid}, /opt/llm/venv/bin/python3, 102918\n"
        assert smi(box, "--query-gpu=index,memory.used", "--format=csv,noheader").stdout == "0, 0 MiB\n1, 102928 MiB\n"
        assert (
            f"   1   N/A  N/A{process.pid:>16}      C   /opt/llm/venv/bin/python3             10291... |"
            in smi(box).stdout
        )


def test_the_table_of_a_busy_node_reads_as_recorded(box: Path) -> None:
    with control.stranger(box, 132890, name="sglang::scheduler_TP0") as process:
        row = next(line for line in smi(box).stdout.splitlines() if "scheduler" in line)
    recorded = "|    0   N/A  N/A            3580      C   sglang::scheduler_TP0                 13289... |"
    assert row == recorded.replace(f"{3580:>16}", f"{process.pid:>16}")


def test_memory_outlives_its_process_for_a_moment_with_a_nameless_row(box: Path) -> None:
    control.inject(box, release=600)
    with control.stranger(box, 1000) as process:
        process.kill()
        wait_until(lambda: ledger.start_of(process.pid) is None)
        assert smi(box, *QUERY_APPS).stdout == f"{control.uuids(box)[0]}, {process.pid}, [No data], 1000\n"
        control.inject(box, teardown="empty")
        assert (smi(box, *QUERY_APPS).stdout, used(box)) == ("", [1010, 0])
        control.inject(box, release=0.6)
        process.wait()
        wait_until(lambda: used(box) == [0, 0])
        assert control.held(box) == []


def test_memory_of_a_reused_pid_is_not_the_new_process_s(box: Path) -> None:
    with control.stranger(box, 1000) as process:
        (entry,) = control.held(box)
        other = json.loads(Path(entry.path).read_text()) | {"start": entry.start - 1}
        Path(entry.path).write_text(json.dumps(other))
        assert smi(box, *QUERY_APPS).stdout == f"{control.uuids(box)[0]}, {process.pid}, [No data], 1000\n"


def test_memory_given_back_by_a_live_process_is_free_at_once(box: Path) -> None:
    with control.stranger(box, 1000) as process:
        control.free(box, process.pid)
        assert (used(box), smi(box, *QUERY_APPS).stdout) == ([0, 0], "")


def test_a_process_without_memory_is_known_to_the_node_but_not_to_nvidia_smi(box: Path) -> None:
    with control.stranger(box, 1000) as process:
        control.free(box, process.pid)
        ledger.allocate(str(box / "gpu"), process.pid, "", 0)
        assert smi(box, *QUERY_APPS).stdout == ""
        assert process.pid in node.processes("box", box.parent)


def test_fault_tokens_replace_cells_of_the_named_gpu(box: Path) -> None:
    control.inject(box, fields={"1": {"memory.used": "[Unknown Error]", "temperature.gpu": "[GPU requires reset]"}})
    rows = [line.split(", ") for line in smi(box, *QUERY_GPU).stdout.splitlines()]
    assert rows[0][3:5] == ["0", "34"]
    assert rows[1][3:5] == ["[Unknown Error]", "[GPU requires reset]"]


def test_a_lost_gpu_has_no_row_and_a_message_in_the_middle(box: Path) -> None:
    text = "Unable to determine the device handle for GPU0000:02:00.0: Unknown Error"
    control.inject(box, missing=[0], extra=[text])
    assert [line.split(",")[0] for line in smi(box, *QUERY_GPU).stdout.splitlines()] == ["1", text]
    assert smi(box, "-L").stdout.startswith("GPU 1: ")


def test_all_gpus_gone(box: Path) -> None:
    control.inject(box, missing=["*"])
    done = smi(box, *QUERY_GPU)
    assert (done.returncode, done.stdout) == (6, "No devices were found\n")


def test_stale_rows_and_memory_without_a_process(box: Path) -> None:
    control.inject(box, apps=[{"gpu": 0, "pid": 4194300, "name": "[Not Found]", "mib": "[N/A]"}], used={"1": 70_000})
    assert smi(box, *QUERY_APPS).stdout == f"{control.uuids(box)[0]}, 4194300, [Not Found], [N/A]\n"
    assert used(box) == [0, 70_000]


def test_nvidia_smi_itself_can_fail(box: Path) -> None:
    text = "Failed to initialize NVML: Driver/library version mismatch\n"
    control.inject(box, rc=18, stdout=text, stderr="NVML library version: 580.159\n")
    done = smi(box, *QUERY_GPU)
    assert (done.returncode, done.stdout, done.stderr) == (18, text, "NVML library version: 580.159\n")
    control.clear(box, "rc", "stdout")
    assert smi(box, *QUERY_GPU).returncode == 0
    control.clear(box)
    assert smi(box, *QUERY_GPU).stderr == ""


def test_nvidia_smi_can_hang_and_be_slow(box: Path) -> None:
    control.inject(box, hang=True)
    with pytest.raises(subprocess.TimeoutExpired):
        smi(box, "-L", timeout=0.5)
    control.clear(box)
    control.inject(box, slow=0.3)
    started = time.monotonic()
    assert smi(box, "-L").returncode == 0
    assert time.monotonic() - started >= 0.3


def test_no_driver_at_all(box: Path) -> None:
    (box / "gpu" / "board.json").unlink()
    done = smi(box)
    assert done.returncode == 9
    assert "couldn't communicate with the NVIDIA driver" in done.stdout


def test_a_misspelt_state_is_refused(box: Path) -> None:
    with pytest.raises(ValueError, match="no such state: hangs"):
        control.inject(box, hangs=True)


def test_nodes_have_different_gpus_and_keep_theirs(tmp_path: Path) -> None:
    first, second = node.prepare("a", tmp_path, gpus=3), node.prepare("b", tmp_path)
    assert len({*control.uuids(first), *control.uuids(second)}) == 5
    before = control.uuids(first)
    assert control.uuids(node.prepare("a", tmp_path)) == before


def used(root: Path) -> list[int]:
    return [int(line) for line in smi(root, "--query-gpu=memory.used", "--format=csv,noheader,nounits").stdout.split()]


def wait_until(condition: object, timeout: float = 120) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
