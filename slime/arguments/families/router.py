"""The router between rollout and engines."""

from slime.arguments.flag import STORE_TRUE, Family, Flag, function_path, integer, number, text

FAMILY = Family(
    "Router",
    "sglang-router where it is installed, else slime's own; none is started when the address of one is given.",
    (
        Flag("--sglang-router-ip", text, help="Address of a running router; needs --sglang-router-port."),
        Flag("--sglang-router-port", integer, help="Port of that router."),
        Flag("--sglang-router-request-timeout-secs", integer, 14400, "Longest time of one request."),
        Flag(
            "--sglang-router-env",
            text,
            help="Virtual environment (its directory or Python) with sglang-router, which gets on badly with sglang's "
            "own packages. Default: this environment, if it is installed here.",
        ),
        Flag("--use-slime-router", action=STORE_TRUE, help="Use slime's own router all the same."),
        Flag("--slime-router-timeout", number, help="Longest time of one request, when not the above."),
        Flag("--slime-router-max-connections", integer, help="Connections to all engines. Default: no limit."),
        Flag(
            "--slime-router-middleware-paths",
            function_path,
            [],
            nargs="+",
            help="Middleware classes; the first is the outermost. "
            "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware keeps the tokens of text turns.",
        ),
        Flag(
            "--slime-router-health-check-failure-threshold",
            integer,
            3,
            "Failures in a row until a worker is quarantined.",
        ),
        Flag(
            "--use-distributed-post",
            action=STORE_TRUE,
            help="Send requests from an actor on every node instead of from the rollout manager alone.",
        ),
    ),
)
