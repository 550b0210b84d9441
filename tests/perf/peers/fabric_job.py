"""The job as one writes it by hand with Fabric: one connection, two commands at most. ``MODEL HOST=ADDRESS... KEY``."""

from __future__ import annotations

import base64
import hashlib
import shlex
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fabric import Connection

HERE = Path(__file__).parent


def rendered(model: str, name: str) -> dict[str, tuple[str, str]]:
    """The files of the templates, and their modes."""
    options = "".join(f"OPTION_{i}=value-{i}-{name}\n" for i in range(10))
    script = (
        f"#!/bin/sh\n# {name}: serves {model} on 8000\nset -a; . /opt/llm/serve.env; set +a\n"
        f"exec llama-server --model /opt/models/tiny.gguf --alias {model} --host 127.0.0.1 --port 8000\n"
    )
    return {"serve.env": (f"MODEL={model}\nNODE={name}\n{options}", "644"), "serve.sh": (script, "755")}


def writing(files: dict[str, tuple[str, str]]) -> str:
    """A script that writes them."""
    lines = ["mkdir -p /opt/llm"]
    for file, (text, mode) in files.items():
        data, new = base64.b64encode(text.encode()).decode(), f"/opt/llm/.{file}.new"
        lines.append(f"printf %s {data} | base64 -d >{new} && chmod {mode} {new} && mv {new} /opt/llm/{file}")
    return "\n".join(lines) + "\n"


def wanted(files: dict[str, tuple[str, str]]) -> list[str]:
    return [f"{hashlib.sha256(text.encode()).hexdigest()}  {file}" for file, (text, _) in files.items()]


def asked(connection: Connection, script: str) -> str:
    channel = connection.transport.open_session()
    channel.exec_command("sh -c " + shlex.quote(script))
    channel.shutdown_write()
    said = b"".join(iter(lambda: channel.recv(65536), b""))
    assert channel.recv_exit_status() == 0, said
    return said.decode()


def deploy(model: str, name: str, address: str, key: str) -> None:
    sock = socket.create_connection((address, 22))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {"key_filename": key, "look_for_keys": False, "allow_agent": False, "sock": sock}
    with Connection(address, user="root", connect_kwargs=options) as connection:
        connection.open()
        files, steps = rendered(model, name), f"model={model}\n" + (HERE / "steps.sh").read_text()
        is_well = "\n".join([*wanted(files), "READY\n"])
        if asked(connection, steps + "probe") != is_well:
            script = f"{steps}set -e\n{writing(files)}stale; memory; start; ready; set +e; probe"
            assert asked(connection, script) == is_well


if __name__ == "__main__":
    model, *hosts, key = sys.argv[1:]
    with ThreadPoolExecutor(len(hosts)) as threads:
        list(threads.map(lambda host: deploy(model, *host.split("="), key), hosts))
