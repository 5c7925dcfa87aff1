"""The process that becomes a stock SGLang server.

`python -m slime.backends.sglang_utils.launch <SGLang's flags> --port-file FILE --parent-pid PID` runs
`sglang.launch_server` with slime's front around its HTTP application, on a free port, and ends with its parent.
SGLang's spawned processes import this module again: what must happen before SGLang is imported stands at its top.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import sys
import threading

from slime.backends.sglang_utils.cpu import install_shims

install_shims()


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This module's own flags, and the rest, which is SGLang's."""
    parser = argparse.ArgumentParser(
        prog="slime.backends.sglang_utils.launch", description=__doc__, allow_abbrev=False, add_help=False
    )
    parser.add_argument("--port-file", help="the port is written here before the server listens")
    parser.add_argument("--parent-pid", type=int, help="exit when this process ends")
    return parser.parse_known_args(argv)


def reserve_port(host: str) -> socket.socket:
    """A socket bound to a free port of `host`.

    While it is open and does not listen, the kernel gives the port to nobody who asks for a free one, and a server
    that sets SO_REUSEADDR, as SGLang's does, can still bind it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def write_port(path: str, port: int) -> None:
    """Readers see no file or a whole one."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w") as file:
        file.write(f"{port}\n")
    os.replace(temporary, path)


def end_with(pid: int) -> None:
    """Kill this process when `pid` ends; the processes that SGLang spawned end with it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    selector = selectors.DefaultSelector()
    selector.register(descriptor, selectors.EVENT_READ)

    def watch() -> None:
        selector.select()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(argv: list[str] | None = None) -> None:
    args, flags = parse_args(sys.argv[1:] if argv is None else argv)
    if args.parent_pid is not None:
        end_with(args.parent_pid)
    host = flags[flags.index("--host") + 1] if "--host" in flags else "127.0.0.1"
    holder = reserve_port(host)
    port = holder.getsockname()[1]
    if args.port_file:
        write_port(args.port_file, port)

    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import prepare_server_args

    from slime.backends.sglang_utils.compat import Release, sampling_fields
    from slime.backends.sglang_utils.front import Front

    server_args = prepare_server_args([*flags, "--port", str(port)])
    http_server.app.add_middleware(
        Front,
        release=Release.of_installed(),
        model_path=server_args.model_path,
        keeps_released_weights=server_args.enable_weights_cpu_backup,
        on_cpu=server_args.device == "cpu",
        sampling_fields=sampling_fields(),
    )
    run_server(server_args)


if __name__ == "__main__":
    main()
