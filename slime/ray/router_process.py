"""The router of a model: which one it is, how it is started, and how engines are made known to it."""

from __future__ import annotations

import shlex
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ray

from slime.ray.server_process import ServerError, ServerProcess, http_json
from slime.router import sglang
from slime.utils.served_models import ServedModel, model_url, policy_model

STARTUP_TIMEOUT_SECS = 60.0
REGISTRATION_TIMEOUT_SECS = 60.0
POLL_SECS = 0.1
QUEUE_TIMEOUT_SECS = 30.0
"""Longest wait for an engine when none is restarted: then nobody will come."""


def router_name(args: Namespace, model: ServedModel) -> str:
    """What messages and log files call a router."""
    return "router" if model.name == policy_model(args).name else f"router-{model.name}"


class RouterProcess:
    """The router, or the address of one that runs already (`--sglang-router-ip`, for the policy), which is left as it
    is at the end.

    Args:
        log_file: of the process.
        model: what is behind it.
    """

    def __init__(self, args: Namespace, log_file: Path, model: ServedModel) -> None:
        self.args = args
        self.log_file = log_file
        self.model = model
        self.name = router_name(args, model)
        self.of_policy = model.name == policy_model(args).name
        self.process: ServerProcess | None = None

    def start(self) -> str:
        """Start it and fill its address into the arguments; again on the same port after its death. The URL.

        Raises:
            ServerError: it did not start.
        """
        args, port = self.args, 0
        if self.process is not None:
            self.process.close()  # what its death has left of it
            port = self.process.port
        elif self.of_policy and args.sglang_router_ip is not None:
            self._announce(args.sglang_router_ip, args.sglang_router_port)
            self._check_answers()
            return self.url
        own = args.use_slime_router or sglang.find_python(args.sglang_router_env) is None
        command = self._own_command(port) if own else self._sglang_command(port)
        self.process = ServerProcess(self.name, command, self.log_file, self._host())
        self.process.wait_until_healthy(timeout=STARTUP_TIMEOUT_SECS)
        self._announce(self.process.host, self.process.port)
        return self.url

    def _host(self) -> str:
        """Where it listens: the loopback, unless requests come from other nodes, too."""
        if not self.args.use_distributed_post or len(ray.nodes()) == 1:
            return "127.0.0.1"
        return ray.util.get_node_ip_address()

    def _announce(self, host: str, port: int) -> None:
        if self.of_policy:
            self.args.sglang_router_ip, self.args.sglang_router_port = host, port
        self.args.sglang_model_routers[self.model.name] = (host, port)

    @property
    def url(self) -> str:
        return model_url(self.args, self.model.name)

    def _own_command(self, port: int) -> list[str]:
        args = self.args
        timeout = args.slime_router_timeout or args.sglang_router_request_timeout_secs
        command = [sys.executable, "-m", "slime.router.server", "--host", self._host(), "--port", str(port)]
        command += ["--request-timeout-secs", str(timeout)]
        command += ["--queue-timeout-secs", str(timeout if args.use_fault_tolerance else QUEUE_TIMEOUT_SECS)]
        command += ["--health-check-failure-threshold", str(args.slime_router_health_check_failure_threshold)]
        if args.slime_router_max_connections:
            command += ["--max-connections", str(args.slime_router_max_connections)]
        if args.slime_router_middleware_paths and self.of_policy:
            command += ["--hf-checkpoint", args.hf_checkpoint]
            command += ["--middleware-paths", *args.slime_router_middleware_paths]
        return [*command, "--trust-remote-code"] if args.trust_remote_code else command

    def _sglang_command(self, port: int) -> list[str]:
        args = self.args
        python = sglang.find_python(args.sglang_router_env)
        command = [sys.executable, "-m", "slime.router.sglang", "--python", python]
        command += ["--host", self._host(), "--port", str(port)]
        flags = sglang.options(args)
        if self.model.is_disaggregated:
            flags += ["--pd-disaggregation"]
        if "--request-timeout-secs" not in flags:
            flags += ["--request-timeout-secs", str(args.sglang_router_request_timeout_secs)]
        return [*command, f"--flags={shlex.join(flags)}"]

    def add(self, engine_url: str, worker_type: str = "regular", bootstrap_port: int | None = None) -> None:
        """Make an engine known; returns when requests reach it.

        Args:
            worker_type: "prefill" or "decode" for a server that does half of each request.
            bootstrap_port: where decode servers meet a prefill server.

        Raises:
            ServerError: the router refused it, or does not use it after a minute.
        """
        worker: dict[str, Any] = {"url": engine_url}
        if worker_type != "regular":
            worker["worker_type"] = worker_type
        if worker_type == "prefill":
            worker["bootstrap_port"] = bootstrap_port
        http_json("POST", self.url + "/workers", worker, timeout=30.0)
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

    def _check_answers(self) -> None:
        args = self.args
        try:
            self._workers()
        except (ServerError, KeyError, TypeError) as error:
            flags = f"--sglang-router-ip {args.sglang_router_ip} --sglang-router-port {args.sglang_router_port}"
            fix = "start it, or leave both out for a router of the run's own"
            raise ServerError(f"{flags}: no router answers there ({error})\n    fix: {fix}") from error

    def _workers(self) -> list[dict]:
        return http_json("GET", self.url + "/workers", timeout=30.0)["workers"]

    def is_dead(self) -> bool:
        return self.process is not None and not self.process.is_alive()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


def _is_ready(worker: dict, engine_url: str) -> bool:
    return worker["url"].rstrip("/") == engine_url and worker["is_healthy"]
