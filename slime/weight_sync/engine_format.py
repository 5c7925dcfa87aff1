"""The trainer's tensors as the engine's checkpoint has them: experts one by one, matrices in block-wise FP8.

The engine's own checkpoint decides: what it has under `x.weight_scale_inv` is quantised, what it has as
`experts.0.gate_proj` is taken out of a tensor of all experts.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from slime.utils.checkpoint_files import block_of, checkpoint_headers, read_config
from slime.utils.served_models import policy_path
from slime.weight_sync.buckets import TensorSpec, WeightSource
from slime.weight_sync.fp8 import SCALE_SUFFIX, quantise, scale_shape

_STACKED = re.compile(r"(?P<prefix>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


def engine_format(args: Namespace, source: WeightSource) -> WeightSource:
    """`source` in the format of the checkpoint that the policy's engines were started with."""
    if args.rollout_engine != "sglang":
        return source  # the embedded engine takes the trainer's names
    path = policy_path(args)
    adapted = EngineFormat(source, frozenset(checkpoint_headers(path)), block_of(read_config(path)))
    return adapted if adapted.changes else source


@dataclass(frozen=True)
class Piece:
    """A tensor that the engine knows, cut out of one of the trainer's."""

    name: str
    shape: tuple[int, ...]
    cut: Callable[[torch.Tensor], torch.Tensor]


class EngineFormat:
    """A `WeightSource` around the trainer's.

    A tensor of the trainer can end up in several buckets. It is gathered for the first of them; what the others need
    is kept until they come: scales, and the stacked experts while their pieces are sent.

    Args:
        names: all tensors of the engine's checkpoint.
        block: of its FP8 weights, if it has any.
    """

    def __init__(self, source: WeightSource, names: frozenset[str], block: tuple[int, int] | None):
        self.source = source
        self.block = block
        self._inner = {spec.name: spec for spec in source.tensor_specs()}
        self._pieces: dict[str, tuple[str, Piece]] = {}
        """By the engine's name: the trainer's, and how the one is cut out of the other."""
        self._quantised: set[str] = set()
        for spec in self._inner.values():
            for piece in pieces_of(spec, names):
                self._pieces[piece.name] = (spec.name, piece)
                if block is not None and piece.name + SCALE_SUFFIX in names:
                    self._quantised.add(piece.name)
        self._stacked = {name for name, (inner, _) in self._pieces.items() if inner != name}
        self._kept: dict[str, torch.Tensor | None] = {}
        self._left: dict[str, set[str]] = {}
        """By the trainer's name of what is in `_kept`: the pieces that are still to come."""
        self._scales: dict[str, torch.Tensor | None] = {}
        self._delivered: set[str] = set()

    @property
    def changes(self) -> bool:
        """Whether it differs from the trainer's."""
        return bool(self._stacked or self._quantised)

    def tensor_specs(self) -> list[TensorSpec]:
        specs: list[TensorSpec] = []
        for name, (inner, piece) in self._pieces.items():
            if name in self._quantised:
                specs.append(TensorSpec(name, piece.shape, torch.float8_e4m3fn))
                specs.append(TensorSpec(name + SCALE_SUFFIX, scale_shape(piece.shape, self.block), torch.float32))
            else:
                specs.append(TensorSpec(name, piece.shape, self._inner[inner].dtype))
        return specs

    @torch.no_grad()
    def gather(self, specs: Sequence[TensorSpec], out: Sequence[torch.Tensor] | None) -> None:
        targets: Mapping[str, torch.Tensor] = (
            {} if out is None else {s.name: o for s, o in zip(specs, out, strict=True)}
        )
        wanted = [spec.name for spec in specs]
        if self._delivered.intersection(wanted):  # another update; the last one may have ended in the middle
            for kept in (self._kept, self._left, self._scales, self._delivered):
                kept.clear()
        self._delivered.update(wanted)
        scales = [name for name in wanted if name not in self._pieces]
        weights = [name for name in wanted if name in self._pieces]
        # A scale without its weight is there already, unless its bucket overtook the weight's.
        missing = [name.removesuffix(SCALE_SUFFIX) for name in scales if name not in self._scales]
        self._fetch([*weights, *(name for name in missing if name not in weights)], weights, targets, out is not None)
        for name in scales:
            scale = self._scales.pop(name)
            if out is not None:
                targets[name].copy_(scale)

    def _fetch(self, names: list[str], wanted: list[str], targets: Mapping[str, torch.Tensor], keeps: bool) -> None:
        """Bring `names` (those of `wanted` into `targets`) and the scales of what is quantised."""
        plain = [name for name in names if name not in self._stacked]
        stacked = list(dict.fromkeys(self._pieces[name][0] for name in names if name in self._stacked))
        new = [inner for inner in stacked if inner not in self._kept]
        inner_specs = [self._inner[name] for name in [*plain, *new]]
        fulls: list[torch.Tensor] | None = None
        if keeps:
            device = next(iter(targets.values())).device
            fulls = [
                (
                    targets[spec.name]
                    if spec.name in wanted and spec.name not in self._quantised
                    else torch.empty(spec.shape, dtype=spec.dtype, device=device)
                )
                for spec in inner_specs
            ]
        if inner_specs:
            self.source.gather(inner_specs, fulls)
        got = dict(zip([s.name for s in inner_specs], fulls or [None] * len(inner_specs), strict=True))
        for inner in new:
            self._kept[inner] = got[inner]
            self._left[inner] = {name for name, (owner, _) in self._pieces.items() if owner == inner}
        for name in names:
            inner, piece = self._pieces[name]
            whole = self._kept[inner] if name in self._stacked else got[inner]
            self._deliver(name, None if whole is None else piece.cut(whole), targets if name in wanted else {})
            if name in self._stacked and name in wanted:
                self._left[inner].discard(name)
                if not self._left[inner]:
                    del self._left[inner], self._kept[inner]

    def _deliver(self, name: str, value: torch.Tensor | None, targets: Mapping[str, torch.Tensor]) -> None:
        """One piece in its final form; None on ranks that send nothing, which only keep count."""
        if name in self._quantised:
            quantised, scale = (None, None) if value is None else quantise(value, self.block)
            self._scales[name + SCALE_SUFFIX] = scale
            if name in targets:
                targets[name].copy_(quantised)
        elif name in targets and value.data_ptr() != targets[name].data_ptr():
            targets[name].copy_(value)


def pieces_of(spec: TensorSpec, names: frozenset[str]) -> list[Piece]:
    """One of the trainer's tensors as the engine's checkpoint has it.

    transformers stacks the experts of a layer: gate_up_proj [E, 2 I, D] and down_proj [E, D, I].
    """
    match = _STACKED.match(spec.name)
    if match is None or len(spec.shape) != 3 or f"{match['prefix']}.0.down_proj.weight" not in names:
        return [Piece(spec.name, spec.shape, lambda whole: whole)]
    experts, rows, columns = spec.shape
    pieces = []
    for i in range(experts):
        prefix = f"{match['prefix']}.{i}"
        if match["kind"] == "down_proj":
            pieces.append(Piece(f"{prefix}.down_proj.weight", (rows, columns), lambda whole, i=i: whole[i]))
            continue
        half = rows // 2
        pieces.append(Piece(f"{prefix}.gate_proj.weight", (half, columns), lambda w, i=i, h=half: w[i, :h]))
        pieces.append(Piece(f"{prefix}.up_proj.weight", (half, columns), lambda w, i=i, h=half: w[i, h:]))
    return pieces
