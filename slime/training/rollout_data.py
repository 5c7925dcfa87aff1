"""The rollout on its way to the trainers: cut per DP rank into flat numpy arrays, read back as micro-batches.

`partition_rollout_data` runs in the rollout manager and needs no torch; `RankData` runs in the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.training.schedule import DPSchedule

if TYPE_CHECKING:
    import torch

    from slime.training.batch import MicroBatch

# Per-token lists and how they travel. Other lists of arrays travel flat in their own dtype, the rest as it is.
TOKEN_DTYPES = {
    "tokens": np.int32,
    "loss_masks": np.float32,
    "rollout_log_probs": np.float32,
    "teacher_log_probs": np.float32,
}
# Lists with a length of their own.
OTHER_DTYPES = {"rollout_top_p_token_ids": np.int32, "rollout_top_p_token_offsets": np.int64}
# Facts about the schedule rather than about a sample.
PART_KEYS = ("micro_batches", "num_rollouts", "num_tokens", "denominators")


@dataclass
class Ragged:
    """Arrays that differ in their first dimension, joined: array i is `flat[offsets[i]:offsets[i + 1]]`."""

    flat: np.ndarray
    offsets: np.ndarray

    @classmethod
    def join(cls, arrays: Sequence[np.ndarray]) -> Ragged:
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays), offsets)


def partition_rollout_data(batch: dict[str, list], schedule: DPSchedule) -> list[dict[str, Any]]:
    """Cut a rollout batch (per-sample lists) into one part per DP rank.

    `tokens`, `total_lengths`, `response_lengths`, `loss_masks` and `rollout_ids` must be there; keys that are None, or
    hold None for every sample, are left out.

    Returns:
        Parts with the batch's keys for the rank's samples (per-token lists as `Ragged`), and `micro_batches`
        ([step][micro-batch] -> indices into the part), `num_rollouts` and `num_tokens` (per step, over all ranks),
        `denominators` (per sample: unmasked tokens of its trajectory in the step, at least 1).

    Raises:
        ValueError: lists of a sample that contradict each other, naming the sample.
    """
    columns = _checked_columns(batch)
    masks = columns["loss_masks"]
    mask_sums = [float(mask.sum()) for mask in masks]
    denominators: dict[int, float] = {}
    num_tokens = []
    for step in schedule.steps:
        positions = [i for rank in step.micro_batches for mb in rank for i in mb]
        totals: dict[Any, float] = {}
        for i in positions:
            totals[batch["rollout_ids"][i]] = totals.get(batch["rollout_ids"][i], 0.0) + mask_sums[i]
        denominators.update({i: max(totals[batch["rollout_ids"][i]], 1.0) for i in positions})
        num_tokens.append(int(sum(max(mask_sums[i], 1.0) for i in positions)))

    parts = []
    for rank in range(schedule.dp_size):
        steps = [step.micro_batches[rank] for step in schedule.steps]
        positions = [i for step in steps for mb in step for i in mb]
        local = {position: index for index, position in enumerate(positions)}
        part: dict[str, Any] = {}
        for key, column in columns.items():
            chosen = [column[i] for i in positions]
            part[key] = Ragged.join(chosen) if isinstance(chosen[0], np.ndarray) else chosen
        part["micro_batches"] = [[[local[i] for i in mb] for mb in step] for step in steps]
        part["num_rollouts"] = [step.num_rollouts for step in schedule.steps]
        part["num_tokens"] = num_tokens
        part["denominators"] = [denominators[i] for i in positions]
        parts.append(part)
    return parts


def _checked_columns(batch: dict[str, list]) -> dict[str, list]:
    """The batch's lists, per-token ones as arrays."""
    count = len(batch["tokens"])
    columns = {}
    for key, values in batch.items():
        if values is None or all(value is None for value in values):
            continue
        if len(values) != count:
            raise ValueError(f"rollout batch: {key!r} has {len(values)} entries for {count} samples")
        if key in TOKEN_DTYPES or key in OTHER_DTYPES:
            missing = [i for i, value in enumerate(values) if value is None]
            if missing:
                raise ValueError(f"rollout batch: {key!r} is None for samples {missing[:8]}, but not for all")
            dtype = TOKEN_DTYPES.get(key) or OTHER_DTYPES[key]
            values = [np.asarray(value, dtype=dtype) for value in values]
        columns[key] = values
    for i in range(count):
        total, response = batch["total_lengths"][i], batch["response_lengths"][i]
        if len(columns["tokens"][i]) != total:
            raise ValueError(f"sample {i}: {len(columns['tokens'][i])} tokens, but total_length {total}")
        if not 0 <= response < total:
            raise ValueError(
                f"sample {i}: response_length {response} must be at least 0 and leave a prompt token of the {total}"
            )
        for key in TOKEN_DTYPES.keys() - {"tokens"}:
            if key in columns and len(columns[key][i]) != response:
                raise ValueError(f"sample {i}: {len(columns[key][i])} {key}, but response_length {response}")
        if "rollout_top_p_token_offsets" in columns:
            offsets, ids = (columns[f"rollout_top_p_token_{name}"][i] for name in ("offsets", "ids"))
            if len(offsets) != response + 1 or offsets[-1] != len(ids):
                raise ValueError(
                    f"sample {i}: rollout_top_p_token_offsets must be {response + 1} numbers from 0 to {len(ids)}, "
                    "the count of rollout_top_p_token_ids"
                )
        if not np.isin(columns["loss_masks"][i], (0, 1)).all():
            raise ValueError(f"sample {i}: loss_mask values must be 0 or 1")
    return columns


class RankData(MutableMapping):
    """One DP rank's part of a rollout, as the trainer sees it: to plug-ins a dict of per-sample lists."""

    def __init__(self, part: dict[str, Any]):
        import torch

        self.steps: list[list[list[int]]] = part["micro_batches"]
        """[step][micro-batch] -> indices of this rank's samples. `len(steps)`, `len(steps[s])` are the counts."""
        self.num_rollouts: list[int] = part["num_rollouts"]
        """Per step, over all ranks."""
        self.num_tokens: list[int] = part["num_tokens"]
        """Per step, over all ranks: unmasked response tokens."""
        self.num_samples: int = len(part["total_lengths"])
        self._denominators = torch.tensor(part["denominators"], dtype=torch.float32)
        self._columns: dict[str, list] = {}
        for key, value in part.items():
            if isinstance(value, Ragged):
                # A copy: the arrays may be read-only views of shared memory.
                self._columns[key] = list(torch.tensor(value.flat).split(np.diff(value.offsets).tolist()))
            elif key not in PART_KEYS:
                self._columns[key] = value

    def __getitem__(self, key: str) -> list:
        if key not in self._columns:
            raise KeyError(f"rollout data has no {key!r}; it has {', '.join(sorted(self._columns))}")
        return self._columns[key]

    def __setitem__(self, key: str, values: list) -> None:
        """One number (or other object) per sample, or one tensor per sample as `set_flat` takes them."""
        if any(np.ndim(value) == 1 for value in values):
            self.set_flat(key, values)
            return
        if len(values) != self.num_samples:
            raise ValueError(f"{key!r} has {len(values)} entries for {self.num_samples} samples")
        self._columns[key] = list(values)

    def __delitem__(self, key: str) -> None:
        del self._columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def set_flat(self, key: str, values: list[torch.Tensor]) -> None:
        """Store one [response_length] tensor per sample: log_probs, ref_log_probs, values, advantages, returns.

        Tensors stay on their device and in their dtype.

        Raises:
            ValueError: not one tensor per sample, or one with another length than the response.
        """
        if len(values) != self.num_samples:
            raise ValueError(f"{key!r} has {len(values)} entries for {self.num_samples} samples")
        for i, (value, length) in enumerate(zip(values, self["response_lengths"], strict=True)):
            if len(value) != length:
                raise ValueError(f"{key!r} of sample {i} has {len(value)} entries for {length} response tokens")
        self._columns[key] = list(values)

    def micro_batch(self, step: int, index: int, device: torch.device | str = "cpu") -> MicroBatch:
        """Micro-batch `index` of optimizer step `step`, on `device`."""
        import torch

        from slime.training.batch import MicroBatch
        from slime.training.kept_tokens import KeptTokens

        samples = self.steps[step][index]
        taken = {key: [column[i] for i in samples] for key, column in self._columns.items()}
        tokens, lengths = taken.pop("tokens"), taken.pop("total_lengths")
        if not samples:
            tokens = [torch.zeros(1, dtype=torch.int32)]
        sequences = [len(t) for t in tokens]
        cu_seqlens = torch.zeros(len(sequences) + 1, dtype=torch.int32)
        cu_seqlens[1:] = torch.tensor(sequences).cumsum(0)

        def flat(key: str) -> torch.Tensor | None:
            if key not in taken:
                return None
            values = taken.pop(key)
            return torch.cat(values).to(device) if values else torch.zeros(0, device=device)

        kept_ids, kept_offsets = (taken.pop(f"rollout_top_p_token_{key}", None) for key in ("ids", "offsets"))
        return MicroBatch(
            tokens=torch.cat(tokens).long().to(device),
            position_ids=torch.cat([torch.arange(n) for n in sequences]).to(device),
            cu_seqlens=cu_seqlens.to(device),
            max_seqlen=max(sequences),
            total_lengths=lengths,
            response_lengths=taken.pop("response_lengths"),
            loss_masks=flat("loss_masks"),
            denominators=self._denominators[samples].to(device),
            num_rollouts=self.num_rollouts[step],
            num_tokens=self.num_tokens[step],
            sample_indices=taken.pop("sample_indices", samples),
            old_log_probs=flat("log_probs"),
            ref_log_probs=flat("ref_log_probs"),
            rollout_log_probs=flat("rollout_log_probs"),
            values=flat("values"),
            advantages=flat("advantages"),
            returns=flat("returns"),
            opd_reverse_kl=flat("opd_reverse_kl"),
            kept=None if kept_ids is None else KeptTokens.join(kept_ids, kept_offsets, device),
            extra=taken,
        )
