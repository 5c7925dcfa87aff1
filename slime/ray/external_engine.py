"""Engines that someone else runs (`--rollout-external`): controlled like the run's own, never started or ended."""

from __future__ import annotations

import os
import threading
from argparse import Namespace

import ray

from slime.ray.engine_actor import RolloutEngineActor
from slime.ray.server_process import ServerError, http_json

FIRST_ANSWER_SECS = 10.0


class ExternalServer:
    """What an engine actor asks of its server, for one that is no child of this process."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.pid = os.getpid()
        self._closed = threading.Event()

    def is_alive(self) -> bool:
        return True

    def raise_if_dead(self) -> None:
        """Only its answers can tell."""

    def wait_for_death(self) -> None:
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()


@ray.remote(concurrency_groups={"watch": 1, "side": 2}, num_cpus=0)
class ExternalEngineActor(RolloutEngineActor):
    """Controls the server at the `rank`-th address of `--rollout-external-engine-addrs`."""

    def __init__(self, args: Namespace, rank: int, name: str) -> None:
        super().__init__(args, rank, name)
        address = args.rollout_external_engine_addrs[rank]
        self._server = ExternalServer(self.name, f"http://{address}")

    def start(self) -> str:
        """Raises:
        ServerError: it does not answer.
        """
        url = self._server.url
        try:
            http_json("GET", url + "/health", timeout=FIRST_ANSWER_SECS)
        except ServerError as error:
            raise ServerError(f"--rollout-external-engine-addrs: {error}") from error
        return url

    @ray.method(concurrency_group="side")
    def pids(self) -> dict[str, int]:
        return {f"{self.name}-actor": os.getpid()}
