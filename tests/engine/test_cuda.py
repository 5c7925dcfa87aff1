"""The whole engine on a GPU: bf16, paged kernels, captured decode steps, memory release."""

import random
import threading

import pytest
import torch

from slime.engine.engine import Engine, EngineConfig
from slime.engine.protocol import Request, SamplingParams
from slime.modeling.hf import load_causal_lm
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.system, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("cuda-model"))
    save_tiny_model(path, head_dim=64, hidden_size=256, num_attention_heads=8, max_position_embeddings=2048)
    return path


def make_engine(model_dir: str, **config) -> Engine:
    model = load_causal_lm(model_dir, torch.bfloat16, "cuda")
    config = {"max_running_requests": 64, "max_total_tokens": 65536, "weights_cpu_backup": True, **config}
    engine = Engine(model, None, set(), EngineConfig(**config))
    engine.start()
    return engine


@pytest.fixture(scope="module")
def engine(model_dir):
    engine = make_engine(model_dir)
    yield engine
    engine.stop()


def generate(engine: Engine, prompts: list[list[int]], **params):
    done, left = threading.Event(), len(prompts)

    def on_output(seq) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    requests = [
        Request(f"{i}-{random.random()}", ids, SamplingParams(sampling_seed=i, ignore_eos=True, **params))
        for i, ids in enumerate(prompts)
    ]
    seqs = engine.call(engine.submit, requests, False, on_output).result(60)
    assert done.wait(120)
    assert all(seq.finish_reason["type"] == "length" for seq in seqs), seqs[0].finish_reason
    return seqs


def prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, 128) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def test_logprobs_are_those_of_the_model_in_fp32(engine, model_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda().eval()
    for seq in generate(engine, prompts(20, 900), max_new_tokens=100):
        ids = torch.tensor([seq.token_ids], device="cuda")
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        got = torch.tensor(seq.output_logprobs, device="cuda")
        assert (got - logprobs[seq.prompt_len - 1 :]).abs().max() < 0.05
    assert engine.runner.graphs.graphs and engine.runner.graphs.usable


def test_graphs_do_not_change_results(engine, model_dir):
    batch = prompts(7, 600)
    plain = make_engine(model_dir, disable_cuda_graph=True)
    captured, uncaptured = (generate(e, batch, max_new_tokens=40) for e in (engine, plain))
    plain.stop()
    for a, b in zip(captured, uncaptured, strict=True):
        same = next((i for i in range(40) if a.output_ids[i] != b.output_ids[i]), 40)
        assert same > 0
        difference = torch.tensor(a.output_logprobs[:same]) - torch.tensor(b.output_logprobs[:same])
        assert difference.abs().max() < 0.03


def test_prefix_cache_and_memory_release(engine):
    batch = prompts(3, 600)
    engine.call(engine.flush_cache).result(60)
    before = generate(engine, batch, max_new_tokens=20)
    again = generate(engine, batch, max_new_tokens=20)
    assert sum(seq.cached_tokens for seq in again) > sum(seq.cached_tokens for seq in before)
    held = torch.cuda.memory_allocated()
    engine.call(engine.release_memory, ["kv_cache", "weights", "cuda_graph"]).result(60)
    assert torch.cuda.memory_allocated() < 0.1 * held
    engine.call(engine.resume_memory, ["weights", "kv_cache", "cuda_graph"]).result(60)
    after = generate(engine, batch, max_new_tokens=20)
    for a, b in zip(before, after, strict=True):
        assert abs(a.output_logprobs[0] - b.output_logprobs[0]) < 0.03
