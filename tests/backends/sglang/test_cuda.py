"""A trainer and a stock SGLang server on one GPU: FP8 weights, experts one by one, adapters."""

from pathlib import Path

import pytest
import torch

from slime.arguments.parser import resolve
from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.backends.sglang_utils.command import launch_command, launch_env
from slime.backends.sglang_utils.compat import installed_version
from slime.utils.served_models import ADAPTER_NAME, one_group
from slime.weight_sync.fp8 import dequantise, is_quantised_by_default, quantise
from slime.weight_sync.fp8_files import to_fp8
from tests.backends.test_cuda import masters, served_log_probs
from tests.backends.trainers import make_trainer, run_world, trainer_args
from tests.conformance.servers import SGLangServer
from tests.tiny_model import save_tiny_model, save_tiny_moe

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available() or installed_version() is None, reason="needs a GPU and SGLang"),
]

ENGINE = """
    --device cuda --dtype bfloat16 --rollout-engine sglang --sglang-mem-fraction-static 0.3
    --sglang-max-total-tokens 8192 --sglang-max-running-requests 8 --sglang-attention-backend triton
    --sglang-sampling-backend pytorch --sglang-grammar-backend none --sglang-disable-cuda-graph
    --sglang-mm-feature-transport cpu
""".split()
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 512, "num_hidden_layers": 4}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LORA = ("--lora-rank", "8", "--lora-sync", "adapter")


class CudaServer(SGLangServer):
    """Launched as slime's engine actor does it, on GPU 0."""

    flags: tuple[str, ...] = ()

    def command(self, model_path: str) -> tuple[list[str], dict[str, str]]:
        args = resolve([*ENGINE, *self.flags, "--hf-checkpoint", model_path])
        args.offload_rollout = False
        return launch_command(args, rank=0, host="127.0.0.1"), launch_env(args, ["0"])

    def log_probs(self, **fields) -> tuple[list[int], torch.Tensor, str]:
        """Tokens of a greedy continuation, their log-probs, and the version of the weights."""
        params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        payload = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, **fields}
        reply = self.ok("/generate", payload)
        scored = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
        return PROMPT + reply["output_ids"], scored, reply["meta_info"]["weight_version"]


def push(rank, world_size, port, model_dir, served_dir, url, flags):
    """Perturb the trainer's weights, push them; what the engine should hold."""
    args = trainer_args(
        model_dir, "--device", "cuda", *flags[:2], colocate=True, rollout_engine="sglang",
        served_models=one_group(served_dir, 1, 1), update_weight_buffer_size=4_000_000,
        lora_sync="adapter" if flags else "merged",
    )  # fmt: skip
    trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
    trainer.node_address = lambda: "127.0.0.1"
    generator = torch.Generator("cuda").manual_seed(1)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator, device="cuda") * 0.02
            parameter.data.add_(noise.to(parameter.dtype))
    trainer.set_rollout_engines([url], [[0]])
    first = trainer.update_weights()
    second = trainer.update_weights()
    specs = trainer.weights.tensor_specs()
    out = [torch.empty(spec.shape, dtype=torch.bfloat16, device="cuda") for spec in specs]
    trainer.weights.gather(specs, out)
    held = {spec.name: tensor.float().cpu() for spec, tensor in zip(specs, out, strict=True)}
    held = held if flags else masters(trainer)
    trainer.dispose()
    return held, first, second


def expected_log_probs(rank, world_size, port, weights, model_dir, ids):
    return served_log_probs({name: tensor.cuda() for name, tensor in weights.items()}, model_dir, ids)


def run_case(tmp_path: Path, model_dir: str, served_dir: str, flags=(), adapt=lambda name, weight: weight, **fields):
    """Largest difference to the pushed weights, and to the ones from before."""
    server = CudaServer.__new__(CudaServer)
    server.flags = tuple(flags)
    CudaServer.__init__(server, served_dir, tmp_path)
    try:
        server.wait()
        _, before, _ = server.log_probs()
        ((held, first, second),) = run_world(push, 1, model_dir, served_dir, server.url, tuple(flags))
        ids, after, version = server.log_probs(**fields)
    finally:
        server.stop()
    assert version == "2"
    pushed = {name: adapt(name, weight) for name, weight in held.items()}
    (expected,) = run_world(expected_log_probs, 1, pushed, model_dir, ids)
    print(f"sync {first['perf/update_weights_time']:.3f} then {second['perf/update_weights_time']:.3f} s,", end=" ")
    print(f"{second['perf/update_weights_bytes'] / 1e6:.1f} MB")
    return (after - expected[-len(after) :]).abs().max(), (after - before).abs().max()


def through_fp8(name: str, weight: torch.Tensor) -> torch.Tensor:
    return dequantise(*quantise(weight.bfloat16())) if is_quantised_by_default(name, tuple(weight.shape)) else weight


def test_fp8_engine(tmp_path):
    """The engine computes with FP8 activations too: a little further from the weights than bf16."""
    model_dir, fp8_dir = tmp_path / "bf16", tmp_path / "fp8"
    save_tiny_model(str(model_dir), **SIZES)
    to_fp8(model_dir, fp8_dir)
    distance, change = run_case(tmp_path, str(model_dir), str(fp8_dir), adapt=through_fp8)
    assert distance < 0.25 < change, (distance, change)


def test_experts_one_by_one(tmp_path):
    model_dir = str(tmp_path / "moe")
    save_tiny_moe(model_dir, hidden_size=256, moe_intermediate_size=128, head_dim=64, num_attention_heads=4)
    distance, change = run_case(tmp_path, model_dir, model_dir)
    assert distance < 0.1 < change, (distance, change)


def test_adapters(tmp_path):
    """Requests name the adapter; those that do not get the base."""
    model_dir = str(tmp_path / "base")
    save_tiny_model(model_dir, **SIZES)
    distance, change = run_case(tmp_path, model_dir, model_dir, flags=LORA, lora_path=ADAPTER_NAME)
    assert distance < 0.1 < change, (distance, change)
