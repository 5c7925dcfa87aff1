"""Requests of the rollout sent from every node (`--use-distributed-post`).

One process has one event loop, which carries so many sockets and so much JSON at a time, through the network of one
node. With an actor on each node they are shared out; the rollout manager only waits for the replies.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from argparse import Namespace
from typing import Any

import aiohttp
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.observability import stacks
from slime.observability.run_dir import RunDir, redirect_output
from slime.utils import http_utils
from slime.utils.logging_utils import configure_logging

logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 65_536
"""Requests that one actor has in flight; the engines' own limits are far below."""


@ray.remote(num_cpus=0, max_concurrency=MAX_CONCURRENCY)
class HttpPoster:
    """Sends what it is told to send."""

    def __init__(self, args: Namespace, name: str) -> None:
        redirect_output(RunDir(args.run_dir).log_file(name))
        configure_logging(prefix=name)
        stacks.dump_on_signal()
        http_utils.init_http_client(args)

    async def post(self, url: str, payload: Any, max_retries: int, headers: dict[str, str] | None) -> Any:
        try:
            return await http_utils.request("POST", url, json_body=payload, max_retries=max_retries, headers=headers)
        except aiohttp.ClientError as error:
            # Most of them hold sockets and keys that do not travel.
            raise aiohttp.ClientConnectionError(f"{type(error).__name__}: {error}") from None


class Posters:
    """Takes the actors in turn. One whose node is lost is left out; without any, this process sends by itself."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors
        self._turn = itertools.count()

    async def __call__(self, url: str, payload: Any, max_retries: int, headers: dict[str, str] | None) -> Any:
        while self.actors:
            actor = self.actors[next(self._turn) % len(self.actors)]
            reply = actor.post.remote(url, payload, max_retries, headers)
            try:
                return await reply
            except asyncio.CancelledError:
                ray.cancel(reply)
                raise
            except RayActorError as error:
                if actor in self.actors:
                    self.actors.remove(actor)
                    logger.warning("a node no longer sends requests: %s", error)
            except RayTaskError as error:
                raise error.cause from None
        return await http_utils.request("POST", url, json_body=payload, max_retries=max_retries, headers=headers)


def start_posters(args: Namespace) -> Posters:
    """One actor on each node that is up."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return Posters(
        [
            HttpPoster.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                args, f"http-{number}"
            )
            for number, node in enumerate(nodes)
        ]
    )
