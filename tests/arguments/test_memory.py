"""The predicted memory plan against what was measured on GPUs, and what it refuses."""

import json
import math
import os
import struct
from pathlib import Path

import pytest

from slime.arguments.problems import Problems
from slime.arguments.validation import memory
from slime.utils.memory_plan import GIB, MEGATRON_GROUPS, engine_kv_bytes, read_size

pytestmark = pytest.mark.unit
MIB = 1024**2
H100, H200 = 81559 * MIB, 143771 * MIB
QWEN3 = {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960}


def write_headers(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A safetensors file with a hole in place of its data."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + end)


def write_qwen3(path: Path) -> str:
    """Shapes of Qwen3-0.6B: 596,049,920 parameters, tied embeddings."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN3))
    (path / "tokenizer.json").write_text("{}")
    shapes = {"model.embed_tokens.weight": (151936, 1024), "model.norm.weight": (1024,)}
    for i in range(28):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (2048, 1024),
            layer + "self_attn.k_proj.weight": (1024, 1024),
            layer + "self_attn.v_proj.weight": (1024, 1024),
            layer + "self_attn.o_proj.weight": (1024, 2048),
            layer + "self_attn.q_norm.weight": (128,),
            layer + "self_attn.k_norm.weight": (128,),
            layer + "mlp.gate_proj.weight": (3072, 1024),
            layer + "mlp.up_proj.weight": (3072, 1024),
            layer + "mlp.down_proj.weight": (1024, 3072),
            layer + "input_layernorm.weight": (1024,),
            layer + "post_attention_layernorm.weight": (1024,),
        }
    write_headers(path / "model.safetensors", shapes)
    return str(path)


@pytest.fixture
def model(setup):
    return write_qwen3(setup.root / "qwen3")


@pytest.fixture
def load(setup, model):
    def load(*words, **kwargs):
        args = setup.load("--hf-checkpoint", model, "--actor-num-gpus-per-node", "1", *words, **kwargs)
        args.device, args.dtype = "cuda", "bfloat16"  # as where a GPU is
        return args

    return load


def phases(args, gpu_bytes=H100):
    return {phase.name: phase for phase in memory.plan_of(args, gpu_bytes).phases}


def test_size(model):
    size = read_size(model)
    assert size.params == 596_049_920 and size.weight_bytes == 1_192_099_840
    assert size.kv_bytes_per_token(1, 2) == 28 * 2 * 8 * 128 * 2
    assert size.kv_bytes_per_token(8, 2) == size.kv_bytes_per_token(16, 2) == 28 * 2 * 128 * 2


def test_latent_attention_keeps_one_vector(tmp_path):
    config = QWEN3 | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_headers(tmp_path / "model.safetensors", {"a": (2, 2)})
    assert read_size(str(tmp_path)).kv_bytes_per_token(8, 2) == 61 * 576 * 2


@pytest.mark.parametrize(
    "more, layers",
    [
        ({"model_type": "qwen3_next"}, 7),
        ({"model_type": "qwen3_next", "full_attention_interval": 2}, 14),
        ({"layer_types": ["linear_attention"] * 20 + ["full_attention"] * 8}, 8),
    ],
)
def test_linear_attention_keeps_no_keys(tmp_path, more, layers):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | more))
    write_headers(tmp_path / "model.safetensors", {"a": (2, 2)})
    assert read_size(str(tmp_path)).kv_bytes_per_token(1, 2) == layers * 2 * 8 * 128 * 2


def test_figures_of_an_h100(load):
    """nvidia-smi of benchmarks/results/colocated-sglang-h100.json and colocated-megatron-sglang-h200.json."""
    args = load("--use-dynamic-batch-size", "--max-tokens-per-gpu", "16384")
    plan = phases(args)
    assert plan["generating"].total / MIB == pytest.approx(51864, rel=0.02)
    before_the_sync = plan["updating weights"].parts
    before_the_sync = before_the_sync["trainer's parameters"] + before_the_sync["contexts"]
    assert before_the_sync / MIB == pytest.approx(7130, rel=0.03)
    assert plan["training"].parts["parameters"] / MIB == pytest.approx(7130 - 4910, rel=0.05)
    states = sum(plan["training"].parts[name] for name in ("parameters", "gradients", "optimizer"))
    assert states == 16 * 596_049_920
    assert 32_548 * MIB < plan["training"].total < 1.5 * 32_548 * MIB  # measured below the cap of tokens
    assert phases(args, H200)["generating"].total / MIB == pytest.approx(89473, rel=0.02)


@pytest.mark.parametrize(("tokens", "peak_gb"), [(16384, 15.65), (65536, 22.8)])
def test_figures_of_the_train_step(load, tokens, peak_gb):
    """peak_memory_gb of benchmarks/results/train-fsdp-{16k,64k}.json: allocated tensors, without contexts."""
    args = load("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(tokens), "--gradient-checkpointing")
    parts = phases(args)["training"].parts
    predicted = sum(v for name, v in parts.items() if name not in ("CUDA context", "engine released")) / 1e9
    assert 0.97 * peak_gb < predicted < 1.35 * peak_gb


def test_states_are_shared_by_the_ranks(load):
    one, four = (load("--actor-num-gpus-per-node", str(n), colocate=True) for n in (1, 4))
    for name in ("parameters", "gradients", "optimizer"):
        alone, shared = (phases(args)["training"].parts[name] for args in (one, four))
        assert shared == alone / 4
    assert phases(load("--optimizer", "cpu_adam"))["training"].parts["optimizer"] == 0
    adapters = phases(load("--lora-rank", "8"))["training"].parts
    assert adapters["gradients"] < 0.02 * adapters["parameters"]


def test_states_of_megatron(load):
    """Compute-dtype parameters and fp32 gradients per model-parallel rank; the rest is shared by its replicas."""
    args = load("--actor-num-gpus-per-node", "4")
    args.train_backend, args.tensor_model_parallel_size = "megatron", 2
    parts, params = phases(args)["training"].parts, 596_049_920
    assert [parts[name] for name in ("parameters", "gradients", "optimizer")] == [params, 2 * params, 3 * params]
    for args.optimizer, args.optimizer_cpu_offload in (("cpu_adam", False), ("adam", True)):
        parts = phases(args)["training"].parts
        assert parts["optimizer"] == params  # 4 bytes of a quarter of them: the fp32 copy stays on the GPU


def test_megatrons_groups_are_gone_while_it_sleeps(load):
    args = load("--actor-num-gpus-per-node", "2")
    args.train_backend = "megatron"
    plan = phases(args)
    groups = plan["training"].parts["CUDA context"] - plan["generating"].parts["trainer asleep"]
    assert groups == pytest.approx(MEGATRON_GROUPS)
    args.offload_train = False
    assert phases(args)["generating"].parts["trainer asleep"] == plan["training"].parts["CUDA context"]


def test_engines_of_their_own(load):
    args = load("--rollout-num-gpus", "1", colocate=False)
    plan = phases(args)
    assert set(plan) == {"training", "generating"} and "engine released" not in plan["training"].parts
    assert plan["generating"].parts["trainer asleep"] == 0


def test_the_text_has_the_arithmetic(load):
    text = memory.plan_of(load("--use-dynamic-batch-size", "--max-tokens-per-gpu", "262144"), H100).text()
    assert "training: " in text and "parameters 2.2, gradients 2.2, optimizer 4.4" in text
    assert "MAY NOT FIT" in text.splitlines()[1] and "MAY NOT FIT" not in text.splitlines()[2]
    assert "(GiB)" in memory.plan_of(load(), None).text()


def refusal(args, gpu_bytes) -> str:
    problems = Problems()
    memory.check_on(args, gpu_bytes, problems)
    return "\n".join(map(str, problems))


def test_refusals_have_the_arithmetic(load):
    assert refusal(load(), H100) == ""
    message = refusal(load("--sglang-mem-fraction-static", "0.01"), H100)
    assert "0.01 x 79.6 GiB = 0.8 GiB cannot hold the weights of 1.1 GiB" in message
    tight = load("--sglang-mem-fraction-static", "0.014", "--rollout-max-response-len", "4000")
    assert "one request of 4064 tokens needs 4064 x 114688 bytes = 0.43 GiB" in refusal(tight, H100)
    message = refusal(load("--sglang-mem-fraction-static", "0.98"), H100)
    assert "= 78.1 GiB + 1.0 of workspace and CUDA graphs + 1.9 of the sleeping trainer = 81.0 GiB" in message
    assert "do not fit 79.6" in message and "use at most 0.96" in message
    message = refusal(load(), 8 * GIB)
    assert "training needs parameters 2.2 + gradients 2.2 + optimizer 4.4 + CUDA context 1.9 = 10.8 GiB" in message


def test_kv_cache_of_an_engine(load, model):
    args, size = load(), read_size(model)
    args.rollout_num_gpus_per_engine, args.sglang_dp_size = 8, None
    assert engine_kv_bytes(size, args) == 28 * 2 * 128 * 2
    args.sglang_kv_cache_dtype, args.sglang_dp_size = "fp8_e4m3", 8  # attention is not cut
    assert engine_kv_bytes(size, args) == 28 * 2 * 8 * 128


def test_a_checkpoint_that_does_not_tell_its_size(setup):
    args = setup.load()
    args.device = "cuda"
    assert memory.plan_of(args, H100) is None and refusal(args, H100) == ""
