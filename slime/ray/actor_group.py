"""All trainer ranks of one role as one object: calls go to every rank, errors come back with the rank's name."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from slime.observability.run_dir import RunDir
from slime.ray.placement_group import TRAIN_FRACTION, PlacementSlice
from slime.utils.misc import load_function

BACKENDS = {
    ("fsdp", "actor"): "slime.backends.fsdp_utils.actor.FSDPTrainRayActor",
    ("fsdp", "critic"): "slime.backends.fsdp_utils.critic.FSDPCriticRayActor",
    ("megatron", "actor"): "slime.backends.megatron_utils.actor.MegatronTrainRayActor",
    ("megatron", "critic"): "slime.backends.megatron_utils.critic.MegatronCriticRayActor",
}

# For glibc's malloc. The threshold of its own mappings is the highest that it takes.
KEEP_HOST_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 50)}


class TrainWorker:
    """The Ray actor around a trainer rank: it imports the backend in its own process, so that the driver need not."""

    def __init__(self, backend: str, role: str, world_size: int, rank: int, master: tuple[str | None, int | None]):
        self._trainer = load_function(BACKENDS[backend, role])(world_size, rank, *master)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._trainer, method)(*args, **kwargs)


class TrainError(RuntimeError):
    """A trainer rank failed; the message names role and rank."""


class RayTrainGroup:
    """Creates the trainer actors in the bundles of `placement`, rank by rank.

    Args:
        num_nodes, num_gpus_per_node: world size is their product.
        role: "actor" or "critic".
    """

    def __init__(
        self, args: Namespace, num_nodes: int, num_gpus_per_node: int, placement: PlacementSlice, role: str = "actor"
    ):
        self.args = args
        self.role = role
        self.world_size = num_nodes * num_gpus_per_node
        if len(placement) < self.world_size:
            raise ValueError(f"{self.world_size} {role} ranks need as many bundles, but there are {len(placement)}")
        worker = ray.remote(TrainWorker)
        env = {"env_vars": _environment(args)}
        self.actors: list[Any] = []
        master: tuple[str | None, int | None] = (None, None)
        for rank in range(self.world_size):
            options = placement.options(rank, TRAIN_FRACTION)
            actor = worker.options(**options, runtime_env=env).remote(
                args.train_backend, role, self.world_size, rank, master
            )
            actor.call.remote("redirect_logs", str(self._log_file(rank)), self.process_name(rank))
            if rank == 0 and self.world_size > 1:
                master = ray.get(actor.call.remote("get_master_addr_and_port"))
            self.actors.append(actor)

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of a part's micro-batches is a multiple of: chunks of pipeline stages take turns by it."""
        args = self.args
        return args.pipeline_model_parallel_size if args.virtual_pipeline_model_parallel_size else 1

    def process_name(self, rank: int) -> str:
        """What messages and log files call a rank."""
        return f"train-{rank}" if self.role == "actor" else f"{self.role}-{rank}"

    def _log_file(self, rank: int) -> Path:
        return RunDir(self.args.run_dir).log_file(self.process_name(rank))

    @property
    def dp_size(self) -> int:
        """Parts that a rollout is cut into."""
        args = self.args
        model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
        return self.world_size // model

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Start `method` on every rank."""
        return [actor.call.remote(method, *args, **kwargs) for actor in self.actors]

    def get(self, refs: list[ray.ObjectRef]) -> list[Any]:
        """Results of `call`. The first rank to fail ends the wait, since the others may then wait for it forever.

        Raises:
            TrainError: names the rank and its log.
        """
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            for ref in done:
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as error:
                    rank = ranks[ref]
                    raise TrainError(
                        f"{self.role} rank {rank} failed (its log: {self._log_file(rank)}): {error}"
                    ) from error
        return ray.get(refs)

    def async_init(self, args: Namespace, with_ref: bool = False) -> list[ray.ObjectRef]:
        return self.call("init", args, self.role, with_ref)

    def init(self, args: Namespace, with_ref: bool = False) -> int:
        """Build everything; the first rollout id to run."""
        return self.get(self.async_init(args, with_ref))[0]

    def async_train(
        self, rollout_id: int, refs: list[ray.ObjectRef], shared: Sequence[list[ray.ObjectRef]] = ()
    ) -> list[ray.ObjectRef]:
        """`shared`: what the other role computed, each with a ref per rank to arrays per sample by key."""
        return self.call("train", rollout_id, refs, shared)

    def train(self, rollout_id: int, refs: list[ray.ObjectRef]) -> dict[str, float]:
        return self.get(self.async_train(rollout_id, refs))[0]

    def connect(self, rollout_manager: Any) -> None:
        """Make the engines known to the trainers and the number of trainers to the manager."""
        config = {"dp_size": self.dp_size, "micro_batch_multiple": self.micro_batch_multiple}
        ray.get(rollout_manager.set_train_parallel_config.remote(config))
        engines, slots = ray.get(rollout_manager.get_rollout_engines.remote())
        if engines:
            urls = ray.get([engine.url.remote() for engine in engines])
            self.get(self.call("set_rollout_engines", urls, slots))

    def update_weights(self) -> dict[str, float]:
        return self.get(self.call("update_weights"))[0]

    def check_weights(self) -> None:
        self.get(self.call("check_weights"))

    def save_model(self, rollout_id: int) -> dict[str, float]:
        return self.get(self.call("save_model", rollout_id))[0]

    def offload(self) -> dict[str, float]:
        return self.get(self.call("offload"))[0]

    def onload(self) -> dict[str, float]:
        return self.get(self.call("onload"))[0]

    def pids(self) -> dict[str, int]:
        return {self.process_name(rank): pid for rank, pid in enumerate(self.get(self.call("pid")))}

    def dispose(self) -> None:
        """Let the ranks leave their groups and end the actors; one that does not answer is killed all the same."""
        ray.wait(self.call("dispose"), num_returns=self.world_size, timeout=10.0)
        for actor in self.actors:
            ray.kill(actor)


def _environment(args: Namespace) -> dict[str, str]:
    """What trainers have beside the environment of the run."""
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"} if args.deterministic_mode else {}
    if args.device == "cpu" and not args.offload_train:
        # Activations of each step in the memory of the last: pages that the system takes back cost a fault each.
        env |= KEEP_HOST_MEMORY
    if args.rollout_engine == "sglang" and not args.colocate:
        # As SGLang sets them for itself: ranks of one communicator must agree on how memory is mapped.
        env |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    return env | {name: str(value) for name, value in args.train_env_vars.items()}
