"""How long `diagnose --log` takes for logs of 2 MB of every kind: `python -m tests.perf.diagnose`.

The CPU time of the command's own work, without the start of the interpreter, and its ratio to the limit of one second.
Leaves with 1 if a kind is over the limit, so that it is run on an idle machine.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lamplighter.errors import UsageError
from lamplighter.run.diagnose import diagnose_file

SIZE = 2_000_000
LIMIT = 1.0
CASES = Path(__file__).resolve().parents[1] / "cases"
READY = (
    b"[2026-03-01 10:00:00] server_args=ServerArgs()\n[2026-03-01 10:00:09] The server is fired up and ready to roll!\n"
)
WORK = (
    b"[2026-03-01 11:%02d:%02d TP0] Decode batch, #running-req: %d, #token: %d, gen throughput (token/s): 775.32\n"
    b'[2026-03-01 11:%02d:%02d] INFO:     10.0.0.%d:4%d - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
)
BAR = b"\rCapturing batches (bs=%d avail_mem=6.22 GB):  25%%|##   | 1/4 [00:00<00:00]"
FRAME = '  File "/opt/v/sglang/srt/{module}.py", line {line}, in {name}\n    return self.{name}(batch, {line})\n'


def main() -> None:
    slow = False
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "server.log")
        for name, make in KINDS.items():
            path.write_bytes(make())
            before = time.process_time()
            said = read(path)
            spent = time.process_time() - before
            slow = slow or spent > LIMIT
            print(f"{spent:5.2f} s of CPU, {spent / LIMIT:4.0%} of the limit: {name}: {said}")
    sys.exit(1 if slow else 0)


def read(path: Path) -> str:
    try:
        found = diagnose_file(str(path))
    except UsageError as error:
        return str(error)
    return f"{found.outcome}, {found.cause}"


def repeated(part: bytes) -> bytes:
    return part * (SIZE // len(part) + 1)


def case(name: str) -> bytes:
    return (CASES / name / "server.log").read_bytes()


def bars_that_fail() -> bytes:
    return repeated(b"".join(BAR % n for n in range(200))) + b"\n" + case("logs2/sglang-0518-moe-tile-too-large")


def served_for_long() -> bytes:
    lines = (WORK % (n % 60, n % 59, n % 7, n, n % 60, n % 59, n % 250, n % 1000) for n in range(SIZE // 190))
    return READY + b"".join(lines)


def chatter_of_a_start() -> bytes:
    """Words that differ in every line, of a start that goes on."""
    rng = random.Random(SIZE)
    words = ["layer", "expert", "shard", "kernel", "tuned", "config", "found", "error", "loaded", "from", "cache"]
    lines = (
        f"[2026-03-01 10:00:{n % 60:02d} TP{n % 8}] {' '.join(rng.choices(words, k=9))} {rng.random():.4f}\n"
        for n in range(SIZE // 100)
    )
    return (READY.split(b"\n")[0].decode() + "\n" + "".join(lines)).encode()


def rank_flood() -> bytes:
    """Tracebacks of eight ranks, line by line in turn, again and again, before it is ready."""
    rng = random.Random(SIZE)
    blocks = [rank_block(rank, number, rng) for number in range(SIZE // 20_000) for rank in range(8)]
    turns = [
        line
        for first in range(0, len(blocks), 8)
        for rows in zip(*blocks[first : first + 8], strict=True)
        for line in rows
    ]
    return (READY.split(b"\n")[0].decode() + "\n" + "".join(turns)).encode()


def rank_block(rank: int, number: int, rng: random.Random) -> list[str]:
    stamp = f"[2026-03-01 10:{number % 60:02d}:07 TP{rank}]"
    frames = [
        FRAME.format(module=f"layers/part{rng.randrange(40)}", line=rng.randrange(2000), name=f"forward_{each}")
        for each in range(14)
    ]
    return [
        f"{stamp} Scheduler hit an exception: Traceback (most recent call last):\n",
        *frames,
        f"RuntimeError: zebra {number} of {rank} has no stripes\n\n",
    ]


def endless_line() -> bytes:
    return READY.split(b"\n")[0] + b"\n" + repeated(b"tensor([0.1234, 0.5678, error], device='cuda:0'), ")


def garbage() -> bytes:
    """Behind a beginning that is text: else it is refused as no log."""
    return READY.split(b"\n")[0] + b"\n" + b"a line of a log\n" * 5000 + random.Random(SIZE).randbytes(SIZE)


def prompts() -> bytes:
    """What clients sent, logged by a server that is ready: it reads like anything."""
    failed = case("logs/vllm-013-context-too-long").decode("utf-8", "replace")
    line = f"[2026-03-01 11:00:00] Receive: obj=GenerateReqInput(text={failed[:3000]!r})\n".encode()
    return READY + repeated(line)


KINDS: dict[str, Callable[[], bytes]] = {
    "a start with bars that fails": bars_that_fail,
    "a server that has answered for long": served_for_long,
    "a start that tells much": chatter_of_a_start,
    "SGLang, tracebacks of 8 ranks": rank_flood,
    "SGLang, a start again and again": lambda: repeated(case("logs2/sglang-0523-leaks-behind-a-traceback")),
    "vLLM, several processes, again and again": lambda: repeated(case("logs/vllm-013-context-too-long")),
    "vLLM, coloured": lambda: repeated(case("logs/vllm-092-coloured")),
    "transformers, again and again": lambda: repeated(case("logs/transformers-accelerate-missing")),
    "one endless line": endless_line,
    "what clients sent": prompts,
    "binary garbage": garbage,
}


if __name__ == "__main__":
    main()
