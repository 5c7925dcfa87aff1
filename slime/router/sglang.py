"""The stock sglang-router as a process that slime can start like its own router.

    python -m slime.router.sglang --python ENV/bin/python --port-file FILE --flags "--policy cache_aware"

It needs packages of its own, so it runs on the Python of its own environment. This process finds it a free port, ends
it when the parent ends, and ends when it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shlex
import shutil
import signal
import socket
import sys
from argparse import Namespace
from contextlib import suppress

from slime.arguments.families.sglang_router import FAMILY
from slime.observability import stacks
from slime.utils.async_utils import wait_for_exit
from slime.utils.misc import atomic_write

GRACE_SECS = 3.0
MODULE = "sglang_router"


def find_python(environment: str | None) -> str | None:
    """The Python that has sglang-router: of `--sglang-router-env` (a directory or the executable), else this one."""
    if environment is None:
        return sys.executable if importlib.util.find_spec(MODULE) is not None else None
    path = os.path.join(environment, "bin", "python") if os.path.isdir(environment) else environment
    return shutil.which(path)


def options(args: Namespace) -> list[str]:
    """The `--router-*` arguments as sglang-router spells them."""
    words: list[str] = []
    for flag in FAMILY.flags:
        value = getattr(args, flag.dest)
        if value is None or value is False:
            continue
        words.append("--" + flag.name.removeprefix("--router-"))
        if value is not True:
            words += [str(item) for item in (value if isinstance(value, list) else [value])]
    return words


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


async def serve(args: argparse.Namespace) -> int:
    """Run until the router ends, SIGTERM comes or the parent is gone; the exit code."""
    flags = shlex.split(args.flags)
    port = args.port or free_port(args.host)
    command = [args.python, "-m", f"{MODULE}.launch_router", "--host", args.host, "--port", str(port), *flags]
    if "--prometheus-port" not in flags:
        command += ["--prometheus-host", args.host, "--prometheus-port", str(free_port(args.host))]
    # Of this process's environment it must not get the paths: they belong to another Python.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = await asyncio.create_subprocess_exec(*command, env=env)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waits = [asyncio.ensure_future(process.wait()), asyncio.ensure_future(stop.wait())]
    if args.parent_pid:
        waits.append(asyncio.ensure_future(wait_for_exit(args.parent_pid)))
    if args.port_file:
        atomic_write(args.port_file, str(port).encode())
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if process.returncode is None:
        process.terminate()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(waits[0]), GRACE_SECS)
    if process.returncode is None:
        process.kill()
        await waits[0]
        return 0
    return process.returncode


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m slime.router.sglang", description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter of the environment with sglang-router")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--port-file", help="the port is written here")
    parser.add_argument("--parent-pid", type=int, help="exit when this process is gone")
    parser.add_argument("--flags", default="", help="sglang-router's own, quoted as for a shell")
    stacks.dump_on_signal()
    sys.exit(asyncio.run(serve(parser.parse_args(argv))))


if __name__ == "__main__":
    main()
