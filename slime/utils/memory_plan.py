"""What a run will hold on each GPU, predicted before anything is launched.

Weights, gradients, optimizer states and KV cache follow from shapes and flags. Activations are an estimate for the
largest micro-batch (`--max-tokens-per-gpu`), and what CUDA contexts, graphs and communication buffers take was
measured (H100 and H200, SGLang 0.5.17, torch 2.11).
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.utils.checkpoint_files import checkpoint_headers, read_config
from slime.utils.served_models import ServedModel, engine_args, policy_model

GIB = 1024**3
TRAINER_ASLEEP = 1.9 * GIB
"""CUDA context and libraries of a trainer that gave its tensors back."""
MEGATRON_GROUPS = 3.0 * GIB
"""What NCCL keeps for the process groups of Megatron over several GPUs that are in use (measured with TP2 x PP2)."""
ENGINE_RELEASED = 3.0 * GIB
"""The same of an engine whose weights and KV cache are released, with its CUDA graphs."""
ENGINE_WORKSPACE = 1.0 * GIB
"""What a serving engine takes beyond its static share."""
HEAD_CHUNK = 2 * 2**29
"""A chunk of logits (slime.training.logprobs.KERNEL_CHUNK_ELEMENTS in bf16)."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8}
MARGIN_TOKENS = 64


@dataclass(frozen=True)
class ModelSize:
    """What the arithmetic needs of a checkpoint."""

    params: int
    expert_params: int
    """Of `params`, those of routed experts, which expert parallelism divides."""
    weight_bytes: int
    """Of the files; an engine loads them in its own dtype unless they are quantised."""
    quantised: bool
    adapter_unit: int
    """Parameters of a rank-1 adapter on every matrix of the decoder layers."""
    config: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        return self.config[name]

    @property
    def layers(self) -> int:
        return self["num_hidden_layers"]

    @property
    def attention_layers(self) -> int:
        """Those that keep keys and values; linear attention keeps a state per sequence."""
        kinds = self.config.get("layer_types")
        if kinds is None and self.config.get("model_type") == "qwen3_next":
            return self.layers // self.config.get("full_attention_interval", 4)
        return self.layers - (kinds or []).count("linear_attention")

    def kv_bytes_per_token(self, tensor_parallel: int, dtype_bytes: int) -> int:
        """Keys and values of one token on one GPU; key/value heads are repeated when there are fewer than GPUs.

        Latent attention (arXiv 2405.04434) keeps one compressed vector for all heads, on every GPU.
        """
        if self.config.get("kv_lora_rank"):
            return self.layers * (self["kv_lora_rank"] + self["qk_rope_head_dim"]) * dtype_bytes
        heads = self.config.get("num_key_value_heads") or self["num_attention_heads"]
        return 2 * self.attention_layers * math.ceil(heads / tensor_parallel) * self.head_dim * dtype_bytes

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self["hidden_size"] // self["num_attention_heads"]

    def layer_activation_bytes(self, dtype_bytes: int) -> int:
        """What the backward pass needs of one layer, per token: inputs and outputs of norms, projections, attention
        and the gated MLP (of experts, those that a token visits)."""
        hidden = self["hidden_size"]
        queries = self["num_attention_heads"] * self.head_dim
        keys = 2 * (self.config.get("num_key_value_heads") or self["num_attention_heads"]) * self.head_dim
        visited = self.config.get("num_experts_per_tok") or 1
        expert = self.config.get("moe_intermediate_size") if self.expert_params else None
        inner = visited * expert if expert else self.config.get("intermediate_size") or 4 * hidden
        values = 4 * hidden + 2 * (queries + keys) + (2 * queries + keys) + 4 * inner
        return values * dtype_bytes


@dataclass(frozen=True)
class Phase:
    """What one GPU holds at a time, in bytes by part."""

    name: str
    parts: Mapping[str, float]
    certain: frozenset[str] = frozenset()
    """Parts that are no estimate."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def at_least(self) -> float:
        return sum(self.parts[name] for name in self.certain)


@dataclass(frozen=True)
class MemoryPlan:
    """Phases of the trainers' and the engines' GPUs; under --colocate they are the same GPUs."""

    phases: tuple[Phase, ...]
    gpu_bytes: int | None

    def text(self) -> str:
        """A line per phase."""
        size = f" of {self.gpu_bytes / GIB:.1f}" if self.gpu_bytes else ""
        lines = [f"predicted memory per GPU (GiB{size}):"]
        for phase in self.phases:
            parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in phase.parts.items() if value > 0.05 * GIB)
            over = self.gpu_bytes is not None and phase.total > self.gpu_bytes
            lines.append(f"  {phase.name}: {phase.total / GIB:.1f} = {parts}" + ("  (MAY NOT FIT)" if over else ""))
        return "\n".join(lines)


def read_size(path: str) -> ModelSize | None:
    """The size of a Hugging Face checkpoint; None where its files do not tell."""
    try:
        config = read_config(path)
        entries = checkpoint_headers(path)
    except (OSError, ValueError):
        return None
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if not entries or not all(text.get(k) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads")):
        return None
    counts = {name: math.prod(entry["shape"]) for name, entry in entries.items() if not name.endswith("_scale_inv")}
    matrices = [entry["shape"] for name, entry in entries.items() if ".layers." in name and len(entry["shape"]) == 2]
    return ModelSize(
        params=sum(counts.values()),
        expert_params=sum(count for name, count in counts.items() if ".experts." in name),
        weight_bytes=sum(math.prod(e["shape"]) * BYTES.get(e["dtype"], 1) for e in entries.values()),
        quantised=bool(config.get("quantization_config")),
        adapter_unit=sum(sum(shape) for shape in matrices),
        config=text,
    )


def engine_weight_bytes(size: ModelSize, args: Namespace) -> float:
    """Weights on one GPU of an engine with these arguments."""
    total = size.weight_bytes if size.quantised else size.params * BYTES[args.sglang_dtype or args.dtype]
    return total / args.rollout_num_gpus_per_engine


def engine_kv_bytes(size: ModelSize, args: Namespace) -> int:
    """KV cache of one token on one GPU of an engine with these arguments."""
    given = vars(args)
    replicas = max(given.get("sglang_dp_size") or 1, given.get("sglang_attn_dp_size") or 1)
    fp8 = (given.get("sglang_kv_cache_dtype") or "auto").startswith("fp8")
    dtype_bytes = 1 if fp8 else BYTES[args.sglang_dtype or args.dtype]
    return size.kv_bytes_per_token(max(1, args.rollout_num_gpus_per_engine // replicas), dtype_bytes)


def trainer_context(args: Namespace) -> float:
    """What a trainer has on its GPU beside tensors; while it is asleep the groups are gone."""
    alone = args.actor_num_nodes * args.actor_num_gpus_per_node == 1
    return TRAINER_ASLEEP + (MEGATRON_GROUPS if args.train_backend == "megatron" and not alone else 0.0)


def serving_phase(size: ModelSize, args: Namespace, name: str, gpu_bytes: int | None, beside: float) -> Phase:
    """One GPU of an engine; `args` as the engine reads them. `beside`: what a sleeping trainer takes there."""
    weights, fraction = engine_weight_bytes(size, args), args.sglang_mem_fraction_static
    parts = {"weights": weights, "trainer asleep": beside}
    if gpu_bytes is not None and fraction is not None:
        parts["KV cache"] = max(0.0, fraction * gpu_bytes - weights)
    parts["workspace and CUDA graphs"] = ENGINE_WORKSPACE
    return Phase(name, parts, frozenset(parts))


def trainer_states(size: ModelSize, args: Namespace) -> dict[str, float]:
    """Parameters, gradients and optimizer states on one trainer GPU."""
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.train_backend == "megatron":
        return _megatron_states(size, args, world)
    trained = size.adapter_unit * args.lora_rank if args.lora_rank else size.params
    frozen = size.params * BYTES[args.dtype] if args.lora_rank else 0  # kept as it is computed with
    on_gpu = 0.0 if args.fsdp_cpu_offload else 1.0 / world
    moments = 0.0 if args.optimizer == "cpu_adam" else on_gpu
    compute = BYTES[args.dtype]
    # The root unit (embeddings, head) and two decoder layers are gathered in the compute dtype.
    vocab = size.config.get("vocab_size", 0) * size["hidden_size"]
    gathered = vocab + 2 * max(0, size.params - vocab) / size.layers
    return {
        "parameters": (frozen + 4 * trained) * on_gpu,
        "gradients": 4 * trained * on_gpu,
        "optimizer": 8 * trained * moments,
        "gathered layers": compute * gathered if world > 1 or compute < 4 else 0.0,
    }


def _megatron_states(size: ModelSize, args: Namespace, world: int) -> dict[str, float]:
    """The distributed optimizer shards the fp32 copy and the moments over the data-parallel ranks; the copy stays on
    the GPU when the moments are in host memory."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    experts = (
        args.expert_model_parallel_size
        * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
        * args.pipeline_model_parallel_size
    )
    dense = (size.params - size.expert_params) / model
    routed = size.expert_params / experts
    sharded = dense / (world / model) + routed / max(1.0, world / experts)
    local, compute = dense + routed, BYTES[args.dtype]
    moments = sum(2 if dtype == "bf16" else 4 for dtype in (args.exp_avg_dtype, args.exp_avg_sq_dtype))
    if args.optimizer_cpu_offload or args.optimizer == "cpu_adam":
        moments = 0
    return {
        "parameters": compute * local,
        "gradients": 4 * local,
        "optimizer": (moments + (4 if compute < 4 else 0)) * sharded,
    }


def activation_bytes(size: ModelSize, args: Namespace) -> float:
    """At most, for a micro-batch of --max-tokens-per-gpu, or of --micro-batch-size longest samples."""
    longest = (args.rollout_max_prompt_len or 0) + args.rollout_max_response_len
    tokens = args.max_tokens_per_gpu if args.use_dynamic_batch_size else args.micro_batch_size * longest
    compute = BYTES[args.dtype]
    layer = size.layer_activation_bytes(compute) / args.tensor_model_parallel_size
    layers = size.layers / args.pipeline_model_parallel_size
    if args.gradient_checkpointing or args.recompute_granularity == "full":
        attended = size["num_attention_heads"] * size.head_dim / args.tensor_model_parallel_size  # not recomputed
        per_token = layers * (size["hidden_size"] + attended) * compute + layer
    else:
        per_token = layers * layer
    if args.fsdp_offload_activations:
        per_token = layer
    head = 4 * size.config.get("vocab_size", 0) * size["hidden_size"] / args.tensor_model_parallel_size
    return tokens * per_token + head + HEAD_CHUNK


def predict(args: Namespace, size: ModelSize, sizes: Mapping[str, ModelSize], gpu_bytes: int | None) -> MemoryPlan:
    """The plan of a run on GPUs of `gpu_bytes` (None: not known here).

    Args:
        args: validated.
        size: of the trained model.
        sizes: of the served models, by name.
    """
    phases: list[Phase] = []
    if not args.debug_rollout_only:
        states = trainer_states(size, args)
        known = {name: states[name] for name in ("parameters", "gradients", "optimizer")}
        copies = 2 if args.use_critic and not args.offload_train else 1  # PPO's critic has the policy's size
        parts = {name: copies * value for name, value in states.items()}
        parts["activations (at most)"] = activation_bytes(size, args)
        parts["CUDA context"] = trainer_context(args)
        if args.colocate:
            parts["engine released"] = ENGINE_RELEASED
        phases.append(Phase("training", parts, frozenset((*known, "CUDA context"))))
    for model in args.served_models:
        if model.name in sizes:
            phases += _engine_phases(args, model, sizes[model.name], size, gpu_bytes)
    return MemoryPlan(tuple(phases), gpu_bytes)


def _engine_phases(
    args: Namespace, model: ServedModel, size: ModelSize, trained: ModelSize, gpu_bytes: int | None
) -> list[Phase]:
    shares = args.colocate and model.name == policy_model(args).name
    phases: dict[str, Phase] = {}
    for spec in model.engines():
        own = engine_args(args, model, spec)
        name = "generating" if len(args.served_models) == 1 else f"serving {model.name}"
        beside = TRAINER_ASLEEP if args.offload_train else trainer_context(args)
        phase = serving_phase(size, own, name, gpu_bytes, beside if shares else 0.0)
        phases[str(sorted(phase.parts.items()))] = phase
        if shares:
            parts = {
                "trainer's parameters": trainer_states(trained, args)["parameters"],
                "engine's weights": engine_weight_bytes(size, own),
                "buckets": float(min(2 * args.update_weight_buffer_size, trained.params * BYTES[args.dtype])),
                "contexts": trainer_context(args) + ENGINE_RELEASED,
            }
            sync = Phase("updating weights", parts, frozenset(parts))
            phases[str(sorted(parts.items()))] = sync
    return list(phases.values())
