"""How long `diagnose --log` takes for logs of 2 MB: `python -m tests.perf.diagnose`, on an idle machine.

Three shapes: a start with its progress bars that ends in a traceback, a server that has answered for long, and a flood
of tracebacks of all ranks. The time of the command's own work, without the start of the interpreter.
"""

# ruff: noqa: E501 (a line of a log stays one line)

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from lamplighter.run.diagnose import diagnose_file

SIZE = 2_000_000
CASES = Path(__file__).resolve().parents[1] / "cases"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "server.log")
        for name, text in shapes().items():
            path.write_bytes(text)
            before = time.process_time()
            found = diagnose_file(str(path))
            spent = time.process_time() - before
            print(f"{name}: {len(text) / 1e6:.1f} MB in {spent:.2f} s of CPU: {found.outcome}, {found.cause}")


def shapes() -> dict[str, bytes]:
    failed = (CASES / "logs2" / "sglang-0518-moe-tile-too-large" / "server.log").read_bytes()
    stuck = (CASES / "logs" / "vllm-013-context-too-long" / "server.log").read_bytes()
    bar = b"".join(
        b"\rCapturing batches (bs=%d avail_mem=6.22 GB):  25%%|##   | 1/4 [00:00<00:00]" % n for n in range(200)
    )
    work = (
        b"[2026-03-01 11:%02d:%02d TP0] Decode batch, #running-req: %d, #token: %d, gen throughput (token/s): 775.32\n"
        b'[2026-03-01 11:%02d:%02d] INFO:     10.0.0.%d:4%d - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    )
    ready = b"[2026-03-01 10:00:00] server_args=ServerArgs()\n[2026-03-01 10:00:09] The server is fired up and ready to roll!\n"
    served = b"".join(work % (n % 60, n % 59, n % 7, n, n % 60, n % 59, n % 250, n % 1000) for n in range(SIZE // 190))
    return {
        "a start with bars that fails": bar * (SIZE // len(bar)) + b"\n" + failed,
        "a server that has answered for long": ready + served,
        "tracebacks over tracebacks": stuck * (SIZE // len(stuck)),
    }


if __name__ == "__main__":
    main()
