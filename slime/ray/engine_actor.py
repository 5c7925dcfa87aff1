"""A Ray actor per inference engine: it owns the server process and controls it over HTTP.

The methods are SGLang's native endpoints, which the embedded engine serves too; a subclass only says how its server
is launched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from slime.backends.sglang_utils.command import launch_command, launch_env
from slime.observability.run_dir import RunDir
from slime.ray.server_process import ServerError, ServerProcess, http_json

STARTUP_TIMEOUT_SECS = 900.0
CONTROL_TIMEOUT_SECS = 600.0
FLUSH_PATIENCE_SECS = 60.0
FLUSH_INTERVAL_SECS = 0.05
FOLLOWER_CHECK_SECS = 1.0
DIST_INIT_PORTS = range(10000, 30000)
"""Below the kernel's ephemeral range."""
DERIVED_PORTS = 64
"""SGLang takes the ports behind the one of --dist-init-addr for its own messages."""


class RolloutEngineActor:
    """Controls one engine server.

    Control methods run one at a time in the order of the calls. `wait_for_death`, `health`, `url` and `shutdown` run
    beside them (concurrency groups), so that a call that hangs can be seen and ended.
    """

    def __init__(self, args: Namespace, rank: int, name: str) -> None:
        self.args = args
        self.rank = rank
        self.name = name
        self._server: ServerProcess | None = None

    def launch_command(self) -> list[str]:
        """argv of the server, without `--port-file` and `--parent-pid`."""
        raise NotImplementedError

    def launch_env(self) -> dict[str, str]:
        """Environment variables added to the actor's own."""
        return {}

    def host(self) -> str:
        """Where the server listens: the loopback, unless engines and router stand on several nodes."""
        if ray.util.get_node_ip_address() == "127.0.0.1" or len(ray.nodes()) == 1:
            return "127.0.0.1"
        return ray.util.get_node_ip_address()

    def start(self) -> str:
        """Start the server and wait until it is healthy; returns its URL.

        Raises:
            ServerError: it died or never became healthy; the message ends with the end of its log.
        """
        log_file = RunDir(self.args.run_dir).log_file(self.name)
        self._server = ServerProcess(self.name, self.launch_command(), log_file, self.host(), self.launch_env())
        return self._server.wait_until_healthy(timeout=STARTUP_TIMEOUT_SECS)

    @ray.method(concurrency_group="watch")
    def wait_for_death(self) -> str | None:
        """Block until the server ends; how it died, or None when it was shut down."""
        return self._server.wait_for_death()

    @ray.method(concurrency_group="side")
    def url(self) -> str:
        return self._server.url

    @ray.method(concurrency_group="side")
    def bootstrap_port(self) -> int | None:
        """Where decode servers meet this one, if it only prefills."""
        return None

    @ray.method(concurrency_group="side")
    def pids(self) -> dict[str, int]:
        return {self.name: self._server.pid, f"{self.name}-actor": os.getpid()}

    @ray.method(concurrency_group="side")
    def health(self, timeout: float = 5.0, path: str = "/health") -> None:
        """Raises ServerError when the server does not answer."""
        self._server.raise_if_dead()
        http_json("GET", self._server.url + path, timeout=timeout)

    @ray.method(concurrency_group="side")
    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()

    def flush_cache(self) -> None:
        """Drop the prefix cache; an engine refuses while its last requests wind down, so ask again for a while."""
        deadline = time.monotonic() + FLUSH_PATIENCE_SECS
        while True:
            try:
                self._post("/flush_cache", {}, timeout=FLUSH_PATIENCE_SECS)
                return
            except ServerError as error:
                if error.status != 400 or time.monotonic() > deadline:
                    raise
            time.sleep(FLUSH_INTERVAL_SECS)

    def pause_generation(self, mode: str = "abort") -> None:
        self._post("/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self._post("/continue_generation", {})

    def abort_request(self, rid: str | None = None) -> None:
        self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def update_weights_from_disk(self, payload: dict[str, Any]) -> None:
        self._post("/update_weights_from_disk", payload)

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._post("/release_memory_occupation", {} if tags is None else {"tags": tags})

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._post("/resume_memory_occupation", {} if tags is None else {"tags": tags})

    def weights_checker(self, action: str) -> Any:
        return self._post("/weights_checker", {"action": action})

    def get_weight_version(self) -> str:
        return http_json("GET", self._server.url + "/get_model_info")["weight_version"]

    def _post(self, path: str, payload: dict[str, Any], timeout: float = CONTROL_TIMEOUT_SECS) -> Any:
        self._server.raise_if_dead()
        return http_json("POST", self._server.url + path, payload, timeout)


@ray.remote(concurrency_groups={"watch": 1, "side": 2})
class EmbeddedEngineActor(RolloutEngineActor):
    """Launches the embedded engine (`slime.engine.server`)."""

    def launch_command(self) -> list[str]:
        args = self.args
        options = {
            "--model-path": args.hf_checkpoint,
            "--host": self.host(),
            "--port": 0,
            "--device": args.device,
            "--dtype": args.sglang_dtype or args.dtype,
            "--random-seed": args.seed + self.rank,
            "--max-running-requests": args.sglang_max_running_requests,
            "--max-total-tokens": args.sglang_max_total_tokens,
            "--context-length": args.sglang_context_length,
            "--page-size": args.sglang_page_size,
            "--chunked-prefill-size": args.sglang_chunked_prefill_size,
            "--mem-fraction-static": args.sglang_mem_fraction_static,
        }
        command = [sys.executable, "-m", "slime.engine.server"]
        for flag, value in options.items():
            if value is not None:
                command += [flag, str(value)]
        switches = {"--trust-remote-code": args.trust_remote_code, "--batch-invariant": args.true_on_policy_mode}
        return command + [flag for flag, given in switches.items() if given]


@ray.remote(concurrency_groups={"watch": 1, "side": 2})
class SGLangEngineActor(RolloutEngineActor):
    """Launches a stock SGLang server, tensor-parallel over its GPUs, on one or several nodes.

    Args:
        gpus: devices of this node, in tensor-parallel order; empty on CPU.
        followers: for each further node, the options of an actor on it and its devices.
    """

    def __init__(
        self,
        args: Namespace,
        rank: int,
        name: str,
        gpus: Sequence[str] = (),
        followers: Sequence[tuple[dict, list[str]]] = (),
    ) -> None:
        super().__init__(args, rank, name)
        self.gpus = list(gpus)
        self._followers = [
            SGLangNodeActor.options(**options).remote(args, rank, f"{name}-node-{node_rank}", node_rank, node_gpus)
            for node_rank, (options, node_gpus) in enumerate(followers, start=1)
        ]
        self._dist_init_addr: str | None = None

    def launch_command(self) -> list[str]:
        nnodes = 1 + len(self._followers)
        return launch_command(self.args, self.rank, self.host(), 0, nnodes, self._dist_init_addr)

    def launch_env(self) -> dict[str, str]:
        return launch_env(self.args, self.gpus)

    def start(self) -> str:
        """As the base class; the processes of an engine over several nodes find each other on this one."""
        if vars(self.args).get("sglang_disaggregation_mode") == "prefill":
            self.args.sglang_disaggregation_bootstrap_port = free_port_block(self.host(), 1)
        if self._followers:
            self._dist_init_addr = f"{self.host()}:{free_port_block(self.host(), DERIVED_PORTS)}"
        nnodes = 1 + len(self._followers)
        starting = [follower.start.remote(self._dist_init_addr, nnodes) for follower in self._followers]
        with one_start_per_gpu(self.gpus):
            url = super().start()
        ray.get(starting)
        return url

    @ray.method(concurrency_group="side")
    def bootstrap_port(self) -> int | None:
        return vars(self.args).get("sglang_disaggregation_bootstrap_port")

    @ray.method(concurrency_group="watch")
    def wait_for_death(self) -> str | None:
        deaths = [follower.wait_for_death.remote() for follower in self._followers]
        while deaths and self._server.is_alive():
            done, deaths = ray.wait(deaths, timeout=FOLLOWER_CHECK_SECS)
            death = next((text for text in ray.get(done) if text is not None), None)
            if death is not None and not self._server.is_closing:
                return death
        return self._server.wait_for_death()

    @ray.method(concurrency_group="side")
    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        ray.get([follower.shutdown.remote() for follower in self._followers])


@ray.remote(concurrency_groups={"watch": 1, "side": 2})
class SGLangNodeActor:
    """The part of an engine on one of its further nodes: a process that the engine's own server commands."""

    def __init__(self, args: Namespace, rank: int, name: str, node_rank: int, gpus: list[str]) -> None:
        self.args = args
        self.rank = rank
        self.name = name
        self.node_rank = node_rank
        self.gpus = gpus
        self._server: ServerProcess | None = None

    def start(self, dist_init_addr: str, nnodes: int) -> None:
        host = ray.util.get_node_ip_address()
        command = launch_command(self.args, self.rank, host, self.node_rank, nnodes, dist_init_addr)
        log_file = RunDir(self.args.run_dir).log_file(self.name)
        self._server = ServerProcess(self.name, command, log_file, host, launch_env(self.args, self.gpus))
        self._server.wait_until_healthy(timeout=STARTUP_TIMEOUT_SECS)

    @ray.method(concurrency_group="watch")
    def wait_for_death(self) -> str | None:
        return self._server.wait_for_death()

    @ray.method(concurrency_group="side")
    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()


@contextlib.contextmanager
def one_start_per_gpu(gpus: Sequence[str]) -> Iterator[None]:
    """Servers that start together on one GPU would each take the other's memory for free: one after the other."""
    with contextlib.ExitStack() as stack:
        for gpu in sorted(gpus):
            path = Path(tempfile.gettempdir()) / f"slime-engine-start-{os.getuid()}-gpu-{gpu}.lock"
            fcntl.flock(stack.enter_context(open(path, "w")), fcntl.LOCK_EX)
        yield


def free_port_block(host: str, count: int) -> int:
    """The first of `count` neighbouring ports that are free on `host` now.

    Raises:
        ServerError: none was found.
    """
    starts = list(range(DIST_INIT_PORTS.start, DIST_INIT_PORTS.stop - count, count))
    random.shuffle(starts)
    for start in starts:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(start, start + count):
                stack.enter_context(socket.socket()).bind((host, port))
            return start
    raise ServerError(f"no {count} neighbouring free ports on {host} in {DIST_INIT_PORTS}")
