"""From a placement to engine actors: one per engine, on the bundles of its devices."""

from __future__ import annotations

from argparse import Namespace
from itertools import groupby
from typing import Any

from slime.ray.engine_actor import EmbeddedEngineActor, SGLangEngineActor
from slime.ray.external_engine import ExternalEngineActor
from slime.ray.placement_group import ENGINE_FRACTION, PlacementSlice


def num_engines(args: Namespace, placement: PlacementSlice) -> int:
    if args.rollout_external:
        return len(args.rollout_external_engine_addrs)
    return len(placement) // args.rollout_num_gpus_per_engine


def create_engine(args: Namespace, placement: PlacementSlice, rank: int) -> Any:
    """The actor of engine `rank`; its `start` starts the server. An engine over several nodes has one actor, too."""
    if args.rollout_external:
        return ExternalEngineActor.remote(args, rank)
    parts = engine_nodes(placement, args.rollout_num_gpus_per_engine, rank)
    (first, gpus), *others = [(placement.options(bundle, ENGINE_FRACTION), gpus) for bundle, gpus in parts]
    if args.rollout_engine == "embedded":
        return EmbeddedEngineActor.options(**first).remote(args, rank)
    return SGLangEngineActor.options(**first).remote(args, rank, gpus, others)


def engine_nodes(placement: PlacementSlice, size: int, rank: int) -> list[tuple[int, list[str]]]:
    """For each node of engine `rank`: the rank of its first bundle there, and its devices in bundle order."""
    ranks = range(rank * size, (rank + 1) * size)
    parts = [list(part) for _, part in groupby(ranks, key=lambda r: placement.nodes[r])]
    return [(part[0], [placement.gpus[r] for r in part if placement.gpus[r]]) for part in parts]
