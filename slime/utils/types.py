"""The objects that cross rollout, reward and training.

Imports nothing heavy: rollout workers, reward functions and the driver all use this module.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


class SampleStatus(str, Enum):
    """Where a sample stands in its life."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One prompt with one (possibly partial) response.

    A token is generated once and never re-tokenised: `tokens` and `rollout_log_probs` come from the engine and go
    to the loss unchanged. Response-side lists (`loss_mask`, `rollout_log_probs`) have `response_length` entries.
    """

    Status = SampleStatus

    group_index: int | None = None
    """Index of the prompt over the whole run; samples of one prompt share it."""
    index: int | None = None
    """Index of the sample over the whole run."""
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    """Prompt ids followed by response ids."""
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """1 = trained on, 0 = not; None means all ones."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any | None = None
    """int32 [len(tokens) - 1, num_layers, topk] or None."""
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    spec_info: dict[str, Any] | None = None
    """Under speculative decoding: `accepted_tokens`, `draft_tokens`, `verify_steps` and `completion_tokens`, summed
    over the requests of this sample."""
    rollout_id: int | str | None = None
    """Trajectory id: the pieces of one trajectory that was split into several samples share it, and nothing else of
    the rollout has it."""
    session_id: str | None = None
    remove_sample: bool = False
    """Keep the sample in the batch and its denominators, but train on none of its tokens."""
    teacher_log_probs: list[float] | None = None
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    """What top-p left to sample from at each response token, one set after the other."""
    rollout_top_p_token_offsets: list[int] | None = None
    """[response_length + 1]; token t has `ids[offsets[t]:offsets[t + 1]]`."""
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    non_generation_time: float = 0.0
    """Seconds spent outside the engine (tools, environments)."""
    prefix_cache_info: dict[str, Any] | None = None
    """`cached_tokens` and `prompt_tokens`, summed over the requests of this sample."""
    weight_version_spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(version, start, end): the weights that generated the response tokens [start, end)."""

    @property
    def truncated(self) -> bool:
        return self.status == SampleStatus.TRUNCATED

    @property
    def aborted(self) -> bool:
        return self.status == SampleStatus.ABORTED

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else int(sum(self.loss_mask))

    def get_reward_value(self, args) -> float:
        """The scalar reward; `--reward-key` picks it out of a dict reward.

        Raises:
            KeyError: the reward is a dict without that key (the message lists the keys there are).
        """
        if not args.reward_key:
            return self.reward
        if not isinstance(self.reward, dict) or args.reward_key not in self.reward:
            have = sorted(self.reward) if isinstance(self.reward, dict) else type(self.reward).__name__
            raise KeyError(f"--reward-key {args.reward_key!r} is not in the reward of sample {self.index}: {have}")
        return self.reward[args.reward_key]

    def append_response_tokens(
        self,
        args,
        *,
        tokens: list[int],
        log_probs: list[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str = "",
        update_terminal_info: bool = True,
    ) -> Sample:
        """Append tokens to the response and keep every per-token list aligned.

        Args:
            log_probs: the engine's, one per token. Tokens that no model generated (tool output) have none and get 0.
            trainable: whether the loss sees these tokens.
            meta_info: the engine's, from which versions, cache hits and the finish reason are taken.
            text: the detokenised tokens.
            update_terminal_info: set `status` from the finish reason.

        Raises:
            ValueError: the lists do not fit each other.
        """
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ValueError(f"sample {self.index}: {len(tokens)} tokens but {len(log_probs)} log-probs")
        before = self.response_length
        if not trainable and self.loss_mask is None:
            self.loss_mask = [1] * before
        if self.loss_mask is not None:
            self.loss_mask = self.loss_mask + [int(trainable)] * len(tokens)
        if log_probs is not None or self.rollout_log_probs is not None:
            earlier = self.rollout_log_probs if self.rollout_log_probs is not None else [0.0] * before
            self.rollout_log_probs = earlier + (log_probs if log_probs is not None else [0.0] * len(tokens))
        self._append_kept((meta_info or {}).get("output_token_sampling_mask"), len(tokens))
        self.tokens = self.tokens + list(tokens)
        self.response += text
        self.response_length = before + len(tokens)
        if meta_info is not None:
            self._take_meta_info(meta_info, before, update_terminal_info)
        return self

    def _append_kept(self, kept: list[list[int]] | None, count: int) -> None:
        """Tokens that nobody sampled have empty sets."""
        if kept is None and self.rollout_top_p_token_ids is None:
            return
        if kept is not None and len(kept) != count:
            raise ValueError(f"sample {self.index}: {count} tokens but {len(kept)} sets of kept tokens")
        ids, offsets = list(self.rollout_top_p_token_ids or []), list(self.rollout_top_p_token_offsets or [])
        offsets = offsets or [0] * (self.response_length + 1)
        for tokens in kept or [[]] * count:
            ids.extend(tokens)
            offsets.append(len(ids))
        self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = ids, offsets

    def _take_meta_info(self, meta_info: dict[str, Any], start: int, update_terminal_info: bool) -> None:
        version = meta_info.get("weight_version")
        spans = meta_info.get("weight_versions") or []
        if spans:
            self.weight_versions.extend(str(span["version"]) for span in spans)
            self.weight_version_spans.extend(
                (str(span["version"]), start + span["start"], start + span["end"]) for span in spans
            )
        elif version is not None:
            self.weight_versions.append(str(version))
            self.weight_version_spans.append((str(version), start, self.response_length))
        if "prompt_tokens" in meta_info:
            info = self.prefix_cache_info or {"cached_tokens": 0, "prompt_tokens": 0}
            self.prefix_cache_info = {key: info[key] + (meta_info.get(key) or 0) for key in info}
        counters = {name: meta_info[key] for key, name in _SPEC_COUNTERS.items() if meta_info.get(key) is not None}
        if counters:
            counters["completion_tokens"] = meta_info.get("completion_tokens", self.response_length - start)
            earlier = self.spec_info or {}
            self.spec_info = {name: earlier.get(name, 0) + counters.get(name, 0) for name in {*earlier, *counters}}
        if update_terminal_info:
            reason = (meta_info.get("finish_reason") or {}).get("type")
            self.status = _STATUS_OF_FINISH.get(reason, self.status)

    def to_dict(self) -> dict[str, Any]:
        """Shallow dict of all fields; `status` becomes its string value."""
        out = dict(self.__dict__)
        out["status"] = self.status.value
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`. Leaves `data` alone; unknown keys become attributes."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        if "status" in values:
            values["status"] = SampleStatus(values["status"])
        sample = cls(**values)
        for key, value in data.items():
            if key not in known:
                setattr(sample, key, value)
        return sample

    def clone(self) -> Sample:
        """A deep copy, so that the samples of one prompt share no list."""
        return copy.deepcopy(self)


_SPEC_COUNTERS = {
    "spec_accept_token_num": "accepted_tokens",
    "spec_accepted_drafts": "accepted_tokens",
    "spec_num_correct_drafts": "accepted_tokens",
    "spec_draft_token_num": "draft_tokens",
    "spec_proposed_drafts": "draft_tokens",
    "spec_num_proposed_drafts": "draft_tokens",
    "spec_verify_ct": "verify_steps",
}
"""SGLang's names of what it counts per request under speculative decoding, old and new."""

_STATUS_OF_FINISH = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}
