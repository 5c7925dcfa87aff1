"""What stock SGLang does on a GPU only: samples that depend on their seed alone, draft tokens, and what a token was
sampled among by its GPU samplers."""

import pytest
import torch

from slime.arguments.parser import resolve
from slime.backends.sglang_utils.command import launch_command, launch_env
from slime.backends.sglang_utils.compat import installed_version
from slime.observability.rollout_metrics import engine_metrics
from slime.rollout.generation import generate
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.backends.sglang.test_experts import agreement, arguments, port_of
from tests.conformance.servers import SGLangServer
from tests.rollout.support import make_args
from tests.tiny_model import save_tiny_model, save_tiny_moe

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available() or installed_version() is None, reason="needs a GPU and SGLang"),
]
CUDA_WORDS = "--device cuda --dtype float32 --rollout-engine sglang --sglang-mem-fraction-static 0.3".split()
ATTENTION = ("--sglang-attention-backend", "triton")
"""For heads of any width, in fp32 too."""


class CudaServer(SGLangServer):
    words: tuple[str, ...] = ()

    def command(self, model_path):
        args = resolve([*CUDA_WORDS, *ATTENTION, *self.words, "--hf-checkpoint", model_path])
        args.offload_rollout = False
        return launch_command(args, rank=0, host="127.0.0.1"), launch_env(args, [])


class SeededServer(CudaServer):
    words = ("--sglang-enable-deterministic-inference",)


class DraftingServer(CudaServer):
    words = ("--sglang-speculative-algorithm", "NGRAM", "--sglang-speculative-num-draft-tokens", "4")


class RoutingServer(CudaServer):
    words = ("--use-rollout-routing-replay",)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    save_tiny_model(path, hidden_size=256, num_attention_heads=4, head_dim=64)
    return path


@pytest.fixture
def start(model_dir, tmp_path):
    servers = []

    def start(kind, path=model_dir):
        servers.append(kind(path, tmp_path))
        return servers[-1].wait()

    yield start
    for server in servers:
        server.stop()


def test_samples_depend_on_their_seeds_alone(start):
    server = start(SeededServer)
    prompt = list(range(10, 40))

    def sampled(seeds: list[int]):
        params = [{"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": seed} for seed in seeds]
        body = {"input_ids": [prompt] * len(seeds), "sampling_params": params, "return_logprob": True}
        return [(r["output_ids"], r["meta_info"]["output_token_logprobs"]) for r in server.ok("/generate", body)]

    many = sampled(list(range(24)))
    assert len({tuple(ids) for ids, _ in many}) == 24
    assert sampled([7]) == [many[7]] and sampled([3, 900, 11])[::2] == [many[3], many[11]]


def test_accepted_drafts_reach_the_metrics(start, model_dir):
    server = start(DraftingServer)
    args = make_args(hf_checkpoint=model_dir, sglang_router_port=port_of(server))
    sample = Sample(tokens=[5, 6, 7, 8] * 8)
    run(generate(args, sample, {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}))
    info, metrics = sample.spec_info, engine_metrics([sample])
    assert info["completion_tokens"] == 200 and 0 < info["verify_steps"] <= 200
    assert info["accepted_tokens"] <= info["draft_tokens"]
    assert 0 <= metrics["spec_accept_rate"] <= 1 and metrics["spec_accept_length"] == 200 / info["verify_steps"]


def test_what_a_token_was_sampled_among(start, model_dir):
    from transformers import AutoModelForCausalLM

    server = start(CudaServer)
    prompt, params = list(range(10, 40)), {"max_new_tokens": 32, "top_p": 0.6, "top_k": 20, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "return_sampling_mask": True}
    reply = server.ok("/generate", body)
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + reply["output_ids"]])).logits[0, len(prompt) - 1 : -1].double()
    meta = reply["meta_info"]
    sets, among = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    for row, token, kept, logprob in zip(logits, reply["output_ids"], sets, among, strict=True):
        assert token in kept and len(kept) <= 20
        assert logprob == pytest.approx((row[token] - row[kept].logsumexp(0)).item(), abs=5e-3)


def test_experts_are_those_that_the_model_s_routers_choose(start, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("moe"))
    save_tiny_moe(path, hidden_size=256, moe_intermediate_size=128, head_dim=64, num_experts=8)
    args = arguments(path, port_of(start(RoutingServer, path)))
    for _ in range(2):  # the second time the prompt is cached
        params = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
        sample = run(generate(args, Sample(tokens=list(range(10, 70))), params))
        assert agreement(sample, path) > 0.99
