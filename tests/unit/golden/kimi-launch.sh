#!/bin/sh
# Starts server kimi, release DIGEST. Rendered by lamplighter: edit the inventory, not this file.
# With arguments it runs these instead, in the same environment: launch.sh env
#
# Words are in single quotes because they are data, also where they look like an expansion or hold odd characters.
# shellcheck disable=SC2016,SC1003,SC1111,SC1112,SC2088,SC2089,SC2090

# The directory of this release, found from our own name; absolute, because workers may run elsewhere.
case $0 in
    */*) here=${0%/*} ;;
    *) here=. ;;
esac
case $here in
    '' | /*) ;;
    *) here=$PWD/$here ;;
esac
# Kept as $1: below, a variable of the server may have any name.
set -- "$here" "$@"
if [ ! -f "$1/pysite/sitecustomize.py" ]; then
    printf '%s: no pysite/sitecustomize.py beside it: call launch.sh by its path in its release\n' "$0" >&2
    exit 2
fi
case $1 in
    *:*)
        printf '%s: PYTHONPATH cannot hold a directory with a colon in its name\n' "$0" >&2
        exit 2
        ;;
esac

# The server's own bin directory first: servers call tools that are installed there (ninja, ptxas).
export PATH=/opt/sglang/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin

# Output reaches the log at once; setproctitle leaves /proc/PID/environ readable.
export PYTHONUNBUFFERED=1
export SPT_NOENV=1

# Variables of the inventory.
export NCCL_ALGO=Ring
export NCCL_P2P_LEVEL=SYS
export NCCL_PROTO=LL

# What only the node knows: secrets, and the GPUs to use.
if [ -e "$1/env" ]; then
    set -a
    # shellcheck source=/dev/null
    . "$1/env" || exit 2
    set +a
fi

# Every Python below runs our sitecustomize.py. A trailing colon would mean the current directory, so there is none.
export PYTHONPATH="$1/pysite${PYTHONPATH:+:$PYTHONPATH}"

# Another command in this environment: the environment proof, or a curious engineer.
shift
if [ "$#" -gt 0 ]; then
    exec "$@"
fi

# The server, one argument a line.
exec /opt/sglang/bin/python \
    -m \
    sglang.launch_server \
    --model-path \
    /models/kimi-k2.5-int4 \
    --served-model-name \
    kimi-k2.5-int4 \
    --host \
    127.0.0.1 \
    --port \
    8000 \
    --tp \
    8 \
    --trust-remote-code \
    --speculative-algorithm \
    EAGLE3 \
    --speculative-draft-model-path \
    /models/kimi-k2.5-eagle3 \
    --speculative-num-steps \
    2 \
    --speculative-eagle-topk \
    1 \
    --speculative-num-draft-tokens \
    3
