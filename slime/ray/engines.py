"""From a placement to engine actors: one per engine, on the bundles of its devices."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.ray.engine_actor import EmbeddedEngineActor, SGLangEngineActor
from slime.ray.placement_group import ENGINE_FRACTION, PlacementSlice


def num_engines(args: Namespace, placement: PlacementSlice) -> int:
    return len(placement) // args.rollout_num_gpus_per_engine


def create_engine(args: Namespace, placement: PlacementSlice, rank: int) -> Any:
    """The actor of engine `rank`; its `start` starts the server. An engine over several nodes has one actor, too."""
    size = args.rollout_num_gpus_per_engine
    ranks = range(rank * size, (rank + 1) * size)
    options = placement.options(ranks[0], ENGINE_FRACTION)
    if args.rollout_engine == "embedded":
        return EmbeddedEngineActor.options(**options).remote(args, rank)
    parts: list[tuple[int, list[str]]] = []
    last_node = None
    for r in ranks:
        if placement.nodes[r] != last_node:
            last_node = placement.nodes[r]
            parts.append((r, []))
        if placement.gpus[r]:
            parts[-1][1].append(placement.gpus[r])
    (_, gpus), *others = parts
    followers = [(placement.options(r, ENGINE_FRACTION), node_gpus) for r, node_gpus in others]
    return SGLangEngineActor.options(**options).remote(args, rank, gpus, followers)
