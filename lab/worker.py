"""The demo server's worker processes: one scheduler a rank, which pretend to hold a GPU each, and a detokenizer.

Promise: phases, log lines, titles, memory in the ledger and reactions to signals as SGLang 0.5.16 shows them on H200
GPUs, in a few seconds and without a GPU. Each process is entered in the node's ledger, so that none is lost sight of.

Facts: the title comes late, after the imports; only then is PR_SET_PDEATHSIG armed, so a launcher that dies before
leaves orphans that take their memory later; only schedulers are in nvidia-smi; NCCL reads PROTO and ALGO with two ranks
or more, says `set by environment` only with NCCL_DEBUG=INFO, and a value that it cannot parse ends the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lab import ledger
from lab.wording import bar, raw, say, scheduler_traceback

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lab.arguments import Arguments

#: Seconds of each phase at speed 1, so that a start takes about 14 s and every phase can be watched.
SECONDS = {"boot": 2.0, "distributed": 1.2, "weights": 4.0, "kv_cache": 0.4, "graphs": 2.4}
SHARDS = 16
CAPTURE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32)

#: Shares of GPU memory, MiB: the bare context, with NCCL, the pretended weights, per token of the KV cache.
CONTEXT_MIB, COMMUNICATOR_MIB, WEIGHTS_MIB, DRAFT_MIB, GRAPHS_MIB = 518, 1510, 24_000, 1_400, 1_520
BYTES_A_TOKEN = 4096
DRIVER_MIB = 616

#: Seconds of a decode step, plain and speculative (verification plus drafts): 83 and, at 1.85 tokens a step, 60 tok/s.
STEP_SECONDS, VERIFY_SECONDS, DRAFT_SECONDS = 0.012, 0.028, 0.0015
ACCEPTANCE = 0.55
DECODE_LOG_INTERVAL = 40


@dataclass(frozen=True)
class Pipes:
    """A worker's connections: to the launcher, and among the ranks (rank 0 has one to each other)."""

    launcher: Connection
    ranks: tuple[Connection, ...] = ()


class Crash(Exception):
    """The scheduler dies with this as its last traceback line."""


def scheduler(arguments: Arguments, rank: int, pipes: Pipes) -> None:
    """Be one rank: start, report to the launcher, then generate until killed."""
    role = f"sglang::scheduler{f'_TP{rank}' if arguments.tp_size > 1 else ''}"
    Scheduler(arguments, rank, pipes).run(role)


def detokenizer(arguments: Arguments, pipes: Pipes) -> None:
    """Be there, with the right title."""
    register(arguments)
    _pause(arguments, SECONDS["boot"])
    _settle("sglang::detokenizer")
    with contextlib.suppress(BrokenPipeError):  # stays, like the original when its launcher died early
        pipes.launcher.send(_identity("detokenizer"))
    while True:
        signal.pause()


class Scheduler:
    """One rank's life."""

    def __init__(self, arguments: Arguments, rank: int, pipes: Pipes) -> None:
        self.arguments = arguments
        self.rank = rank
        self.pipes = pipes
        self.tag = f"TP{rank}" if arguments.tp_size > 1 else ""
        self.launcher_pid = os.getppid()
        self.gpu: dict[str, Any] | None = None
        self.mib = 0
        self.phase = "boot"

    def run(self, role: str) -> None:
        register(self.arguments)
        try:
            self.start(role)
            self.serve()
        except Crash as crash:
            self.die(scheduler_traceback(self.phase, str(crash)))
        except (BrokenPipeError, EOFError):
            if self.arguments.fault("orphans"):
                while True:
                    signal.pause()
            self.die(scheduler_traceback("ready", "BrokenPipeError: [Errno 32] Broken pipe"))

    def start(self, role: str) -> None:
        arguments = self.arguments
        _pause(arguments, SECONDS["boot"])
        _settle(role)
        model = arguments.model_path
        self.say(
            f"Failed to load generation config for {model}: {model} does not appear to have a file named "
            f"generation_config.json. Checkout 'https://huggingface.co/{model}/tree/main' for available files.. "
            "Proceeding without generation config."
        )
        self.distributed()
        self.barrier()
        before = self.available()
        self.weights()
        self.barrier()
        tokens = self.kv_cache(before)
        self.barrier()
        self.graphs()
        if self.rank == 0:
            self.say(
                f"max_total_num_tokens={tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
                f"max_running_requests=4096, context_len={arguments.context_length}, "
                f"available_gpu_mem={self.available() / 1024:.2f} GB"
            )
        self.say(
            "Tree cache initialized: source=default impl=RadixCache hybrid_swa=False hybrid_ssm=False "
            "hierarchical=False streaming_wrapped=False"
        )
        if arguments.fault("orphans"):
            raise BrokenPipeError
        self.pipes.launcher.send({**_identity(role), "max_total_num_tokens": tokens})

    # The phases.

    def distributed(self) -> None:
        started = self.enter("distributed", "Init torch distributed begin.")
        self.gpu = self.pick_gpu()
        self.take(CONTEXT_MIB)
        self.nccl()
        if self.rank == 0:
            self.say("sglang is using nccl==2.28.9")
        self.spend("distributed", 1.0)
        self.take(COMMUNICATOR_MIB)
        self.say(
            f"Init torch distributed ends. elapsed={time.monotonic() - started:.2f} s, "
            f"mem usage={COMMUNICATOR_MIB / 1024:.2f} GB"
        )

    def weights(self) -> None:
        self.load("weights", "LlamaForCausalLM", WEIGHTS_MIB // self.arguments.tp_size, SHARDS)
        if self.arguments.speculative_algorithm:
            self.load("weights", "LlamaForCausalLMEagle3", DRAFT_MIB // self.arguments.tp_size, 1)

    def load(self, phase: str, architecture: str, mib: int, shards: int) -> None:
        started = self.enter(phase, f"Load weight begin. avail mem={self.available() / 1024:.2f} GB")
        name = "Multi-thread loading shards"
        held = self.mib
        for done in range(shards + 1):
            if done:
                self.spend(phase, 1 / shards if shards > 1 else 0.1)
                self.take(held + mib * done // shards)
            if self.rank == 0:
                bar(name, done, shards, time.monotonic() - started, completed="Completed")
        self.say(
            f"Load weight end. elapsed={time.monotonic() - started:.2f} s, type={architecture}, "
            f"avail mem={self.available() / 1024:.2f} GB, mem usage={mib / 1024:.2f} GB."
        )

    def kv_cache(self, before: int) -> int:
        """Fill what ``--mem-fraction-static`` leaves; ``before`` is the free memory (MiB) before the weights."""
        fraction = self.arguments.mem_fraction_static
        pool = self.available() - int(before * (1 - fraction))
        self.phase = "kv_cache"
        if fraction > 0.99:
            raise Crash(self.out_of_memory(pool))
        if pool < 256:
            raise Crash("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
        tokens = pool * 1024 * 1024 // BYTES_A_TOKEN
        self.take(self.mib + pool)
        half = f"{pool / 2048:.2f} GB"
        self.enter(
            "kv_cache",
            f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: {half}, V size: {half}",
        )
        self.spend("kv_cache", 1.0)
        self.say(f"Memory pool end. avail mem={self.available() / 1024:.2f} GB")
        return tokens

    def graphs(self) -> None:
        drafts = ["draft decode", "draft extend"] if self.arguments.speculative_algorithm else []
        for name in ["target decode", *drafts]:
            free = f"{self.available() / 1024:.2f} GB"
            started = self.enter(
                "graphs",
                f"Capture {name} CUDA graph begin. backend=full, num_tokens_per_req=1, bs={list(CAPTURE_SIZES)}, "
                f"avail mem={free}",
            )
            if self.rank == 0:
                bar("", 0, len(CAPTURE_SIZES), 0)
            for done, size in enumerate(reversed(CAPTURE_SIZES), 1):
                self.spend("graphs", 1 / len(CAPTURE_SIZES) / (1 + len(drafts)))
                if self.rank == 0:
                    label = f"Capturing batches (bs={size} avail_mem={free})"
                    bar(label, done, len(CAPTURE_SIZES), time.monotonic() - started)
            share = GRAPHS_MIB // (1 + len(drafts))
            self.take(self.mib + min(share, max(0, self.available() - 64)))
            self.say(
                f"Capture {name} CUDA graph end. elapsed={time.monotonic() - started:.2f} s, "
                f"mem usage={share / 1024:.2f} GB, avail mem={self.available() / 1024:.2f} GB."
            )

    def enter(self, phase: str, marker: str) -> float:
        """Say that ``phase`` begins, then meet the failure that is injected there. Returns the time."""
        self.phase = phase
        started = time.monotonic()
        self.say(marker)
        self.meet(phase)
        return started

    def meet(self, phase: str) -> None:
        arguments, rank = self.arguments, self.rank
        if arguments.fault("vanish", phase) and rank == 0:
            os.kill(self.launcher_pid, signal.SIGKILL)
            signal.pause()
        if arguments.fault("kill", phase, rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if arguments.fault("oom", phase, rank):
            raise Crash(self.out_of_memory(self.available() + 1024))
        if arguments.fault("die", phase, rank):
            raise Crash(f"RuntimeError: injected failure in phase {phase}")
        while arguments.fault("hang", phase, rank) or (phase == "warmup" and arguments.fault("mute", phase, rank)):
            signal.pause()

    def barrier(self) -> None:
        """Ranks go on together, so a phase ends for all of them when the slowest has ended it."""
        for connection in self.pipes.ranks:
            self.tell(connection, "barrier")
        for connection in self.pipes.ranks:
            self.hear(connection)

    def tell(self, connection: Connection, word: str) -> None:
        with contextlib.suppress(OSError):  # a dead rank: hear() waits for it
            connection.send(word)

    def hear(self, connection: Connection) -> Any:
        """The word of another rank. NCCL waits for ever for a dead one; the launcher ends that."""
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            while True:
                signal.pause()

    # GPU and NCCL.

    def pick_gpu(self) -> dict[str, Any] | None:
        """The rank's GPU on the board, through CUDA_VISIBLE_DEVICES; None on a node without pretended GPUs."""
        if self.arguments.gpu_directory is None:
            return None
        gpus = ledger.read_json(str(Path(self.arguments.gpu_directory, "board.json")))["gpus"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            names = [name.strip() for name in visible.split(",") if name.strip()]
            gpus = [gpu for name in names for gpu in gpus if name == str(gpu["index"]) or gpu["uuid"].startswith(name)]
        index = self.arguments.base_gpu_id + self.rank
        if index >= len(gpus):
            raise Crash(
                "torch.AcceleratorError: CUDA error: invalid device ordinal\n"
                "GPU device may be out of range, do you have enough GPUs?\n"
                "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
                "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
                "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n"
            )
        return dict(gpus[index])

    def take(self, mib: int) -> None:
        self.mib = mib
        if self.gpu is not None and self.arguments.gpu_directory is not None:
            slow = self.arguments.fault("slow-release")
            ledger.allocate(
                self.arguments.gpu_directory,
                os.getpid(),
                self.gpu["uuid"],
                mib,
                ledger.argv0_of(os.getpid()),
                release=slow.seconds if slow else None,
            )

    def available(self) -> int:
        """Free MiB of the rank's GPU."""
        if self.gpu is None or self.arguments.gpu_directory is None:
            return 143771 - DRIVER_MIB - self.mib
        held = ledger.allocations(self.arguments.gpu_directory)
        used = sum(entry.mib for entry in held if entry.gpu == self.gpu["uuid"])
        return max(0, int(self.gpu["mib"]) - DRIVER_MIB - used)

    def out_of_memory(self, wanted: int) -> str:
        free, total = self.available(), (self.gpu or {"mib": 143771})["mib"]
        return (
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {max(wanted, free + 64) / 1024:.2f} GiB. "
            f"GPU {self.rank} has a total capacity of {total / 1024:.2f} GiB of which {free / 1024:.2f} GiB is free. "
            f"Including non-PyTorch memory, this process has {self.mib / 1024:.2f} GiB memory in use. Of the allocated "
            f"memory {self.mib / 1024:.2f} GiB is allocated by PyTorch, and 18.15 MiB is reserved by PyTorch but "
            "unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"
        )

    def nccl(self) -> None:
        several = self.arguments.tp_size > 1
        head = f"{os.uname().nodename}:{os.getpid()}:{os.getpid()} [{self.rank}]"
        if os.environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
            raw(f"{head} NCCL INFO NCCL version 2.28.9+cuda13.0\n")
            for name in sorted(name for name in os.environ if name.startswith("NCCL_")):
                if name.startswith("NCCL_DEBUG") or (name in ("NCCL_PROTO", "NCCL_ALGO") and not several):
                    continue
                value = os.environ[name]
                raw(f"{head} NCCL INFO {name} set by environment to {value}{'.' if value.isdigit() else ''}\n")
        wrong = _wrong_nccl_value() if several else None
        if self.arguments.fault("nccl", rank=self.rank):
            wrong = wrong or "LLL"
        if wrong is not None:
            say(f'{head} graph/tuning.cc:104 NCCL WARN Unrecognized element token "{wrong}" when parsing "{wrong}"')
            raise Crash(
                "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp"
                ":93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
                "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
            )

    # Generation.

    def serve(self) -> None:
        if self.rank > 0:
            self.follow()
        requests: dict[str, list[float]] = {}  # id -> [tokens wanted, tokens done]
        steps, tokens, logged = 0, 0, time.monotonic()
        accepted, step_seconds = self.pace()
        while True:
            while self.pipes.launcher.poll(None if not requests else 0):
                kind, *rest = self.pipes.launcher.recv()
                if kind == "generate":
                    self.prefill(rest[1], len(requests))
                    requests[rest[0]] = [rest[2], 0.0]
                elif kind == "abort":
                    requests.pop(rest[0], None)
                elif kind == "info":
                    self.pipes.launcher.send(("info", rest[0]))
                else:
                    self.announce(kind)
            self.collective("step")
            _pause(self.arguments, step_seconds)
            steps += 1
            for identity, request in list(requests.items()):
                before = int(request[1])
                request[1] = min(request[0], request[1] + (accepted if request[1] else 1.0))
                tokens += int(request[1]) - before
                ended = request[1] >= request[0]
                self.pipes.launcher.send(("tokens", identity, int(request[1]) - before, ended))
                if ended:
                    del requests[identity]
            if steps % DECODE_LOG_INTERVAL == 0:
                seconds, logged = time.monotonic() - logged, time.monotonic()
                self.report(len(requests), sum(int(request[1]) for request in requests.values()), tokens / seconds)
                tokens = 0

    def prefill(self, prompt_tokens: int, running: int) -> None:
        if self.phase not in ("warmup", "ready"):
            self.announce("warmup")
        self.collective("prefill")
        self.say(
            f"Prefill batch, #new-seq: 1, #new-token: {prompt_tokens}, #cached-token: 0, token usage: 0.00, "
            f"#running-req: {running}, #queue-req: 0, #pending-token: 0, cuda graph: False, "
            "input throughput (token/s): 16.96"
        )

    def report(self, running: int, tokens: int, rate: float) -> None:
        accepted, _ = self.pace()
        spoken = ""
        if self.arguments.speculative_algorithm:
            share = (accepted - 1) / self.arguments.speculative_num_steps
            spoken = f"accept len: {accepted:.2f}, accept rate: {share:.2f}, "
        self.say(
            f"Decode batch, #running-req: {running}, #token: {tokens}, token usage: 0.00, {spoken}cuda graph: True, "
            f"gen throughput (token/s): {rate:.2f}, #queue-req: 0"
        )

    def pace(self) -> tuple[float, float]:
        """Tokens a step and seconds a step."""
        if not self.arguments.speculative_algorithm:
            return 1.0, STEP_SECONDS
        steps = self.arguments.speculative_num_steps
        return sum(ACCEPTANCE**power for power in range(steps + 1)), VERIFY_SECONDS + DRAFT_SECONDS * steps

    def announce(self, phase: str) -> None:
        """The launcher has reached ``phase``: tell the other ranks, then meet what is injected there."""
        for connection in self.pipes.ranks:
            self.tell(connection, phase)
        self.phase = phase
        self.meet(phase)

    def collective(self, word: str) -> None:
        """Nothing goes on before every rank has answered: a stopped or dead one stops all."""
        for connection in self.pipes.ranks:
            self.tell(connection, word)
        for connection in self.pipes.ranks:
            self.hear(connection)

    def follow(self) -> NoReturn:
        """A rank above 0 does what rank 0 says."""
        (leader,) = self.pipes.ranks
        while True:
            word = self.hear(leader)
            if word in ("step", "prefill"):
                self.tell(leader, word)
            else:
                self.phase = word
                self.meet(word)

    def die(self, text: str) -> NoReturn:
        self.say(text)
        try:
            if os.getppid() == self.launcher_pid:
                os.kill(self.launcher_pid, signal.SIGQUIT)
                time.sleep(30)  # killed by the launcher long before
        finally:
            sys.exit(1)

    def spend(self, phase: str, share: float) -> None:
        seconds = SECONDS[phase] * share
        _pause(self.arguments, seconds * 10 if self.arguments.fault("slow", phase) else seconds)

    def say(self, text: str) -> None:
        say(text, self.tag)


def register(arguments: Arguments) -> None:
    """Be known to the node, also before there is any memory: a retitled process cannot be found otherwise."""
    if arguments.gpu_directory is not None:
        ledger.allocate(arguments.gpu_directory, os.getpid(), "", 0)


def _pause(arguments: Arguments, seconds: float) -> None:
    time.sleep(seconds / arguments.speed)


def _settle(title: str) -> None:
    """What comes after the imports: death with the launcher, and the title."""
    import setproctitle  # as late as the original

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    setproctitle.setproctitle(title)


def _identity(role: str) -> dict[str, Any]:
    return {"role": role, "pid": os.getpid(), "argv": list(sys.argv), "environ": dict(os.environ)}


def _wrong_nccl_value() -> str | None:
    """The first token of NCCL_PROTO or NCCL_ALGO that NCCL 2.28 cannot parse."""
    known = {
        "NCCL_PROTO": {"ll", "ll128", "simple"},
        "NCCL_ALGO": {"tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"},
    }
    for name, words in known.items():
        for token in re.split(r"[,;:]", os.environ.get(name, "")):
            word = token.removeprefix("^")
            if word and word.lower() not in words | {"allreduce", "allgather", "reducescatter", "broadcast", "reduce"}:
                return word
    return None
