"""Megatron parameters <-> checkpoint tensors, by the family's name map, over any layout of ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from slime.backends.megatron_utils.architecture import Architecture
from slime.backends.megatron_utils.hf_files import HFTensors
from slime.backends.megatron_utils.layouts import Layout, Replicated, layouts_of
from slime.backends.megatron_utils.name_maps import BLOCK, DRAFT_LAYERS, EXPERT, LAYER, NAME_MAPS, VALUE_HEAD, Rule
from slime.utils.checkpoint_files import refuse_quantised
from slime.weight_sync.buckets import TensorSpec

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")
_DRAFT = re.compile(r"mtp\.layers\.(\d+)\.(transformer_layer\.|mtp_model_layer\.)?(.*)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Source:
    """What one Megatron parameter (under its global name) consists of."""

    hf_names: tuple[str, ...]
    layout: Layout

    @property
    def whole(self) -> bool:
        """Every rank that has it has all of it."""
        return isinstance(self.layout, Replicated)


class NameMap:
    """The family's rules for one model."""

    def __init__(self, architecture: Architecture):
        self.architecture = architecture
        self._rules: dict[str, Rule] = {rule.megatron: rule for rule in NAME_MAPS[architecture.family]}
        self._layouts = layouts_of(architecture)

    def source(self, name: str) -> Source:
        """Of a parameter with global layer and expert numbers.

        Raises:
            KeyError: the family's table does not have it.
        """
        draft = _DRAFT.fullmatch(name)
        if draft:
            return self._of_draft_layer(int(draft[1]), draft[3], ordinary=draft[2] is not None)
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        pattern = name
        if expert:
            pattern = _EXPERT.sub(EXPERT, pattern)
        if layer:
            pattern = _LAYER.sub(LAYER, pattern)
        if self.architecture.tied and name == OUTPUT:
            pattern = EMBEDDING
        if pattern not in self._rules:
            raise KeyError(f"the name map of {self.architecture.family} has no rule for {pattern!r}")
        rule = self._rules[pattern]
        numbers = {"layer": layer and layer[0], "expert": expert and expert[0]}
        return Source(tuple(hf.format(**numbers) for hf in rule.hf), self._layouts[rule.layout])

    def _of_draft_layer(self, draft: int, name: str, ordinary: bool) -> Source:
        """Of a part of a layer for multi-token prediction; `ordinary`: of the layer inside it."""
        kind = DRAFT_LAYERS[self.architecture.family]
        prefix = kind.prefix.format(draft=draft, layer=self.architecture["num_layers"] + draft)
        if not ordinary:
            layout, hf = kind.parts[name]
            return Source((prefix + hf,), self._layouts[layout])
        ours, theirs = BLOCK
        like = self.source(ours.format(**{"layer": 0}) + name)
        start = len(theirs.format(**{"layer": 0}))
        return Source(tuple(prefix + hf[start:] for hf in like.hf_names), like.layout)


def global_tensors(chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's parameters and persistent buffers, under names with global layer and expert numbers."""
    tensors: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        persistent = chunk.state_dict(keep_vars=True)
        for name, tensor in persistent.items():
            if not torch.is_tensor(tensor):
                continue  # extra states of modules
            layer, expert = _LAYER.search(name), _EXPERT.search(name)
            if expert:
                local = chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
                first = parallel_state.get_expert_model_parallel_rank() * local
                name = _EXPERT.sub(str(first + int(expert[0])), name)
            if layer:
                name = _LAYER.sub(str(layers[int(layer[0])]), name)
            tensors[name] = tensor
    return tensors


def cut_of(name: str) -> tuple[int, int]:
    """(rank, ranks) that a parameter is cut over: tensor parallelism, for experts their own."""
    if _EXPERT.search(name):
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


@torch.no_grad()
def load_hf(chunks: Sequence[nn.Module], architecture: Architecture, path: str) -> None:
    """Fill this rank's parameters from a Hugging Face directory, one at a time; all but a critic's head.

    Raises:
        KeyError: the checkpoint lacks a tensor.
        ValueError: a tensor has another shape than the model's, or the checkpoint is quantised.
    """
    try:
        refuse_quantised(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    names = NameMap(architecture)
    with HFTensors(path) as checkpoint:
        for name, tensor in global_tensors(chunks).items():
            if name == VALUE_HEAD:
                continue  # checkpoints have none; a critic's starts at zero
            source = names.source(name)
            rank, size = cut_of(name)
            parts = [checkpoint[hf_name] for hf_name in source.hf_names]
            value = source.layout.shard(parts, rank, size, tensor.shape[0])
            if value.shape != tensor.shape:
                raise ValueError(
                    f"{path}: {', '.join(source.hf_names)} give {name} the shape {tuple(value.shape)}, but the model "
                    f"has {tuple(tensor.shape)}"
                )
            tensor.copy_(value)


@dataclass(frozen=True)
class Shared:
    """One Megatron parameter of the whole model and where its parts are."""

    name: str
    source: Source
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    owners: tuple[int, ...]
    """Per part: the rank that sends it."""


class MegatronWeights:
    """`WeightSource` of a model that is cut over tensor-, pipeline- and expert-parallel ranks. Construction is
    collective over all trainer ranks.

    Each part has one sending rank, chosen among its replicas in turn; a bucket takes one broadcast per sender.

    Args:
        chunks: this rank's model chunks, unwrapped.
        dtype: what parameters are sent as; buffers (the routers' biases) keep theirs.
        device: where the transport's buckets live.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], architecture: Architecture, dtype: torch.dtype, device: torch.device
    ):
        self.device = device
        names = NameMap(architecture)
        self.local = global_tensors(chunks)
        if architecture.tied:
            self.local.pop(OUTPUT, None)
        mine = []
        for name, tensor in self.local.items():
            rank, size = (0, 1) if names.source(name).whole else cut_of(name)
            kind = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
            mine.append((name, rank, size, tuple(tensor.shape), kind))
        everyone: list[list] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        holders: dict[str, list[list[int]]] = {}
        facts: dict[str, tuple] = {}
        for holder, theirs in enumerate(everyone):
            for name, rank, size, shape, kind in theirs:
                holders.setdefault(name, [[] for _ in range(size)])[rank].append(holder)
                facts[name] = (shape, kind)
        self.shared: list[Shared] = []
        for index, name in enumerate(sorted(holders, key=_natural)):
            owners = tuple(replicas[index % len(replicas)] for replicas in holders[name])
            self.shared.append(Shared(name, names.source(name), *facts[name], owners))
        self._by_hf_name = {hf: item for item in self.shared for hf in item.source.hf_names}

    def tensor_specs(self) -> list[TensorSpec]:
        specs = []
        for item in self.shared:
            meta = [torch.empty(item.local_shape, device="meta") for _ in item.owners]
            wholes = item.source.layout.merge(meta)
            specs += [
                TensorSpec(hf, tuple(whole.shape), item.dtype)
                for hf, whole in zip(item.source.hf_names, wholes, strict=True)
            ]
        return specs

    @torch.no_grad()
    def gather(self, specs: Sequence[TensorSpec], out: Sequence[torch.Tensor] | None) -> None:
        items = list({id(item): item for item in (self._by_hf_name[spec.name] for spec in specs)}.values())
        parts = self._exchange(items)
        if out is None:
            return
        wholes: dict[str, torch.Tensor] = {}
        for item in items:
            shards = [parts[item.name, part] for part in range(len(item.owners))]
            wholes |= zip(item.source.hf_names, item.source.layout.merge(shards), strict=True)
        torch._foreach_copy_(list(out), [wholes[spec.name] for spec in specs])

    def _exchange(self, items: list[Shared]) -> dict[tuple[str, int], torch.Tensor]:
        """All parts of `items`, on every rank."""
        if dist.get_world_size() == 1:
            return {(item.name, 0): self.local[item.name].detach() for item in items}
        by_owner: dict[int, list[tuple[Shared, int]]] = {}
        for item in items:
            for part, owner in enumerate(item.owners):
                by_owner.setdefault(owner, []).append((item, part))
        parts = {}
        for owner in sorted(by_owner):
            wanted = by_owner[owner]
            sizes = [torch.Size(item.local_shape).numel() for item, _ in wanted]
            flat = torch.empty(sum(sizes), dtype=wanted[0][0].dtype, device=self.device)
            views = [view.view(item.local_shape) for view, (item, _) in zip(flat.split(sizes), wanted, strict=True)]
            if owner == dist.get_rank():
                torch._foreach_copy_(views, [self.local[item.name].detach() for item, _ in wanted])
            dist.broadcast(flat, src=owner)
            parts |= {(item.name, part): view for view, (item, part) in zip(views, wanted, strict=True)}
        return parts


def _natural(name: str) -> list:
    """Sort key: embedding first, layers by number, the ends last."""
    rank = 0 if name.startswith("embedding") else 1 if name.startswith("decoder.layers") else 2
    return [rank, *(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))]
