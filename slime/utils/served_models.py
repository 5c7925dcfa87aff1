"""What the engines of a run serve: models, and for each the groups of servers that share its requests.

Without `--sglang-config` there is one model, the policy, and one group. Slots are positions in the engines' placement;
the policy's come first, so that under --colocate they are trainer ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder")
"""`prefill` and `decode` servers do one half of each request; a `placeholder` only keeps its GPUs free."""

ADAPTER_NAME = "policy"
"""What engines call the trained adapter under `--lora-sync adapter`."""


@dataclass(frozen=True)
class ServerGroup:
    """Servers that are alike."""

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the arguments (`sglang_...`) that are others for its servers."""

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class EngineSpec:
    """One server of a model."""

    worker_type: str
    slots: range
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class ServedModel:
    """A model behind a router of its own.

    `update_weights`: it is the policy, whose engines get the trainers' weights; otherwise it stays as it was loaded.
    """

    name: str
    model_path: str
    update_weights: bool
    groups: tuple[ServerGroup, ...]
    first_slot: int = 0

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.groups)

    @property
    def is_disaggregated(self) -> bool:
        """Prefill and decode are done by different servers."""
        return any(group.worker_type == "prefill" for group in self.groups)

    def engines(self) -> list[EngineSpec]:
        """One after the other, in the order of the groups."""
        specs, slot = [], self.first_slot
        for group in self.groups:
            size = group.num_gpus_per_engine
            for i in range(group.num_engines):
                slots = range(slot + i * size, slot + (i + 1) * size)
                specs.append(EngineSpec(group.worker_type, slots, group.overrides))
            slot += group.num_gpus
        return specs

    def num_answering(self) -> int:
        """Servers that generate tokens."""
        return sum(group.num_engines for group in self.groups if group.worker_type != "prefill")


def one_group(path: str | None, num_gpus: int, num_gpus_per_engine: int) -> tuple[ServedModel, ...]:
    """What is served without `--sglang-config`: the policy, by servers that are all alike."""
    return (ServedModel("default", path, True, (ServerGroup("regular", num_gpus, num_gpus_per_engine),)),)


def policy_model(args: Namespace) -> ServedModel:
    """The model that rollouts are generated with: the one that is trained, else (without trainers) the first."""
    models = args.served_models
    return next((model for model in models if model.update_weights), models[0])


def policy_path(args: Namespace) -> str:
    """The checkpoint that the policy's engines start with."""
    return policy_model(args).model_path if args.served_models else args.hf_checkpoint


def engine_args(args: Namespace, model: ServedModel, spec: EngineSpec) -> Namespace:
    """The arguments as one server of `model` reads them."""
    own: dict[str, Any] = {"hf_checkpoint": model.model_path, "rollout_num_gpus_per_engine": len(spec.slots)}
    if model.name != policy_model(args).name:
        # Its memory is nobody else's, and nobody trains on what it says.
        own |= {"offload_rollout": False, "use_rollout_routing_replay": False, "lora_sync": "merged"}
    if spec.worker_type != "regular":
        own["sglang_disaggregation_mode"] = spec.worker_type
    return Namespace(**{**vars(args), **own, **spec.overrides})


def model_url(args: Namespace, name: str) -> str:
    """Where the requests for a model of `--sglang-config` go, e.g. `model_url(args, "reward") + "/generate"`.

    Raises:
        KeyError: the run serves no such model; the message names those that it does.
    """
    if name not in args.sglang_model_routers:
        served = ", ".join(sorted(args.sglang_model_routers)) or "none yet"
        raise KeyError(f"no model {name!r} is served (--sglang-config); there are: {served}")
    host, port = args.sglang_model_routers[name]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
