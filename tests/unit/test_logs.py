"""What the log reader says about logs: invented cases of every kind, real recordings, and one line for each signature."""

# ruff: noqa: E501 (a line of a log, or of a message, stays one line)

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lamplighter.node.events import PHASES
from lamplighter.node.log import rules as logrules
from lamplighter.node.log import watch as logwatch
from lamplighter.node.log.findings import MOST_RANKS
from lamplighter.node.log.verdict import Diagnosis
from lamplighter.node.log.watch import LogWatch
from lamplighter.node.log.whole import diagnose_log, guess_engine
from lamplighter.release.engine import load_engines

PROJECT = Path(__file__).resolve().parents[2]
CASES = sorted((PROJECT / "tests" / "cases" / "logs").iterdir())
RECORDINGS = PROJECT / "tests" / "recordings" / "h200" / "sglang-0.5.16"
ENGINES = {name: engine.compiled for name, engine in load_engines(PROJECT / "roles").items()}
REAL = ("sglang", "vllm", "transformers")


def diagnose(log: str | bytes, engine: str = "sglang", version: str | None = None) -> Diagnosis:
    return diagnose_log(log.encode() if isinstance(log, str) else log, ENGINES, engine, version)


def expected(case: Path) -> dict[str, Any]:
    answer: dict[str, Any] = yaml.safe_load((case / "expect.yml").read_text())
    return answer


# -- whole logs


@pytest.mark.parametrize("told", [True, False], ids=["engine told", "engine guessed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_read_as_its_author_says(case: Path, told: bool) -> None:
    want = expected(case)
    engine, version = (want["engine"], want["version"]) if told else (None, None)
    found = diagnose_log((case / "server.log").read_bytes(), ENGINES, engine, version)
    assert (found.engine, found.outcome, found.phase, found.cause) == (
        want["engine"],
        want["outcome"],
        want["phase"],
        want["cause"],
    ), found
    assert (want["evidence"] or "") in found.evidence
    assert want["rank"] is None or found.rank == want["rank"]
    assert bool(found.hint) == (want["cause"] is not None)
    if want["engine"] == "vllm" and not told:
        assert found.version == want["version"]


SECOND = sorted((PROJECT / "tests" / "cases" / "logs2").iterdir())


@pytest.mark.parametrize("told", [True, False], ids=["engine told", "engine guessed"])
@pytest.mark.parametrize("case", SECOND, ids=lambda case: case.name)
def test_a_case_of_the_second_round_is_read_as_its_author_says(case: Path, told: bool) -> None:
    want = expected(case)
    log = (case / "server.log").read_bytes()
    found = diagnose_log(log, ENGINES, *((want["engine"], want["version"]) if told else (None, None)))
    assert [getattr(found, key) for key in ("engine", "outcome", "phase", "cause")] == [
        want[key] for key in ("engine", "outcome", "phase", "cause")
    ], found
    assert (want["evidence"] or "") in found.evidence
    assert want["rank"] is None or found.rank == want["rank"]
    assert want.get("hint", "") in found.hint_for("NAME")
    assert not want["cause"] or (found.hint and found.rule)
    assert found.version == want["version"] or b"version " not in log


# From what happened on the machine, told in the notes of the recordings: outcome, phase, cause, rank.
RECORDED = {
    "fail-flag": ("failed", "boot", "unknown_flag", None),
    "fail-model": ("failed", "boot", "model_path", None),
    "fail-tp3": ("failed", "distributed", "gpu_count", 1),
    "fail-memlarge": ("failed", "weights", "gpu_oom", None),
    "fail-over-ssh-bare-path": ("failed", "graphs", "jit_toolchain", None),
    "fail-port-in-use": ("failed", "http", "port_in_use", None),
    "fail-hog": ("ready", "ready", None, None),
    "over-ssh-full-path": ("ready", "ready", None, None),
    "ready-then-term": ("ready", "ready", None, None),
    "tp2-ready-then-term": ("ready", "ready", None, None),
    "parent-killed": ("ready", "ready", None, None),
    # The launcher was killed while its ranks loaded: a rank that writes to nobody, and no cause of its own.
    "parent-killed-early": ("failed", "graphs", None, None),
    "first-start-jit": ("running", "graphs", None, None),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDINGS.glob("*.log")))
def test_a_recording_of_a_real_server(name: str) -> None:
    log = (RECORDINGS / f"{name}.log").read_bytes()
    found = diagnose_log(log, ENGINES)
    assert found.engine == "sglang"
    assert (found.outcome, found.phase, found.cause, found.rank) == RECORDED[name]
    if found.cause:
        assert found.line is not None
        assert found.evidence[:200] in log.decode().splitlines()[found.line - 1].strip() or b"\r" in log


def test_phases_and_their_seconds_come_from_the_stamps() -> None:
    found = diagnose_log((RECORDINGS / "fail-hog.log").read_bytes(), ENGINES)
    names = [each.phase for each in found.phases]
    assert names == ["boot", "distributed", "weights", "kv_cache", "graphs", "http", "warmup", "ready"]
    assert all(each.seconds is not None and each.seconds >= 0 for each in found.phases)
    assert found.phases[0].seconds == 9


def test_the_json_answer_is_complete_and_json() -> None:
    answer = diagnose_log((CASES[0] / "server.log").read_bytes(), ENGINES).to_json("kimi")
    assert set(answer) == {
        "engine", "version", "outcome", "phase", "cause", "evidence", "line", "rank", "hint", "phases",
        "cause_above", "rule",
    }  # fmt: skip
    assert json.loads(json.dumps(answer)) == answer
    assert "servers.kimi.python" in answer["hint"]
    assert answer["phases"][0] == {"phase": "boot", "seconds": 4.0}


# -- one signature at a time: id, engines, what the log says

HEAD = (
    '[2026-03-01 10:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n  File "x.py", line 1\n'
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 79.20 GiB of which {free} is free. "
ITSELF = "Including non-PyTorch memory, this process has 10.00 GiB memory in use."

SIGNATURES: list[tuple[str, tuple[str, ...], str]] = [
    ("unknown_flag", REAL, "launch_server.py: error: unrecognized arguments: --foo"),
    ("unknown_flag", ("vllm",), "vllm: error: unrecognized arguments: --tp_size 8"),
    ("unknown_flag", ("transformers",), "Error: No such option '--tp'."),
    ("unknown_flag", ("sglang",), "launch_server.py: error: argument --tp-size: invalid int value: 'two'"),
    ("port_in_use", ("sglang", "transformers"), "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 1): address already in use"),
    ("port_in_use", ("vllm",), "(APIServer pid=1) OSError: [Errno 98] Address already in use"),
    ("derived_port_in_use", ("sglang",), "ValueError: rpc_port at 31236 is not available in 30 seconds. process.name()='x'"),
    ("derived_port_in_use", ("sglang",), "ValueError: port_base at 31236 is not available in 30 seconds."),
    ("derived_port_in_use", ("sglang",), "[2026-09-14 13:31:28] Port is already in use. dist_init_port=31233 port_base=31234"),
    ("derived_port_in_use", REAL, "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
    ("rendezvous_timeout", REAL, "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 4/8 clients joined."),
    ("rendezvous_timeout", REAL, "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 29500)."),
    ("gpu_oom", REAL, OOM.format(wanted="448.00 MiB", free="201.31 MiB") + ITSELF),
    ("gpu_oom", REAL, "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity)"),
    ("gpu_held", REAL, OOM.format(wanted="20.00 GiB", free="1.00 GiB") + "Process 4242 has 60.00 GiB memory in use. " + ITSELF),
    ("gpu_held", ("vllm",), "ValueError: Free memory on device (11.87/79.18 GiB) on startup is less than desired GPU memory utilization (0.92, 72.85 GiB)."),
    ("gpu_held", ("sglang",), "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes."),
    ("kv_cache_too_small", ("sglang",), "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    ("kv_cache_too_small", ("vllm",), "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ("kv_cache_too_small", ("vllm",), "ValueError: To serve at least one request with the model's max seq len (131072), (20.00 GiB KV cache is needed"),
    ("graph_capture_failed", ("sglang",), "Exception: Capture cuda graph failed: CUDA error: operation not permitted when stream is capturing"),
    ("shm_full", ("vllm",), "RuntimeError: Insufficient space in /dev/shm for message queue: 160 MiB required, 64 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host)."),
    ("nccl_error", REAL, "torch.distributed.DistBackendError: NCCL error in: /pytorch/x.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.7"),
    ("nccl_error", REAL, "RuntimeError: NCCL error: internal error - please report this issue to the NCCL developers"),
    ("nccl_error", REAL, "RuntimeError: NCCL error: remote process exited or there was a network error"),
    ("nccl_error", REAL, "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."),
    ("nccl_error", REAL, "gpu-1:1:1 [0] enqueue.cc:1 NCCL WARN Cuda failure 719 'unspecified launch failure'"),
    ("nccl_error", REAL, "gpu-1:1:1 [0] transport/nvls.cc:155 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401"),
    ("nccl_config", REAL, "gpu1:1:1 [0] graph/tuning.cc:104 NCCL WARN Unrecognized element token \"LLL\" when parsing \"LLL\"\nRuntimeError: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)"),
    ("nccl_config", REAL, "gpu1:1:1 [0] bootstrap.cc:1 NCCL WARN Bootstrap : no socket interface found"),
    ("nccl_config", REAL, "gpu1:1:1 [0] enqueue.cc:1 NCCL WARN Error : no algorithm/protocol available for function AllGather"),
    ("nccl_config", REAL, "gpu1:1:1 [0] graph/tuning.cc:1 NCCL WARN All entries except the first must have a prefix: \"ring\""),
    ("shm_full", REAL, "gpu1:1:1 [0] misc/shmutils.cc:1 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-X (size 3)\nncclSystemError: System call"),
    ("shm_full", REAL, "RuntimeError: posix_fallocate failed: No space left on device (28)"),
    ("shm_full", REAL, "gpu1:1:1 [0] NCCL INFO opened /dev/shm/nccl-X\nBus error (core dumped)"),
    ("shm_full", REAL, "Caught signal 7 (Bus error: nonexistent physical address)\n /dev/shm/nccl-X mapped"),
    ("shm_full", REAL, "Traceback (most recent call last):\n  File \"/usr/lib/python3.12/multiprocessing/shared_memory.py\", line 1, in __init__\nOSError: [Errno 28] No space left on device"),
    ("shm_full", REAL, "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'"),
    ("collective_timeout", REAL, "[rank3]:[E1227 14:12:09.331901 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41)"),
    ("collective_timeout", REAL, "[rank3]:[E1227 14:12:09.331901 ProcessGroupNCCL.cpp:685] ProcessGroupNCCL's watchdog: Timeout at NCCL work: 41"),
    ("watchdog_timeout", ("sglang",), "[2026-03-03 09:05:24 TP1] Watchdog timeout (self.watchdog_timeout=300)"),
    ("fabric_not_ready", REAL, "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"),
    ("fabric_not_ready", REAL, "torch.AcceleratorError: CUDA error: system not yet initialized"),
    ("driver_too_old", REAL, "RuntimeError: The NVIDIA driver on your system is too old (found version 12040)."),
    ("driver_too_old", REAL, "RuntimeError: CUDA driver version is insufficient for CUDA runtime version"),
    ("driver_mismatch", REAL, "RuntimeError: cudaGetDeviceCount() returned Error 803: system has unsupported display driver / cuda driver combination"),
    ("gpu_arch", REAL, "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    ("gpu_count", REAL, "torch.AcceleratorError: CUDA error: invalid device ordinal"),
    ("gpu_count", REAL, "  Value error, World size (8) is larger than the number of available GPUs (4) in this node."),
    ("kernel_abi", ("sglang",), "ImportError: \n[sgl_kernel] CRITICAL: Could not load any common_ops library!"),
    ("kernel_abi", REAL, "ImportError: /x/common_ops.abi3.so: undefined symbol: _ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"),
    ("kernel_abi", REAL, "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory"),
    ("glibc_too_old", REAL, "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found (required by /x/sgl_kernel/common_ops.abi3.so)"),
    ("glibc_too_old", ("sglang",), "ImportError: \n[sgl_kernel] CRITICAL: Could not load any common_ops library!\n- ImportError: libstdc++.so.6: version `GLIBCXX_3.4.32' not found"),
    ("package_too_old", REAL, "Exception: sgl-kernel is installed with version 0.3.17, which is less than the minimum required version 0.3.21."),
    ("jit_toolchain", REAL, "subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/x']' returned non-zero exit status 1."),
    ("jit_toolchain", REAL, "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"),
    ("jit_toolchain", REAL, "/x/y.cuh:12:10: fatal error: cuda_fp4.h: No such file or directory"),
    ("jit_toolchain", REAL, "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)"),
    ("jit_toolchain", REAL, "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root."),
    ("jit_toolchain", REAL, "FileNotFoundError: [Errno 2] No such file or directory: 'nvcc'"),
    ("jit_toolchain", ("sglang",), "Exception: Capture cuda graph failed: FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"),
    ("gated_model", REAL, "OSError: You are trying to access a gated repo."),
    ("gated_model", REAL, "huggingface_hub.errors.GatedRepoError: 403 Client Error."),
    ("gated_model", REAL, "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/a/b/resolve/main/config.json"),
    ("model_path", REAL, "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/x/y'."),
    ("model_path", REAL, "OSError: foo/bar is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'"),
    ("hub_offline", REAL, "ConnectionError: Cannot reach https://huggingface.co/x: offline mode is enabled."),
    ("hub_offline", REAL, "huggingface_hub.errors.LocalEntryNotFoundError: An error happened"),
    ("hub_offline", REAL, "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files."),
    ("hub_offline", REAL, "ValueError: cannot find the appropriate snapshot folder for the specified revision"),
    ("weights_incomplete", REAL, "RuntimeError: Cannot find any model weights with `/x`"),
    ("weights_incomplete", REAL, "OSError: /x does not appear to have a file named config.json. Checkout 'https://huggingface.co//x/tree/main'"),
    ("weights_incomplete", REAL, "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"),
    ("weights_incomplete", REAL, "Exception: Error while deserializing header: MetadataIncompleteBuffer"),
    ("unsupported_architecture", REAL, "ValueError: Model architectures ['WillowForCausalLM'] are not supported for now. Supported: x"),
    ("unsupported_architecture", REAL, "KeyError: 'willow'\n\nDuring handling of the above exception, another exception occurred:\n\nValueError: The checkpoint has model type `willow` but Transformers does not recognize this architecture."),
    ("tp_divisibility", REAL, "AssertionError: 32 is not divisible by 6"),
    ("tp_divisibility", ("vllm",), "ValueError: Total number of attention heads (40) must be divisible by tensor parallel size (6)."),
    ("fd_limit", REAL, "Traceback (most recent call last):\n  File \"x.py\", line 1\nOSError: [Errno 24] Too many open files"),
    ("fd_limit", REAL, "RuntimeError: can't start new thread"),
    ("disk_full", REAL, "OSError: [Errno 28] No space left on device: '/root/.cache/x'"),
    ("fork_cuda", REAL, "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method"),
    ("host_oom", ("sglang",), "RuntimeError: Rank 5 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OOM killer."),
    ("host_oom", ("sglang",), "[2026-03-01 10:00:00] Rank 5 scheduler is dead. Please check if there are relevant logs.\n[2026-03-01 10:00:00] Exit code: -9"),
    ("host_oom", ("vllm",), "Starting to load model /m...\n(EngineCore pid=1) ERROR 01-05 16:20:54 [x.py:1] Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor."),
    ("gpu_hardware", REAL, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("gpu_hardware", REAL, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."),
    ("gpu_hardware", REAL, "Unable to determine the device handle for GPU0: 0000:3B:00.0: Unknown Error"),
    ("proxy", ("sglang",), "[2026-03-01 10:00:00] Initialization failed. warmup error: Traceback (most recent call last):\n  File \"x.py\", line 1\nAssertionError: res=<Response [502]>, res.text=''"),
    ("proxy", REAL, "requests.exceptions.ProxyError: HTTPConnectionPool(host='proxy', port=3128): Max retries exceeded"),
    ("proxy", REAL, "OSError: Tunnel connection failed: 403 Forbidden"),
    ("engine_timeout", ("vllm",), "(APIServer pid=1) TimeoutError: Timed out waiting for engine core processes to start."),
    ("engine_timeout", ("sglang",), "[2026-03-01 10:00:00] Initialization failed. warmup error: Traceback (most recent call last):\n  File \"x.py\", line 1\nrequests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', port=30000): Read timed out. (read timeout=600)"),
    ("permission", REAL, "PermissionError: [Errno 13] Permission denied: '/var/cache/x'"),
    ("interpreter_missing", REAL, "/srv/x/launch.sh: line 12: /opt/x/bin/python: No such file or directory"),
    ("interpreter_missing", REAL, "/srv/x/launch.sh: 12: exec: /opt/x/bin/python: not found"),
    ("interpreter_missing", REAL, "bash: line 1: vllm: command not found"),
    ("interpreter_missing", REAL, "launch.sh: /opt/x/bin/vllm: /opt/y/bin/python3: bad interpreter: No such file or directory"),
    ("interpreter_missing", REAL, "/opt/x/bin/python: No module named sglang"),
    ("interpreter_missing", REAL, "No module named vllm"),
    ("interpreter_missing", REAL, "/opt/x/bin/python: Error while finding module specification for 'sglang.launch_server' (ModuleNotFoundError: No module named 'sglang')"),
    ("interpreter_missing", REAL, "/usr/bin/python3: can't open file '/opt/x/bin/vllm': [Errno 2] No such file or directory"),
    ("import_error", REAL, "Traceback (most recent call last):\n  File \"x.py\", line 1\nModuleNotFoundError: No module named 'flashinfer'"),
    ("import_error", REAL, "ImportError: cannot import name 'x' from 'y'"),
    ("import_error", ("transformers",), "ValueError: Using a `device_map` requires `accelerate`. You can install it"),
    ("sitecustomize_error", REAL, "Error in sitecustomize; set PYTHONVERBOSE for traceback:\nModuleNotFoundError: No module named 'x'"),
    ("sitecustomize_error", REAL, "Fatal Python error: init_import_site: Failed to import the site module"),
    ("sitecustomize_error", REAL, "Fatal Python error: init_import_size: Failed to import the site module"),
    ("unknown_flag", REAL, "launch_server.py: error: the following arguments are required: --model-path/--model"),
    ("unknown_flag", ("transformers",), "Error: Invalid value for '--port': 'x' is not a valid integer."),
    ("derived_port_in_use", REAL, "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."),
    ("rendezvous_timeout", REAL, "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (node-1, 29500)."),
    ("rendezvous_timeout", REAL, "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/x.cc:144] no error"),
    ("gpu_oom", REAL, "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    ("gpu_oom", REAL, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("gpu_oom", REAL, "gpu1:1:1 [0] include/alloc.h:1 NCCL WARN Cuda failure 2 'out of memory'\nRuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    ("gpu_held", REAL, "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),
    ("kv_cache_too_small", ("vllm",), "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (10272)."),
    ("kv_cache_too_small", ("sglang",), "RuntimeError: Not enough GPU memory for hybrid state cache (total_rest_memory=0.41 GB)"),
    ("nccl_config", REAL, "gpu1:1:1 [0] plugin/net.cc:1 NCCL WARN Error: network zebra not found."),
    ("nccl_error", REAL, "ncclInternalError: Internal check failed."),
    ("shm_full", REAL, "RuntimeError: unable to write to file </torch_4711_1_0>: No space left on device (28)"),
    ("shm_full", REAL, "FileNotFoundError\nOSError: [Errno 28] No space left on device: '/psm_a1b2c3'"),
    ("collective_timeout", REAL, "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
    ("watchdog_timeout", ("sglang",), "[2026-03-03 09:05:24 DP1 TP3] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False) tripped_by=x"),
    ("driver_too_old", REAL, "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."),
    ("driver_mismatch", REAL, "pynvml.NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch."),
    ("no_gpu", REAL, "RuntimeError: No CUDA GPUs are available"),
    ("no_gpu", REAL, "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"),
    ("gpu_arch", REAL, "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 75. Current capability: 70."),
    ("gpu_count", REAL, "AssertionError: local_world_size (4) must be less than or equal to the number of visible devices (2)."),
    ("kernel_abi", REAL, "ImportError: /x/flash_attn_2_cuda.so: undefined symbol: _ZN2at4_ops5zeros4callE"),
    ("kernel_abi", REAL, "ImportError: libnvrtc.so.13: cannot open shared object file: No such file or directory"),
    ("package_too_old", REAL, "ImportError: tokenizers>=0.21,<0.22 is required for a normal functioning of this module, but found tokenizers==0.20.3."),
    ("jit_toolchain", REAL, "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/x/main.c', '-O3']' returned non-zero exit status 1."),
    ("jit_toolchain", REAL, "nvcc fatal   : Unsupported gpu architecture 'compute_120'"),
    ("gated_model", REAL, "OSError: Access to model meta/x is restricted and you are not in the authorized list."),
    ("model_path", REAL, "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/a/b/resolve/main/config.json\n\nhuggingface_hub.errors.RepositoryNotFoundError: 401 Client Error."),
    ("model_path", ("vllm",), "ValueError: Invalid repository ID or local directory specified: '/mnt/models'."),
    ("hub_offline", REAL, "urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x (Caused by NameResolutionError(\"x: Failed to resolve 'huggingface.co' ([Errno -3] Temporary failure in name resolution)\"))"),
    ("proxy", REAL, "urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded (Caused by ProxyError('Unable to connect to proxy', NewConnectionError('[Errno 111] Connection refused')))"),
    ("weights_incomplete", REAL, "FileNotFoundError: No such file or directory: \"/m/model-00002-of-00008.safetensors\""),
    ("weights_incomplete", REAL, "_pickle.UnpicklingError: invalid load key, 'v'."),
    ("unsupported_architecture", ("sglang",), "ValueError: WillowForCausalLM has no SGlang implementation and the Transformers implementation is not compatible with SGLang."),
    ("tp_divisibility", REAL, "  File \"x.py\", line 1, in __init__\n    assert self.total_num_heads % tp_size == 0\nAssertionError"),
    ("tp_divisibility", REAL, "ValueError: The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128."),
    ("trust_remote_code", REAL, "ValueError: Loading /m requires you to execute the configuration file in that repo on your local machine."),
    ("context_too_long", ("vllm",), "ValueError: User-specified max_model_len (262144) is greater than the derived max_model_len (max_position_embeddings=32768)."),
    ("context_too_long", ("sglang", "transformers"), "ValueError: User-specified context_length (65536) is greater than the derived context_length (32768)."),
    ("fd_limit", REAL, "zmq.error.ZMQError: Too many open files (src/ipc_listener.cpp:327)"),
    ("disk_full", REAL, "fatal error: error writing to /tmp/cc1.s: No space left on device"),
    ("disk_full", REAL, "OSError: [Errno 122] Disk quota exceeded"),
    ("host_oom", ("sglang",), "Load weight begin.\n[2026-03-01 10:00:00] Subprocess scheduler_1 (pid=20238) crashed with exit code -9. Triggering SIGQUIT for cleanup..."),
    ("host_oom", REAL, "RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes."),
    ("worker_died", ("sglang",), "[2026-03-01 10:00:00] Rank 2 scheduler is dead. Please check if there are relevant logs.\n[2026-03-01 10:00:01] Exit code: -6"),
    ("worker_died", ("vllm",), "(EngineCore pid=1) ERROR 01-05 16:20:54 [x.py:1] Worker proc VllmWorker-3 died unexpectedly, shutting down executor."),
    ("interpreter_missing", REAL, "llm.service: Failed at step EXEC spawning /opt/x/bin/python: No such file or directory"),
    ("interpreter_missing", REAL, "exec /opt/x/bin/python: no such file or directory"),
    ("unknown_flag", ("vllm",), "vllm serve: error: argument --speculative-config/-sc: Value {method:eagle} cannot be converted to <function loads at 0x7f>."),
    ("unknown_flag", ("sglang",), "launch_server.py: error: argument --a: not allowed with argument --b"),
    ("unknown_flag", ("transformers",), "│ Invalid value for '--port': 'abc' is not a valid integer.      │"),
    ("unknown_flag", ("transformers",), "Error: Option '--port' requires an argument."),
    ("kv_cache_too_small", ("vllm",), "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed"),
    ("gpu_arch", REAL, "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your GPU has 7.0."),
    ("gpu_hardware", REAL, "pynvml.NVMLError_GpuIsLost: GPU is lost"),
    ("jit_toolchain", REAL, "RuntimeError: \nThe detected CUDA version (11.8) mismatches the version that was used to compile\nPyTorch (12.8)."),
    ("jit_toolchain", REAL, "AssertionError: NVCC compilation failed: nvcc not found"),
    ("context_too_long", ("sglang",), "ValueError: Warning: User-specified context_length (65536) is greater than the derived context_length (32768). This may lead to incorrect outputs"),
    ("permission", REAL, "ERROR:    [Errno 13] error while attempting to bind on address ('0.0.0.0', 80): permission denied"),
    ("host_oom", REAL, "Apr 02 11:03:01 gpu1 kernel: Out of memory: Killed process 4790 (python) total-vm:1kB, anon-rss:1kB"),
    ("host_oom", REAL, "Apr 02 11:03:01 gpu1 systemd[1]: llm.service: Failed with result 'oom-kill'."),
    ("host_oom", REAL, "Traceback (most recent call last):\n  File \"x.py\", line 1\nMemoryError"),
    ("host_oom", ("vllm",), "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."),
    ("host_oom", ("transformers",), "Loading weights:  50%|█████     | 73/146 [00:01<00:01, 50.00it/s]Killed"),
    ("native_crash", REAL, "/srv/x/launch.sh: line 12:  4711 Segmentation fault      (core dumped) python -m x"),
    ("native_crash", REAL, "Aborted (core dumped)"),
    ("native_crash", REAL, "Fatal Python error: Segmentation fault"),
    ("native_crash", REAL, "terminate called after throwing an instance of 'c10::Error'\n  what():  bad handle"),
    ("native_crash", REAL, "double free or corruption (!prev)"),
    ("native_crash", REAL, "[node:119  :0:119] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)"),
    ("interrupted", REAL, "Traceback (most recent call last):\n  File \"x.py\", line 1, in f\nKeyboardInterrupt"),
    ("interrupted", REAL, "slurmstepd: error: *** STEP 4711.0 ON gpu3 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***"),
    ("hung", ("sglang",), "The server is fired up and ready to roll!\n" + "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.\n" * 3),
    ("hung", ("vllm",), "Application startup complete.\n(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] EngineCore encountered a fatal error.\nTimeoutError: RPC call to execute_model timed out."),
    ("engine_timeout", ("vllm",), "Starting to load model\nTimeoutError: RPC call to execute_model timed out.\nEngineCore failed to start."),
    ("graph_capture_failed", REAL, "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
]  # fmt: skip
EACH = [(cause, engine, text) for cause, engines, text in SIGNATURES for engine in engines]


@pytest.mark.parametrize(("cause", "engine", "text"), EACH)
def test_each_signature_is_found(cause: str, engine: str, text: str) -> None:
    found = diagnose(text, engine)
    assert (found.outcome, found.cause) == ("failed", cause)
    assert found.hint
    assert "{server}" in found.hint
    assert found.evidence


def test_each_id_that_an_engine_knows_has_an_example_and_a_hint() -> None:
    for engine in REAL:
        known = {entry["id"] for entry in ENGINES[engine]["failures"]}
        assert known == {cause for cause, engines, _ in SIGNATURES if engine in engines}
        assert all(any(e["id"] == cause and e.get("hint") for e in ENGINES[engine]["failures"]) for cause in known)


BENIGN = [
    "[2026-01-30 21:09:17 TP1] Failed to load generation config for /m: /m does not appear to have a file named generation_config.json. Checkout 'x'.",
    "[2026-01-30 21:09:17 TP1] Setup Custom allreduce failed with module 'sgl_kernel' has no attribute 'x': ImportError",
    "(Worker_TP1 pid=15696) INFO 11-03 06:51:10 [custom_all_reduce.py:189] Custom allreduce is disabled because it's not supported",
    "[2026-01-30 21:09:17] Fail to set RLIMIT_NOFILE: PermissionError: [Errno 13] not allowed to raise maximum limit",
    "[2026-01-30 21:09:17] Fail to set RLIMIT_STACK: not allowed to raise maximum limit",
    "[2026-01-30 21:09:17] Ignore import error when loading sglang.srt.models.x: ImportError: No module named 'decord'",
    "gpu1:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so",
    "gpu1:1:1 [0] NCCL INFO ncclOsDlopen(libnccl-env.so) failed: libnccl-env.so: cannot open shared object file: No such file or directory",
    "gpu1:1:1 [0] NCCL INFO ENV/Plugin: Could not find: libnccl-env.so",
    "gpu-07:611388:611388 [3] ras/client_support.cc:171 NCCL WARN Call to bind failed: Address already in use",
    "gpu1:1:1 [0] NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2 : CUDA error 2. Proceeding without NVLS support.",
    "[2026-01-30 21:09:17] OpenAI Responses API is disabled: ImportError: cannot import name 'x'",
    "(APIServer pid=1) WARNING 11-03 06:50:44 [system_utils.py:279] Found ulimit of 16384 and failed to automatically increase. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
    "(EngineCore pid=1) INFO 08-30 20:03:49 [shm_broadcast.py:802] No available shared memory broadcast block found in 60 seconds.",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 262144, Hardware limit: 101376.",
    "WARNING 07-30 07:30:24 [interface.py:1] Failed to import from vllm._C with ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')",
    "[2026-01-30 21:09:17] libtcmalloc is not found, ImportError",
    "(EngineCore pid=1) WARNING 11-03 06:50:44 [x.py:1] Compiling model again due to a load failure from /x, reason: ImportError",
    "/usr/lib/python3.12/multiprocessing/resource_tracker.py:219: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects /dev/shm",
    "nanobind: leaked 5 instances!",
    "[2026-09-14 13:31:08] port 31236 is in use. Waiting for 1 seconds for rpc_port to be available.",
    "[2026-03-03 09:05:24 TP1] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)",
    "(APIServer pid=1) Waiting for 8 local, 0 remote core engine proc(s) to start.",
    "[W1128 03:10:52.118804921 socket.cpp:767] [c10d] The client socket cannot be initialized to connect to [node-b.lab]:29700 (errno: 97).",
    "[2026-01-30 21:09:17] Endpoint '/get_model_info' is deprecated and will be removed in a future version.",
    "[2026-01-30 21:09:17] The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
    "[rank0]:[W1129 14:05:21.582761721 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not called before program exit",
    "/x/torch/cuda/__init__.py:180: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).",
    "[2026-01-30 21:09:17] INFO:     127.0.0.1:1 - \"GET /health HTTP/1.1\" 503 Service Unavailable",
    "[2026-01-30 21:09:17] server_args=ServerArgs(model_path='/m', watchdog_timeout=300, dist_init_port=None, port_base=1)",
    "[2026-01-30 21:09:17] Warning: User-specified context_length (65536) is greater than the derived context_length (32768). This may lead to incorrect model outputs",
    "2026-01-30 21:09:17,120 - WARNING - autotuner.py:485 - flashinfer.jit: [Autotuner]: Skipping tactic 14, due to failure while profiling: CUDA out of memory. Tried to allocate 2.00 GiB.",
]  # fmt: skip


@pytest.mark.parametrize("engine", REAL)
@pytest.mark.parametrize("line", BENIGN)
def test_a_line_of_healthy_starts_is_no_failure(line: str, engine: str) -> None:
    found = diagnose(line + "\n", engine)
    assert (found.outcome != "failed", found.cause) == (True, None)


# -- the rules of the first cause


def test_an_oom_line_that_names_a_process_of_ours_accuses_nobody() -> None:
    line = OOM.format(wanted="20.00 GiB", free="1.00 GiB") + "Process 4242 has 60.00 GiB memory in use. " + ITSELF
    assert diagnose(line, "vllm").cause == "gpu_held"
    own = "(Worker_TP0 pid=4242) INFO 11-03 06:51:11 [x.py:1] Starting to load model /m\n"
    assert diagnose(own + line, "vllm").cause == "gpu_oom"
    watch = LogWatch(ENGINES["sglang"], own_pids=[4242])
    watch.feed(line.encode())
    watch.finish()
    assert watch.diagnosis().cause == "gpu_oom"


@pytest.mark.parametrize(
    ("wanted", "free", "others", "itself", "cause"),
    [
        ("20.00 GiB", "1.00 GiB", "Process 7 has 60.00 GiB memory in use. ", ITSELF, "gpu_held"),
        ("20.00 GiB", "1.00 GiB", "Process 7 has 60.00 GiB memory in use. ", "", "gpu_oom"),  # torch named itself so
        ("2.00 MiB", "1.00 MiB", "Process 7 has 612.00 MiB memory in use. ", ITSELF, "gpu_oom"),  # a bare context
        ("20.00 GiB", "1.00 GiB", "Process 7 has 2.00 GiB memory in use. ", ITSELF, "gpu_oom"),  # would not have fitted
        ("1.50 GiB", "0 bytes", "Process 7 has 800.00 MiB memory in use. Process 8 has 900.00 MiB memory in use. ", ITSELF, "gpu_held"),
    ],
)  # fmt: skip
def test_others_are_blamed_only_when_the_request_would_fit_without_them(
    wanted: str, free: str, others: str, itself: str, cause: str
) -> None:
    assert diagnose(OOM.format(wanted=wanted, free=free) + others + itself).cause == cause


def test_the_sigquit_line_may_come_before_the_traceback() -> None:
    sigquit = "[2026-03-01 10:00:00] Received sigquit from a child process. It usually means the child failed.\n"
    assert diagnose(sigquit).outcome == "failed"
    assert diagnose(sigquit).cause is None
    found = diagnose(sigquit + HEAD + "AssertionError: 32 is not divisible by 6\n")
    assert (found.cause, found.rank, found.line) == ("tp_divisibility", 1, 4)


def test_a_wrapper_with_an_unknown_error_shows_that_error() -> None:
    found = diagnose(HEAD + "zebra.StripeError: too many stripes\n")
    assert (found.outcome, found.cause, found.rank) == ("failed", None, 1)
    assert found.evidence == "zebra.StripeError: too many stripes"


def test_a_log_that_ends_in_a_traceback_has_failed_and_one_that_goes_on_has_not() -> None:
    end = 'Traceback (most recent call last):\n  File "x.py", line 1\nzebra.StripeError: too many\n'
    assert diagnose("[2026-03-01 10:00:00] server_args=1\n" + end).outcome == "failed"
    assert diagnose(end + "[2026-03-01 10:00:00] server_args=1\n").outcome == "running"
    assert diagnose(end + "[2026-03-01 10:00:00] Using default chat template\n").outcome == "running"


def test_a_consequence_gives_way_to_another_ranks_own_error_before_or_after_it() -> None:
    timeout = "[rank0]:[E1227 14:12:09.331901 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: W\n"
    killed = "RuntimeError: Rank 5 scheduler died during initialization (exit code: -9). If\n"
    remote = "[2026-03-01 10:00:00 TP2] NCCL error: remote process exited or there was a network error\n"
    own = HEAD + "OSError: [Errno 28] No space left on device: '/root/.cache'\n"
    for consequence in (timeout, killed, remote):
        for log in (consequence + own, own + consequence):
            found = diagnose(log)
            assert (found.cause, found.rank) == ("disk_full", 1)
    assert diagnose(remote + killed).cause == "host_oom"
    assert diagnose(remote + killed).rank == 5
    assert diagnose(timeout + remote).cause == "collective_timeout"
    assert diagnose(remote).rank == 2


def test_exit_code_minus_nine_of_one_rank_after_another_ranks_error_is_no_memory_trouble() -> None:
    dead = "[2026-03-01 10:00:00] Rank {n} scheduler is dead. Please check if there are relevant logs.\n[2026-03-01 10:00:00] Exit code: {code}\n"
    found = diagnose(dead.format(n=3, code=-9))
    assert (found.cause, found.rank) == ("host_oom", 3)
    assert "Rank 3 scheduler is dead" in found.evidence
    assert "Exit code: -9" in found.evidence
    assert diagnose(dead.format(n=3, code=-6)).cause == "worker_died"
    assert diagnose(dead.format(n=3, code=-6)).outcome == "failed"
    assert (
        diagnose(HEAD + "RuntimeError: CUDA error: invalid device ordinal\n" + dead.format(n=0, code=-9)).cause
        == "gpu_count"
    )


def test_general_ids_give_way_to_specific_ones() -> None:
    nccl = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)\n"
    assert (
        diagnose(nccl + "x NCCL WARN Error while creating shared memory segment /dev/shm/nccl-1\n").cause == "shm_full"
    )
    assert diagnose("ImportError: x\n" + nccl).cause == "nccl_error"
    capture = "Exception: Capture cuda graph failed: {}\n"
    assert diagnose(capture.format("CUDA out of memory. Tried to allocate 2.00 GiB.")).cause == "gpu_oom"
    assert diagnose(capture.format("NCCL error: remote process exited or")).cause == "nccl_error"
    assert diagnose(capture.format("out of luck")).cause == "graph_capture_failed"


def test_of_chained_tracebacks_the_first_holds_the_cause_and_the_head_names_the_rank() -> None:
    log = (
        HEAD
        + "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'\n\n"
        + "The above exception was the direct cause of the following exception:\n\n"
        + 'Traceback (most recent call last):\n  File "y.py", line 2\n'
        + "RuntimeError: CUDA_HOME environment variable is not set\n"
    )
    found = diagnose(log)
    assert (found.cause, found.rank) == ("jit_toolchain", 1)
    assert "'ninja'" in found.evidence
    second = log.replace("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'", "KeyError: 'x'")
    assert diagnose(second).rank == 1


def test_another_ranks_line_may_stand_within_a_traceback() -> None:
    log = (
        HEAD
        + '[2026-03-01 10:00:00 TP3] Load weight end.\n  File "y.py", line 2\nAssertionError: 32 is not divisible by 6\n'
    )
    assert diagnose(log).rank == 1


@pytest.mark.parametrize(
    ("line", "engine", "rank"),
    [
        ("[2026-01-01 00:00:00 TP3] ", "sglang", 3),
        ("[2026-01-01 00:00:00.123 DP1 PP0 TP5 EP7] ", "sglang", 5),
        ("[2026-01-01 00:00:00 EP7 TP2] ", "sglang", 2),
        ("[2026-01-01 00:00:00] ", "sglang", None),
        ("[rank6]: ", "sglang", 6),
        ("(VllmWorker rank=1 pid=30399) ERROR 07-21 11:14:32 [x.py:1] ", "vllm", 1),
        ("\x1b[1;36m(VllmWorker TP2 pid=11412)\x1b[0;0m ERROR 09-03 19:41:01 [x.py:560] ", "vllm", 2),
        ("(Worker_TP3 pid=1) ", "vllm", 3),
        ("(Worker_DP1_TP4_EP12 pid=1) ", "vllm", 4),
        ("(Worker_PP1_TP0 pid=1) ", "vllm", 0),
        ("(VllmWorker-2 pid=1) ", "vllm", 2),
        ("(EngineCore_DP0 pid=1) ", "vllm", None),
        ("(APIServer pid=1) ", "vllm", None),
    ],
)
def test_prefixes_of_all_versions_name_the_rank(line: str, engine: str, rank: int | None) -> None:
    found = diagnose(line + "RuntimeError: CUDA error: invalid device ordinal\n", engine)
    assert (found.cause, found.rank) == ("gpu_count", rank)


# -- ready

READY = {
    "sglang": "[2026-03-01 10:00:09] The server is fired up and ready to roll!\n",
    "vllm": "INFO:     Application startup complete.\n",
    "transformers": "INFO:     Uvicorn running on http://localhost:8123 (Press CTRL+C to quit)\n",
}


@pytest.mark.parametrize("engine", REAL)
def test_ready_is_final(engine: str) -> None:
    later = 'Load weight begin\nStarting to load model\nLoading x\nINFO: "POST /v1/chat/completions HTTP/1.1" 500\n'
    trouble = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\nModuleNotFoundError: No module named 'x'\n"
    found = diagnose(trouble + READY[engine] + later + trouble, engine)
    assert (found.outcome, found.phase, found.cause) == ("ready", "ready", None)


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("engine", REAL)
def test_a_ready_line_beside_a_failed_bind_does_not_count(engine: str, is_before: bool) -> None:
    bind = "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 1): address already in use\n"
    log = bind + READY[engine] if is_before else READY[engine] + bind
    found = diagnose(log, engine)
    assert (found.outcome, found.phase, found.cause) == ("failed", "http", "port_in_use")


def test_a_death_after_ready_is_a_failure_of_what_came_after() -> None:
    noise = "ImportError: early and harmless\n"
    oom = '[2026-03-01 10:01:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n  File "x", line 1\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n'
    found = diagnose(noise + READY["sglang"] + oom + "[2026-03-01 10:01:01] SIGQUIT received. signum=None\n")
    assert (found.outcome, found.phase, found.cause, found.rank) == ("failed", "ready", "gpu_oom", 1)
    dead = "(APIServer pid=1) ERROR 01-01 00:00:00 [x.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    found = diagnose(READY["vllm"] + dead, "vllm")
    assert (found.outcome, found.cause) == ("failed", None)


def test_an_ordered_end_is_no_failure() -> None:
    end = "[shutdown] stopping\n(EngineCore pid=1) ERROR 01-01 00:00:00 [x.py:1] EngineCore encountered a fatal error.\nRuntimeError: cancelled\n"
    assert diagnose(READY["vllm"] + end, "vllm").outcome == "ready"


def test_a_server_known_to_have_ended_has_failed_whatever_the_log_says() -> None:
    watch = LogWatch(ENGINES["vllm"])
    watch.feed(b"(APIServer pid=1) WARNING 01-01 00:00:00 [x.py:1] PermissionError: [Errno 13] Permission denied\n")
    assert watch.diagnosis().outcome == "running"
    ended = watch.diagnosis(exited=True)
    assert (ended.outcome, ended.cause) == ("failed", "permission")


def test_what_python_survives_is_a_failure_only_while_nothing_follows() -> None:
    trouble = "Error in sitecustomize; set PYTHONVERBOSE for traceback:\nValueError: x\n"
    assert diagnose(trouble).cause == "sitecustomize_error"
    goes_on = trouble + "[2026-03-01 10:00:00] server_args=1\n"
    assert diagnose(goes_on).outcome == "running"
    assert diagnose(goes_on + READY["sglang"]).outcome == "ready"
    assert diagnose(goes_on + HEAD + "AssertionError: 32 is not divisible by 6\n").cause == "tp_divisibility"


def test_what_a_server_may_handle_is_a_failure_only_while_nothing_follows_or_something_says_so() -> None:
    handled = "[2026-03-01 10:00:00 TP1] no cache: PermissionError: [Errno 13] Permission denied: '/x'\n"
    assert diagnose(handled).cause == "permission"
    assert diagnose(handled + "Load weight begin.\n").outcome == "running"
    later = handled + "Load weight begin.\n" + HEAD
    assert diagnose(later + "AssertionError: 32 is not divisible by 6\n").cause == "tp_divisibility"
    # Rank 0 went on for a while; that rank 1 died of it, a wrapper says.
    fatal = (
        HEAD
        + "PermissionError: [Errno 13] Permission denied: '/x'\n"
        + "[2026-03-01 10:00:00 TP0] Load weight begin.\n"
    )
    assert diagnose(fatal + "RuntimeError: NCCL error: unhandled system error\n").cause == "permission"
    first = "huggingface_hub.errors.LocalEntryNotFoundError: x\n\nThe above exception was the direct cause of the following exception:\n\nOSError: x is not a local folder and is not a valid model identifier\n"
    assert diagnose(first).cause == "hub_offline"


NOISE = "[2026-03-01 10:00:00] cannot write statistics: PermissionError: [Errno 13] Permission denied: '/x'\n"
STRIPES = HEAD + "zebra.StripeError: too many stripes\n"


@pytest.mark.parametrize(
    ("end", "cause", "evidence"),
    [
        (STRIPES, None, "zebra.StripeError"),
        (HEAD + "RuntimeError: NCCL error: unhandled system error\n", "nccl_error", "NCCL error"),
        (
            "[2026-03-01 10:00:09] Rank 1 scheduler is dead.\n[2026-03-01 10:00:09] Exit code: -9\n",
            "host_oom",
            "Rank 1",
        ),
        ("[2026-03-01 10:00:09] Received sigquit from a child process.\n", None, "sigquit"),
    ],
)
def test_what_was_survived_phases_ago_is_no_cause(end: str, cause: str | None, evidence: str) -> None:
    found = diagnose("[2026-03-01 10:00:00] server_args=1\n" + NOISE + "Load weight begin.\nMemory pool end.\n" + end)
    assert (found.outcome, found.cause) == ("failed", cause)
    assert evidence in found.evidence


def test_an_error_that_no_signature_knows_explains_more_than_a_warning_or_what_was_survived() -> None:
    survived = diagnose("Load weight begin.\n" + NOISE + "Load weight end.\n" + STRIPES)
    assert (survived.cause, survived.evidence) == (None, "zebra.StripeError: too many stripes")
    warning = "(Worker_TP1 pid=401) WARNING 11-03 06:50:44 [x.py:1] PermissionError: [Errno 13] Permission denied\n"
    for log in (warning + STRIPES, STRIPES + warning):
        assert diagnose(log + "EngineCore failed to start.\n", "vllm").evidence == "zebra.StripeError: too many stripes"


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("ModuleNotFoundError: No module named 'flashinfer'\n", "import_error"),
        ("OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/x/y'.\n", "model_path"),
        ("zebra.StripeError: too many stripes\n", None),
    ],
)
def test_a_program_that_a_script_misses_is_no_cause_once_the_server_has_run(end: str, cause: str | None) -> None:
    missed = "/srv/x/launch.sh: line 3: nvidia-smi: command not found\n"
    found = diagnose(missed + 'Traceback (most recent call last):\n  File "x.py", line 1\n' + end)
    assert (found.outcome, found.cause, found.line) == ("failed", cause, 4)
    assert diagnose(missed + "launch_server.py: error: unrecognized arguments: --foo\n").cause == "unknown_flag"


def test_a_rank_that_waited_for_the_others_is_not_the_cause() -> None:
    waited = HEAD.replace("TP1", "TP0") + (
        "ValueError: TP rank 0 could finish the model loading, but there are other ranks that didn't finish loading.\n"
    )
    found = diagnose(waited + STRIPES)
    assert (found.cause, found.rank, found.evidence) == (None, 1, "zebra.StripeError: too many stripes")
    dead = "[2026-03-01 10:00:09] Rank 2 scheduler is dead.\n[2026-03-01 10:00:09] Exit code: -9\n"
    assert (diagnose(waited + dead).cause, diagnose(waited + dead).rank) == ("host_oom", 2)


@pytest.mark.parametrize("engine", REAL)
@pytest.mark.parametrize(
    "line",
    [
        "ERROR:    [Errno 99] error while attempting to bind on address ('10.9.9.9', 30000): cannot assign requested address",
        "[2026-03-01 10:00:09] Received sigquit from a child proces. It usually means the child failed.",
    ],
)  # fmt: skip
def test_an_end_without_a_known_cause_is_a_failure(line: str, engine: str) -> None:
    if "sigquit" in line and engine != "sglang":
        return
    found = diagnose(line + "\n", engine)
    assert (found.outcome, found.cause) == ("failed", None)
    assert found.evidence in line


def test_killed_is_a_failure_unless_the_server_was_told_to_end() -> None:
    assert diagnose(READY["sglang"] + "Killed\n").outcome == "failed"
    told = "[2026-03-01 10:00:09] Gracefully exiting... Remaining number of requests 0.\n"
    assert diagnose(READY["sglang"] + told + "Killed\n").outcome == "ready"


def test_a_gated_repo_is_not_what_a_missing_one_suggests() -> None:
    log = "Traceback (most recent call last):\nOSError: x\nIf you are trying to access a private or gated repo, make sure you are authenticated.\n"
    assert diagnose(log + "Repository Not Found for url: https://huggingface.co/a/b.\n").cause == "model_path"


def test_workers_of_ray_are_told_apart() -> None:
    worker = "(RayWorkerWrapper pid=777, ip=10.0.0.2) "
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1', "zebra.StripeError: too many stripes"]
    log = "".join(f"{worker}{line} [repeated 3x across cluster]\n" for line in lines)
    dead = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    found = diagnose(log + "EngineCore failed to start.\nTraceback (most recent call last):\n" + dead, "vllm")
    assert (found.cause, found.line) == (None, 3)


CARRIERS = {
    "journald, precise": "Nov 29 10:00:01.123456 gpu1 launch.sh[4711]: ",
    "journald, full": "Sun 2026-11-29 10:00:01 UTC gpu1 launch.sh[4711]: ",
    "journald, monotonic": "[12345.678901] gpu1 launch.sh[4711]: ",
    "ts": "Nov 29 10:00:01 ",
    "srun": " 3: ",
    "swarm": "llm.1.abc@gpu1    | ",
    "pm2": "0|llm  | ",
}


@pytest.mark.parametrize("carrier", CARRIERS.values(), ids=CARRIERS)
def test_what_a_carrier_writes_before_each_line_is_taken_off(carrier: str) -> None:
    remote = "RuntimeError: NCCL error: remote process exited or there was a network error\n"
    log = "Load weight begin.\n" + STRIPES + HEAD.replace("TP1", "TP0") + remote
    found = diagnose("".join(f"{carrier}{line}\n" for line in log.splitlines()))
    assert (found.phase, found.cause, found.rank) == ("weights", None, 1)
    assert found.evidence == "zebra.StripeError: too many stripes"


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("sglang", "launch_server.py: error: unrecognized arguments: --foo\n"),
        ("vllm", "vllm serve: error: unrecognized arguments: --foo\n"),
    ],
)
def test_a_refused_flag_behind_an_earlier_start_is_a_start_of_its_own(engine: str, line: str) -> None:
    found = diagnose("Load weight begin.\nStarting to load model\n" + READY[engine] + line, engine)
    assert (found.outcome, found.phase, found.cause) == ("failed", "boot", "unknown_flag")


@pytest.mark.parametrize("told", [True, False], ids=["engine told", "engine guessed"])
def test_the_banner_alone_begins_a_start(told: bool) -> None:
    gated = (PROJECT / "tests" / "cases" / "logs" / "vllm-032-licence-not-accepted" / "server.log").read_text()
    whole = (PROJECT / "tests" / "cases" / "logs" / "vllm-033-tp4-ulimit-warning" / "server.log").read_text()
    found = diagnose_log((whole + gated).encode(), ENGINES, "vllm" if told else None)
    assert (found.outcome, found.phase, found.cause) == ("failed", "boot", "gated_model")
    found = diagnose_log((gated + whole).encode(), ENGINES, "vllm" if told else None)
    assert (found.outcome, found.phase, found.cause) == ("ready", "ready", None)


def test_the_pids_of_nccl_lines_are_ours() -> None:
    oom = OOM.format(wanted="20.00 GiB", free="1.00 GiB") + "Process 4242 has 60.00 GiB memory in use. " + ITSELF
    assert diagnose("gpu-1:4242:4242 [3] ras/client_support.cc:171 NCCL WARN x\n" + oom).cause == "gpu_oom"
    assert diagnose("gpu-1:4242:4250 [3] NCCL INFO x\n" + oom).cause == "gpu_oom"


def test_every_line_of_a_traceback_may_carry_the_prefix() -> None:
    log = "".join(f"[rank2]: {line}\n" for line in [*HEAD.splitlines()[1:], "zebra.StripeError: too many"])
    found = diagnose("[rank2]: Traceback (most recent call last):\n" + log)
    assert (found.outcome, found.cause, found.rank) == ("failed", None, 2)
    assert found.evidence == "[rank2]: zebra.StripeError: too many"


# -- phases and progress

WORDING = {
    "sglang": [
        ("[2026-01-01 00:00:00] server_args=ServerArgs(x)", "boot"),
        ("Init torch distributed begin.", "distributed"),
        ("Init parallel begin.", "distributed"),
        ("sglang is using nccl==2.27.5", "distributed"),
        ("NCCL/RCCL warmup completed", "distributed"),
        ("NCCL/RCCL/HCCL warmup completed", "distributed"),
        ("Load weight begin. avail mem=1 GB", "weights"),
        ("Loading safetensors checkpoint shards:  10% Completed", "weights"),
        ("Loading pt checkpoint shards:  10% Completed", "weights"),
        ("Multi-thread loading shards:  10% Completed", "weights"),
        ("KV Cache is allocated. #tokens: 1", "kv_cache"),
        ("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1", "kv_cache"),
        ("KV Cache VA upper bound", "kv_cache"),
        ("Memory pool end. avail mem=1 GB", "kv_cache"),
        ("DeepGEMM warmup: 10%|x| 1/10", "compile"),
        ("Try DeepGEMM JIT Compiling for x", "compile"),
        ("Running FlashInfer autotune.", "compile"),
        ("Compiling num tokens (num_tokens=8)", "compile"),
        ("Compiling a graph for x", "compile"),
        ("Capture cuda graph begin. This can take up to several minutes. avail mem=1 GB", "graphs"),
        ("Capture piecewise CUDA graph begin.", "graphs"),
        ("Capture target decode CUDA graph begin. backend=full", "graphs"),
        ("Capture target prefill CUDA graph begin. backend=full", "graphs"),
        ("Capture draft extend CUDA graph begin.", "graphs"),
        ("Capture single-CG draft extend begin.", "graphs"),
        ("Capture cuda graph end. Time elapsed: 4 s", "graphs"),
        ("Capturing batches (avail_mem=1 GB):   0%|", "graphs"),
        ("Capturing batches (bs=8 avail_mem=1 GB):   0%|", "graphs"),
        ("Capturing num tokens (num_tokens=8):   0%|", "graphs"),
        ("INFO:     Uvicorn running on http://0.0.0.0:1", "http"),
        ("INFO:     Application startup complete.", "http"),
        ('INFO:     127.0.0.1:1 - "GET /get_model_info HTTP/1.1" 200 OK', "warmup"),
        ('INFO:     127.0.0.1:1 - "GET /model_info HTTP/1.1" 200 OK', "warmup"),
        ('INFO:     127.0.0.1:1 - "POST /encode HTTP/1.1" 200 OK', "warmup"),
        ("The server is fired up and ready to roll!", "ready"),
    ],
    "vllm": [
        ("INFO 07-21 11:14:17 [api_server.py:1] vLLM API server version 0.9.2", "boot"),
        ("(APIServer pid=1) INFO 08-30 20:02:12 [api_utils.py:347]  █ ▀▄▀ █  version 0.32.0", "boot"),
        ("Initializing a V1 LLM engine (v0.9.2) with config", "boot"),
        ("world_size=4 rank=0 local_rank=0", "distributed"),
        ("rank 1 in world size 2 is assigned as DP rank 0", "distributed"),
        ("vLLM is using nccl==2.26.2", "distributed"),
        ("Starting to load model /m...", "weights"),
        ("Loading safetensors checkpoint shards:  10% Completed", "weights"),
        ("Loading weights took 8.08 seconds", "weights"),
        ("Model loading took 12.9 GiB", "weights"),
        ("Available KV cache memory: 34 GiB", "kv_cache"),
        ("GPU KV cache size: 512,204 tokens", "kv_cache"),
        ("CPU KV cache size: 512,204 tokens", "kv_cache"),
        ("Dynamo bytecode transform time: 7.64 s", "compile"),
        ("Compiling a graph for dynamic shape", "compile"),
        ("Cache the graph of shape None", "compile"),
        ("Directly load the compiled graph(s)", "compile"),
        ("torch.compile takes 26 s in total", "compile"),
        ("torch.compile took 26 s in total", "compile"),
        ("saved AOT compiled function to /x", "compile"),
        ("Capturing CUDA graph shapes:   0%|", "graphs"),
        ("Capturing CUDA graphs (decode, FULL):   0%|", "graphs"),
        ("Graph capturing finished in 13 secs", "graphs"),
        ("Starting vLLM API server 0 on http://0.0.0.0:8000", "http"),
        ("Starting vLLM server on http://0.0.0.0:8000", "http"),
        ("INFO:     Application startup complete.", "ready"),
    ],
    "transformers": [
        ("[transformers] Loading /m@main", "weights"),
        ("Loading weights:  50%|█████     | 73/146", "weights"),
        ("INFO:     Started server process [1]", "http"),
        ("INFO:     Application startup complete.", "http"),
        ("INFO:     Uvicorn running on http://localhost:1", "ready"),
    ],
}
MARKERS = [(engine, text, phase) for engine, lines in WORDING.items() for text, phase in lines]


@pytest.mark.parametrize(("engine", "text", "phase"), MARKERS)
def test_each_marker_of_each_version_sets_its_phase(engine: str, text: str, phase: str) -> None:
    ground = "INFO:     Started server process [1]\n" if engine == "transformers" and phase == "http" else ""
    assert diagnose(ground + text + "\n", engine).phase == phase


def test_a_phase_may_go_backwards_and_prefill_counts_only_after_http() -> None:
    watch = LogWatch(ENGINES["sglang"])
    watch.feed(b"Capture cuda graph begin.\nInit torch distributed begin.\n")
    assert watch.phase == "distributed"
    watch.feed(b"Prefill batch, #new-seq: 1\n")
    assert watch.phase == "distributed"
    watch.feed(b"INFO:     Uvicorn running on http://x\nPrefill batch, #new-seq: 1\n")
    assert watch.phase == "warmup"


def test_each_rank_has_its_phase_and_the_slowest_is_known() -> None:
    watch = LogWatch(ENGINES["sglang"])
    assert watch.slowest is None
    watch.feed(
        b"[2026-01-01 00:00:00 TP0] Load weight begin.\n[2026-01-01 00:00:00 TP1] Load weight begin.\n"
        b"[2026-01-01 00:00:01 TP0] Memory pool end.\n"
    )
    assert watch.phase == "kv_cache"
    assert watch.ranks == {0: "kv_cache", 1: "weights"}
    assert watch.slowest == (1, "weights")


def test_bars_give_the_percent_and_a_new_phase_clears_it() -> None:
    watch = LogWatch(ENGINES["sglang"])
    news = watch.feed(b"\rLoading safetensors checkpoint shards:  37% Completed | 3/8 [00:03<00:06]\r")
    assert (watch.phase, watch.percent) == ("weights", 37.0)
    assert [(each.kind, each.percent) for each in news][:2] == [("phase", None), ("percent", 37.0)]
    watch.feed(
        b"Loading safetensors checkpoint shards:  50% Completed | 4/8[2026-01-01 00:00:00 TP2] Memory pool end.\n"
    )
    assert (watch.phase, watch.percent) == ("kv_cache", None)
    watch.feed(b"Capturing batches (bs=8 avail_mem=1 GB):  25%|xx    | 1/4 [00:00<00:02]\r")
    assert (watch.phase, watch.percent) == ("graphs", 25.0)


def test_another_process_may_write_into_an_open_bar() -> None:
    watch = LogWatch(ENGINES["sglang"])
    watch.feed(
        b"\rLoading safetensors checkpoint shards:  37% Completed | 3/8[2026-01-01 00:00:00 TP2] Memory pool end.\n"
    )
    assert watch.ranks == {2: "kv_cache"}
    watch.feed(
        b"\rCapturing batches:  37%|x| 3/8[2026-01-01 00:00:00 TP2] Scheduler hit an exception: Traceback (most recent call last):\nAssertionError: 32 is not divisible by 6\n"
    )
    found = watch.diagnosis()
    assert (found.cause, found.rank, found.line) == ("tp_divisibility", 2, 3)


def test_events_tell_of_failures_and_the_ready_line_once() -> None:
    watch = LogWatch(ENGINES["sglang"])
    kinds = [each.kind for each in watch.feed((HEAD + "AssertionError: 3 is not divisible by 2\n" * 3).encode())]
    assert kinds.count("failure") == 2  # the wrapper, and the cause
    kinds = [each.kind for each in LogWatch(ENGINES["sglang"]).feed(READY["sglang"].encode() * 2)]
    assert kinds.count("ready_line") == 1


def test_the_tail_shows_lines_and_the_last_state_of_a_bar() -> None:
    watch = LogWatch(ENGINES["sglang"])
    watch.feed(b"one\r\n\x1b[31mtwo\x1b[0m\n\rbar 1\rbar 2\rbar 3\nthree\nfo")
    assert watch.tail(10) == ["one", "two", "bar 3", "three"]
    watch.finish()
    assert watch.tail(2) == ["three", "fo"]
    assert watch.last_line == "fo"
    assert watch.tail(0) == []


def test_a_live_clock_times_a_log_without_stamps() -> None:
    watch = LogWatch(ENGINES["transformers"])
    for at, text in (
        (100.0, b"x\n"),
        (103.5, b"Loading weights:   0%|\r"),
        (110.0, b"INFO: Started server process [1]\n"),
    ):
        watch.feed(text, at=at)
    watch.feed(b"", at=112.0)
    assert [(each.phase, each.seconds) for each in watch.diagnosis().phases] == [
        ("boot", 3.5),
        ("weights", 6.5),
        ("http", 2.0),
    ]


# -- any bytes, in any pieces, in bounded memory


def answers(watch: LogWatch) -> tuple[Any, ...]:
    watch.finish()
    return (watch.diagnosis(), watch.diagnosis(exited=True), watch.phase, watch.percent, watch.ranks, watch.tail(60))


def in_pieces(engine: str, data: bytes, cuts: list[int]) -> LogWatch:
    watch = LogWatch(ENGINES[engine])
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        watch.feed(data[start:end])
    return watch


@settings(max_examples=40, deadline=None)
@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 1 << 20), max_size=40))
def test_how_a_log_arrives_changes_nothing(case: Path, cuts: list[int]) -> None:
    data = (case / "server.log").read_bytes()
    engine = expected(case)["engine"]
    assert answers(in_pieces(engine, data, cuts)) == answers(in_pieces(engine, data, []))


SCRAPS = [text.encode() for _, _, text in SIGNATURES] + [line.encode() for line in BENIGN] + [
    text.encode() for _, text, _ in MARKERS
] + [HEAD.encode(), b"\x1b[1;36m", b"\xff\xfe", b"\x00", b"%|", b"99999999999999999999% Completed"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    engine=st.sampled_from(REAL),
    parts=st.lists(
        st.tuples(
            st.sampled_from(SCRAPS) | st.binary(max_size=40), st.sampled_from([b"\n", b"\r", b"\r\n", b"", b"\n\n"])
        ),
        max_size=30,
    ),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=12),
)
def test_junk_never_raises_and_how_it_arrives_changes_nothing(
    engine: str, parts: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    data = b"".join(text + end for text, end in parts)
    whole, pieces = answers(in_pieces(engine, data, [])), answers(in_pieces(engine, data, cuts))
    assert whole == pieces
    assert whole[0].outcome in ("ready", "failed", "running")
    json.dumps(whole[0].to_json())


@settings(max_examples=20, deadline=None)
@given(data=st.binary(max_size=2000))
def test_random_bytes_are_no_news(data: bytes) -> None:
    found = diagnose_log(data, ENGINES)
    assert (found.outcome, found.cause) == ("running", None)


def held(watch: LogWatch) -> int:
    """Bytes and characters that it keeps of the log."""
    earlier = watch._earlier.size if watch._earlier is not None else 0
    return len(watch._partial) + watch._tail.size + watch._sieve.size + watch._start.size + earlier


def test_a_line_of_ten_megabytes_is_read_to_its_end() -> None:
    line = (
        b"x" * 5_000_000 + b"RuntimeError: CUDA error: invalid device ordinal" + b"y" * 5_000_000 + b"Memory pool end."
    )
    watch = LogWatch(ENGINES["sglang"])
    for start in range(0, len(line), 700_001):
        watch.feed(line[start : start + 700_001])
        assert held(watch) < 500_000
    watch.finish()
    found = watch.diagnosis()
    assert (found.cause, found.phase, found.line) == ("gpu_count", "kv_cache", 1)
    assert len(found.evidence) <= logwatch.TEXT_CHARACTERS
    assert diagnose_log(line, ENGINES, "sglang") == found


def test_a_flood_of_two_hundred_megabytes_stays_small() -> None:
    decode = b"[2026-11-29 14:06:17] Decode batch, #running-req: 1, #token: %d, gen throughput (token/s): 775.32\n"
    block = b"".join(decode % number for number in range(10_000))
    watch = LogWatch(ENGINES["sglang"])
    watch.feed(b"[2026-11-29 14:06:17] server_args=ServerArgs()\n")
    fed = 0
    while fed < 200_000_000:
        watch.feed(block)
        fed += len(block)
        assert held(watch) < 500_000
    watch.feed(b"RuntimeError: CUDA error: invalid device ordinal\n")
    assert watch.diagnosis().line == fed // len(block) * 10_000 + 2


def test_floods_of_matching_lines_and_tracebacks_stay_small() -> None:
    watch = LogWatch(ENGINES["vllm"])
    for number in range(300):
        watch.feed(
            f"(Worker_TP{number} pid={number}) Traceback (most recent call last):\n{'z' * 3000}\n"
            f"(Worker_TP{number} pid={number}) ValueError: {OOM}Process {number} has 2.00 GiB memory in use.{'x' * 3000}\n"
            "Error in sitecustomize; set PYTHONVERBOSE\n".encode()
        )
    assert held(watch) < 2_000_000
    watch.feed(b"".join(b"[rank%d]: Starting to load model\n" % number for number in range(3000)))
    assert len(watch.ranks) == MOST_RANKS


# -- guessing


def test_the_engine_is_guessed_from_its_own_marks() -> None:
    assert guess_engine("nothing to see", ENGINES) is None
    assert guess_engine("sglang is using nccl==2.27.5", ENGINES) == "sglang"  # not demo, which extends it
    assert guess_engine("[2026-03-01 10:00:00 DP1 TP3 EP3] Load weight end.", ENGINES) == "sglang"
    assert guess_engine("[2026-03-01 10:00:00] Received sigquit from a child process.", ENGINES) == "sglang"
    assert diagnose_log(b"[x] vLLM API server version 0.10.1\n", ENGINES).version == "0.10.1"
    assert diagnose_log(b"nothing", ENGINES, "sglang").version is None


def test_a_log_of_an_unknown_engine_is_still_read() -> None:
    found = diagnose_log(b"RuntimeError: CUDA error: invalid device ordinal\n", ENGINES)
    assert (found.engine, found.cause) == (None, "gpu_count")


def test_a_stream_is_read_as_bytes_are(tmp_path: Path) -> None:
    case = CASES[0] / "server.log"
    with case.open("rb") as stream:
        assert diagnose_log(stream, ENGINES) == diagnose_log(case.read_bytes(), ENGINES)


# -- the plain text that makes a flood cheap


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("abc", b"abc"),
        (r"a\.b\[c\]", b"a.b[c]"),
        (r"x\d+ is not divisible by \d+", b" is not divisible by "),
        (r"abc|def", None),
        (r"(?:abc|def)g", None),
        (r"(?:abc|def)gh", b"gh"),
        (r"colou?r was", b"r was"),
        (r"abc{2,3}de", b"ab"),
        (r"ab[c\]d]efg", b"efg"),
        (r"[^]x]yz", b"yz"),
        (r"(?i)abc", None),
        (r"hello+w", b"hello"),
        ("version `GLIBC", b"version `GLIBC"),
    ],
)
def test_needed_text(pattern: str, text: bytes | None) -> None:
    assert logrules.needed_text(pattern) == text


@pytest.mark.parametrize(
    ("pattern", "alike"),
    [
        (r"\d{1,3}%\|", True),
        (r"(?P<rank2>[0-9a-f]{7}) \d+", True),
        (r"exit code 1\b", False),
        (r"IPv[46]", False),
        (r"(a)\1", False),
        (r"\x1b\[", False),
    ],
)
def test_to_which_patterns_all_digits_are_alike(pattern: str, alike: bool) -> None:
    assert logrules.is_alike(pattern) == alike


def test_what_was_remembered_of_a_line_is_not_said_of_another_number() -> None:
    """A line with the same words and other digits has its own rank, and its own answer where a digit matters."""
    rules = logrules.Rules(ENGINES["sglang"])
    lines = [f"[2026-01-30 21:09:17 TP{rank}] x" for rank in (1, 2)]
    assert [rules.rank_in(each) for each in lines] == [1, 2]
    assert [rules.prefixes_in(each)[0].who for each in lines] == [" TP1", " TP2"]
    said = [rules.is_consequence(f"SignalException: Process 71 got signal: {number}") for number in (9, 2)]
    assert said == [False, True]


def test_every_pattern_of_the_roles_has_plain_text() -> None:
    for engine in ENGINES.values():
        for phase in engine["phases"]:
            assert phase["name"] in PHASES
            assert all(logrules.needed_text(each) for each in phase["patterns"])
        for failure in engine["failures"]:
            assert all(logrules.needed_text(each) for each in failure["patterns"]), failure["id"]
        for key in ("wrappers", "benign", "consequences", "stopping", "pids", "percent"):
            assert all(logrules.needed_text(each) for each in engine.get(key, ())), key


# -- what a ready server says of itself


def watched(name: str, *lines: str) -> LogWatch:
    watch = LogWatch(ENGINES[name])
    watch.feed("".join(f"{line}\n" for line in lines).encode())
    watch.finish()
    return watch


@pytest.mark.parametrize(("name", "tokens"), [("fail-hog", 2_194_000), ("ready-then-term", 16_458_301)])
def test_the_kv_pool_is_measured(name: str, tokens: float) -> None:
    watch = LogWatch(ENGINES["sglang"])
    watch.feed((RECORDINGS / f"{name}.log").read_bytes())
    assert watch.measures["kv_tokens"] == pytest.approx(tokens, rel=0.01)
    assert "no_cuda_graph" not in watch.warnings  # a prefill never has one


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_recorded_start_of_every_engine_is_read(engine: str) -> None:
    """Each phase once, ready the last, no failure: every role has a recording, and its file reads it."""
    log = (PROJECT / "tests/recordings" / engine / "ready.log").read_bytes()
    signals = LogWatch(ENGINES[engine]).feed(log)
    phases = [signal.phase for signal in signals if signal.kind == "phase"]
    assert (phases[-1], len(phases)) == ("ready", len(set(phases)))
    assert len(phases) > 2
    found = diagnose_log(log, ENGINES)
    assert (found.outcome, found.phase, found.cause) == ("ready", "ready", None)
    assert found.engine in (engine, *ENGINES[engine]["ancestors"])


@pytest.mark.parametrize(
    ("name", "phase", "cause"),
    [
        ("fail-flag", "boot", "unknown_flag"),
        ("fail-model", "weights", "model_path"),
        ("fail-file", "weights", "weights_incomplete"),
        ("fail-port", "boot", "port_in_use"),
    ],
)
def test_recorded_failures_of_llama_server_have_their_cause(name: str, phase: str, cause: str) -> None:
    found = diagnose_log((PROJECT / f"tests/recordings/llama_cpp/{name}.log").read_bytes(), ENGINES)
    assert (found.engine, found.outcome, found.phase, found.cause) == ("llama_cpp", "failed", phase, cause)


def test_vllms_kv_pool_is_measured_and_its_start_is_read() -> None:
    log = (PROJECT / "tests/recordings/vllm/ready.log").read_bytes()
    watch = LogWatch(ENGINES["vllm"])
    watch.feed(log)
    assert watch.measures == {"kv_tokens": 1_048_576.0}
    assert list(watch.warnings) == ["fallback"]  # Disabling Triton
    found = diagnose_log(log, ENGINES)
    assert (found.engine, found.version, found.outcome, found.phase) == ("vllm", "0.32.0", "ready", "ready")


def test_small_batches_without_a_graph_are_a_warning_also_after_the_ready_line() -> None:
    decode = (
        "Decode batch, #running-req: {0}, #token: 20, token usage: 0.00, cuda graph: {1}, gen throughput (token/s): 1"
    )
    assert not watched("sglang", decode.format(1, True), decode.format(200, False)).warnings
    watch = watched("sglang", "The server is fired up and ready to roll!", decode.format(2, False))
    assert set(watch.warnings) == {"no_cuda_graph"}
    assert "servers.{server}.args" in watch.hint("no_cuda_graph")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sglang", "[2026-03-01 10:00:00] server_args=ServerArgs(" + "x='y', " * 400 + "disable_cuda_graph=True, " + "z='y', " * 400),
        ("vllm", "(EngineCore pid=1) INFO 01-05 16:20:54 [x.py:1] Cudagraph is disabled under eager mode"),
    ],
)  # fmt: skip
def test_a_start_without_graphs_is_a_warning_before_it_is_ready(name: str, line: str) -> None:
    said = watched(name, line).warnings["no_cuda_graph"]
    assert "graph" in said
    assert len(said) <= logwatch.WARNING_CHARACTERS
    assert "no_cuda_graph" not in watched(name, line.replace("True", "False").replace("disabled", "used")).warnings


def test_only_what_no_server_survives_is_fatal() -> None:
    assert watched("sglang", HEAD + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB").is_fatal
    assert watched("sglang", "Received sigquit from a child process. It usually means the child failed.").is_fatal
    assert not watched("sglang", "ModuleNotFoundError: No module named 'x'").is_fatal
    assert not watched("sglang", "The server is fired up and ready to roll!", "SIGQUIT received.").is_fatal
    for name in ("ready-then-term", "tp2-ready-then-term", "first-start-jit", "fail-hog"):
        watch = LogWatch(ENGINES["sglang"])
        for line in (RECORDINGS / f"{name}.log").read_bytes().splitlines(keepends=True):
            watch.feed(line)
            assert not watch.is_fatal, line


def test_healthy_cases_are_never_fatal_on_the_way() -> None:
    for case in CASES:
        want = expected(case)
        if want["outcome"] == "failed":
            continue
        watch = LogWatch(ENGINES[want["engine"]])
        for line in (case / "server.log").read_bytes().splitlines(keepends=True):
            watch.feed(line)
            assert not watch.is_fatal, (case.name, line)


def test_answers_to_our_own_questions_show_nobody_at_work() -> None:
    watch = watched("sglang", "Load weight begin. avail mem=1 GB")
    before = watch.lines_of_work
    watch.feed(b'[2026-11-29 14:18:00] INFO:     127.0.0.1:4 - "GET /health HTTP/1.1" 503 Service Unavailable\n')
    assert watch.lines_of_work == before
    watch.feed(b"anything else\n")
    assert watch.lines_of_work == before + 1
