"""The decoder of Llama-like models in few operations, for a CPU.

On a CPU a decode step of a small model is bound by the number of operations: a transformers layer has about 60. Here
it has about 25: query, key and value (and gate and up) are one matrix product, norms take four operations and rotary
embeddings three, residuals are added by the products. It applies to every model that is built like Llama or Qwen and
computes the same; other models run their own code.

The weights are not copied: the products' matrices lie transposed in memory, as CPU libraries like them best, and the
model's own parameters become views of them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from slime.modeling.attention import AttentionContext, PackedSequences

logger = logging.getLogger(__name__)

# Rotary embeddings whose angles depend on the position alone.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj"}
PROBE_LENGTHS = [5, 3]


class Projection:
    """Linear layers with the same input as one product: [T, in] -> [T, sum of out]."""

    def __init__(self, *layers: nn.Linear):
        self.layers = layers
        self.has_bias = layers[0].bias is not None
        self.sizes = [layer.out_features for layer in layers]
        self.weight_IO = torch.empty(0)
        self.bias_O: torch.Tensor | None = None

    def pack(self) -> None:
        """Lay the weights side by side and make the layers' parameters views of them."""
        weight = torch.cat([layer.weight.detach().t() for layer in self.layers], 1)
        for layer, part in zip(self.layers, weight.split(self.sizes, 1), strict=True):
            layer.weight.data = part.t()
        self.weight_IO = weight
        if self.has_bias:
            bias = torch.cat([layer.bias.detach() for layer in self.layers])
            for layer, part in zip(self.layers, bias.split(self.sizes), strict=True):
                layer.bias.data = part
            self.bias_O = bias

    def unpack(self) -> None:
        """Let go of the memory."""
        self.weight_IO, self.bias_O = torch.empty(0), None

    @property
    def packed(self) -> bool:
        return self.layers[0].weight.numel() > 0 and self.layers[0].weight.data_ptr() == self.weight_IO.data_ptr()

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self.bias_O is None:
            return torch.mm(x_TI, self.weight_IO)
        return torch.addmm(self.bias_O, x_TI, self.weight_IO)

    def add_to(self, residual_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """residual + product, in the residual's memory."""
        if self.bias_O is not None:
            residual_TO.add_(self.bias_O)
        return residual_TO.addmm_(x_TI, self.weight_IO)


class RMSNorm:
    """x / rms(x) * weight over the last dimension: [T, width], or [T, heads, width] with a module for each head."""

    def __init__(self, *modules: nn.Module):
        self.modules = modules
        self.width = modules[0].weight.shape[0]
        self.floor = torch.tensor((self.width * modules[0].variance_epsilon) ** 0.5)
        self.weight = torch.empty(0)

    def refresh(self) -> None:
        """Follow the modules' weights. x / sqrt(|x|^2 / width + eps) = sqrt(width) x / hypot(|x|, sqrt(width eps))"""
        weights = [module.weight.detach() for module in self.modules]
        weight = weights[0] if len(weights) == 1 else torch.stack(weights)
        self.weight = weight * self.width**0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.div(x, norm.hypot_(self.floor)).mul_(self.weight)


@dataclass
class _Layer:
    index: int
    heads: int
    """Query heads."""
    head_dim: int
    groups: int
    """Key and value heads."""
    attention_norm: RMSNorm
    """Before attention."""
    head_norm: RMSNorm | None
    """Of query and key heads."""
    mlp_norm: RMSNorm
    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    scale: float = 1.0
    window: int | None = None
    """As the model's own code gives them to the attention."""

    def __call__(
        self, x_TD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """The layer's output, in the memory of `x_TD`."""
        tokens, turned = len(x_TD), self.heads + self.groups
        qkv = self.qkv(self.attention_norm(x_TD)).view(tokens, -1, self.head_dim)
        qk = qkv[:, :turned]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = torch.addcmul(qk * cos, torch.roll(qk, self.head_dim // 2, -1), sin)
        attended = context.attend(
            self.index, qk[:, : self.heads], qk[:, self.heads :], qkv[:, turned:], self.scale, self.window
        )
        x_TD = self.out.add_to(x_TD, attended.reshape(tokens, -1))
        gate_up = self.gate_up(self.mlp_norm(x_TD))
        gate, up = gate_up.chunk(2, 1)
        return self.down.add_to(x_TD, F.silu(gate).mul_(up))

    @property
    def projections(self) -> list[Projection]:
        return [self.qkv, self.out, self.gate_up, self.down]

    @property
    def norms(self) -> list[RMSNorm]:
        heads = [] if self.head_norm is None else [self.head_norm]
        return [self.attention_norm, self.mlp_norm, *heads]


class LeanForward:
    """A model's logits by few operations; made by `lean_forward`."""

    def __init__(self, model: nn.Module):
        base = model.base_model
        self.embedding = base.embed_tokens
        self.norm = RMSNorm(base.norm)
        self.head = model.get_output_embeddings()
        self.rotary = base.rotary_emb
        self.layers = [_layer(i, layer) for i, layer in enumerate(base.layers)]
        self._cos = self._sin = torch.empty(0)

    def projections(self) -> list[Projection]:
        return [projection for layer in self.layers for projection in layer.projections]

    def norms(self) -> list[RMSNorm]:
        return [self.norm, *(norm for layer in self.layers for norm in layer.norms)]

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter that a call uses."""
        modules = [self.embedding, self.head]
        modules += [module for norm in self.norms() for module in norm.modules]
        modules += [linear for projection in self.projections() for linear in projection.layers]
        return [p for module in modules for p in module.parameters()]

    def refresh(self) -> None:
        """The parameters may have other values, other memory, or none: follow them."""
        for projection in self.projections():
            if projection.layers[0].weight.numel() == 0:
                projection.unpack()
            elif not projection.packed:
                projection.pack()
        for norm in self.norms():
            norm.refresh()

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        context: AttentionContext,
        keep_N: torch.Tensor,
        num_positions: int,
    ) -> torch.Tensor:
        """Logits [N, V] of the row tokens `keep_N`; all positions are below `num_positions`."""
        x_TD = F.embedding(input_ids_T, self.embedding.weight)
        cos, sin = self._angles(positions_T, num_positions)
        for layer in self.layers:
            x_TD = layer(x_TD, cos, sin, context)
        x_ND = x_TD.index_select(0, keep_N)
        return F.linear(self.norm(x_ND), self.head.weight)

    def _angles(self, positions_T: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, head dim]; the sine of the first half is negative, as `rotate_half` is a roll then."""
        if size > len(self._cos):
            size = max(1024, 2 * size)
            like = self.embedding.weight
            cos, sin = self.rotary(like[:1, None], torch.arange(size, device=like.device)[None])
            half = sin.shape[-1] // 2
            self._cos, self._sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], 1)
        return tuple(table.index_select(0, positions_T).unsqueeze(1) for table in (self._cos, self._sin))


def lean_forward(model: nn.Module) -> LeanForward | None:
    """The model by few operations, or None where that would not be the same computation.

    Checked are the modules, that every parameter is used, and the logits of two short sequences.
    """
    try:
        lean = LeanForward(model)
    except (AttributeError, TypeError, ValueError) as error:
        logger.debug("%s runs its own code: %s", type(model).__name__, error)
        return None
    if {id(p) for p in lean.parameters()} != {id(p) for p in model.parameters()}:
        return None
    with torch.no_grad():
        lean.refresh()
        same = _same_logits(model, lean)
    if not same:
        logger.debug("%s runs its own code: it computes something else", type(model).__name__)
        return None
    return lean


def _layer(index: int, layer: nn.Module) -> _Layer:
    """
    Raises:
        AttributeError, TypeError, ValueError: the layer is built differently.
    """
    attention, mlp = layer.self_attn, layer.mlp
    children = {name for name, _ in attention.named_children()}
    head_norms = children >= HEAD_NORMS
    if children - HEAD_NORMS != ATTENTION or attention.layer_idx != index:
        raise ValueError(f"attention of {sorted(children)}")
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
        raise ValueError(f"activation {type(mlp.act_fn).__name__}")
    linear = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    if {name.rsplit(".", 1)[-1] for name in linear} != ATTENTION | MLP:
        raise ValueError(f"linear layers {sorted(linear)}")
    head_dim = attention.head_dim
    heads, groups = (projection.out_features // head_dim for projection in (attention.q_proj, attention.k_proj))
    head_norm = None
    if head_norms:
        if attention.q_norm.variance_epsilon != attention.k_norm.variance_epsilon:
            raise ValueError("head norms with different eps")
        head_norm = RMSNorm(*[attention.q_norm] * heads, *[attention.k_norm] * groups)
    return _Layer(
        index=index,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        attention_norm=RMSNorm(layer.input_layernorm),
        head_norm=head_norm,
        mlp_norm=RMSNorm(layer.post_attention_layernorm),
        qkv=Projection(attention.q_proj, attention.k_proj, attention.v_proj),
        out=Projection(attention.o_proj),
        gate_up=Projection(mlp.gate_proj, mlp.up_proj),
        down=Projection(mlp.down_proj),
    )


class _Recorder(PackedSequences):
    """Remembers scale and window of each layer."""

    def __init__(self, lengths: list[int]):
        super().__init__(lengths)
        self.options: dict[int, tuple[float, int | None]] = {}

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        self.options[layer_idx] = (scale, window)
        return super().attend(layer_idx, query_THD, key_TGD, value_TGD, scale, window)


def _same_logits(model: nn.Module, lean: LeanForward) -> bool:
    from slime.engine.forward import model_logits

    if lean.rotary.rope_type not in ROPE_TYPES or lean.head.bias is not None:
        return False
    vocab = lean.embedding.weight.shape[0]
    ids = torch.arange(sum(PROBE_LENGTHS)) * 7919 % vocab
    positions = torch.cat([torch.arange(n) * 3 for n in PROBE_LENGTHS])
    context = _Recorder(PROBE_LENGTHS)
    expected = model_logits(model, ids[None], positions[None], context, 0)
    for layer in lean.layers:
        layer.scale, layer.window = context.options[layer.index]
    got = lean(ids, positions, context, torch.arange(len(ids)), 3 * max(PROBE_LENGTHS))
    limit = 1e-5 * float(expected.abs().max())
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=limit)
