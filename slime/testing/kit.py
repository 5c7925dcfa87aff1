"""What a contract needs of a run: arguments, prompts, rewarded samples, a tokenizer, an engine without a model."""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.arguments.parser import resolve
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.testing.scripted_engine import ScriptedEngine, served_in_thread
from slime.utils.served_models import one_group
from slime.utils.types import Sample

PROMPTS = 6
SETTINGS: dict[str, Any] = {
    "rollout_batch_size": 2,
    "over_sampling_batch_size": 2,
    "n_samples_per_prompt": 2,
    "global_batch_size": 2,
    "rollout_max_response_len": 8,
    "served_models": one_group(None, 1, 1),
    "sglang_model_routers": {},
    "num_rollout": 1,
    "rm_type": "random",
    "input_key": "messages",
    "label_key": "label",
    "apply_chat_template": True,
    "eps_clip_high": 0.2,
    "use_critic": False,
    "device": "cpu",
    "sglang_router_ip": "127.0.0.1",
}


class Kit:
    """Fresh arguments and samples for each contract.

    Args:
        directory: an empty one, for prompts, tokenizer and whatever a hook writes.
        engine_url: of a `ScriptedEngine`.
        samples: groups to show to hooks instead of made-up ones (a rollout dump's).
    """

    def __init__(self, directory: Path, engine_url: str, samples: list[list[Sample]] | None = None) -> None:
        self.directory = directory
        self.engine_url = engine_url
        self._samples = samples

    @functools.cached_property
    def tokenizer_dir(self) -> str:
        from slime.quickstart.tokenizer import train_tokenizer

        path = self.directory / "tokenizer"
        train_tokenizer([f"What is {i} plus {i}? It is {2 * i}." for i in range(20)]).save_pretrained(path)
        return str(path)

    def args(self, **changes: Any) -> Namespace:
        """All flags at their defaults but for a tiny run on the scripted engine."""
        args = resolve([])
        prompts = self.directory / "prompts.jsonl"
        if not prompts.exists():
            rows = [
                {"messages": [{"role": "user", "content": f"What is {i} plus {i}?"}], "label": str(2 * i)}
                for i in range(PROMPTS)
            ]
            prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        vars(args).update(
            SETTINGS,
            hf_checkpoint=self.tokenizer_dir,
            prompt_data=str(prompts),
            sglang_router_port=int(self.engine_url.rsplit(":", 1)[1]),
            eval_datasets=[],
            **changes,
        )
        return args

    def data_source(self, args: Namespace) -> RolloutDataSourceWithBuffer:
        return RolloutDataSourceWithBuffer(args)

    def pending(self, args: Namespace) -> list[list[Sample]]:
        """Two groups as the data source hands them out."""
        return self.data_source(args).get_samples(2)

    def finished(self) -> list[list[Sample]]:
        """Two rewarded groups of two: one with equal rewards, one with different ones and a truncated sample."""
        if self._samples is not None:
            return [[sample.clone() for sample in group] for group in self._samples]
        groups = []
        for group in range(2):
            samples = []
            for copy in range(2):
                length = 3 + group + copy
                sample = Sample(group_index=group, index=2 * group + copy, label="4", reward=float(group * copy))
                sample.prompt, sample.response = "What is 2 plus 2?", "It is 4."
                sample.tokens = [10 + i for i in range(4 + length)]
                sample.response_length, sample.rollout_log_probs = length, [-0.5] * length
                sample.weight_versions, sample.weight_version_spans = ["1"], [("1", 0, length)]
                sample.status = Sample.Status.TRUNCATED if group * copy else Sample.Status.COMPLETED
                samples.append(sample)
            groups.append(samples)
        return groups


@contextmanager
def kit(directory: Path, samples: list[list[Sample]] | None = None) -> Iterator[Kit]:
    """A kit with a running engine."""
    engine = ScriptedEngine()
    engine.first_token, engine.last_token = 3, 200
    with served_in_thread(engine.app()) as url:
        engine.url = url
        yield Kit(directory, url, samples)
