"""What is said of logs as people paste them: behind a carrier's prefixes, with several starts in one file, cut short."""

# ruff: noqa: E501 (a line of a log stays one line)

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lamplighter.node.log.verdict import Diagnosis
from lamplighter.node.log.watch import LogWatch
from lamplighter.node.log.whole import diagnose_log
from lamplighter.release.engine import load_engines
from lamplighter.run.diagnose import diagnose_file

PROJECT = Path(__file__).resolve().parents[2]
ENGINES = {name: engine.compiled for name, engine in load_engines(PROJECT / "roles").items()}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.20 GiB."
UNKNOWN = "RuntimeError: zebra stripes are missing"
CONSEQUENCE = "torch.distributed.DistBackendError: NCCL error in: /pytorch/x.cpp:93, remote process exited or there was a network error"


def sglang(end: str, begin: str = "Init torch distributed begin.") -> str:
    """A start with four ranks, up to the weights or until it is ready."""
    stamp = "[2026-03-01 10:00:0{}{}]"
    lines = [stamp.format(0, "") + " server_args=ServerArgs(model_path='/m', port=30000, tp_size=4)"]
    lines += [stamp.format(1, f" TP{rank}") + f" {begin}" for rank in (2, 0, 3, 1)]
    lines += [stamp.format(2, f" TP{rank}") + " Load weight begin. avail mem=78.42 GB" for rank in (3, 1, 0, 2)]
    if end == "ready":
        lines += [stamp.format(3, " TP0") + " Capture cuda graph begin. This can take up to several minutes."]
        lines += [stamp.format(4, "") + " INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)"]
        lines += [stamp.format(5, "") + " The server is fired up and ready to roll!"]
    return "\n".join(lines) + "\n"


def sglang_failed(error: str, rank: int, after: tuple[int, ...] = ()) -> str:
    """Rank ``rank`` ends with ``error``, those of ``after`` because of it, and the launcher says that a child failed."""
    text = sglang("weights")
    for each, said in [(rank, error), *((other, CONSEQUENCE) for other in after)]:
        text += f"[2026-03-01 10:00:07 TP{each}] Scheduler hit an exception: Traceback (most recent call last):\n"
        text += f'  File "/opt/v/sglang/srt/managers/scheduler.py", line 2671, in run\n    scheduler = Scheduler(\n{said}\n\n'
    return text + "[2026-03-01 10:00:08] Received sigquit from a child process. It usually means the child failed.\n"


def vllm(end: str) -> str:
    stamp = "INFO 09-03 19:41:0{} [x.py:1]"
    lines = [f"(APIServer pid=200) {stamp.format(0)} vLLM API server version 0.13.0"]
    lines += [f"(Worker_TP{rank} pid={300 + rank}) {stamp.format(1)} Starting to load model /m..." for rank in (0, 1)]
    if end == "ready":
        lines += [f"(APIServer pid=200) {stamp.format(2)} Starting vLLM API server 0 on http://0.0.0.0:8000"]
        lines += ["INFO:     Application startup complete."]
    return "\n".join(lines) + "\n"


def vllm_failed(error: str, rank: int) -> str:
    stamp = f"(Worker_TP{rank} pid={300 + rank}) ERROR 09-03 19:41:05 [multiproc_executor.py:560]"
    lines = [f"{stamp} WorkerProc failed to start.", f"{stamp} Traceback (most recent call last):"]
    lines += [f'{stamp}   File "/opt/v/vllm/v1/worker/gpu_worker.py", line 2, in x', f"{stamp} {error}"]
    return vllm("weights") + "\n".join(lines) + "\n"


def read_in_pieces(log: str, engine: str) -> Diagnosis:
    """The same log as it may arrive: cut anywhere, through lines and letters."""
    watch = LogWatch(ENGINES[engine])
    data = log.encode()
    for start in range(0, len(data), 37):
        watch.feed(data[start : start + 37])
    watch.finish()
    return watch.diagnosis()


def read(log: str | bytes, engine: str | None = None) -> Diagnosis:
    return diagnose_log(log.encode() if isinstance(log, str) else log, ENGINES, engine)


CARRIERS = {
    "journald": "Nov 29 10:00:01 gpu1 launch.sh[4711]: ",
    "journald, ISO": "2026-11-29T10:00:01+0000 gpu1 launch.sh[4711]: ",
    "docker": "2026-11-29T10:00:01.123456789Z ",
    "compose": "sglang-1  | ",
    "compose with times": "sglang-1  | 2026-11-29T10:00:01.123456789Z ",
    "kubectl": "[pod/llm-0/server] ",
    "CRI": "2026-11-29T10:00:01.123456789+00:00 stderr F ",
}


@pytest.mark.parametrize("carrier", CARRIERS.values(), ids=CARRIERS)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_what_a_carrier_puts_before_each_line_changes_nothing(carrier: str, end: str) -> None:
    def carried(log: str) -> str:
        return "".join(f"{carrier}{line}{end}" for line in log.splitlines())

    assert (read(carried(sglang("ready"))).outcome, read(carried(vllm("ready"))).outcome) == ("ready", "ready")
    for log, engine in ((sglang_failed(OOM, 2, (0, 3)), "sglang"), (vllm_failed(OOM, 1), "vllm")):
        plain, found = read(log), read(carried(log))
        assert (found.engine, found.phase, found.cause, found.rank) == (engine, "weights", "gpu_oom", plain.rank)
        assert carrier not in found.evidence
    unknown = read(carried(sglang_failed(UNKNOWN, 2, (0, 3))))
    assert (unknown.outcome, unknown.cause, unknown.evidence, unknown.rank) == ("failed", None, UNKNOWN, 2)


def test_lines_in_the_json_of_docker_are_read(tmp_path: Path) -> None:
    log = "".join(
        json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-11-29T10:00:01.1Z"}) + "\n"
        for line in sglang_failed(UNKNOWN, 2, (0, 3)).splitlines()
    )
    (tmp_path / "a-json.log").write_bytes(log.encode())
    (tmp_path / "b.gz").write_bytes(gzip.compress(log.encode()))
    for name in ("a-json.log", "b.gz"):
        found = diagnose_file(str(tmp_path / name))
        assert (found.engine, found.phase, found.evidence, found.rank) == ("sglang", "weights", UNKNOWN, 2)


# -- which error explains the others


@pytest.mark.parametrize("after", [(0,), (0, 1, 3)])
def test_what_follows_from_an_error_that_no_signature_knows_is_not_its_cause(after: tuple[int, ...]) -> None:
    found = read(sglang_failed(UNKNOWN, 2, after))
    assert (found.outcome, found.cause, found.evidence, found.rank) == ("failed", None, UNKNOWN, 2)


def test_an_error_that_the_start_got_over_hides_no_later_cause() -> None:
    caught = 'Traceback (most recent call last):\n  File "/opt/v/sglang/srt/x.py", line 1, in f\nRuntimeError: no such thing\n'
    lines = sglang("weights").splitlines(keepends=True)
    dead = "[2026-03-01 10:00:09] Rank 3 scheduler is dead. Please check if there are relevant logs.\n[2026-03-01 10:00:09] Exit code: -9\n"
    found = read("".join([lines[0], caught, *lines[1:], dead]))
    assert (found.cause, found.rank) == ("host_oom", 3)


def test_what_one_rank_reports_is_not_survived_because_another_goes_on() -> None:
    log = sglang("weights")
    log += "[2026-03-01 10:00:07 TP1] PermissionError: [Errno 13] Permission denied: '/m/model-1.safetensors'\n"
    log += "[2026-03-01 10:00:08 TP0] Load weight end. type=X, avail mem=63.50 GB\n"
    found = read(log)
    assert (found.outcome, found.cause, found.rank) == ("failed", "permission", 1)
    found = read(log + "[2026-03-01 10:00:08 TP1] Load weight end. type=X, avail mem=63.50 GB\n")
    assert (found.outcome, found.cause) == ("running", None)


# -- several starts in one file

FAILED, READY = sglang_failed(OOM, 1, (0,)), sglang("ready")


@pytest.mark.parametrize(
    ("log", "engine", "outcome", "phase", "cause"),
    [
        (FAILED + READY, "sglang", "ready", "ready", None),
        (READY + FAILED, "sglang", "failed", "weights", "gpu_oom"),
        (READY + "[2026-03-01 11:00:00] Gracefully exiting... Remaining number of requests 0.\n" + FAILED, "sglang", "failed", "weights", "gpu_oom"),
        (FAILED + sglang("weights"), "sglang", "running", "weights", None),
        (vllm_failed(OOM, 1) + vllm("weights"), "vllm", "running", "weights", None),
        (vllm("ready") + vllm_failed(OOM, 1), "vllm", "failed", "weights", "gpu_oom"),
        (vllm_failed(UNKNOWN, 1) + FAILED, "sglang", "failed", "weights", "gpu_oom"),
        (FAILED + vllm("ready"), "vllm", "ready", "ready", None),
    ],
)  # fmt: skip
def test_the_last_start_is_the_one_that_counts(
    log: str, engine: str, outcome: str, phase: str, cause: str | None
) -> None:
    found = read(log)
    assert (found.engine, found.outcome, found.phase, found.cause) == (engine, outcome, phase, cause)
    assert found.phases[-1].phase == phase
    again = read_in_pieces(log, engine)
    assert (again.outcome, again.phase, again.cause, again.evidence) == (outcome, phase, cause, found.evidence)


TR_LOAD = "[transformers] Loading /m/{0}@main\nLoading weights:   0%|          | 0/21 [00:00<?, ?it/s]\rLoading weights: 100%|##########| 21/21 [00:00<00:00, 900it/s]\n"
TR_SERVE = "INFO:     Started server process [555]\nINFO:     Application startup complete.\nINFO:     Uvicorn running on http://127.0.0.1:8000 (Press CTRL+C to quit)\n"
TR_READY = TR_LOAD.format("tiny") + TR_SERVE
TR_FAILED = f'[transformers] Loading /m/big@main\nTraceback (most recent call last):\n  File "/opt/t/transformers/cli/serve.py", line 3, in x\n{OOM}\n'
TR_RESET = 'INFO:     10.0.0.4:4 - "POST /reset HTTP/1.1" 200 OK\n' + TR_LOAD.format("tiny")
TR_ANSWER = '[transformers] [Request received] Model: /m/tiny@main, CB: False\nINFO:     10.0.0.4:4 - "POST /v1/completions HTTP/1.1" 200 OK\n'
TR_500 = '[transformers] Loading /m/tiny@main\nERROR:    Exception in ASGI application\nTraceback (most recent call last):\n  File "/opt/t/transformers/cli/serving/utils.py", line 3, in x\n{}\nINFO:     10.0.0.4:4 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
LIBRARY = "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"
GONE = "/root/r/launch.sh: line 14: /opt/sglang/bin/python: No such file or directory\n"
STOPPED = (
    "[2026-03-01 11:00:00] INFO:     Shutting down\n[2026-03-01 11:00:01] INFO:     Finished server process [4141]\n"
)
ENGINE_ERROR = "(EngineCore pid=9) ERROR 09-03 20:00:00 [core.py:9] EngineCore encountered a fatal error.\n"


def dead(program: str, error: str) -> str:
    """A program that ends at once, by an error of its first lines."""
    return f'Traceback (most recent call last):\n  File "{program}", line 5, in <module>\n    import x\n{error}\n'


SGLANG_PROGRAM, VLLM_PROGRAM = "/opt/v/site-packages/sglang/launch_server.py", "/opt/v/bin/vllm"
SGLANG_WORK = "[2026-03-01 11:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 6\n"
VLLM_WORK = '(APIServer pid=200) INFO:     10.0.0.4:4 - "POST /v1/completions HTTP/1.1" 200 OK\n'


@pytest.mark.parametrize(
    ("log", "engine", "outcome", "phase", "cause"),
    [
        (TR_READY + TR_FAILED, "transformers", "failed", "weights", "gpu_oom"),
        (TR_FAILED + TR_LOAD.format("tiny"), "transformers", "running", "weights", None),
        (TR_FAILED + TR_READY, "transformers", "ready", "ready", None),
        (TR_READY + TR_LOAD.format("b"), "transformers", "running", "weights", None),
        (TR_READY + "Usage: transformers serve [OPTIONS]\nError: No such option: --x\n", "transformers", "failed", "boot", "unknown_flag"),
        (TR_READY + dead("/opt/t/bin/transformers", "ModuleNotFoundError: No module named 'requests'"), "transformers", "failed", "boot", "import_error"),
        (TR_READY + GONE, "transformers", "failed", "boot", "interpreter_missing"),
        (READY + dead(SGLANG_PROGRAM, LIBRARY), "sglang", "failed", "boot", "kernel_abi"),
        (READY + STOPPED + dead(SGLANG_PROGRAM, "ImportError: cannot import name 'a' from 'b'"), "sglang", "failed", "boot", "import_error"),
        (READY + dead("<frozen runpy>", "ModuleNotFoundError: No module named 'numpy'").replace("<module>", "_get_module_details"), "sglang", "failed", "boot", "import_error"),
        (READY + GONE, "sglang", "failed", "boot", "interpreter_missing"),
        (READY + "/opt/v/bin/python: No module named sglang\n", "sglang", "failed", "boot", "interpreter_missing"),
        (vllm("ready") + dead(VLLM_PROGRAM, "ImportError: /opt/v/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda"), "vllm", "failed", "boot", "kernel_abi"),
        (vllm("ready") + GONE, "vllm", "failed", "boot", "interpreter_missing"),
        # one server that goes on
        (TR_READY + TR_ANSWER + TR_RESET + TR_ANSWER, "transformers", "ready", "ready", None),
        (TR_READY + TR_500.format(OOM), "transformers", "ready", "ready", None),
        (TR_SERVE + TR_LOAD.format("a") + TR_ANSWER, "transformers", "ready", "ready", None),
        (READY + GONE + SGLANG_WORK, "sglang", "ready", "ready", None),
        # the end of the one that was ready, by itself or as it was told
        (READY + STOPPED + dead(SGLANG_PROGRAM, "KeyboardInterrupt"), "sglang", "ready", "ready", None),
        (READY + "[2026-03-01 12:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\nRuntimeError: Ninja build failed:\n/bin/sh: 1: nvcc: not found\n", "sglang", "failed", "ready", "jit_toolchain"),
        (vllm("ready") + ENGINE_ERROR + dead(VLLM_PROGRAM, "vllm.v1.engine.exceptions.EngineDeadError: x"), "vllm", "failed", "ready", None),
    ],
)  # fmt: skip
def test_another_start_is_told_from_what_a_ready_server_does(
    log: str, engine: str, outcome: str, phase: str, cause: str | None
) -> None:
    for end in ("\r\n", "\n"):
        found = read(log.replace("\n", end))
        assert (found.engine, found.outcome, found.phase, found.cause) == (engine, outcome, phase, cause)
    again = read_in_pieces(log, engine)
    assert (again.outcome, again.phase, again.cause, again.evidence) == (outcome, phase, cause, found.evidence)


# -- what clients send


@pytest.mark.parametrize(
    "text",
    [
        "Received sigquit from a child process. It usually means the child failed.",
        "Fatal Python error: Aborted",
        "EngineDeadError: x",
        "terminate called after throwing an instance of x",
        "OSError: [Errno 98] Address already in use",
        "server_args=ServerArgs(model_path='/m')",
        "(APIServer pid=9) INFO 09-03 19:41:05 [x.py:1] vLLM API server version 0.9",
        "[transformers] Loading /m@main",
        "launch.sh: line 14: /opt/v/bin/python: No such file or directory",
        "[2026-03-01 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        ENGINE_ERROR.strip(),
    ],
)  # fmt: skip
def test_words_of_a_client_are_no_end_and_no_start(text: str) -> None:
    for quoted in (repr(f"why: {text}"), repr(f"it's said: \n{text}\n"), repr(f'a "{text}" and it\'s')):
        for log in (
            READY + f"[2026-03-01 11:00:00] Receive: obj=GenerateReqInput(rid='a', text={quoted}, n=1)\n",
            vllm("ready") + f"(APIServer pid=200) INFO 09-03 20:00:00 [logger.py:39] Received request c-1: prompt: {quoted}, params: SamplingParams(n=1)\n",
        ):  # fmt: skip
            assert (read(log).outcome, read(log).phase) == ("ready", "ready"), log
    long = READY + f"[2026-03-01 11:00:00] Receive: obj=GenerateReqInput(text={('x' * 99 + text) * 999!r}, n=1)\n"
    assert (read(long, "sglang").outcome, read(long, "sglang").phase) == ("ready", "ready")
    lines = f"prompt: 'why\n{text}\nwhat is that'\n"
    for engine, log in {
        "sglang": READY + lines + SGLANG_WORK,
        "vllm": vllm("ready") + lines + VLLM_WORK,
        "transformers": TR_READY + lines + TR_ANSWER,
    }.items():
        assert (read(log, engine).outcome, read(log, engine).phase) == ("ready", "ready"), log


def test_the_end_of_a_ready_server_counts_whatever_it_answered_before() -> None:
    end = f'[2026-03-01 12:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n  File "/opt/v/sglang/srt/x.py", line 1, in f\n{OOM}\n'
    sigquit = "[2026-03-01 12:00:01] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
    for log in (READY + SGLANG_WORK + end, READY + end + SGLANG_WORK + sigquit):  # another rank's line may come between
        found = read(log)
        assert (found.outcome, found.phase, found.cause, found.rank) == ("failed", "ready", "gpu_oom", 1)
    asked = "prompt: 'why\nOSError: [Errno 28] No space left on device\n'\n"
    found = read(READY + asked + SGLANG_WORK * 100 + end + sigquit)
    assert (found.outcome, found.cause) == ("failed", "gpu_oom")  # what was asked long ago is no cause


def test_a_start_that_begins_by_saying_its_arguments_is_no_second_one() -> None:
    log = "[2026-03-01 10:00:00] Using default HuggingFace chat template\n" + sglang("weights")
    watch = LogWatch(ENGINES["sglang"])
    watch.feed(log.encode(), at=0.0)
    assert (watch.phase, len(watch.ranks)) == ("weights", 4)


def test_what_a_client_sent_is_no_mark_of_another_engine() -> None:
    """Not even where it is a whole log of one that failed, which the server wrote down in one line, in quotes."""
    pasted = repr((PROJECT / "tests/cases/logs/vllm-013-context-too-long/server.log").read_text()[:3000])
    begun = "[2026-03-01 10:00:00] server_args=ServerArgs()\n"
    ready = "[2026-03-01 10:00:09] The server is fired up and ready to roll!\n"
    log = begun + ready + f"[2026-03-01 11:00:00] Receive: obj=GenerateReqInput(text={pasted})\n" * 3
    found = diagnose_log(log.encode(), ENGINES)
    assert (found.engine, found.outcome) == ("sglang", "ready")


def test_a_log_without_its_head_is_read() -> None:
    found = read(FAILED[FAILED.index("Load weight begin") :])
    assert (found.engine, found.outcome, found.cause, found.rank) == ("sglang", "failed", "gpu_oom", 1)
