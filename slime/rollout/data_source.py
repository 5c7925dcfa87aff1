"""Where prompts come from: an endless walk over the prompt data set, in front of it a buffer of unfinished groups.

What is saved says exactly which samples have been handed out and which wait in the buffer, so a resumed run loses no
sample and repeats none.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from slime.rollout.errors import HookFailure, blame
from slime.utils import state_file
from slime.utils.data import Dataset
from slime.utils.misc import flatten, load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


METHODS = ("get_samples", "add_samples", "save", "load")


def open_data_source(args) -> Any:
    """An instance of `--data-source-path`.

    Raises:
        DataError: slime's own cannot read the prompt data.
        HookFailure: a user's class cannot be built, or lacks a method; the message names the flag.
    """
    factory = load_function(args.data_source_path, "--data-source-path")
    who = f"--data-source-path {args.data_source_path}"
    with contextlib.nullcontext() if factory.__module__ == __name__ else blame("--data-source-path", factory):
        source = factory(args)
    missing = [name for name in METHODS if not callable(getattr(source, name, None))]
    if missing:
        raise HookFailure(f"{who} has no method {', '.join(missing)}")
    if args.num_rollout is None and not hasattr(source, "__len__"):
        raise HookFailure(f"{who} has no __len__, which --num-epoch needs; write it, or use --num-rollout")
    return source


class RolloutDataSource:
    """Prompts of `--prompt-data`, `n_samples_per_prompt` copies each, epoch after epoch.

    `group_index` counts prompts and `index` counts samples over the whole run. Without a managed data set
    (`--disable-rollout-global-dataset`) the samples are empty and the rollout function fills them.
    """

    def __init__(self, args) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.dataset = _load_dataset(args) if args.rollout_global_dataset else None
        if self.dataset is not None and args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next `num_samples` groups."""
        return [self._group(prompt) for prompt in self._prompts(num_samples)]

    def _prompts(self, count: int) -> list[Sample]:
        if self.dataset is None:
            return [Sample() for _ in range(count)]
        prompts: list[Sample] = []
        while len(prompts) < count:
            taken = self.dataset[self.sample_offset : self.sample_offset + count - len(prompts)]
            prompts += taken
            self.sample_offset += len(taken)
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                if self.args.rollout_shuffle:
                    self.dataset.shuffle(self.epoch_id)
        return prompts

    def _group(self, prompt: Sample) -> list[Sample]:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = prompt.clone()
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise RuntimeError(
            f"{type(self).__name__} has no buffer; use RolloutDataSourceWithBuffer (--data-source-path)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides which samples come next, as plain values."""
        return {
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
            "dataset_length": 0 if self.dataset is None else len(self.dataset),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        length = state.get("dataset_length", 0)
        if self.dataset is not None and length and length != len(self.dataset):
            logger.warning(
                "--prompt-data %s has %d prompts, the checkpoint was written with %d: the position in the epoch (%d) "
                "no longer means the same prompts",
                self.args.prompt_data, len(self.dataset), length, state["sample_offset"],
            )  # fmt: skip
        self.sample_offset = state["sample_offset"]
        self.epoch_id = state["epoch_id"]
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = dict(state.get("metadata") or {})
        if self.dataset is not None:
            self.sample_offset %= len(self.dataset)
            if self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)

    def save(self, rollout_id: int) -> None:
        """Write the state beside the checkpoint of this rollout, atomically. Does nothing without `--save`."""
        if self.args.save:
            state_file.save(_state_path(self.args.save, rollout_id), self.state_dict())

    def load(self, rollout_id: int | None = None) -> None:
        """Continue after this rollout. A checkpoint without such a state (rollout_id < 0: none yet) starts afresh.

        Raises:
            FileNotFoundError: `--load` has states of other rollouts but not of this one.
        """
        if not self.args.load or rollout_id is None or rollout_id < 0:
            return
        path = _state_path(self.args.load, rollout_id)
        if os.path.isfile(path):
            self.load_state_dict(state_file.load(path))
            return
        if os.path.isdir(os.path.dirname(path)) and os.listdir(os.path.dirname(path)):
            raise FileNotFoundError(f"--load: there is no data source state {path}; the run would repeat samples")
        logger.warning("--load: there is no data source state %s; starting with the first prompt", path)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def get_buffer_length(self) -> int:
        return 0

    def __len__(self) -> int:
        """Prompts per epoch."""
        return 0 if self.dataset is None else len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Hands out buffered groups (partial rollouts, requeued work) before new prompts."""

    def __init__(self, args) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        self.holders: list[Callable[[], AbstractContextManager[list[list[Sample]]]]] = []
        """Whoever keeps groups in hand between rollouts adds a function here. It is entered while the state is read:
        inside, nothing takes prompts, and the groups it gives belong to the state (they resume from the buffer)."""
        self.buffer_filter: Callable = (
            load_function(args.buffer_filter_path, "--buffer-filter-path") if args.buffer_filter_path else pop_first
        )

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        if self.buffer:
            with blame("--buffer-filter-path", self.buffer_filter):
                groups = list(self.buffer_filter(self.args, None, self.buffer, num_samples))
        if len(groups) > num_samples:
            raise ValueError(
                f"--buffer-filter-path {self.args.buffer_filter_path} returned {len(groups)} groups, "
                f"asked for at most {num_samples}"
            )
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Put groups back. A group is a list of samples (or, after fan-out, of lists of samples).

        Raises:
            TypeError: something that is not a group of samples.
        """
        for group in samples:
            if not isinstance(group, list) or not group or not all(isinstance(s, Sample) for s in flatten(group)):
                raise TypeError(f"add_samples takes a list of groups, each a list of Sample; got {group!r:.200}")
        self.buffer.extend(samples)

    def state_dict(self) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            in_hand = [group for holder in self.holders for group in stack.enter_context(holder())]
            # Copies: the groups in hand go on while the state is written.
            groups = copy.deepcopy([_pack(group) for group in [*in_hand, *self.buffer]])
            return {**super().state_dict(), "buffer": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = [_unpack(group) for group in state.get("buffer", [])]

    def get_buffer_length(self) -> int:
        return len(self.buffer)


def pop_first(args, rollout_id, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """The default buffer filter: the oldest groups."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def _load_dataset(args) -> Dataset:
    max_length = args.rollout_max_prompt_len
    if args.rollout_max_context_len is not None:
        # A prompt that fills the context leaves no room for one response token.
        room = args.rollout_max_context_len - 1
        max_length = room if max_length is None else min(max_length, room)
    return Dataset(
        args.prompt_data,
        load_tokenizer(args.hf_checkpoint, args.trust_remote_code) if args.hf_checkpoint else None,
        max_length,
        prompt_key=args.input_key,
        label_key=args.label_key,
        tool_key=args.tool_key,
        metadata_key=args.metadata_key,
        multimodal_keys=args.multimodal_keys,
        apply_chat_template=args.apply_chat_template,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs,
        seed=args.rollout_seed,
    )


def _state_path(root: str, rollout_id: int) -> str:
    return os.path.join(root, "rollout", f"global_dataset_state_dict_{rollout_id}.pt")


def _pack(item: Any) -> Any:
    return [_pack(i) for i in item] if isinstance(item, list) else item.to_dict()


def _unpack(item: Any) -> Any:
    return [_unpack(i) for i in item] if isinstance(item, list) else Sample.from_dict(item)
