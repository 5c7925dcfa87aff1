"""The router of a run: which one it is, how it is started, and how engines are made known to it."""

from __future__ import annotations

import shlex
import sys
import time
from argparse import Namespace
from pathlib import Path
from urllib.parse import quote

from slime.ray.server_process import ServerError, ServerProcess, http_json
from slime.router import sglang

STARTUP_TIMEOUT_SECS = 60.0
REGISTRATION_TIMEOUT_SECS = 60.0
POLL_SECS = 0.1
QUEUE_TIMEOUT_SECS = 30.0
"""Longest wait for an engine when none is restarted: then nobody will come."""


class RouterProcess:
    """The router, or the address of one that runs already (`--sglang-router-ip`), which is left as it is at the end.

    Args:
        log_file: of the process.
    """

    def __init__(self, args: Namespace, log_file: Path) -> None:
        self.args = args
        self.log_file = log_file
        self.process: ServerProcess | None = None

    def start(self) -> str:
        """Start it and fill its address into the arguments; again on the same port after its death. The URL.

        Raises:
            ServerError: it did not start.
        """
        args = self.args
        if self.process is None and args.sglang_router_ip is not None:
            return self.url
        if self.process is not None:
            self.process.close()  # what its death has left of it
        port = args.sglang_router_port or 0
        command = self._own_command(port) if args.use_slime_router else self._sglang_command(port)
        self.process = ServerProcess("router", command, self.log_file, "127.0.0.1")
        self.process.wait_until_healthy(timeout=STARTUP_TIMEOUT_SECS)
        args.sglang_router_ip, args.sglang_router_port = self.process.host, self.process.port
        return self.url

    @property
    def url(self) -> str:
        return f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}"

    def _own_command(self, port: int) -> list[str]:
        args = self.args
        timeout = args.slime_router_timeout or args.sglang_router_request_timeout_secs
        command = [sys.executable, "-m", "slime.router.server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--request-timeout-secs", str(timeout)]
        command += ["--queue-timeout-secs", str(timeout if args.use_fault_tolerance else QUEUE_TIMEOUT_SECS)]
        command += ["--health-check-failure-threshold", str(args.slime_router_health_check_failure_threshold)]
        if args.slime_router_max_connections:
            command += ["--max-connections", str(args.slime_router_max_connections)]
        if args.slime_router_middleware_paths:
            command += ["--hf-checkpoint", args.hf_checkpoint]
            command += ["--middleware-paths", *args.slime_router_middleware_paths]
        return [*command, "--trust-remote-code"] if args.trust_remote_code else command

    def _sglang_command(self, port: int) -> list[str]:
        args = self.args
        python = sglang.find_python(args.sglang_router_env)
        command = [sys.executable, "-m", "slime.router.sglang", "--python", python, "--port", str(port)]
        flags = sglang.options(args)
        if "--request-timeout-secs" not in flags:
            flags += ["--request-timeout-secs", str(args.sglang_router_request_timeout_secs)]
        return [*command, f"--flags={shlex.join(flags)}"]

    def add(self, engine_url: str) -> None:
        """Make an engine known; returns when requests reach it.

        Raises:
            ServerError: the router refused it, or does not use it after a minute.
        """
        http_json("POST", self.url + "/workers", {"url": engine_url}, timeout=30.0)
        deadline = time.monotonic() + REGISTRATION_TIMEOUT_SECS
        while not any(_is_ready(worker, engine_url) for worker in self._workers()):
            if time.monotonic() > deadline:
                raise ServerError(f"the router does not use {engine_url} after {REGISTRATION_TIMEOUT_SECS:.0f} s")
            time.sleep(POLL_SECS)

    def remove(self, engine_url: str) -> None:
        """Let no more requests go to an engine; nothing happens when it is unknown.

        Raises:
            ServerError: the router does not answer.
        """
        for worker in self._workers():
            if worker["url"].rstrip("/") == engine_url:
                http_json("DELETE", f"{self.url}/workers/{quote(worker['id'], safe='')}", timeout=30.0)

    def _workers(self) -> list[dict]:
        return http_json("GET", self.url + "/workers", timeout=30.0)["workers"]

    def is_dead(self) -> bool:
        return self.process is not None and not self.process.is_alive()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


def _is_ready(worker: dict, engine_url: str) -> bool:
    return worker["url"].rstrip("/") == engine_url and worker["is_healthy"]
