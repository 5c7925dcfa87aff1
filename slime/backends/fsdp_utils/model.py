"""The trained policy: a Hugging Face causal LM over packed rows, sharded by FSDP2.

Parameters are kept in fp32. Where the computation runs in bf16, or on several ranks, every decoder layer is an FSDP2
unit and the wrapper (embeddings, final norm, output head) is the root unit; a single fp32 process needs neither.
The module always stays in eval mode: dropout would make trainer and engine different policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from slime.backends.fsdp_utils.fused_cpu import fuse_for_cpu_training
from slime.backends.fsdp_utils.lora import LoraOptions, add_adapters
from slime.modeling.attention import AttentionContext, PackedSequences
from slime.modeling.batch_invariant import InvariantSequences, invariant_log_probs, make_batch_invariant
from slime.modeling.context_parallel import ShardedSequences
from slime.modeling.cudnn_attention import LongSequences
from slime.modeling.hf import empty_causal_lm, load_causal_lm
from slime.modeling.kept_attention import KeptAttention
from slime.training.batch import MicroBatch
from slime.training.context_parallel import ALONE, ContextParallel, LocalRow, local_row
from slime.training.logprobs import log_probs_from_logits, token_log_probs

# Config fields by which models change their logits after the output head. They take the path through full logits.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "logits_soft_cap",
    "logits_mup_width_multiplier",
    "lm_head_multiplier",
)


class PolicyModel(nn.Module):
    """Log-probs of the response tokens of a micro-batch.

    With context parallelism every rank of the group calls it with the same micro-batch, computes its part of the
    tokens, and gets the values of all.
    """

    def __init__(self, model: nn.Module, gradient_checkpointing: bool = False, cp: ContextParallel = ALONE):
        super().__init__()
        self.model = model.eval()
        self.cp = cp
        self.recomputes = gradient_checkpointing
        self.cudnn_attention = False
        self.plain_head = all(getattr(model.config, name, None) in (None, 1, 1.0) for name in LOGIT_TRANSFORMS)
        if gradient_checkpointing:
            for layer in decoder_layers(model):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_grad: bool = False,
        chunk_size: int | None = None,
        with_logits: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(log_probs [R], entropy [R] or None, logits [1, T, V] or None), the first two in fp32.

        Both are of the distribution softmax(logits / temperature); the logits come undivided, for custom losses.
        The entropy has a gradient only with `entropy_grad`.
        """
        row = local_row(batch, self.cp)
        if with_logits or not self.plain_head:
            logits = self.model(**self._inputs(row), logits_to_keep=0 if with_logits else row.rows).logits
            picked_KV = logits[0, row.rows] if with_logits else logits[0]
            log_probs_K, entropy_K = log_probs_from_logits(
                picked_KV, row.labels, temperature, with_entropy, entropy_grad, chunk_size, row.kept
            )
            return *self._gathered(row, log_probs_K, entropy_K), logits if with_logits else None
        hidden_TD = self._hidden_states(row)
        head = self.model.get_output_embeddings()
        log_probs_K, entropy_K = token_log_probs(
            hidden_TD[row.rows],
            head.weight,
            row.labels,
            temperature=temperature,
            bias=head.bias,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            chunk_size=chunk_size,
            kept=row.kept,
        )
        return *self._gathered(row, log_probs_K, entropy_K), None

    def _inputs(self, row: LocalRow) -> dict[str, Any]:
        return {
            "input_ids": row.tokens[None],
            "position_ids": row.position_ids[None],
            "attention_context": self.attention_context(row),
            "use_cache": False,
        }

    def _hidden_states(self, row: LocalRow) -> torch.Tensor:
        """[T, D] of the rank's row, after the final norm."""
        return self.model.base_model(**self._inputs(row)).last_hidden_state[0]

    def attention_context(self, row: LocalRow) -> AttentionContext:
        """How the tokens of `row` attend to each other."""
        if self.cp.size == 1:
            return self._packed(row.lengths, row.tokens.device)
        return ShardedSequences(row.lengths, self.cp.group, row.tokens.device, self._packed)

    @property
    def _packed(self) -> Callable[..., PackedSequences]:
        if self.cudnn_attention:
            return partial(LongSequences, keep=self.recomputes)
        return KeptAttention if self.recomputes else PackedSequences

    @staticmethod
    def _gathered(row: LocalRow, log_probs_K, entropy_K) -> tuple[torch.Tensor, torch.Tensor | None]:
        return row.gather(log_probs_K), None if entropy_K is None else row.gather(entropy_K)

    def hf_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of the Hugging Face module; tied ones once."""
        return dict(self.model.named_parameters())

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward reduces gradients over the ranks or only accumulates them."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(enabled)

    def free_unsharded(self) -> None:
        """Drop gathered parameters, so that the next forward sees what the shards hold now.

        The root unit keeps its full parameters after a forward without backward.
        """
        if isinstance(self, FSDPModule):
            for module in self.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


@dataclass(frozen=True)
class ModelOptions:
    """How to build a policy."""

    path: str
    """Hugging Face directory."""
    compute_dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    cpu_offload: bool = False
    """Keep shards, gradients and so the optimizer in host memory."""
    trust_remote_code: bool = False
    cudnn_attention: bool = False
    """Long sequences by cuDNN."""
    batch_invariant: bool = False
    """Build an `InvariantPolicyModel`."""
    offload_activations: bool = False
    """Keep what the backward pass needs of each layer in host memory."""
    lora: LoraOptions | None = None
    """Train adapters instead of the weights."""
    compile_backend: str | None = None
    """Run the decoder layers through `torch.compile` with this backend."""


class InvariantPolicyModel(PolicyModel):
    """The policy by batch-invariant operations: its log-probs are those of the engine's `--batch-invariant`."""

    def __init__(self, model: nn.Module, gradient_checkpointing: bool = False, cp: ContextParallel = ALONE):
        make_batch_invariant(model)
        super().__init__(model, gradient_checkpointing, cp)

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_grad: bool = False,
        chunk_size: int | None = None,
        with_logits: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """As in `PolicyModel`, without logits; all logits of the response are in memory at once."""
        row = local_row(batch, self.cp)
        logits_KV = self.model(**self._inputs(row), logits_to_keep=row.rows).logits[0]
        log_probs_K, entropy_K = invariant_log_probs(logits_KV, row.labels, temperature, with_entropy, entropy_grad)
        return *self._gathered(row, log_probs_K, entropy_K), None

    @property
    def _packed(self) -> Callable[..., PackedSequences]:
        return InvariantSequences


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's blocks, in order; sharded or not.

    Raises:
        ValueError: the architecture does not say what its blocks are.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if names & {base.__name__ for base in type(module).__mro__}]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules), so it cannot be sharded"
        )
    return layers


def offload_activations(model: nn.Module, device: torch.device) -> None:
    """What backward needs of each layer goes to (pinned) host memory; with recomputation that is the layer's input."""

    def offloaded(forward: Callable[..., Any], *args, **kwargs) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
            return forward(*args, **kwargs)

    for layer in decoder_layers(model):
        layer.forward = partial(offloaded, layer.forward)


Wrapper = TypeVar("Wrapper", bound=PolicyModel)


def build_policy(
    options: ModelOptions,
    mesh: DeviceMesh,
    device: torch.device,
    cp: ContextParallel = ALONE,
    wrap: Callable[..., Wrapper] = PolicyModel,
) -> Wrapper:
    """Load the checkpoint, wrap it and shard it over `mesh` (1-D).

    `wrap(model, gradient_checkpointing, cp)` may add parameters, where those of `model` are; rank 0's values count.
    Rank 0 alone reads the files; unit by unit the weights are broadcast, sharded and freed, so a rank never holds
    more than its shards and one full layer (rank 0: and what is left of the checkpoint, in host memory).
    """
    if mesh.size() == 1 and options.compute_dtype == options.param_dtype and not options.cpu_offload:
        model = load_causal_lm(options.path, options.param_dtype, device, options.trust_remote_code)
        policy = _wrapped(model, options, device, cp, wrap)
        if device.type == "cpu":
            _fuse([policy], options, device)
        return policy

    if mesh.get_rank() == 0:
        model = load_causal_lm(options.path, options.param_dtype, "cpu", options.trust_remote_code)
    else:
        model = empty_causal_lm(options.path, options.param_dtype, options.trust_remote_code)
    policy = _wrapped(model, options, device, cp, wrap)
    shard = partial(
        fully_shard,
        mesh=mesh,
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda") if options.cpu_offload else OffloadPolicy(),
    )
    reduce_dtype = torch.promote_types(options.param_dtype, torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=options.compute_dtype, reduce_dtype=reduce_dtype)
    done: set[nn.Module] = set()
    for layer in decoder_layers(model):
        _materialize(layer, mesh, device, done)
        _fuse([layer], options, device)
        shard(layer, mp_policy=precision)
    rest = [module for module in policy.modules() if module not in done and not list(module.children())]
    _materialize(policy, mesh, device, done)
    _fuse(rest, options, device)
    # The root's input is the MicroBatch, whose fp32 masks and advantages must stay as they are.
    root_precision = MixedPrecisionPolicy(
        param_dtype=options.compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    shard(policy, mp_policy=root_precision)
    return policy


def _wrapped(
    model: nn.Module, options: ModelOptions, device: torch.device, cp: ContextParallel, wrap: Callable[..., Wrapper]
) -> Wrapper:
    """The policy over `model`, whose weights need not be there yet."""
    if options.lora is not None:
        add_adapters(model, options.lora, options.compute_dtype)
    if options.compile_backend is not None:
        from slime.backends.fsdp_utils.compiled import compile_layers

        compile_layers(decoder_layers(model), options.compile_backend)
    policy = wrap(model, options.gradient_checkpointing, cp)
    policy.cudnn_attention = options.cudnn_attention
    if options.offload_activations:
        offload_activations(model, device)
    return policy


def _fuse(modules: list[nn.Module], options: ModelOptions, device: torch.device) -> None:
    """Fused operations in modules whose parameters are there and not sharded yet; a compiler makes its own."""
    if options.compile_backend is not None:
        return
    if device.type == "cpu":
        if options.compute_dtype == torch.float32 and not options.batch_invariant:
            for module in modules:
                fuse_for_cpu_training(module)
        return
    if options.compute_dtype == torch.float32:
        return
    from slime.backends.fsdp_utils.fused import fuse_for_training

    for module in modules:
        fuse_for_training(module, swiglu=not options.batch_invariant)


@torch.no_grad()
def _materialize(unit: nn.Module, mesh: DeviceMesh, device: torch.device, done: set[nn.Module]) -> None:
    """Replace parameters and buffers of the unit's modules by rank 0's, on `device`; tied ones stay tied.

    Modules in `done` are left alone, and the unit's are added to it.
    """
    group = mesh.get_group()

    def fetch(tensor: torch.Tensor) -> torch.Tensor:
        full = tensor.detach().to(device) if mesh.get_rank() == 0 else torch.empty_like(tensor, device=device)
        full = full.contiguous()
        dist.broadcast(full, src=dist.get_global_rank(group, 0), group=group)
        return full

    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in [module for module in unit.modules() if module not in done]:
        done.add(module)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in new:
                new[parameter] = nn.Parameter(fetch(parameter), parameter.requires_grad)
            setattr(module, name, new[parameter])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            module._buffers[name] = fetch(buffer)


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """All of a parameter; collective over the ranks that share it."""
    data = parameter.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, sharing its memory."""
    data = parameter.detach()
    return data.to_local() if isinstance(data, DTensor) else data
