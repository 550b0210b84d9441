"""Logs of servers that are well, made up: versions and shapes of each engine, with words that alarm and mean nothing.

Each goes on to another point: still loading, asked for the first time, busy, loading again, stopped in order. What the
alarming words are is chosen by a seed, so that each log holds others of them.
"""

# ruff: noqa: E501 (a line of a log stays one line)

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

UNTIL = ("loading", "serving", "busy", "again", "stopped")

#: Said by every engine's libraries, in starts that went well.
SCARES = (
    "/opt/llm/lib/python3.12/site-packages/torch/cuda/__init__.py:63: FutureWarning: The pynvml package is deprecated.",
    "[W1128 03:10:52.118804921 socket.cpp:767] [c10d] The client socket cannot be initialized to connect to [node-b.lab]:29700 (errno: 97 - Address family not supported by protocol).",
    "gpu-07:611388:611388 [3] ras/client_support.cc:171 NCCL WARN Call to bind failed: Address already in use",
    "gpu1:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so",
    "gpu1:1:1 [0] NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2 : CUDA error 2. Proceeding without NVLS support.",
    "[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 0",
    "W0311 10:00:01.123000 4711 torch/utils/cpp_extension.py:2425] TORCH_CUDA_ARCH_LIST is not set, all archs for visible cards are included for compilation.",
    "The tokenizer you are loading from '/srv/models/m' with an incorrect regex pattern: this will lead to incorrect tokenization.",
)
SGLANG_SCARES = (
    "Fail to set RLIMIT_NOFILE: PermissionError: [Errno 13] not allowed to raise maximum limit",
    "Ignore import error when loading sglang.srt.models.x: ImportError: No module named 'decord'",
    "Setup Custom allreduce failed with module 'sgl_kernel' has no attribute 'x': ImportError",
    "port 31236 is in use. Waiting for 1 seconds for rpc_port to be available.",
    "The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
    "Endpoint '/get_model_info' is deprecated and will be removed in a future version.",
    "Failed to load generation config for /srv/models/m: it does not appear to have a file named generation_config.json.",
    "User-specified context_length (65536) is greater than the derived context_length (32768). This may lead to incorrect model outputs",
)
VLLM_SCARES = (
    "WARNING 03-11 10:00:02 [system_utils.py:279] Found ulimit of 16384 and failed to automatically increase. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
    "INFO 03-11 10:00:02 [custom_all_reduce.py:189] Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs.",
    "INFO 03-11 10:00:02 [shm_broadcast.py:802] No available shared memory broadcast block found in 60 seconds.",
    "WARNING 03-11 10:00:02 [x.py:1] Compiling model again due to a load failure from /x, reason: ImportError",
    "WARNING 03-11 10:00:02 [fused_moe.py:7] Using default MoE config. Performance might be sub-optimal! Config file not found at /x/E=8.json",
    "WARNING 03-11 10:00:02 [interface.py:1] Failed to import from vllm._C with ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')",
    "INFO 03-11 10:00:02 [model.py:40] Failed requests are answered with an error; max_num_batched_tokens=8192",
)
#: What clients said or were answered, which the server repeats.
ASKED = (
    'INFO:     10.0.0.{n}:4{n} - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    'INFO:     10.0.0.{n}:4{n} - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request',
    'INFO:     10.0.0.{n}:4{n} - "GET /v1/CUDA%20out%20of%20memory HTTP/1.1" 404 Not Found',
    'INFO:     127.0.0.1:5{n} - "GET /health HTTP/1.1" 200 OK',
)

ENVELOPES: dict[str, Callable[[int], str]] = {
    "none": lambda n: "",
    "journald": lambda n: f"Mar 11 10:{n // 60 % 60:02d}:{n % 60:02d} gpu1 serve[4711]: ",
    "CRI": lambda n: f"2026-03-11T10:{n // 60 % 60:02d}:{n % 60:02d}.12345678{n % 10}Z stderr F ",
    "compose": lambda n: "llm-1  | ",
    "supervisor": lambda n: f"2026-03-11 10:{n // 60 % 60:02d}:{n % 60:02d},{n % 1000:03d} INFO llm stderr: ",
    "pasted": lambda n: "    ",
}


def healthy_logs() -> Iterator[tuple[str, str, str]]:
    """Name, engine and text of each."""
    makers: Sequence[tuple[str, Callable[[str, str, random.Random], list[str]], Sequence[str]]] = (
        ("sglang", sglang, ("0.4.6", "0.5.5", "0.5.12", "0.5.18", "0.5.23")),
        ("vllm", vllm, ("0.9.2", "0.11.0", "0.24.1", "0.31.0", "0.33.1")),
        ("transformers", transformers, ("4.57", "5.2", "5.19")),
    )
    for engine, make, versions in makers:
        for version in versions:
            for until in UNTIL:
                name = f"{engine}-{version}-{until}"
                rng = random.Random(name)
                envelope = rng.choice(list(ENVELOPES))
                lines = make(version, until, rng)
                text = "".join(f"{ENVELOPES[envelope](number)}{line}\n" for number, line in enumerate(lines))
                yield f"{name}-{envelope}", engine, text


def sglang(version: str, until: str, rng: random.Random) -> list[str]:
    ranks = rng.choice((1, 2, 4))
    clock = iter(range(1, 10_000))

    def said(text: str, rank: int | None = None) -> str:
        number = next(clock)
        who = "" if rank is None or ranks == 1 else f" TP{rank}"
        return f"[2026-03-11 10:{number // 60 % 60:02d}:{number % 60:02d}{who}] {text}"

    def all_say(text: str) -> list[str]:
        return [said(text, rank) for rank in range(ranks)]

    older = version.startswith(("0.4", "0.5.5", "0.5.12", "0.5.18"))
    scares = [*rng.sample(SCARES, 3), *map(said, rng.sample(SGLANG_SCARES, 3))]
    load = [
        *all_say("Init torch distributed begin." if older else "Init parallel begin."),
        said("sglang is using nccl==2.27.3", 0),
        *all_say("Load weight begin. avail mem=139.03 GB"),
        *bar("Loading safetensors checkpoint shards", rng.randrange(2, 30)),
    ]
    start = [
        said(f"server_args=ServerArgs(model_path='/srv/models/m', tp_size={ranks}, watchdog_timeout=300)"),
        *scares,
    ]
    rest = [
        *all_say("Load weight end. type=Qwen3ForCausalLM, avail mem=56.30 GB, mem usage=82.70 GB."),
        *all_say("KV Cache is allocated. #tokens: 903411, K size: 23.65 GB, V size: 23.65 GB"),
        *all_say("Memory pool end. avail mem=9.01 GB"),
        *all_say("Capture cuda graph begin. This can take up to several minutes. avail mem=9.00 GB"),
        *bar("Capturing batches (bs=8 avail_mem=6.22 GB)", 4),
        *all_say("Capture cuda graph end. Time elapsed: 4 s. mem usage=0.6 GB. avail mem=8.4 GB."),
        "INFO:     Started server process [4711]",
        "INFO:     Waiting for application startup.",
        "INFO:     Application startup complete.",
        "INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)",
        said("Prefill batch. #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00", 0),
        said("The server is fired up and ready to roll!"),
    ]
    work = [
        said("Receive: obj=GenerateReqInput(text='Traceback (most recent call last): RuntimeError: CUDA error')"),
        said("Decode batch. #running-req: 3, #token: 300, token usage: 0.00, gen throughput (token/s): 775.32", 0),
        said("Request 7 was aborted: the client disconnected. error=None"),
        *asked(rng, 12),
    ]
    stop = ["INFO:     Shutting down", said("Gracefully exiting... Remaining number of requests 0."),
            "/usr/lib/python3.12/multiprocessing/resource_tracker.py:219: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects to clean up at shutdown"]  # fmt: skip
    return until_then(until, start, load, rest, work, stop)


def vllm(version: str, until: str, rng: random.Random) -> list[str]:
    named = not version.startswith("0.9")
    ranks = rng.choice((1, 2))

    def said(who: str, text: str) -> str:
        line = text if text[:4] in ("INFO", "WARN") else f"INFO 03-11 10:00:02 [x.py:1] {text}"
        return f"({who}) {line}" if named else line

    workers = [f"Worker_TP{rank} pid={100 + rank}" if ranks > 1 else "EngineCore pid=99" for rank in range(ranks)]

    def all_say(text: str) -> list[str]:
        return [said(each, text) for each in workers]

    scares = [*rng.sample(SCARES, 3), *(said("APIServer pid=7", each) for each in rng.sample(VLLM_SCARES, 3))]
    start = [said("APIServer pid=7", f"vLLM API server version {version}"), *scares,
             said("EngineCore pid=99", f"Initializing a V1 LLM engine (v{version}) with config: model='/srv/models/m'")]  # fmt: skip
    load = [*all_say("rank 0 in world size 2 is assigned as DP rank 0"), *all_say("vLLM is using nccl==2.27.3"),
            *all_say("Starting to load model /srv/models/m..."),
            *bar("Loading safetensors checkpoint shards", rng.randrange(2, 30))]  # fmt: skip
    rest = [
        *all_say("Loading weights took 20.59 seconds"),
        *all_say("Dynamo bytecode transform time: 7.64 s"),
        *all_say("Available KV cache memory: 34.61 GiB"),
        said("EngineCore pid=99", "GPU KV cache size: 512,204 tokens"),
        *bar("Capturing CUDA graphs (decode, FULL)", 7),
        *all_say("Graph capturing finished in 13 secs, took 0.61 GiB"),
        said("APIServer pid=7", "Starting vLLM API server 0 on http://0.0.0.0:8000"),
        "INFO:     Started server process [7]",
        "INFO:     Waiting for application startup.",
        "INFO:     Application startup complete.",
    ]
    work = [
        said("APIServer pid=7", "Received request chatcmpl-7: prompt: 'ValueError: No available memory for the cache blocks.'"),
        said("APIServer pid=7", "Engine 000: Avg prompt throughput: 12.0 tokens/s, Avg generation throughput: 7.0 tokens/s, Running: 1 reqs"),
        *asked(rng, 12),
    ]  # fmt: skip
    stop = ["INFO:     Shutting down", "INFO:     Waiting for application shutdown.",
            "INFO:     Application shutdown complete.", "INFO:     Finished server process [7]",
            "nanobind: leaked 5 instances!"]  # fmt: skip
    return until_then(until, start, load, rest, work, stop)


def transformers(version: str, until: str, rng: random.Random) -> list[str]:
    port = rng.randrange(8000, 9000)
    start = [
        *rng.sample(SCARES, 3),
        "`torch_dtype` is deprecated! Use `dtype` instead!",
        f"[transformers] {version}: Flash Attention is not installed, failed checks are skipped",
    ]
    load = ["[transformers] Loading /srv/models/Sprig-1B@main", *bar("Loading weights", rng.randrange(2, 30))]
    rest = [
        f"INFO:     Started server process [{port}]",
        "INFO:     Waiting for application startup.",
        "INFO:     Application startup complete.",
        f"INFO:     Uvicorn running on http://localhost:{port} (Press CTRL+C to quit)",
    ]
    work = ["[transformers] [Request received] Model: /srv/models/Sprig-1B@main, CB: False", *asked(rng, 12)]
    stop = ["INFO:     Shutting down", "INFO:     Waiting for application shutdown.",
            "INFO:     Application shutdown complete.", f"INFO:     Finished server process [{port}]"]  # fmt: skip
    return until_then(until, start, load, rest, work, stop)


def until_then(
    until: str, start: list[str], load: list[str], rest: list[str], work: list[str], stop: list[str]
) -> list[str]:
    ready = [*start, *load, *rest]
    return {
        "loading": [*start, *load],
        "serving": [*ready, *work[:2]],
        "busy": [*ready, *work * 3],
        "again": [*ready, *work, *stop, *start, *load],
        "stopped": [*ready, *work, *stop],
    }[until]


def bar(name: str, count: int) -> list[str]:
    """One line, in which each state of the bar replaces the one before."""
    states = (
        f"{name}: {100 * n // count:3d}%|{'#' * n:<{count}}| {n}/{count} [00:{n:02d}<00:09,  1.10s/it]"
        for n in range(count + 1)
    )
    return ["\r".join(states)]  # fmt: skip


def asked(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(ASKED).format(n=rng.randrange(1, 250)) for _ in range(count)]
