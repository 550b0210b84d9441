#!/bin/bash
# The job as one script over one ssh; the node decides. bash_job.sh MODEL PYTHON SSH_CONFIG HOST...
here=$(cd "$(dirname "$0")" && pwd)
model=$1 python=$2 config=$3
shift 3
deploy() {
    "$python" -SEs - "$here" "$model" "$1" <<'P' | ssh -F "$config" -o BatchMode=yes "$1" 'sh -s' >/dev/null
import sys
sys.path.insert(0, sys.argv[1])
import types
sys.modules["fabric"] = types.SimpleNamespace(Connection=None)
from fabric_job import rendered, wanted, writing
files = rendered(sys.argv[2], sys.argv[3])
print("model=" + sys.argv[2])
print(open(sys.argv[1] + "/steps.sh").read())
print("want='" + "\n".join([*wanted(files), "READY"]) + "'")
print('[ "$(probe)" = "$want" ] && exit 0\nset -e')
print(writing(files) + "stale; memory; start; ready\nexit 0")
P
    return "${PIPESTATUS[1]}"
}
pids=() status=0
for host in "$@"; do deploy "$host" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
exit $status
