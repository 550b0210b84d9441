# The steps of the job on a node, for those who send a script: sourced, not run.
probe() {
    cd /opt/llm 2>/dev/null && sha256sum serve.env serve.sh 2>/dev/null
    p=$(cat pid 2>/dev/null); [ -n "$p" ] && kill -0 $p 2>/dev/null &&
        curl -sf -m 2 localhost:8000/v1/models | grep -q "$model" && echo READY; true
}
stale() {
    [ -s /opt/llm/pid ] || return 0
    p=$(cat /opt/llm/pid); kill $p 2>/dev/null || return 0
    for i in $(seq 100); do kill -0 $p 2>/dev/null || return 0; sleep 0.1; done; kill -9 $p
}
memory() {
    m=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | sort -n | tail -1)
    [ "$m" -lt 1000 ] || { echo "GPU memory in use: $m MiB" >&2; return 1; }
}
start() { setsid /opt/llm/serve.sh </dev/null >/opt/llm/log 2>&1 & echo $! >/opt/llm/pid; }
ready() { for i in $(seq 300); do curl -sf -m 2 localhost:8000/v1/models | grep -q "$model" && return 0; sleep 0.1; done; return 1; }
