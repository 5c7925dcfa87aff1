"""What the tasks of one rollout share: tokenizer, sampling parameters, concurrency limit, pending groups."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.served_models import policy_model
from slime.utils.types import Sample

_KEPT = 4
_states: list[GenerateState] = []
_lock = threading.Lock()


class GenerateState:
    """State of the rollouts that run with one `args` object.

    `GenerateState(args)` returns the same state for the same args object, so custom generate functions can get at it;
    another args object gets another state.
    """

    def __new__(cls, args) -> GenerateState:
        with _lock:
            for state in _states:
                if state.args is args:
                    return state
            state = super().__new__(cls)
            state._set_up(args)
            _states.append(state)
            del _states[:-_KEPT]
            return state

    def _set_up(self, args) -> None:
        self.args = args
        self.sampling_params = train_sampling_params(args)
        self.concurrency = args.sglang_server_concurrency * policy_model(args).num_answering()
        self._semaphores: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self.dp_counts = [0] * attention_dp_size(args)
        """Requests in flight per data-parallel attention rank of the engines."""
        self.rollout_id: int | None = None
        self.eval_rollout_id: int | None = None
        self.eval_datasets: dict[str, Any] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the previous rollout."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task] = set()
        self.aborted = False
        self.progress = (0, 0)
        """(groups accepted, groups wanted) of the rollout that runs, for progress displays."""

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """Bounds the requests in flight on the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            self._semaphores = {known: s for known, s in self._semaphores.items() if not known.is_closed()}
            self._semaphores[loop] = asyncio.Semaphore(self.concurrency)
        return self._semaphores[loop]

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int | None]:
        """The attention rank with the fewest requests in flight, one more while inside; None for one rank alone.

        It goes into a request as `routed_dp_rank`.
        """
        if len(self.dp_counts) == 1:
            yield None
            return
        rank = self.dp_counts.index(min(self.dp_counts))
        self.dp_counts[rank] += 1
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    @functools.cached_property
    def tokenizer(self):
        return load_tokenizer(self.args.hf_checkpoint, self.args.trust_remote_code)

    @functools.cached_property
    def processor(self):
        return load_processor(self.args.hf_checkpoint, self.args.trust_remote_code)

    def submit_generate_tasks(self, groups: list[list[Sample]]) -> None:
        """Start one task per group."""
        from slime.rollout.generation import generate_and_rm_group

        for group in groups:
            task = asyncio.create_task(generate_and_rm_group(self.args, group, self.sampling_params.copy()))
            task.group = group
            self.pendings.add(task)
        self.remaining_batch_size += len(groups)


def attention_dp_size(args) -> int:
    """Data-parallel attention ranks inside an engine; SGLang's own arguments exist where it is installed."""
    given = vars(args)
    return max(given.get("sglang_attn_dp_size") or 1, given.get("sglang_dp_size") or 1)


def train_sampling_params(args) -> dict[str, Any]:
    """`sampling_params` of a training request, as SGLang's native API names them."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
