# Runs slime on one node or on every node of a cluster; sourced by scripts/grpo.sh, which sets NODES and calls `launch`.
#
# One node: nothing to set. Several: run the same script on every node with
#   NODE_RANK   0 on the node that trains, 1, 2, ... on the others
#   HEAD        address of node 0, e.g. 10.0.0.1
#   RAY_PORT    6379 by default; free on node 0
#   RAY_AUTH_TOKEN  the same secret on all nodes; without it whoever reaches the ports of node 0 can run code there
# Node 0 starts the head of a Ray cluster, waits until all nodes have joined, trains, and takes its cluster down. The
# others join and stay until the head goes. Only processes that this script started are ended.

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
RAY_PORT=${RAY_PORT:-6379}
[ -n "${PYTHON:-}" ] || { [ -x .venv/bin/python ] && PYTHON=.venv/bin/python; } || PYTHON=python

launch() {
    if [ -n "${DRY_RUN:-}" ]; then # shows the resolved configuration and starts nothing
        exec "$PYTHON" "$1" "${@:2}" --print-config
    fi
    if [ "$NODES" -eq 1 ]; then
        exec "$PYTHON" "$1" "${@:2}"
    fi
    : "${HEAD:?set HEAD to the address of node 0}"
    export RAY_ADDRESS="$HEAD:$RAY_PORT" RAY_USAGE_STATS_ENABLED=0
    # ray start and ray.init differ in when they take to tokens by themselves.
    export RAY_AUTH_MODE=${RAY_AUTH_MODE:-$([ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] && echo token || echo disabled)}
    local patience=${RAY_WAIT_SECONDS:-600}
    if [ "$NODE_RANK" -ne 0 ]; then
        "$PYTHON" - "$HEAD" "$RAY_PORT" "$patience" <<'WAIT' || return 1
import socket
import sys
import time

head, port, end = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while True:
    try:
        socket.create_connection((head, port), timeout=5).close()
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"node 0 does not answer at {head}:{port} ({error}): run this script there with NODE_RANK=0")
        time.sleep(1)
WAIT
        exec ray start --block --address "$RAY_ADDRESS" --num-gpus "$GPUS_PER_NODE" --disable-usage-stats
    fi
    ray start --block --head --node-ip-address "$HEAD" --port "$RAY_PORT" --num-gpus "$GPUS_PER_NODE" \
        --include-dashboard false --disable-usage-stats &
    local head=$!
    trap "kill $head 2>/dev/null || true; wait $head 2>/dev/null || true" EXIT
    "$PYTHON" - "$NODES" "$patience" <<'WAIT' || return 1
import sys
import time

import ray

nodes, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
connected = False
while True:
    try:
        if not connected:
            ray.init(logging_level="error", log_to_driver=False)
            connected = True
        there = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        there = 0
    if there >= nodes:
        break
    if time.monotonic() > end:
        sys.exit(f"{there} of {nodes} nodes have joined the Ray cluster: run this script on every node")
    time.sleep(1)
WAIT
    "$PYTHON" "$1" "${@:2}"
}
