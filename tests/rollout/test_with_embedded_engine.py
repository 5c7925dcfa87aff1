"""The rollout loop against the real embedded engine: two server processes behind the router process."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from argparse import Namespace

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.teacher import teacher_log_probs
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.misc import flatten
from slime.utils.types import Sample

pytestmark = pytest.mark.integration
HOOKS = "tests.rollout.hooks."


class Server:
    """One server module as a process that writes its port to a file."""

    def __init__(self, directory, name: str, *command: str) -> None:
        self.port_file = directory / f"{name}.port"
        self.log = directory / f"{name}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, "--port-file", str(self.port_file), "--parent-pid", str(os.getpid())],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def url(self) -> str:
        deadline = time.monotonic() + 120
        while not self.port_file.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return f"http://127.0.0.1:{self.port_file.read_text().strip()}"


@pytest.fixture(scope="module")
def router_port(tmp_path_factory, tiny_model_dir):
    directory = tmp_path_factory.mktemp("servers")
    options = ["--model-path", tiny_model_dir, "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096"]
    servers = [Server(directory, f"engine{i}", "slime.engine.server", *options) for i in range(2)]
    router = Server(directory, "router", "slime.router.server")
    try:
        for server in servers:
            run(post(f"{router.url}/workers", {"url": server.url}))
        yield int(router.url.rsplit(":", 1)[1])
    finally:
        for server in [router, *servers]:
            server.process.terminate()
        for server in [router, *servers]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(10)
            server.process.kill()


def test_a_teacher_behind_an_engine_scores_the_response(router_port):
    """The policy as its own teacher gives its own log-probs."""
    url = f"http://127.0.0.1:{router_port}"
    params = {"max_new_tokens": 9, "temperature": 1.0, "ignore_eos": True}
    for prompt in ([5, 6, 7], [9]):
        reply = run(post(f"{url}/generate", {"input_ids": prompt, "return_logprob": True, "sampling_params": params}))
        scored = reply["meta_info"]["output_token_logprobs"]
        sample = Sample(tokens=prompt + reply["output_ids"], response_length=9)
        args = Namespace(opd_teacher_url=url)
        run(teacher_log_probs(args, sample, evaluation=True))
        assert sample.teacher_log_probs is None
        run(teacher_log_probs(args, sample))
        assert sample.teacher_log_probs == pytest.approx([logprob for logprob, _, _ in scored], abs=1e-5)


def rollout(args, source, rollout_id=0):
    return list(flatten(generate_rollout(args, rollout_id, source).samples))


def test_samples_are_reproducible_and_aligned(rollout_args, router_port):
    runs = []
    for seed in (1, 1, 2):
        args = rollout_args(
            custom_rm_path=HOOKS + "reward_parity", sglang_router_port=router_port, rollout_seed=seed,
            rollout_batch_size=6, over_sampling_batch_size=6, n_samples_per_prompt=4,
        )  # fmt: skip
        runs.append(rollout(args, RolloutDataSourceWithBuffer(args)))
    tokens = [[s.tokens for s in samples] for samples in runs]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len({tuple(t) for t in tokens[0]}) > 20
    for a, b in zip(runs[0], runs[1], strict=True):
        assert a.rollout_log_probs == pytest.approx(b.rollout_log_probs, abs=1e-5)
        assert len(a.rollout_log_probs) == a.response_length and all(p <= 0 for p in a.rollout_log_probs)


def test_partial_rollout_with_real_aborts(rollout_args, router_port):
    """Surplus requests are aborted in mid-generation and continued, each sample exactly once, with whole responses."""
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity", sglang_router_port=router_port, rows=40, rollout_batch_size=2,
        over_sampling_batch_size=8, partial_rollout=True, rollout_max_response_len=150,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    seen, continued = [], 0
    for rollout_id in range(6):
        continued += sum(1 for s in flatten(source.buffer) if s.aborted and s.response_length)
        for sample in rollout(args, source, rollout_id):
            seen.append(sample.index)
            assert not sample.aborted and sample.reward in (0.0, 1.0)
            assert sample.response_length == len(sample.tokens) - 9 == len(sample.rollout_log_probs) <= 150
            assert sample.weight_version_spans[-1][2] == sample.response_length
            assert sample.truncated == (sample.response_length == 150) or sample.tokens[-1] == 3
    waiting = [s.index for s in flatten(source.buffer)]
    assert continued > 0
    assert len(seen) == len(set(seen)) == 24 and not set(seen) & set(waiting)
    assert sorted(seen + waiting) == list(range(source.sample_index))


def test_over_long_prompt_is_named(rollout_args, router_port, tmp_path):
    from slime.rollout.errors import RolloutError
    from tests.data.support import write_jsonl

    path = write_jsonl(tmp_path / "long.jsonl", [{"input": "w0 " * 600, "label": "1"}])
    args = rollout_args(prompt_data=path, custom_rm_path=HOOKS + "reward_sync", sglang_router_port=router_port)
    with pytest.raises(RolloutError, match=r"the engine refused sample \d .*600 input tokens.*rollout-max-prompt-len"):
        rollout(args, RolloutDataSourceWithBuffer(args))


def test_client_that_hangs_up_frees_the_engine(router_port):
    """A cancelled request must not go on generating."""

    async def scenario():
        url = f"http://127.0.0.1:{router_port}/generate"
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(post(url, body) for _ in range(8))), 0.2)
        return await post(url, {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}})

    assert run(scenario())["meta_info"]["completion_tokens"] <= 2
