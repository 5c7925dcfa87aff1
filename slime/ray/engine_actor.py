"""A Ray actor per inference engine: it owns the server process and controls it over HTTP.

The methods are SGLang's native endpoints, which the embedded engine serves too; a subclass only says how its server
is launched.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any

import ray

from slime.observability.run_dir import RunDir
from slime.ray.server_process import ServerProcess, http_json

STARTUP_TIMEOUT_SECS = 900.0
CONTROL_TIMEOUT_SECS = 600.0
FLUSH_PATIENCE_SECS = 60.0


class RolloutEngineActor:
    """Controls one engine server.

    Control methods run one at a time in the order of the calls. `wait_for_death`, `health`, `url` and `shutdown` run
    beside them (concurrency groups), so that a call that hangs can be seen and ended.
    """

    def __init__(self, args: Namespace, rank: int) -> None:
        self.args = args
        self.rank = rank
        self.name = f"engine-{rank}"
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
    def pids(self) -> dict[str, int]:
        return {self.name: self._server.pid, f"{self.name}-actor": os.getpid()}

    @ray.method(concurrency_group="side")
    def health(self, timeout: float = 5.0) -> None:
        """Raises ServerError when the server does not answer."""
        self._server.raise_if_dead()
        http_json("GET", self._server.url + "/health", timeout=timeout)

    @ray.method(concurrency_group="side")
    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()

    def flush_cache(self) -> None:
        """Drop the prefix cache; it is refused while requests run."""
        self._post("/flush_cache", {}, timeout=FLUSH_PATIENCE_SECS)

    def pause_generation(self, mode: str = "abort") -> None:
        self._post("/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self._post("/continue_generation", {})

    def abort_request(self, rid: str | None = None) -> None:
        self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def begin_weight_update(self) -> None:
        self._post("/begin_weight_update", {})

    def end_weight_update(self) -> None:
        self._post("/end_weight_update", {})

    def update_weights_from_tensor(self, payload: dict[str, Any]) -> None:
        self._post("/update_weights_from_tensor", payload)

    def update_weights_from_distributed(self, payload: dict[str, Any]) -> None:
        self._post("/update_weights_from_distributed", payload)

    def update_weights_from_disk(self, payload: dict[str, Any]) -> None:
        self._post("/update_weights_from_disk", payload)

    def init_weights_update_group(self, payload: dict[str, Any]) -> None:
        self._post("/init_weights_update_group", payload)

    def destroy_weights_update_group(self, group_name: str) -> None:
        self._post("/destroy_weights_update_group", {"group_name": group_name})

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._post("/release_memory_occupation", {} if tags is None else {"tags": tags})

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._post("/resume_memory_occupation", {} if tags is None else {"tags": tags})

    def weights_checker(self, action: str) -> Any:
        return self._post("/weights_checker", {"action": action})

    def get_weight_version(self) -> str:
        return http_json("GET", self._server.url + "/get_weight_version")["weight_version"]

    def get_server_info(self) -> dict[str, Any]:
        return http_json("GET", self._server.url + "/get_server_info")

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
        return [*command, "--trust-remote-code"] if args.trust_remote_code else command
