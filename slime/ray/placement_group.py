"""Which process runs where: one Ray placement group of one-device bundles, cut into slices.

A bundle is one GPU, or one worker slot with `--device cpu`. Bundles are put in the order (node, device), so that
consecutive ranks are neighbours. Colocated trainers and engines use the same bundles, each a fraction of it.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from slime.ray.session import Session
    from slime.ray.trainers import Trainers

TRAIN_FRACTION = 0.4
ENGINE_FRACTION = 0.2
PLACEMENT_TIMEOUT_SECS = 300.0


@dataclass(frozen=True)
class PlacementSlice:
    """Bundles of a placement group, one per rank."""

    pg: PlacementGroup | None
    bundle_indices: tuple[int, ...]
    device: str
    nodes: tuple[str, ...]
    """Ray's id of the node that each bundle is on."""
    gpus: tuple[str, ...]
    """The node's device of each bundle, as in CUDA_VISIBLE_DEVICES; empty strings with `--device cpu`."""

    def __len__(self) -> int:
        return len(self.bundle_indices)

    def options(self, rank: int, fraction: float) -> dict[str, Any]:
        """Options for `Actor.options(**...)` that put an actor on the bundle of `rank` with a share of its device."""
        return {
            "num_cpus": fraction,
            "num_gpus": fraction if self.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.pg, placement_group_bundle_index=self.bundle_indices[rank]
            ),
        }


def num_slots(args: Namespace) -> tuple[int, int]:
    """`(trainer slots, engine slots)`; none of the kind that the run does without."""
    actor = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    return actor, 0 if args.debug_train_only or args.rollout_external else args.rollout_num_gpus


def total_slots(args: Namespace) -> int:
    """Bundles that the run needs."""
    actor, rollout = num_slots(args)
    return max(actor, rollout) if args.colocate else actor + rollout


def create_placement_groups(args: Namespace) -> dict[str, PlacementSlice]:
    """Reserve the devices: slices `actor` and `rollout`.

    Raises:
        RuntimeError: the cluster cannot place them; the message has the arithmetic.
    """
    actor, rollout = num_slots(args)
    if total_slots(args) == 0:  # engines of someone else, and nothing to train
        return dict.fromkeys(("actor", "rollout"), _slice(None, [], args.device))
    pg = _reserve(total_slots(args), args.device)
    bundles = _ordered_bundles(pg, args.device)
    engines = bundles[:rollout] if args.colocate else bundles[actor:]
    return {"actor": _slice(pg, bundles[:actor], args.device), "rollout": _slice(pg, engines, args.device)}


def _slice(pg: PlacementGroup | None, bundles: list[tuple[str, str, int]], device: str) -> PlacementSlice:
    nodes, gpus, indices = zip(*bundles, strict=True) if bundles else ((), (), ())
    return PlacementSlice(pg, indices, device, nodes, gpus)


def _reserve(count: int, device: str) -> PlacementGroup:
    bundle = {"GPU": 1, "CPU": 1} if device == "cuda" else {"CPU": 1}
    have = ray.cluster_resources()
    kind = "GPU" if device == "cuda" else "CPU"
    if have.get(kind, 0) < count:
        raise RuntimeError(
            f"the run needs {count} {kind} slots (trainers: --actor-num-nodes x --actor-num-gpus-per-node; engines: "
            f"--rollout-num-gpus, shared under --colocate) but the Ray cluster has {have.get(kind, 0):g}"
        )
    pg = placement_group([bundle] * count, strategy="PACK")
    if not pg.wait(PLACEMENT_TIMEOUT_SECS):
        remove_placement_group(pg)
        raise RuntimeError(
            f"no place for {count} bundles of {bundle} within {PLACEMENT_TIMEOUT_SECS:.0f} s; free on the cluster: "
            f"{ray.available_resources()}"
        )
    return pg


def _ordered_bundles(pg: PlacementGroup, device: str) -> list[tuple[str, str, int]]:
    """(node, GPU, bundle index), sorted by node, then by the GPU that Ray gave the bundle."""
    nodes = placement_group_table(pg)["bundles_to_node_id"]
    if device == "cpu":
        return sorted((node, "", bundle) for bundle, node in nodes.items())
    probe = ray.remote(num_gpus=ENGINE_FRACTION, num_cpus=0)(_visible_gpu)
    gpus = ray.get(
        [
            probe.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(pg, placement_group_bundle_index=bundle)
            ).remote()
            for bundle in sorted(nodes)
        ]
    )
    return [(nodes[b], str(gpus[b]), b) for b in sorted(nodes, key=lambda bundle: (nodes[bundle], gpus[bundle]))]


def _visible_gpu() -> int:
    return int(ray.get_gpu_ids()[0])


def create_training_models(args: Namespace, slices: dict[str, PlacementSlice], session: Session) -> Trainers | None:
    """Start the trainer processes, policy and critic on the same bundles; none under `--debug-rollout-only`.

    They import their backend at once, while the engines start; `init` builds the models.
    """
    if args.debug_rollout_only:
        return None
    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.trainers import Trainers

    groups = []
    for role in ("actor", "critic") if args.use_critic else ("actor",):
        group = RayTrainGroup(args, args.actor_num_nodes, args.actor_num_gpus_per_node, slices["actor"], role)
        for rank, actor in enumerate(group.actors):
            session.name_actor(actor, group.process_name(rank))
        session.on_close(group.dispose)
        groups.append(group)
    return Trainers(groups[0], groups[1] if args.use_critic else None, session)
