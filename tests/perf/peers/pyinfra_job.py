"""The job as pyinfra does it; MODEL is in the environment."""

import os

from pyinfra import host
from pyinfra.facts.server import Command
from pyinfra.operations import files, server

model = os.environ["MODEL"]
values = {"model": model, "port": 8000, "inventory_hostname": host.name}
files.directory("/opt/llm", mode="755")
one = files.template("templates/serve.env.j2", "/opt/llm/serve.env", mode="644", **values)
two = files.template("templates/serve.sh.j2", "/opt/llm/serve.sh", mode="755", **values)
state = host.get_fact(
    Command,
    "kill -0 $(cat /opt/llm/pid 2>/dev/null) 2>/dev/null && "
    f"curl -sf -m 2 localhost:8000/v1/models | grep -q {model} && echo ok || echo no",
)
if one.will_change or two.will_change or "ok" not in (state or ""):
    server.shell(
        "[ -s /opt/llm/pid ] || exit 0; p=$(cat /opt/llm/pid); kill $p 2>/dev/null || exit 0; "
        "for i in $(seq 100); do kill -0 $p 2>/dev/null || exit 0; sleep 0.1; done; kill -9 $p"
    )
    server.shell(
        "test $(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | sort -n | tail -1) -lt 1000"
    )
    server.shell("setsid /opt/llm/serve.sh </dev/null >/opt/llm/log 2>&1 & echo $! > /opt/llm/pid")
    server.shell(
        f"for i in $(seq 300); do curl -sf -m 2 localhost:8000/v1/models | grep -q {model} && exit 0; "
        "sleep 0.1; done; exit 1"
    )
