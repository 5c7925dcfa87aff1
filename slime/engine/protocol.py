"""What may stand in a request: every field is checked here, before the engine sees it.

Field names and defaults are SGLang's, so that one client serves both engines.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from dataclasses import dataclass, field, fields
from typing import Any

TOP_K_ALL = 1 << 30
GREEDY_EPS = 1e-6
# Features of SGLang that this engine does not have; their neutral values are accepted.
UNSUPPORTED = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "custom_params": (None,),
    "stream_interval": (None, 1),
}


class RequestError(ValueError):
    """A request that cannot be served as it stands; the server answers `status` with the message."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass
class SamplingParams:
    """How one request is sampled and when it ends."""

    max_new_tokens: int = 128
    """0 computes the prompt only."""
    min_new_tokens: int = 0
    """End tokens are not sampled before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is no limit."""
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    n: int = 1

    @classmethod
    def parse(cls, data: dict[str, Any] | None) -> SamplingParams:
        """Build from JSON.

        Raises:
            RequestError: an unknown field, a wrong type or a value out of range.
        """
        if data is None:
            return cls()
        if not isinstance(data, dict):
            raise RequestError(f"sampling_params must be an object, got {type(data).__name__}")
        known = {f.name for f in fields(cls)}
        values = {}
        for name, value in data.items():
            if name in known:
                values[name] = value
            elif name not in UNSUPPORTED:
                raise RequestError(f"sampling_params: unknown field {name!r}; known: {', '.join(sorted(known))}")
            elif value not in UNSUPPORTED[name]:
                raise RequestError(f"sampling_params: {name}={value!r} is not supported by the embedded engine")
        for name in ("stop", "stop_token_ids"):
            if values.get(name) is None:
                values.pop(name, None)
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        params = cls(**values)
        params._check()
        return params

    def _check(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "top_k", "n"):
            self._require(name, _is_int(getattr(self, name)), "an integer")
        for name in ("temperature", "top_p", "min_p"):
            self._require(name, _is_number(getattr(self, name)), "a finite number")
        for name in ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        self._require("max_new_tokens", self.max_new_tokens >= 0, ">= 0")
        self._require("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "in [0, max_new_tokens]")
        self._require("temperature", self.temperature >= 0, ">= 0")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._require("top_k", self.top_k == -1 or 1 <= self.top_k <= TOP_K_ALL, "-1 or >= 1")
        self._require("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._require("n", 1 <= self.n <= 4096, "in [1, 4096]")
        seed = self.sampling_seed
        self._require("sampling_seed", seed is None or (_is_int(seed) and abs(seed) < 2**63), "a 64-bit integer")
        strings = isinstance(self.stop, list) and all(isinstance(s, str) and s for s in self.stop)
        self._require("stop", strings, "a non-empty string or a list of them")
        ids = isinstance(self.stop_token_ids, list) and all(_is_int(i) and i >= 0 for i in self.stop_token_ids)
        self._require("stop_token_ids", ids and len(self.stop_token_ids) <= 1024, "a list of token ids")

    def _require(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise RequestError(f"sampling_params: {name} must be {rule}, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPS or self.top_k == 1


@dataclass
class Request:
    """One sequence to generate."""

    rid: str
    input_ids: list[int]
    params: SamplingParams
    group_rid: str = ""
    """The rid the client gave; samples of one prompt (`n` > 1) share it."""
    sample_index: int = 0
    """Which of the `n` samples this is; it enters the sampling key."""
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First prompt position with a log-prob; -1: none."""
    top_logprobs_num: int = 0
    return_kept_tokens: bool = False
    """Tell for each output token what top-p, top-k and min-p left to sample from, with log-probs over just these."""


@dataclass
class GenerateRequest:
    """A parsed /generate body."""

    requests: list[Request]
    single: bool
    """The reply is an object, not a list."""
    stream: bool


def _listed(name: str, value: Any, count: int, default: Any) -> list[Any]:
    """A per-prompt list from one value for all, a list, or nothing."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _check_ids(ids: Any, vocab_size: int) -> list[int]:
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int}:
        raise RequestError("input_ids must be a non-empty list of integers, or a list of such lists")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"input_ids: token id {bad} is outside the vocabulary of {vocab_size}")
    return ids


def _prompts(body: dict[str, Any], tokenizer, vocab_size: int) -> tuple[list[list[int]], bool]:
    """Prompt ids of each prompt, and whether there was just one outside a list."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("give exactly one of text and input_ids")
    if text is not None:
        if tokenizer is None:
            raise RequestError("the model directory has no tokenizer: send input_ids")
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
            raise RequestError("text must be a non-empty string or a list of them")
        ids = [tokenizer(t)["input_ids"] for t in texts]
        return [_check_ids(i, vocab_size) for i in ids], isinstance(text, str)
    if not isinstance(ids, list) or not ids:
        raise RequestError("input_ids must be a non-empty list of integers, or a list of such lists")
    single = not isinstance(ids[0], list)
    return [_check_ids(i, vocab_size) for i in ([ids] if single else ids)], single


def parse_generate(body: Any, tokenizer, vocab_size: int, max_context: int) -> GenerateRequest:
    """Check a /generate body and split it into one `Request` per sequence to generate.

    A request whose prompt and `max_new_tokens` together pass the context is cut to it and ends with "length".

    Raises:
        RequestError: anything in the body that cannot be served.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    prompts, single = _prompts(body, tokenizer, vocab_size)
    count = len(prompts)
    for name in ("image_data", "audio_data", "video_data", "input_embeds", "lora_path"):
        if body.get(name):
            raise RequestError(f"{name} is not supported by the embedded engine")
    if body.get("return_routed_experts"):
        raise RequestError("return_routed_experts is not supported by the embedded engine")
    params = [SamplingParams.parse(p) for p in _listed("sampling_params", body.get("sampling_params"), count, None)]
    rids = _listed("rid", body.get("rid"), count, None)
    if count > 1 and isinstance(body.get("rid"), str):
        rids = [f"{body['rid']}_{i}" for i in range(count)]
    with_logprob = _listed("return_logprob", body.get("return_logprob"), count, False)
    starts = _listed("logprob_start_len", body.get("logprob_start_len"), count, -1)
    top_logprobs = _listed("top_logprobs_num", body.get("top_logprobs_num"), count, 0)
    with_kept = _listed("return_sampling_mask", body.get("return_sampling_mask"), count, False)
    stream = body.get("stream", False)
    if not isinstance(stream, bool):
        raise RequestError("stream must be true or false")
    requests = []
    for i, ids in enumerate(prompts):
        if len(ids) >= max_context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the context of {max_context} must hold it and one new token"
            )
        if rids[i] is not None and not (isinstance(rids[i], str) and rids[i]):
            raise RequestError(f"rid must be a non-empty string, got {rids[i]!r}")
        if not isinstance(with_logprob[i], bool):
            raise RequestError(f"return_logprob must be true or false, got {with_logprob[i]!r}")
        if not isinstance(with_kept[i], bool):
            raise RequestError(f"return_sampling_mask must be true or false, got {with_kept[i]!r}")
        if not _is_int(starts[i]) or starts[i] < -1 or starts[i] >= len(ids):
            raise RequestError(f"logprob_start_len must be -1 or a prompt position, got {starts[i]!r}")
        if not _is_int(top_logprobs[i]) or not 0 <= top_logprobs[i] <= vocab_size:
            raise RequestError(f"top_logprobs_num must be in [0, {vocab_size}], got {top_logprobs[i]!r}")
        if any(token >= vocab_size for token in params[i].stop_token_ids):
            raise RequestError(f"stop_token_ids has an id outside the vocabulary of {vocab_size}")
        if params[i].stop and tokenizer is None:
            raise RequestError("the model directory has no tokenizer: stop strings cannot be matched")
        params[i].max_new_tokens = min(params[i].max_new_tokens, max_context - len(ids))
        group = rids[i] or uuid.uuid4().hex
        for k in range(params[i].n):
            requests.append(
                Request(
                    rid=group if params[i].n == 1 else f"{group}_{k}",
                    input_ids=ids,
                    params=params[i],
                    group_rid=group,
                    sample_index=k,
                    return_logprob=with_logprob[i],
                    logprob_start_len=starts[i],
                    top_logprobs_num=top_logprobs[i],
                    return_kept_tokens=with_kept[i],
                )
            )
    return GenerateRequest(requests, single=single and len(requests) == 1, stream=stream)


def sampling_key(params: SamplingParams, sample_index: int, engine_seed: int, arrival: int) -> int:
    """The 64-bit key of a request's random numbers: its own seed, or the engine's and the order of arrival."""
    if params.sampling_seed is not None:
        source = f"request:{params.sampling_seed}:{sample_index}"
    else:
        source = f"engine:{engine_seed}:{arrival}"
    return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "little")
