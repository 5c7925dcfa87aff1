"""Which router runs, and whose flags those are."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.families import sglang_router
from slime.arguments.problems import Problems
from slime.router.sglang import find_python


def complete(args: Namespace, problems: Problems) -> None:
    """use_slime_router becomes true where sglang-router is not installed."""
    for flag, other in (("ip", "port"), ("port", "ip")):
        value = getattr(args, f"sglang_router_{flag}")
        if value is not None and getattr(args, f"sglang_router_{other}") is None:
            problems.add(f"--sglang-router-{flag}", value, f"needs --sglang-router-{other}", "add it")
    given = [f for f in sglang_router.FAMILY.flags if getattr(args, f.dest) not in (None, False)]
    if args.sglang_router_ip is not None:
        _refuse_all(args, given, problems)
        return
    python = find_python(args.sglang_router_env)
    if args.sglang_router_env is not None and args.use_slime_router:
        problems.add("--use-slime-router", None, "contradicts --sglang-router-env", "give one of the two")
    elif args.sglang_router_env is not None and python is None:
        problems.add("--sglang-router-env", args.sglang_router_env, "has no Python", "give a virtual environment")
    asked, args.use_slime_router = args.use_slime_router, args.use_slime_router or python is None
    if args.use_slime_router:
        why = "--use-slime-router is given" if asked else "it is not installed"
        for flag in given:
            fix = "drop one of the two" if asked else "name its environment with --sglang-router-env"
            problems.add(flag.name, None, f"belongs to sglang-router, but {why}", fix)
    elif args.slime_router_middleware_paths:
        problems.add(
            "--slime-router-middleware-paths",
            args.slime_router_middleware_paths,
            "sglang-router takes no middleware",
            "add --use-slime-router",
        )


def _refuse_all(args: Namespace, given: list, problems: Problems) -> None:
    names = [flag.name for flag in given]
    names += ["--sglang-router-env"] if args.sglang_router_env is not None else []
    names += ["--slime-router-middleware-paths"] if args.slime_router_middleware_paths else []
    for name in names:
        problems.add(name, None, "has no effect on the running router of --sglang-router-ip", "drop one of the two")
