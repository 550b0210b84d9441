#!/bin/sh
# The scenarios without a GPU, to find their own mistakes before a machine is there: the lab's server in place of the
# engine and its nvidia-smi, all the rest as on the machine.   rehearse.sh PACKS DIRECTORY SCENARIO...
# PACKS holds `project` of pack.py; python3 on PATH is a CPython 3.12; not `stranger` on one that has no setproctitle.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
packs=$1 BASE=$2
shift 2
export BASE SSH_PORT="${SSH_PORT:-22922}" PROJECT="$BASE/project"
lab=$BASE/lab/node
mkdir -p "$BASE/out" "$BASE/model" "$BASE/home"

if [ ! -e "$BASE/engine/complete" ]; then
    mkdir -p "$BASE/project" && tar -xf "$packs/project/project.tar" -C "$BASE/project"
    python3 -m venv --without-pip "$BASE/engine"
    site=$("$BASE/engine/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    tar -xJf "$packs/project/control.tar.xz" -C "$site"
    mkdir -p "$site/sglang" "$site/sglang-0.5.16.dist-info"
    printf 'Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.16\n' >"$site/sglang-0.5.16.dist-info/METADATA"
    : >"$site/sglang/__init__.py"
    cat >"$site/sglang/launch_server.py" <<END
import sys

sys.path.insert(0, "$BASE/project")
if __name__ == "__main__":
    from lab.server import main

    sys.exit(main([*sys.argv[1:], "--lab-gpus", "$lab/gpu"]))
END
    cat >"$BASE/trainer.py" <<END
import os, sys, time
from pathlib import Path

import setproctitle

sys.path.insert(0, "$BASE/project")
from lab import control

setproctitle.setproctitle("trainer")
control.allocate(Path("$lab"), os.getpid(), 20480)
print("held", flush=True)
time.sleep(3600)
END
    (cd "$BASE/project" && "$BASE/engine/bin/python3" -c \
        'import sys; from pathlib import Path; from lab.node import prepare; prepare("node", Path(sys.argv[1]), gpus=1)' "$BASE/lab")
    ln -s /bin/true "$BASE/engine/bin/ninja"
    : >"$BASE/engine/complete"
fi
cat >"$BASE/extra.json" <<END
{"root": "$BASE/state", "smi": "$lab/bin", "trainer": ["$BASE/engine/bin/python3", "$BASE/trainer.py"],
 "device": "cpu", "transformers": ${TRANSFORMERS:-{\}},
 "environment": {"LAB_SPEED": "${LAB_SPEED:-2}", "PATH": "$BASE/engine/bin:/usr/bin:/bin"}}
END
export MACHINE_EXTRA="$BASE/extra.json"
export SSHD_EXTRA="SetEnv PATH=$lab/bin:/usr/local/bin:/usr/bin:/bin HOME=$BASE/home"
exec "$here/run.sh" "$packs" "$BASE/out" "$@"
