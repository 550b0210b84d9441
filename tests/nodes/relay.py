"""A wire with delay and loss, in user space: carries Ethernet frames between two interfaces of one network namespace.

``python relay.py LEFT RIGHT`` prints ``ready`` and then obeys JSON lines on stdin, ``{"delay_ms": 25, "jitter_ms": 0,
"loss": 0.0}``; ``delay_ms`` is one way, so the round trip grows by twice that. It ends when stdin does.

facts: many kernels come without netem, and a TAP would change the node's interface. AF_PACKET with PACKET_VNET_HDR
passes the kernel's offload marks along (a veth hands over frames of up to 64 KiB without a checksum), so that frames
stay valid on the other side.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import select
import socket
import sys
import time

ETH_P_ALL = 3
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 1, 15, 23
PACKET_MR_PROMISC = 1
LONGEST = 80_000


def main(left_name: str, right_name: str) -> None:
    left, right = tap_into(left_name), tap_into(right_name)
    other = {left: right, right: left}
    wire = {"delay_ms": 0.0, "jitter_ms": 0.0, "loss": 0.0}
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    number = 0
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, out, frame = heapq.heappop(waiting)
            send(out, frame)
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([left, right, 0], [], [], pause)  # select counts microseconds, epoll milliseconds
        if 0 in ready:
            orders = os.read(0, 65536)
            if not orders:
                return
            wire.update(json.loads(orders.splitlines()[-1]))
        for source in ready:
            if source == 0:
                continue
            for frame in frames(source):
                if random.random() < wire["loss"]:
                    continue
                jitter = random.uniform(-1, 1) * wire["jitter_ms"]
                due = time.monotonic() + max(0.0, wire["delay_ms"] + jitter) / 1000
                number += 1
                heapq.heappush(waiting, (due, number, other[source], frame))


def tap_into(name: str) -> socket.socket:
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    tap.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    tap.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    promiscuous = b"".join(
        (
            socket.if_nametoindex(name).to_bytes(4, sys.byteorder),
            PACKET_MR_PROMISC.to_bytes(2, sys.byteorder),
            bytes(10),
        )
    )
    tap.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, promiscuous)
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    tap.setblocking(False)
    tap.bind((name, ETH_P_ALL))
    return tap


def frames(source: socket.socket) -> list[bytes]:
    found: list[bytes] = []
    with contextlib.suppress(OSError):  # nothing more, or the link is down
        while len(found) < 64:
            found.append(source.recv(LONGEST))
    return found


def send(out: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a cut link, or a full queue: a wire drops what it cannot carry
        out.send(frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
