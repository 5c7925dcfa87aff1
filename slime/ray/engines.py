"""From a placement to engine actors: one per engine, on the bundles of its devices."""

from __future__ import annotations

from argparse import Namespace
from itertools import groupby
from typing import Any

from slime.ray.engine_actor import EmbeddedEngineActor, SGLangEngineActor
from slime.ray.external_engine import ExternalEngineActor
from slime.ray.placement_group import ENGINE_FRACTION, PlacementSlice
from slime.utils.served_models import ServedModel, engine_args, policy_model


def engine_name(args: Namespace, model: ServedModel, rank: int) -> str:
    """What messages and log files call an engine."""
    return f"engine-{rank}" if model.name == policy_model(args).name else f"{model.name}-{rank}"


def create_engine(args: Namespace, placement: PlacementSlice, model: ServedModel, rank: int) -> Any:
    """The actor of engine `rank` of `model`; its `start` starts the server. An engine over several nodes has one
    actor, too."""
    name = engine_name(args, model, rank)
    if args.rollout_external:
        return ExternalEngineActor.remote(args, rank, name)
    spec = model.engines()[rank]
    own = engine_args(args, model, spec)
    parts = engine_nodes(placement, spec.slots)
    (first, gpus), *others = [(placement.options(bundle, ENGINE_FRACTION), gpus) for bundle, gpus in parts]
    if args.rollout_engine == "embedded":
        return EmbeddedEngineActor.options(**first).remote(own, rank, name)
    return SGLangEngineActor.options(**first).remote(own, rank, name, gpus, others)


def engine_nodes(placement: PlacementSlice, slots: range) -> list[tuple[int, list[str]]]:
    """For each node of an engine: the rank of its first bundle there, and its devices in bundle order."""
    parts = [list(part) for _, part in groupby(slots, key=lambda r: placement.nodes[r])]
    return [(part[0], [placement.gpus[r] for r in part if placement.gpus[r]]) for part in parts]
