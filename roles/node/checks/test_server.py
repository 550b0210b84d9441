"""What must hold for every server that lamplighter put into service, asked on the node over one connection."""

from __future__ import annotations

import json

#: Asks one token of the server, on the node, without any proxy. Arguments: host, port, path, body.
ASK = """
import http.client, sys
c = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
c.request("POST", sys.argv[3], sys.argv[4], {"Content-Type": "application/json"})
r = c.getresponse()
sys.stdout.write("%d %s" % (r.status, r.read(20000).decode("utf-8", "replace")))
"""

LISTEN = "0A"


def test_release_files_are_in_place(host, server):
    current = f"{server.directory}/current"
    assert host.file(current).is_symlink, f"{current} is no symbolic link"
    assert host.file(f"{current}/launch.sh").mode & 0o777 == 0o755
    assert host.file(f"{current}/pysite/sitecustomize.py").is_file


def test_environment_file_is_private(host, server):
    env = host.file(f"{server.directory}/current/env")
    assert env.exists, "the release has no env file"
    assert env.mode & 0o777 == 0o600, f"mode {env.mode & 0o777:o}: others can read the secrets"


def test_current_release_is_the_one_that_runs(host, server):
    target = host.file(f"{server.directory}/current").linked_to
    assert target.rstrip("/").endswith(server.release), f"current is {target}, release {server.release} runs"


def test_process_is_alive(host, server):
    assert server.pid, "no process is recorded"
    stat = host.file(f"/proc/{server.pid}/stat")
    assert stat.exists, f"pid {server.pid} is gone"
    state = stat.content_string.rpartition(")")[2].split()[0]
    assert state not in "ZX", f"pid {server.pid} is in state {state}"


def test_port_is_listening(host, server):
    tables = host.run("cat /proc/net/tcp /proc/net/tcp6").stdout.splitlines()
    rows = [line.split() for line in tables]
    listening = {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == LISTEN}
    assert server.port in listening, f"nobody listens on port {server.port}"


def test_model_answers(host, server):
    generate = server.engine["generate"]
    body = {"model": server.served_name, "max_tokens": 1, **(generate.get("body") or {})}
    if generate["kind"] == "chat":
        body.setdefault("messages", [{"role": "user", "content": "Say hello."}])
    else:
        body.setdefault("prompt", "Hello")
    wanted = json.dumps({name: value for name, value in body.items() if value is not None})
    probe_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # noqa: S104 - compared, not bound
    asked = host.run(
        "%s -I -S -c %s %s %s %s %s", server.python, ASK, probe_host, str(server.port), generate["path"], wanted
    )
    assert asked.rc == 0, asked.stderr.strip().splitlines()[-1:]
    assert asked.stdout.startswith("200 "), asked.stdout[:200]
