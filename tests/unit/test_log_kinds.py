"""Kinds of trouble in reading logs, each in several engines and versions: how a process says that, and why, it ended.

The letters are the kinds: A benign wording that ends a traceback, B lines of an end, C crashes outside of Python,
D networks, E unknown envelopes, F no kernel for this GPU, G the right line with the right advice, H starts told by the
banner, I excerpts, J nodes of rank 1 and more, K and L servers that had been ready, M source lines, N advice.
"""

# ruff: noqa: E501 (a line of a log stays one line)

from __future__ import annotations

import collections
import dataclasses
import re
from pathlib import Path

import pytest

from lamplighter.node.log.whole import diagnose_log
from lamplighter.release.engine import load_engines

PROJECT = Path(__file__).resolve().parents[2]
ENGINES = {name: engine.compiled for name, engine in load_engines(PROJECT / "roles").items()}


@dataclasses.dataclass(frozen=True)
class Row:
    kind: str
    engine: str
    log: str
    cause: str | None
    evidence: str = ""
    outcome: str = "failed"
    phase: str = "weights"
    rank: int | None = None
    hint: str = ""
    version: str = ""


# -- how the engines begin and end


def sg(*said: str, ready: bool = False, rank: int = 0) -> str:
    """SGLang, up to the weights or ready."""
    lines = ["[2026-04-02 03:00:00] server_args=ServerArgs(model_path='/m', tp_size=4)"]
    lines += [f"[2026-04-02 03:00:10 TP{each}] Init torch distributed begin." for each in (0, rank)]
    lines += [f"[2026-04-02 03:00:12 TP{each}] Load weight begin. avail mem=78.42 GB" for each in (0, rank)]
    if ready:
        lines += ["[2026-04-02 03:01:00] The server is fired up and ready to roll!"]
    return "\n".join([*lines, *said]) + "\n"


def sg_trace(sentence: str, rank: int = 0, source: str = "scheduler = Scheduler(") -> str:
    return (
        f"[2026-04-02 03:02:00 TP{rank}] Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "/v/sglang/srt/managers/scheduler.py", line 9, in run_scheduler_process\n    {source}\n{sentence}\n\n'
        "[2026-04-02 03:02:00] Received sigquit from a child process. It usually means the child failed."
    )


LOGO = "(APIServer pid=7) INFO 11-20 06:00:12 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version {}"


def vl(*said: str, ready: bool = False, version: str = "0.24.1") -> str:
    lines = [
        LOGO.format(version),
        "(Worker_TP1 pid=9) INFO 11-20 06:00:30 [gpu_model_runner.py:1] Starting to load model /m...",
    ]
    if ready:
        lines += [
            "(APIServer pid=7) INFO 11-20 06:01:00 [entry.py:1] Starting vLLM server on http://0.0.0.0:8000",
            "(APIServer pid=7) INFO:     Application startup complete.",
        ]
    return "\n".join([*lines, *said]) + "\n"


def vl_trace(sentence: str, source: str = "worker = WorkerProc(*args, **kwargs)") -> str:
    stamp = "(Worker_TP1 pid=9) ERROR 11-20 06:00:41 [multiproc_executor.py:9]"
    lines = [
        "WorkerProc failed to start.",
        "Traceback (most recent call last):",
        '  File "/v/vllm/v1/worker/gpu_worker.py", line 3, in load',
        f"    {source}",
        *sentence.split("\n"),
    ]
    outer = "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    return "\n".join([*(f"{stamp} {line}" for line in lines), outer])


def tr(*said: str) -> str:
    return "\n".join(["[transformers] Loading /m@main", *said]) + "\n"


def tr_trace(sentence: str, source: str = "return cls.load(x)") -> str:
    return f'Traceback (most recent call last):\n  File "/v/transformers/cli/serve.py", line 9, in __init__\n    {source}\n{sentence}'


def py(sentence: str, program: str = "/v/x.py") -> str:
    return f'Traceback (most recent call last):\n  File "{program}", line 3, in main\n    go()\n{sentence}'


LEAKS = "/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: resource_tracker: There appear to be 3 leaked semaphore objects to clean up at shutdown\n  warnings.warn('resource_tracker: There appear to be %d '"
NO_DESTROY = "[rank0]:[W402 03:02:01.118204551 ProcessGroupNCCL.cpp:1553] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources."
OOR = "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help."
QUIT = "[2026-04-02 03:02:00] Received sigquit from a child process. It usually means the child failed."
ZEBRA = "RuntimeError: zebra stripes are missing"
DIED = "RuntimeError: Rank 3 scheduler died during initialization (exit code: {})."
PYSPY = "[2026-04-02 03:09:05] Pyspy failed (py-spy dump --pid 12). Error: {}\n"
DEAD_CORE = "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore_DP0': {}}}"


def vlp(text: str, who: str = "(APIServer pid=7) ") -> str:
    return who + text.replace("\n", f"\n{who}")


def lost(log: str) -> str:
    """Colours whose escape was lost."""
    return re.sub(r"^\((\w+) pid=(\d+)\)", r"[1;36m(\1 pid=\2)[0;0m", log, flags=re.MULTILINE)


def behind(prefix: str, log: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in log.splitlines())


ROWS = [
    # A
    Row("A", "sglang", sg(sg_trace(f"triton.runtime.errors.OutOfResources: {OOR}", 2), rank=2), "gpu_arch", "OutOfResources", rank=2),
    Row("A", "vllm", vl(vl_trace(f"triton.runtime.errors.OutOfResources: {OOR}")), "gpu_arch", "Required: 147456", rank=1),
    Row("A", "transformers", tr(tr_trace(f"triton.runtime.errors.OutOfResources: {OOR}")), "gpu_arch", "Required: 147456"),
    Row("A", "sglang", sg(f"[rank0]:E0402 03:01:00.774000 7 torch/_inductor/select_algorithm.py:5068] [0/0] {OOR}", ZEBRA.replace("RuntimeError", "[2026-04-02 03:01:00] note")), None, outcome="running"),
    Row("A", "vllm", vl('(APIServer pid=7) ERROR 11-20 06:00:13 [repo_utils.py:65] Error retrieving file list: Repo id must be in the form \'repo_name\' or \'namespace/repo_name\': \'/srv/m\'. Use `repo_type` argument if needed., retrying 1 of 2', '(APIServer pid=7) ERROR 11-20 06:00:15 [repo_utils.py:63] Error retrieving file list: Repo id must be in the form \'repo_name\' or \'namespace/repo_name\': \'/srv/m\'. Use `repo_type` argument if needed.'), None, outcome="running"),
    Row("A", "vllm", vl(vl_trace("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/srv/zebra'. Use `repo_type` argument if needed.")), "model_path", "/srv/zebra"),
    Row("A", "vllm", vl("gpu9:7:7 [1] misc/ibvwrap.cc:35 NCCL WARN Failed to open libibverbs.so[.1]", "(Worker_TP1 pid=9) INFO 11-20 06:00:50 [gpu_worker.py:1] Available KV cache memory: 41.2 GiB", ready=True), None, outcome="ready", phase="ready"),
    Row("A", "vllm", vl("(APIServer pid=7) '(ReadTimeoutError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. (read timeout=10)\"), '(Request ID: x)')' thrown while requesting HEAD https://huggingface.co/zebra/z/resolve/main/config.json", "(APIServer pid=7) Retrying in 1s [Retry 1/5]."), None, outcome="running"),
    Row("A", "vllm", vl("gpu9:7:7 [1] misc/ibvwrap.cc:35 NCCL WARN Failed to open libibverbs.so[.1]"), None, outcome="running"),
    Row("A", "sglang", sg("[2026-04-02 03:00:30 TP1] Failed to get device capability: zebra", "[2026-04-02 03:00:31 TP1] Using triton backend."), None, outcome="running"),
    Row("A", "vllm", vl("(Worker_TP1 pid=9) WARNING 11-20 06:00:41 [fp8_utils.py:7] Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! Config file not found at /v/N=512.json"), None, outcome="running"),
    Row("A", "vllm", vl("(EngineCore pid=8) ERROR 11-20 06:00:41 [fa_utils.py:57] Cannot use FA version 3 is not supported due to FA3 is only supported on devices with compute capability >= 8 excluding 8.6 and 8.9"), None, outcome="running"),
    Row("A", "sglang", sg("W0402 03:00:30.480146 20331 transfer_engine.cpp:77] Failed to open device mlx5_9: No such device, skip it", "I0402 03:00:30.5 20331 rdma_context.cpp:1] Topology discovery complete"), None, outcome="running"),
    Row("A", "vllm", vl("[rank0]:[W1120 06:00:41.1 ProcessGroupNCCL.cpp:5068] Guessing device ID based on global rank. This can cause a hang if rank to GPU mapping is heterogeneous."), None, outcome="running"),
    Row("A", "vllm", vl("(Worker_TP1 pid=9) INFO 11-20 06:00:41 [cuda.py:9] Cannot use FlashMLA backend: only supported on SM90"), None, outcome="running"),
    # B
    Row("B", "sglang", sg(py("TypeError: zebra"), LEAKS), None, "TypeError: zebra"),
    Row("B", "vllm", vl("(APIServer pid=7) " + py("ValueError: zebra").replace("\n", "\n(APIServer pid=7) "), NO_DESTROY, LEAKS), None, "ValueError: zebra"),
    Row("B", "transformers", tr(tr_trace("KeyError: 'zebra'"), "nanobind: leaked 2 instances!", ' - leaked instance 0x7f of type "x"', LEAKS), None, "KeyError: 'zebra'"),
    Row("B", "transformers", tr("INFO:     Started server process [5]", "INFO:     Waiting for application startup.", py("ValueError: zebra"), "ERROR:    Application startup failed. Exiting."), None, "ValueError: zebra", phase="http"),
    Row("B", "sglang", sg(py("KeyboardInterrupt"), NO_DESTROY), "interrupted", "KeyboardInterrupt"),
    Row("B", "vllm", vl("slurmstepd: error: *** STEP 77.0 ON gpu9 CANCELLED AT 2026-04-02T04:00:00 DUE TO TIME LIMIT ***"), "interrupted", "TIME LIMIT"),
    Row("B", "sglang", sg("[2026-04-02 03:02:09] SIGTERM received. signum=None frame=None. Draining requests and shutting down..."), "interrupted", "SIGTERM received"),
    Row("B", "vllm", vl("(Worker_TP1 pid=9) INFO 11-20 06:00:41 [multiproc_executor.py:843] Parent process exited, terminating worker queues"), None, "Parent process exited"),
    Row("B", "vllm", vl("(APIServer pid=7) ERROR 11-20 06:00:41 [core_client.py:598] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."), "worker_died", "EngineCore_DP0 died"),
    Row("B", "vllm", vl("Nov 20 06:00:42 gpu9 systemd[1]: llm.service: Main process exited, code=killed, status=9/KILL", "Nov 20 06:00:42 gpu9 systemd[1]: llm.service: Failed with result 'signal'."), None, "status=9/KILL"),
    Row("B", "sglang", sg("Nov 20 06:00:42 gpu9 systemd[1]: llm.service: A process of this unit has been killed by the OOM killer.", "Nov 20 06:00:42 gpu9 systemd[1]: llm.service: Failed with result 'oom-kill'."), "host_oom", "OOM killer"),
    Row("B", "sglang", sg("Nov 20 06:00:42 gpu9 systemd[1]: llm.service: Main process exited, code=exited, status=1/FAILURE"), None, "status=1/FAILURE"),
    Row("B", "vllm", vl("(APIServer pid=7) INFO:     Shutting down", "(APIServer pid=7) INFO:     Waiting for application shutdown.", "(APIServer pid=7) INFO:     Application shutdown complete.", py("KeyboardInterrupt"), "terminate called without an active exception", "Aborted (core dumped)", ready=True), None, outcome="ready", phase="ready"),
    Row("B", "sglang", sg("slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.", "srun: error: gpu9: task 0: Out Of Memory"), "host_oom", "oom_kill"),
    Row("B", "vllm", vl("slurmstepd: error: *** JOB 77 ON gpu9 CANCELLED AT 2026-04-02T04:00:00 DUE TO PREEMPTION ***"), "interrupted", "PREEMPTION"),
    Row("B", "sglang", sg("[2026-04-02 03:02:00] Initialization failed. warmup error: Traceback (most recent call last):", '  File "/v/sglang/srt/entrypoints/http_server.py", line 9, in _execute_server_warmup', '    assert res.status_code == 200, f"{res.text}"', 'AssertionError: {"object":"error","message":"Internal server error: zebra","code":500}', "", "Killed"), None, "Internal server error: zebra"),
    # C
    Row("C", "sglang", sg("terminate called after throwing an instance of 'c10::Error'", "  what():  zebra handle is bad", DIED.format(-6)), "native_crash", "zebra handle is bad"),
    Row("C", "vllm", vl("corrupted size vs. prev_size", "Fatal Python error: Aborted", DEAD_CORE.format(-6)), "native_crash", "corrupted size vs. prev_size"),
    Row("C", "vllm", vl("!!!!!!! Segfault encountered !!!!!!!", DEAD_CORE.format(-11)), "native_crash", "Segfault encountered"),
    Row("C", "sglang", sg("python3: /build/llvm/lib/IR.cpp:88: void f(): Assertion `x->isZebra()' failed.", "Fatal Python error: Aborted", QUIT), "native_crash", "isZebra"),
    Row("C", "sglang", sg("zebra library: cannot map its buffer", "Fatal Python error: Segmentation fault", QUIT), "native_crash", "zebra library: cannot map its buffer"),
    Row("C", "transformers", tr("[gpu9:17   :0:17] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)"), "native_crash", "Caught signal 11"),
    Row("C", "vllm", vl("/src/nvshmem/src/host/init/init.cu:1131: non-zero status: 7 nvshmem register static heaps failed", DEAD_CORE.format(255)), "nccl_error", "register static heaps failed"),
    Row("C", "vllm", "/opt/v/bin/python3: symbol lookup error: /opt/v/lib/python3.12/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: ncclZebraRegister\n", "kernel_abi", "ncclZebraRegister", phase="boot"),
    Row("C", "sglang", sg(py("OSError: libcudnn_zebra.so.9: cannot open shared object file: No such file or directory")), "kernel_abi", "libcudnn_zebra.so.9"),
    Row("C", "sglang", sg(":0:rocdevice.cpp            :3006: 41871236 us: [pid:99 tid:0x7f] Callback: Queue 0x7f0a error: HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. code: 0x1016", "Fatal Python error: Aborted", QUIT), "native_crash", "HSA_STATUS_ERROR_EXCEPTION"),
    Row("C", "vllm", vl("Memory access fault by GPU node-3 (Agent handle: 0x2b7) on address 0x7f3a000. Reason: Unknown.", DEAD_CORE.format(-6)), "native_crash", "Memory access fault by GPU node-3"),
    Row("C", "sglang", sg("python3: ../src/zebra.cc:88: virtual void a::b(): Assertion `x > 0' failed.", "[gpu9:00017] *** Process received signal ***", "[gpu9:00017] Signal: Aborted (6)", QUIT), "native_crash", "Assertion `x > 0' failed"),
    Row("C", "vllm", vl("F1120 06:00:41.123456    99 zebra_engine.cpp:77] Check failed: a == b (3 vs. 4) ", "*** Check failure stack trace: ***", DEAD_CORE.format(-6)), "native_crash", "Check failed: a == b"),
    Row("C", "vllm", vl("(EngineCore_DP0 pid=8) ERROR 11-20 06:00:41 [core.py:1006] hip runtime failed to load.", "(EngineCore_DP0 pid=8) ERROR 11-20 06:00:41 [core.py:1006] Error: Please provide architecture for which code is to be generated.", DEAD_CORE.format(1)), None, "Please provide architecture"),
    # D
    Row("D", "vllm", vl("gpu9:7:7 [1] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno 115(Operation now in progress)", vl_trace("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")), "rendezvous_timeout", "10.0.0.4<56849>", hint="NCCL_SOCKET_IFNAME"),
    Row("D", "sglang", sg("[Gloo] Rank 8 is NOT connected to: 0", sg_trace("RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error")), "rendezvous_timeout", "Rank 8 is NOT connected", hint="GLOO_SOCKET_IFNAME"),
    Row("D", "sglang", sg(sg_trace("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:780] connect [127.0.1.1]:9911: Connection refused")), "rendezvous_timeout", "[127.0.1.1]:9911", hint="GLOO_SOCKET_IFNAME"),
    Row("D", "vllm", vl("[1784273406.684686] [gpu9:994396:0]      ib_mlx5_dv.c:452  UCX  ERROR   mlx5dv_devx_obj_create(CQ) failed on mlx5_1, syndrome 0x2a: Remote I/O error", vl_trace("nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND")), "nccl_error", "failed on mlx5_1"),
    Row("D", "sglang", sg("E0914 06:30:12.480146 20331 rdma_context.cpp:211] Failed to open device mlx5_2 on port 1 with GID 3", sg_trace("RuntimeError: Mooncake Transfer Engine initialization failed.")), "nccl_error", "mlx5_2"),
    Row("D", "vllm", vl("gpu9:7:7 [1] transport/net_ib.cc:99 NCCL WARN NET/IB: Got completion from peer 10.0.0.4<4791> with status=12 opcode=0 len=0 vendor err 129", vl_trace("RuntimeError: NCCL error: remote process exited or there was a network error")), "nccl_error", "10.0.0.4<4791>"),
    Row("D", "vllm", vl(vl_trace("RuntimeError: createHCCLComm:build/CMakeFiles/x.ts:89 HCCL function error: HcclCommInitRootInfo(numRanks, &rootInfo, rank, &(comm->hcclComm_)), error code is 4\n[ERROR] 2026-04-02-03:00:00 (PID:99, Device:1, RankID:1) ERR02200 DIST call hccl api failed.\nEI0006: [PID: 99] 2026-04-02-03:00:00.119.066 Getting socket times out. Reason: Remote Rank did not send the data in time. Failed to connect to localhost 10.0.0.9")), "rendezvous_timeout", "Getting socket times out"),
    Row("D", "sglang", sg(sg_trace("RuntimeError: HCCL function error: HcclAllReduce(a, b), error code is 6\nERR02200 DIST call hccl api failed.")), "nccl_error", "HcclAllReduce"),
    Row("D", "vllm", vl("[1754890927.298391] [gpu9:270  :0]    ib_mlx5dv_md.c:1100 UCX  ERROR mlx5_7: ibv_modify_qp(UMR QP 0x9b) failed to modify to RTR: No such device", vl_trace("nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND")), "nccl_error", "mlx5_7"),
    Row("D", "sglang", sg("ibv_modify_qp failed ", "/sgl-workspace/nvshmem/src/modules/transport/ibrc/ibrc.cpp:1433: non-zero status: 7 ", "NVSHMEM API called before NVSHMEM initialization has completed", QUIT), "nccl_error", "ibv_modify_qp failed"),
    Row("D", "sglang", sg("[2026-04-02 03:00:30] transfer engine: E0402 03:00:30.480146 20331 transfer_metadata_plugin.cpp:211] HttpStoragePlugin: failed to GET http://10.9.9.9:8080/metadata?key=x, Couldn't connect to server", sg_trace("RuntimeError: Mooncake Transfer Engine initialization failed.")), "rendezvous_timeout", "10.9.9.9:8080"),
    Row("D", "sglang", sg("[rank8]:[W402 03:10:00.1 TCPStore.cpp:115] [c10d] recvValue failed on SocketImpl(fd=77, addr=[gpu2]:43210, remote=[gpu1]:5000): failed to recv, got 0 bytes", sg_trace("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", 9), rank=9), "nccl_error", "got 0 bytes", hint="another rank or node"),
    Row("D", "vllm", vl("gpu9:7:7 [1] init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", vl_trace("torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.")), "nccl_error", "Duplicate GPU detected"),
    Row("D", "vllm", vl("gpu9:7:7 [1] transport/p2p.cc:275 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'", vl_trace("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)")), "nccl_error", "peer access is not supported"),
    Row("D", "sglang", sg("[2026-04-02 03:00:30 TP0] Failed to connect to bootstrap server http://10.9.9.9:8998: zebra", sg_trace("ConnectionError: HTTPConnectionPool(host='10.9.9.9', port=8998): Max retries exceeded with url: /route (Caused by NewConnectionError('<urllib3.connection.HTTPConnection object at 0x7f>: Failed to establish a new connection: [Errno 111] Connection refused'))")), "rendezvous_timeout", "10.9.9.9"),
    Row("D", "vllm", vl(vl_trace("torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined.")), "rendezvous_timeout", "1/2 clients"),
    Row("D", "vllm", vl(vl_trace("RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address for: zebra0")), "nccl_config", "zebra0"),
    Row("D", "sglang", sg("[gpu9:17:0] ib_iface.c:1156 UCX  ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory : Please set max locked memory (ulimit -l) to 'unlimited' (current: 64 kbytes)", sg_trace("nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND")), "nccl_error", "ulimit -l", hint="LimitMEMLOCK"),
    Row("D", "vllm", vl(vl_trace("RuntimeError: arange_out_op_api:build/CMakeFiles/x.ts:36 NPU function error: call aclnnZebra failed, error code is 561103\n[ERROR] 2026-04-02-03:00:00 (PID:99, Device:0, RankID:-1) ERR00100 PTA call acl api failed.\nEZ9999: Inner Error!\nEZ9999: [PID: 99] 2026-04-02-03:00:00.166.059 Parse dynamic kernel config fail.\n        TraceBack (most recent call last):\n       AclOpKernelInit failed opType")), None, "aclnnZebra"),
    # E
    Row("E", "vllm", behind("2026-04-02 03:00:00,117 DEBG 'llm' stderr output: ", vl(vl_trace(ZEBRA))), None, ZEBRA, rank=1),
    Row("E", "sglang", behind("worker-1 stderr >> ", sg(sg_trace(ZEBRA, 1), rank=1)), None, ZEBRA, rank=1),
    Row("E", "transformers", behind("(Replica:tiny pid=41, ip=10.0.0.7) ", tr(tr_trace(ZEBRA))), None, ZEBRA),
    Row("E", "transformers", behind("      ", tr(tr_trace(ZEBRA))), None, ZEBRA),
    Row("E", "sglang", "".join(f"server.log:{n}:{line}\n" for n, line in enumerate(sg(sg_trace(ZEBRA, 1), rank=1).splitlines(), 3)), None, ZEBRA, rank=1),
    Row("E", "vllm", behind("[vllm] | ", vl(vl_trace(ZEBRA))), None, ZEBRA, rank=1),
    Row("E", "vllm", "".join(f"2026-05-08 11:47:{n % 60:02d}.{369 + n} [Info] (Process) {line}\n" for n, line in enumerate(vl(vl_trace(ZEBRA)).splitlines())), None, ZEBRA, rank=1),
    Row("E", "sglang", behind("> ", sg(sg_trace(ZEBRA, 1), rank=1)), None, ZEBRA, rank=1),
    Row("E", "vllm", behind("\x1b[36m(ServeReplica:llm:LLMServer pid=4711)\x1b[0m ", vl(vl_trace(ZEBRA))), None, ZEBRA, rank=1),
    Row("E", "sglang", "".join(f"I1120 06:00:{n % 60:02d}.123456 1 runner.go:77] {line}\n" for n, line in enumerate(sg(sg_trace(ZEBRA, 1), rank=1).splitlines())), None, ZEBRA, rank=1),
    Row("E", "sglang", "".join(f"gpu9: {line}\n" for line in sg(sg_trace(ZEBRA, 1), rank=1).splitlines()), None, ZEBRA, rank=1),
    Row("E", "vllm", "".join(f'{{"time":"2026-05-08T11:47:{n % 60:02d}Z"}} stderr F {line}\n' for n, line in enumerate(vl(vl_trace(ZEBRA)).splitlines())), None, ZEBRA, rank=1),
    Row("E", "sglang", "".join(f"\t{line}\n" for line in sg(sg_trace(ZEBRA, 1), rank=1).splitlines()), None, ZEBRA, rank=1),
    Row("E", "sglang", "".join(f"| {line}\n" for line in sg(sg_trace(ZEBRA, 1), rank=1).splitlines()), None, ZEBRA, rank=1),
    Row("E", "vllm", lost(vl(vl_trace(ZEBRA))), None, ZEBRA, rank=1),
    Row("E", "vllm", behind("> ", lost(vl(vlp(py("ValueError: zebra"))))), None, "ValueError: zebra"),
    Row("E", "vllm", behind("[36m(RayWorkerWrapper pid=99)[0m ", py(ZEBRA)), None, ZEBRA, phase="boot"),
    Row("E", "vllm", "\n".join(re.sub(r" +", " ", line) for line in vl(vl_trace(ZEBRA)).split("\n")), None, ZEBRA, rank=1),
    Row("E", "sglang", "\n".join(line.strip() for line in sg(sg_trace(ZEBRA, 1), rank=1).split("\n")), None, ZEBRA, rank=1),
    # F
    Row("F", "vllm", vl(vl_trace("RuntimeError: No compiled cutlass_scaled_mm for CUDA device capability: 120")), "gpu_arch", "capability: 120"),
    Row("F", "vllm", vl(vl_trace("ValueError: Selected backend AttentionBackendEnum.FLASHMLA is not valid for this configuration. Reason: ['compute capability not supported']")), "gpu_arch", "FLASHMLA"),
    Row("F", "sglang", sg(sg_trace("RuntimeError: CUDA error: device kernel image is invalid")), "gpu_arch", "device kernel image is invalid"),
    Row("F", "sglang", sg(sg_trace("AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend flashinfer`.")), "gpu_arch", "requires SM>=80", hint="--attention-backend flashinfer"),
    Row("F", "sglang", sg(sg_trace("NotImplementedError: deep_gemm is only supported on Hopper GPUs")), "gpu_arch", "only supported on Hopper"),
    Row("F", "vllm", vl(vl_trace("RuntimeError: Unsupported compute capability: 12.1")), "gpu_arch", "12.1"),
    Row("F", "transformers", tr(tr_trace("torch.AcceleratorError: HIP error: invalid device function")), "gpu_arch", "invalid device function"),
    Row("F", "sglang", sg(sg_trace("RuntimeError: CUDA driver error (/src/deep_gemm/jit/handle.hpp:108): 98 (CUDA_ERROR_INVALID_DEVICE_FUNCTION, invalid device function)")), "gpu_arch", "invalid device function"),
    Row("F", "vllm", vl(vl_trace("RuntimeError: Assertion error (/src/csrc/apis/../jit/device_runtime.hpp:80): Unsupported architecture")), "gpu_arch", "Unsupported architecture"),
    Row("F", "vllm", vl(vl_trace("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Zebra T4 GPU has compute capability 7.5. You can use float16 instead by explicitly setting the `dtype` flag in CLI, for example: --dtype=half.")), "gpu_arch", "7.5", hint="You can use float16 instead"),
    Row("F", "vllm", vl(vl_trace("triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'")), "jit_toolchain", "sm_121a", hint="TRITON_PTXAS_PATH"),
    Row("F", "sglang", sg("nvcc fatal   : Unsupported gpu architecture 'compute_120f'", sg_trace("RuntimeError: Ninja build failed. Ninja output:")), "jit_toolchain", "compute_120f", hint="CUDA toolkit"),
    Row("F", "vllm", vl(vl_trace("RuntimeError: [aiter] Unsupported GPU arch gfx1151 for this kernel")), "gpu_arch", "gfx1151"),
    Row("F", "sglang", sg(sg_trace("hipErrorNoBinaryForGpu: Unable to find code object for all current devices!")), "gpu_arch", "code object"),
    Row("F", "vllm", vl(vl_trace("NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:\n     query       : shape=(1, 2, 3, 4) (torch.bfloat16)\n`fa3F@0.0.0` is not supported because:\n    requires device with capability <= (9, 0) but your GPU has capability (12, 0) (too new)")), "gpu_arch", "(12, 0)"),
    Row("F", "sglang", sg(sg_trace("RuntimeError: Error in function 'run' at /v/flashinfer/data/csrc/zebra_gemm_runner.cu:77:\nError occurred when running GEMM! (numBatches: 96, kernel: zebra_sm100f)")), None, "Error occurred when running GEMM"),
    Row("F", "sglang", sg("/tmp/zebra/main.c:6:10: fatal error: Python.h: No such file or directory", "compilation terminated.", sg_trace("subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/zebra/main.c', '-O3']' returned non-zero exit status 1.")), "jit_toolchain", "Python.h", hint="python3-dev"),
    # G
    Row("G", "vllm", vl(vl_trace("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination")), "driver_mismatch", "803", hint="LD_LIBRARY_PATH"),
    Row("G", "transformers", tr(tr_trace("RuntimeError: CUDA error: system has unsupported display driver / cuda driver combination")), "driver_mismatch", "unsupported display driver", hint="cuda-compat"),
    Row("G", "sglang", sg("[2026-04-02 03:00:09] ZebraForCausalLM has no SGLang implementation, falling back to Transformers implementation.", sg_trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")), "gpu_oom", "2.00 GiB", hint="servers.NAME.python"),
    Row("G", "vllm", vl("/v/torch/cuda/__init__.py:174: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:109.)", vl_trace("RuntimeError: No CUDA GPUs are available")), "driver_too_old", "12040"),
    Row("G", "sglang", sg("/v/torch/cuda/__init__.py:174: UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination (Triggered internally at x.cpp:1.)", sg_trace("RuntimeError: No CUDA GPUs are available")), "driver_mismatch", "803"),
    Row("G", "vllm", vl(vl_trace("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero.")), "no_gpu", "CUDA unknown error"),
    Row("G", "vllm", "docker: Error response from daemon: could not select device driver \"\" with capabilities: [[gpu]].\n", "no_gpu", "could not select device driver", phase="boot"),
    Row("G", "vllm", "docker: Error response from daemon: failed to create task for container: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: error during container init: nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.9, please update your driver to a newer version, or use an earlier cuda container: unknown\n", "driver_too_old", "cuda>=12.9", phase="boot"),
    Row("G", "vllm", "docker: Error response from daemon: driver failed programming external connectivity on endpoint llm (9f): Bind for 0.0.0.0:8000 failed: port is already allocated.\n", "port_in_use", "0.0.0.0:8000", phase="boot"),
    Row("G", "vllm", "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown\n", "no_gpu", "driver not loaded", phase="boot"),
    Row("G", "vllm", vl(vl_trace("pynvml.NVMLError_DriverNotLoaded: Driver Not Loaded")), "no_gpu", "Driver Not Loaded"),
    Row("G", "sglang", sg(sg_trace("ValueError: Not enough host memory available. Requesting 412.00 GB but only have 98.31 GB free. Please reduce the size of the hierarchical cache.")), "host_oom", "412.00 GB", hint="Please reduce the size"),
    Row("G", "vllm", vl(vl_trace("ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (312). Each decode sequence requires one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most 312 or increase gpu_memory_utilization.")), "kv_cache_too_small", "Mamba cache blocks"),
    Row("G", "vllm", vl(vl_trace("RuntimeError: Triton Error [CUDA]: out of memory")), "gpu_oom", "Triton Error"),
    Row("G", "vllm", vl(vl_trace("RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 1; 60.97 GiB total capacity; 57.01 GiB already allocated)")), "gpu_oom", "NPU 1"),
    Row("G", "vllm", vl(vl_trace("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.91 GiB.")), "gpu_oom", "XPU"),
    Row("G", "sglang", sg(sg_trace("OSError: [Errno 30] Read-only file system: '/root/.cache/zebra'")), "permission", "Read-only file system"),
    Row("G", "vllm", vl("Unable to open /dev/kfd read-write: Permission denied", vl_trace("RuntimeError: No HIP GPUs are available")), "permission", "/dev/kfd"),
    Row("G", "vllm", vl(vl_trace("BlockingIOError: [Errno 11] Resource temporarily unavailable")), "fd_limit", "Errno 11"),
    Row("G", "vllm", vl(vl_trace("AssertionError: Number of experts 384 must be divisible by expert parallel size 14")), "tp_divisibility", "expert parallel size"),
    Row("G", "vllm", vl(vl_trace("ValueError: Cannot provide a placement group of placement_group_specs=[{'GPU': 1.0}] within 1800 seconds. See `ray status` and `ray list nodes` to make sure the cluster has enough resources.")), "gpu_count", "placement group"),
    Row("G", "vllm", vl(vl_trace("ValueError: Current node has no GPU available. current_node_resource={'CPU': 8.0}. vLLM engine cannot start without GPU. Make sure you have at least 1 GPU available in a node")), "no_gpu", "no GPU available"),
    # H
    Row("H", "vllm", vl(vl_trace(ZEBRA), version="0.24.1") + vl(version="0.25.0"), None, outcome="running", version="0.25.0"),
    Row("H", "vllm", vl(ready=True, version="0.24.1") + vl(vl_trace(ZEBRA), version="0.31.0"), None, ZEBRA, version="0.31.0"),
    Row("H", "vllm", vl(vl_trace(ZEBRA)).replace(LOGO.format("0.24.1"), "(APIServer pid=7) INFO 10-11 01:10:02 [api_utils.py:347] vLLM server version 0.26.0, serving model /m") * 2, None, ZEBRA, version="0.26.0"),
    Row("H", "sglang", sg(sg_trace(ZEBRA)) + sg(), None, outcome="running"),
    Row("H", "sglang", sg(ready=True) + "/opt/v/bin/python: Error while finding module specification for 'sglang.launch_server' (ModuleNotFoundError: No module named 'sglang')\n", "interpreter_missing", "sglang.launch_server", phase="boot"),
    # I
    Row("I", "vllm", "\n".join(vl_trace(ZEBRA).splitlines()[2:]), None, ZEBRA, phase="boot", rank=1),
    Row("I", "sglang", "\n".join(sg_trace(ZEBRA).splitlines()[1:]), None, ZEBRA, phase="boot"),
    Row("I", "vllm", '(APIServer pid=7) INFO:     10.0.0.4:4 - "POST /v1/completions HTTP/1.1" 200 OK\n(APIServer pid=7) INFO:     Shutting down\n(APIServer pid=7) INFO:     Finished server process [7]\n' + LEAKS, None, outcome="ready", phase="ready"),
    Row("I", "sglang", QUIT + "\nKilled\n", None, "sigquit", phase="boot", hint="give the whole log"),
    Row("I", "vllm", DEAD_CORE.format(1), None, "Engine core initialization failed", phase="boot", hint="give the whole log"),
    Row("I", "vllm", "\n".join(vlp(py("RuntimeError: Worker failed with error 'zebra stripes', please check the stack trace above for the root cause"), "(EngineCore_DP0 pid=8) ERROR 11-20 06:00:41 [core.py:9] ").splitlines()), None, "zebra stripes", phase="boot"),
    Row("I", "vllm", vlp("Process EngineCore:\n" + py(ZEBRA), "(EngineCore pid=118) ") + "\n" + DEAD_CORE.format(1) + "\n", None, ZEBRA, phase="boot"),
    # J
    Row("J", "sglang", sg("[2026-04-02 03:03:00] Dummy health check server started in background thread at 0.0.0.0:30000"), None, outcome="ready", phase="ready"),
    Row("J", "sglang", sg("[2026-04-02 03:03:00] Dummy health check server scheduled on existing loop at 0.0.0.0:30000", sg_trace("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.9.9.9]:27155", 9), rank=9), "nccl_error", "[10.9.9.9]:27155", phase="ready", rank=9, hint="look at its log"),
    Row("J", "vllm", vl(vl_trace("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [10.9.9.9]:5757: Connection reset by peer [10.9.9.9]:5757")), "nccl_error", "[10.9.9.9]:5757"),
    Row("J", "vllm", vl("[rank9]:[E1120 06:30:41.1 ProcessGroupNCCL.cpp:683] [Rank 9] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600077 milliseconds before timing out.", "terminate called after throwing an instance of 'c10::DistBackendError'", "  what():  [PG ID 2 PG GUID 3 Rank 9] Process group watchdog thread terminated with exception"), "collective_timeout", "Rank 9] Watchdog caught", rank=9),
    Row("J", "sglang", sg("[rank9]:[W402 03:10:00.1 socket.cpp:766] [c10d] The client socket has failed to connect to [gpu1]:5000 (errno: 113 - No route to host).", sg_trace("torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.9.9.1, 5000).", 9), rank=9), "rendezvous_timeout", "10.9.9.1, 5000"),
    # K, L
    Row("K", "sglang", sg("[2026-04-02 03:09:00] Subprocess scheduler_3 (pid=12) crashed with exit code -9. Triggering SIGQUIT for cleanup...", PYSPY.format("sh: 1: py-spy: not found"), ready=True), "worker_died", "scheduler_3", phase="ready", rank=3),
    Row("K", "vllm", vl("(EngineCore pid=8) ERROR 11-20 07:00:41 [multiproc_executor.py:231] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", "/bin/sh: line 1: py-spy: command not found", ready=True), "worker_died", "VllmWorker-1", phase="ready", rank=1),
    Row("K", "vllm", vl("(EngineCore pid=8) ERROR 11-20 07:00:41 [multiproc_executor.py:231] Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", ready=True), "worker_died", "exit code: -9", phase="ready", rank=1),
    Row("K", "sglang", sg(sg_trace("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", 3), rank=3, ready=True), None, "illegal memory access", phase="ready", rank=3),
    Row("K", "vllm", vl("(APIServer pid=7) ERROR 11-20 07:00:41 [core_client.py:598] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.", "(APIServer pid=7) ERROR 11-20 07:00:42 [async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.", ready=True), "worker_died", "EngineCore_DP0", phase="ready"),
    Row("K", "sglang", sg("Nov 20 06:00:42 gpu9 systemd[1]: llm.service: Main process exited, code=killed, status=9/KILL", ready=True), None, "status=9/KILL", phase="ready"),
    Row("K", "vllm", vl("(EngineCore_DP0 pid=8) ERROR 11-20 07:00:41 [multiproc_executor.py:231] Worker proc VllmWorker-2 died unexpectedly, shutting down executor.", "NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', GPU has fallen off the bus.", ready=True), "gpu_hardware", "79", phase="ready"),
    Row("K", "sglang", sg(sg_trace("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", 3), rank=3, ready=True), "gpu_hardware", "ECC", phase="ready", rank=3),
    Row("K", "sglang", sg("[2026-04-02 03:09:00 TP3] Watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "[2026-04-02 03:09:05] SIGQUIT received. signum=None, frame=None. It usually means one child failed.", ready=True), "watchdog_timeout", "watchdog_timeout=300", phase="ready", rank=3),
    Row("K", "sglang", sg("[2026-04-02 03:09:00 TP0] CUDA_ERROR_INVALID_VALUE /workspace/include/flashinfer/zebra.cuh 328", "/pytorch/aten/src/ATen/native/cuda/TensorCompare.cu:109: _assert_async_cuda_kernel: block: [0,0,0], thread: [0,0,0] Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed.", sg_trace("torch.AcceleratorError: CUDA error: device-side assert triggered", 0), ready=True), "native_crash", "probability tensor contains", phase="ready"),
    Row("L", "sglang", sg(*["[2026-04-02 03:09:00] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."] * 4, ready=True), "hung", "Health check failed", phase="ready"),
    Row("L", "sglang", sg("[2026-04-02 03:09:00] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.", ready=True), None, outcome="ready", phase="ready"),
    Row("L", "vllm", vl("(EngineCore pid=8) ERROR 11-20 07:00:41 [core.py:1] EngineCore encountered a fatal error.", "(EngineCore pid=8) ERROR 11-20 07:00:41 [core.py:1] TimeoutError: RPC call to sample_tokens timed out.", "/bin/sh: 1: py-spy: not found", ready=True), "hung", "RPC call to sample_tokens timed out", phase="ready"),
    Row("L", "vllm", vl("(EngineCore_DP0 pid=8) ERROR 11-20 07:00:41 [dump_input.py:69] Dumping input data for V1 LLM engine (v0.24.1) with config: model='/m'", "(EngineCore_DP0 pid=8) ERROR 11-20 07:00:41 [core.py:710] EngineCore encountered a fatal error.", "(EngineCore_DP0 pid=8) ERROR 11-20 07:00:41 [core.py:710] Traceback (most recent call last):", '(EngineCore_DP0 pid=8) ERROR 11-20 07:00:41 [core.py:710]   File "/v/vllm/v1/executor/multiproc_executor.py", line 9, in collective_rpc', '(EngineCore_DP0 pid=8) ERROR 11-20 07:00:41 [core.py:710]     raise TimeoutError(f"RPC call to {method} timed out.") from e', '(EngineCore_DP0 pid=8) ERROR 11-20 07:00:41 [core.py:710] TimeoutError: RPC call to execute_model timed out.', ready=True), "hung", "execute_model timed out", phase="ready"),
    Row("L", "sglang", sg("[2026-04-02 03:09:00 TP0] Decode transfer failed for request rank=0 decode_req.req.rid='x' with exception KVTransferError(bootstrap_room=77): Failed to send kv chunk of 77 to 10.9.9.9:43210", ready=True), None, outcome="ready", phase="ready"),
    Row("L", "vllm", vl("(APIServer pid=7) ERROR 11-20 07:00:41 [serving_chat.py:1] Error in chat completion stream generator.", *["(APIServer pid=7) ERROR 11-20 07:00:41 [serving_chat.py:1] " + line for line in py("ValueError: zebra").split("\n")], ready=True), None, outcome="ready", phase="ready"),
    Row("L", "vllm", vl("(APIServer pid=7) ERROR:    Exception in ASGI application", vlp(py("RuntimeError: zebra")), ready=True), None, outcome="ready", phase="ready"),
    Row("L", "sglang", sg(py("ValueError: The input (9000 tokens) is longer than the model's context length (8192 tokens)."), "[2026-04-02 03:09:00] INFO:     10.0.0.4:4 - \"POST /generate HTTP/1.1\" 400 Bad Request", ready=True), None, outcome="ready", phase="ready"),
    # M
    Row("M", "vllm", vl(vl_trace("huggingface_hub.errors.LocalEntryNotFoundError: zebra is not cached", "raise LocalEntryNotFoundError(")), "hub_offline", "zebra is not cached"),
    Row("M", "transformers", tr(tr_trace("huggingface_hub.errors.GatedRepoError: 403 Client Error. zebra", "raise _format(GatedRepoError, message) from e")), "gated_model", "403 Client Error"),
    Row("M", "sglang", sg(sg_trace("ValueError: zebra", source='raise OSError("CUDA out of memory. Tried to allocate")')), None, "ValueError: zebra"),
    Row("M", "sglang", sg(sg_trace("AssertionError", source="assert self.total_num_heads % tp_size == 0")), "tp_divisibility", "total_num_heads % tp_size == 0 … AssertionError"),
    Row("M", "vllm", vl(vl_trace("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/models/zebra/z/tree/main")), "hub_offline", "429"),
    Row("M", "sglang", sg(sg_trace("requests.exceptions.SSLError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /zebra (Caused by SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate in certificate chain')))\"), '(Request ID: x)')")), "hub_offline", "CERTIFICATE_VERIFY_FAILED"),
    Row("M", "vllm", vl(vl_trace("huggingface_hub.errors.RevisionNotFoundError: 404 Client Error. (Request ID: Root=1-x)\n\nRevision Not Found for url: https://huggingface.co/zebra/z/resolve/v9/config.json.\nInvalid rev id: v9")), "model_path", "RevisionNotFound", hint="revision"),
    Row("M", "sglang", sg(sg_trace("ValueError: Couldn't instantiate the backend tokenizer from one of: \n(1) a `tokenizers` library serialization file, \n(2) a slow tokenizer instance to convert or \n(3) an equivalent slow tokenizer class to instantiate and convert. \nYou need to have sentencepiece or tiktoken installed to convert a slow tokenizer to a fast one.")), "import_error", "sentencepiece or tiktoken"),
    Row("M", "vllm", vl("(APIServer pid=7) " + py("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, Model architectures ['ZebraForCausalLM'] are not supported for now. Supported architectures: dict_keys(['A']) [type=value_error]").replace("\n", "\n(APIServer pid=7) ")), "unsupported_architecture", "ZebraForCausalLM"),
    Row("M", "vllm", vl("(APIServer pid=7) " + py("pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, zebra stripes are not allowed with this backend [type=value_error, input_value=ArgsKwargs()]\n    For further information visit https://errors.pydantic.dev/2.11/v/value_error").replace("\n", "\n(APIServer pid=7) ")), None, "zebra stripes are not allowed"),
    Row("M", "vllm", vl(vl_trace("ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons: \n MacheteLinearKernel cannot implement due to: Group size (64) not supported by Machete, supported group sizes are: [-1, 128]\n MarlinLinearKernel cannot implement due to: Weight input_size_per_partition = 8256 is not divisible by min_thread_k = 128. Consider reducing tensor_parallel_size or running with --quantization gptq.")), "tp_divisibility", "min_thread_k", hint="Consider reducing tensor_parallel_size"),
    Row("M", "vllm", vl(vl_trace("ValueError: Quantization method specified in the model config (fp8) does not match the quantization method specified in the `quantization` argument (awq).")), None, "does not match"),
    Row("M", "vllm", vl(vl_trace("torch._dynamo.exc.BackendCompilerFailed: backend='<vllm.compilation.backends.VllmBackend object at 0x7f>' raised:\nAssertionError: zebra graph is odd")), None, "zebra graph is odd"),
    Row("M", "sglang", sg(sg_trace("torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.")), "jit_toolchain", "Failed to find C compiler"),
    # N
    Row("N", "vllm", vl(vl_trace("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.")), "kv_cache_too_small", "cache blocks", hint="Try increasing `gpu_memory_utilization`"),
    Row("N", "sglang", sg(sg_trace("Exception: Capture cuda graph failed: zebra\nPossible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n2. set --cuda-graph-max-bs to a smaller value (e.g., 16)")), "graph_capture_failed", "zebra", hint="2. set --cuda-graph-max-bs"),
    Row("N", "sglang", sg(sg_trace("RuntimeError: zebra pool is short. Please increase --zebra-fraction to 0.91 or more.")), None, "zebra pool", hint="Please increase --zebra-fraction to 0.91"),
    Row("N", "vllm", vl(vl_trace("ValueError: Free memory on device cuda:1 (9.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.")), "gpu_held", "9.1/79.1", hint="Decrease GPU memory utilization"),
    Row("N", "vllm", vl(vl_trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB of which 1.00 GiB is free. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.")), "gpu_oom", "2.00 GiB", hint="gpu-memory-utilization"),
    Row("N", "vllm", vl(vl_trace("RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.")), "gpu_oom", "warming up sampler", hint="Please try lowering `max_num_seqs`"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.kind}{number}-{row.engine}" for number, row in enumerate(ROWS)])
def test_each_kind_in_other_engines_and_versions(row: Row) -> None:
    for told in (row.engine, None):
        found = diagnose_log(row.log.encode(), ENGINES, told)
        assert (found.outcome, found.phase, found.cause) == (row.outcome, row.phase, row.cause), found
        assert row.evidence in found.evidence
        assert row.rank is None or found.rank == row.rank, found
        assert row.hint in found.hint_for("NAME")
        assert not row.version or found.version == row.version
        assert (found.rule is not None) == bool(row.evidence or row.outcome != "failed"), found


def test_no_kind_has_fewer_than_three() -> None:
    assert min(collections.Counter(row.kind for row in ROWS).values()) >= 3
