"""One request on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.engine.protocol import Request, SamplingParams


@dataclass(eq=False)
class Sequence:
    """Tokens, KV blocks and results of one request. Only the engine thread changes it."""

    request: Request
    seed: int
    """Key of its random numbers; see `protocol.sampling_key`."""
    stop_ids: frozenset[int]
    """Tokens that end it, end-of-sequence tokens included."""
    on_output: Callable[[Sequence], None]
    """Called after each token when streaming, and once when finished."""
    stream: bool = False
    token_ids: list[int] = field(default_factory=list)
    """Prompt, then output."""
    num_computed: int = 0
    """Tokens whose KV is in the cache."""
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chain hash of each full block registered or matched so far."""
    row: int = -1
    """Its row in the `RowTable` while it runs."""
    cacheable: bool = True
    """False when its KV mixes weight versions: it must not serve others."""
    cached_tokens: int = 0
    num_retractions: int = 0
    output_logprobs: list[float] = field(default_factory=list)
    output_top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    output_kept: list[tuple[list[int], float]] = field(default_factory=list)
    """Of each output token, if the request asks: the tokens that it was sampled among, and its log-prob among them."""
    input_logprobs: list[float] = field(default_factory=list)
    """Log-probs of prompt tokens from position `logprob_start` (or 1) on."""
    versions: list[list[Any]] = field(default_factory=list)
    """[weight version, first output token, end] of each span."""
    finish_reason: dict[str, Any] | None = None
    created: float = field(default_factory=time.perf_counter)
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.input_ids)
        self.prompt_len = len(self.token_ids)
        self.max_len = self.prompt_len + self.params.max_new_tokens

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def wants_input_logprobs(self) -> bool:
        return self.request.return_logprob and self.request.logprob_start_len >= 0

    @property
    def logprob_start(self) -> int:
        """First prompt position whose token gets a log-prob (position 0 has none)."""
        return max(1, self.request.logprob_start_len)

    def mark_version(self, version: str) -> None:
        """The next output token comes from weights `version`."""
        if not self.versions or self.versions[-1][0] != version:
            self.close_version()
            self.versions.append([version, self.num_output, self.num_output])

    def close_version(self) -> None:
        if self.versions:
            self.versions[-1][2] = self.num_output

    def finish(self, reason: dict[str, Any]) -> None:
        self.close_version()
        self.finish_reason = reason
        self.finished_at = time.perf_counter()
