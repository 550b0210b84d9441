#!/bin/sh
# On a GPU machine that is bare and offline (root, a Python with torch first on PATH): what pack.py made becomes an
# engine, an SSH server on loopback, the project and an inventory, and then scenarios.py runs through `./inv`.
#
#   run.sh PACKS OUT warm            only the engine: start it once in the background, so that its kernels are compiled
#   run.sh PACKS OUT SCENARIO...     scenarios by name, or all; OUT gets table.txt, table.jsonl and raw.tar.gz
#
# Puts everything below $BASE, but for a user `sshd` where there is none, and the node's own directories. What is there
# already is kept, so that the packs may come one after the other. The machine is taken to be thrown away afterwards.
set -u
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1
packs=$1 out=$2
shift 2
BASE=${BASE:-/opt/lamplighter-gpu}
CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
engine=$BASE/engine
port=${SSH_PORT:-2222}

say() { printf '%s %s\n' "$(date +%T)" "$*"; }

put_engine() {  # an environment of its own, above the packages of the machine's own Python
    [ -e "$engine/complete" ] || {
        say "engine: unpacking"
        theirs=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        tools=$(dirname "$(command -v python3)")
        python3 -m venv --without-pip "$engine" || return 1
        ours=$("$engine/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        tar -xJf "$packs/site/site.tar.xz" -C "$ours" || return 1
        printf '%s\n' "$theirs" >"$ours/machine.pth"
        ln -sf "$tools/ninja" "$engine/bin/ninja"
        printf '#!%s\nfrom transformers.cli.transformers import main\n\nmain()\n' "$engine/bin/python3" \
            >"$engine/bin/transformers"
        chmod +x "$engine/bin/transformers"
        "$engine/bin/python3" -m compileall -q -j0 "$ours" >/dev/null 2>&1
        "$engine/bin/python3" "$here/tiny_model.py" "$BASE/model" >"$BASE/model.log" 2>&1 || { cat "$BASE/model.log"; return 1; }
        [ ! -e "$packs/jit.tar.xz" ] || tar -xJf "$packs/jit.tar.xz" -C "$HOME"
        : >"$engine/complete"
        say "engine: ready"
    }
}

put_project() {
    [ -e "$BASE/project/complete" ] && return
    say "project: unpacking commit $(cat "$packs/project/commit")"
    mkdir -p "$BASE/project" && tar -xf "$packs/project/project.tar" -C "$BASE/project" || return 1
    venv=$BASE/project/.venv
    python3 -m venv --without-pip "$venv" || return 1
    tar -xJf "$packs/project/control.tar.xz" -C "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    cp "$BASE/project/requirements.lock" "$venv/requirements.lock"
    cp "$packs/project/commit" "$BASE/project/complete"
}

make_keys() {
    "$BASE/project/.venv/bin/python" - "$BASE/ssh" <<'END'
import sys
from pathlib import Path
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

for name in ("host", "client"):
    key = Ed25519PrivateKey.generate()
    file = Path(sys.argv[1], name)
    file.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption()))
    file.chmod(0o600)
    file.with_suffix(".pub").write_bytes(key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH) + b"\n")
END
}

start_sshd() {
    [ -e "$BASE/ssh/sshd.pid" ] && kill -0 "$(cat "$BASE/ssh/sshd.pid")" 2>/dev/null && return
    mkdir -p "$BASE/ssh" "$BASE/sshd" /run/sshd && chmod 755 /run/sshd
    chmod 700 "$BASE/ssh"
    tar -xJf "$packs/project/sshd.tar.xz" -C "$BASE/sshd" && make_keys || return 1
    grep -q '^sshd:' /etc/passwd || echo 'sshd:x:64990:65534::/run/sshd:/usr/sbin/nologin' >>/etc/passwd
    printf '[127.0.0.1]:%s %s\n' "$port" "$(cat "$BASE/ssh/host.pub")" >"$BASE/ssh/known_hosts"
    cat >"$BASE/ssh/config" <<END
Port $port
ListenAddress 127.0.0.1
HostKey $BASE/ssh/host
AuthorizedKeysFile $BASE/ssh/client.pub
PidFile $BASE/ssh/sshd.pid
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
LogLevel VERBOSE
${SSHD_EXTRA:-}
END
    LD_LIBRARY_PATH=$BASE/sshd "$BASE/sshd/sshd" -f "$BASE/ssh/config" -E "$BASE/ssh/log" || { cat "$BASE/ssh/log"; return 1; }
    say "sshd: $(LD_LIBRARY_PATH=$BASE/sshd "$BASE/sshd/sshd" -V 2>&1 | head -n 1) on 127.0.0.1:$port"
}

describe() {
    cat >"$BASE/machine.json" <<END
{
  "ssh": {"ansible_host": "127.0.0.1", "ansible_port": $port, "ansible_user": "$(id -un)",
          "ansible_ssh_private_key_file": "$BASE/ssh/client", "known_hosts": "$BASE/ssh/known_hosts"},
  "base": "$BASE", "tool": ["$BASE/project/inv"], "project": "${PROJECT:-$BASE/project}",
  "python": "$engine/bin/python3", "model": "$BASE/model", "trainer": ["$engine/bin/python3", "$here/trainer.py", "20"],
  "device": "cuda:0",
  "environment": {"HF_HUB_OFFLINE": "1", "CUDA_HOME": "$CUDA_HOME", "NCCL_NVLS_ENABLE": "0",
                  "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
                  "PATH": "$engine/bin:$CUDA_HOME/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
}
END
}

mkdir -p "$BASE" "$out" || exit 1
if [ "$*" = warm ]; then
    put_engine && describe && exec "$engine/bin/python3" "$here/scenarios.py" "$BASE/machine.json" "$out" warm
    exit 1
fi
put_engine && put_project && start_sshd && describe || exit 1
exec "$BASE/project/.venv/bin/python" "$here/scenarios.py" "$BASE/machine.json" "$out" "$@"
