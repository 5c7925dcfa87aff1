"""The router between rollout and engines."""

from slime.arguments import pending
from slime.arguments.flag import STORE_TRUE, Family, Flag, function_path, integer, number, text

PREFIX = "--router-"

FAMILY = Family(
    "Router",
    "Slime starts its own router unless the address of one is given. `--router-*` belongs to sglang-router.",
    (
        Flag("--sglang-router-ip", text, help="Address of a running router; needs --sglang-router-port."),
        Flag("--sglang-router-port", integer, help="Port of that router."),
        Flag("--sglang-router-request-timeout-secs", integer, 14400, "Longest time of one request."),
        Flag("--use-slime-router", action=STORE_TRUE, help="Use slime's router. It is the only one so far."),
        Flag("--slime-router-timeout", number, help="Longest time of one request, when not the above."),
        Flag("--slime-router-max-connections", integer, help="Connections to all engines. Default: no limit."),
        Flag(
            "--slime-router-middleware-paths",
            function_path,
            [],
            nargs="+",
            help="Middleware classes.",
            pending=pending.ROUTER_MIDDLEWARE,
        ),
        Flag(
            "--slime-router-health-check-failure-threshold",
            integer,
            3,
            "Failures until a worker is quarantined.",
            pending=pending.ROUTER_HEALTH,
        ),
        Flag(
            "--use-distributed-post",
            action=STORE_TRUE,
            help="Send requests from every node.",
            pending=pending.MULTI_NODE_POST,
        ),
    ),
)
