"""Block-wise FP8 against a float64 reference, and the trainer's tensors in the format of an engine's checkpoint."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils.checkpoint_files import block_of, quantization_config
from slime.weight_sync.buckets import TensorSpec, plan_buckets
from slime.weight_sync.engine_format import EngineFormat
from slime.weight_sync.fp8 import SCALE_SUFFIX, dequantise, is_quantised_by_default, quantise

pytestmark = pytest.mark.unit


def e4m3_numbers() -> np.ndarray:
    """All finite non-negative values of e4m3 (OCP FP8 specification): bias 7, no infinities, 0x7f is NaN."""
    out = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        out.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(out)


def reference(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales in float64, one block at a time; ties go to the even mantissa."""
    numbers = e4m3_numbers()
    down, across = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
    values, scales = np.zeros(weight.shape), np.ones((down, across))
    for i in range(down):
        for j in range(across):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            largest = np.abs(weight[at]).max()
            if largest == 0:
                continue
            scales[i, j] = np.float32(np.float32(largest) / np.float32(448))
            x = (weight[at].astype(np.float32) / np.float32(scales[i, j])).astype(np.float64)
            distance = np.abs(np.abs(x)[..., None] - numbers)
            nearest = distance.argmin(-1)
            upper = np.minimum(nearest + 1, len(numbers) - 1)
            tie = np.take_along_axis(distance, upper[..., None], -1)[..., 0] == distance.min(-1)
            nearest = np.where(tie & (nearest % 2 == 1) & (upper != nearest), upper, nearest)
            values[at] = np.sign(x) * numbers[nearest]
    return values, scales


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 200), (5, 300), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference(shape, dtype):
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    weight[0, 0] = 3.0  # an outlier makes the others of its block small, down to subnormal numbers
    values, scales = quantise(weight)
    expected, expected_scales = reference(weight.double().numpy(), (128, 128))
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    np.testing.assert_array_equal(scales.double().numpy(), expected_scales)
    np.testing.assert_array_equal(values.double().numpy(), expected)


def test_error_is_half_a_step():
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(2), dtype=torch.float64).float()
    values, scales = quantise(weight)
    error = (dequantise(values, scales) - weight).abs()
    steps = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    allowed = torch.maximum(weight.abs() * 2.0**-4, steps * 2.0**-10) * (1 + 1e-6)
    assert (error <= allowed).all()
    assert values.float().abs().amax() == 448


def test_zero_blocks_and_other_sizes():
    weight = torch.zeros(96, 64)
    weight[:32, :32] = 7.0
    values, scales = quantise(weight, (32, 32))
    assert scales.shape == (3, 2) and scales[0, 0] == 7 / 448 and (scales.flatten()[1:] == 1).all()
    torch.testing.assert_close(dequantise(values, scales, (32, 32)), weight)


class Trainer:
    """A `WeightSource` in memory that counts what it gathers."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.gathered: list[str] = []

    def tensor_specs(self):
        return [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in self.tensors.items()]

    def gather(self, specs, out):
        self.gathered += [spec.name for spec in specs]
        for spec, target in zip(specs, out or (), strict=False):
            target.copy_(self.tensors[spec.name])


def moe_trainer(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (50, 32),
        "model.layers.0.self_attn.q_proj.weight": (64, 32),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.mlp.experts.gate_up_proj": (4, 48, 32),
        "model.layers.0.mlp.experts.down_proj": (4, 32, 24),
    }
    return Trainer({name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()})


def names_of(fp8: bool) -> frozenset[str]:
    names = {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"}
    matrices = {"model.layers.0.self_attn.q_proj.weight"}
    for i in range(4):
        matrices |= {f"model.layers.0.mlp.experts.{i}.{kind}_proj.weight" for kind in ("gate", "up", "down")}
    return frozenset(names | matrices | ({name + SCALE_SUFFIX for name in matrices} if fp8 else set()))


def push(source, max_bytes):
    """Gather bucket by bucket as an update does; what arrived."""
    arrived = {}
    for bucket in plan_buckets(source.tensor_specs(), max_bytes):
        flat = torch.empty(bucket.numel, dtype=bucket.dtype)
        source.gather(bucket.specs, bucket.views(flat))
        arrived |= {spec.name: view.clone() for spec, view in zip(bucket.specs, bucket.views(flat), strict=True)}
    return arrived


@pytest.mark.parametrize("max_bytes", [1, 2000, 10_000, 10**9])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_tensor_arrives_once_whatever_the_buckets(fp8, max_bytes):
    trainer = moe_trainer()
    source = EngineFormat(trainer, names_of(fp8), (16, 16) if fp8 else None)
    assert source.changes
    for _ in range(2):  # an update after the other
        arrived = push(source, max_bytes)
        assert set(arrived) == names_of(fp8)
        gate_up, down = (
            trainer.tensors[f"model.layers.0.mlp.experts.{kind}"] for kind in ("gate_up_proj", "down_proj")
        )
        experts = {"gate_proj": gate_up[:, :24], "up_proj": gate_up[:, 24:], "down_proj": down}
        wanted = {"model.layers.0.self_attn.q_proj.weight": trainer.tensors["model.layers.0.self_attn.q_proj.weight"]}
        for kind, stack in experts.items():
            wanted |= {f"model.layers.0.mlp.experts.{i}.{kind}.weight": stack[i] for i in range(4)}
        for name, tensor in wanted.items():
            if fp8:
                values, scales = quantise(tensor, (16, 16))
                assert torch.equal(arrived[name].view(torch.uint8), values.view(torch.uint8)), name
                assert torch.equal(arrived[name + SCALE_SUFFIX], scales), name
            else:
                assert torch.equal(arrived[name], tensor), name
        name = "model.embed_tokens.weight"
        assert torch.equal(arrived[name], trainer.tensors[name])
        assert sorted(set(trainer.gathered)) == sorted(trainer.tensors)
        if max_bytes > 1 or not fp8:
            assert len(trainer.gathered) == len(trainer.tensors)  # nothing is gathered twice
        trainer.gathered.clear()
        trainer.tensors = moe_trainer(seed=1).tensors


def test_ranks_that_send_nothing_gather_the_same(monkeypatch):
    sender, helper = moe_trainer(), moe_trainer()
    sources = [EngineFormat(trainer, names_of(True), (16, 16)) for trainer in (sender, helper)]
    for bucket in plan_buckets(sources[0].tensor_specs(), 2000):
        flat = torch.empty(bucket.numel, dtype=bucket.dtype)
        sources[0].gather(bucket.specs, bucket.views(flat))
        sources[1].gather(bucket.specs, None)
        assert sender.gathered == helper.gathered


def test_an_update_that_ended_in_the_middle_leaves_nothing_behind():
    trainer = moe_trainer()
    source = EngineFormat(trainer, names_of(True), (16, 16))
    for bucket in plan_buckets(source.tensor_specs(), 2000)[:3]:
        source.gather(bucket.specs, bucket.views(torch.empty(bucket.numel, dtype=bucket.dtype)))
    trainer.tensors = moe_trainer(seed=3).tensors
    fresh = push(EngineFormat(trainer, names_of(True), (16, 16)), 2000)
    again = push(source, 2000)
    assert all(torch.equal(again[name].view(torch.uint8), fresh[name].view(torch.uint8)) for name in fresh)


def test_a_checkpoint_like_the_trainers_needs_no_adapter():
    trainer = moe_trainer()
    assert not EngineFormat(trainer, frozenset(trainer.tensors), None).changes


def test_block_of():
    assert block_of({}) is None
    assert block_of({"quantization_config": quantization_config((64, 128), [])}) == (64, 128)
    for other in ({"quant_method": "awq"}, {"quant_method": "fp8"}, {"quant_method": "fp8", "fmt": "e5m2"}):
        with pytest.raises(ValueError, match="not block-wise fp8 e4m3"):
            block_of({"quantization_config": other})


def test_which_matrices_a_conversion_takes():
    layer = "model.layers.3."
    for name in ("self_attn.q_proj.weight", "mlp.experts.7.up_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"):
        assert is_quantised_by_default(layer + name, (8, 8))
    for name in (
        "mlp.gate.weight",
        "input_layernorm.weight",
        "mlp.shared_expert_gate.weight",
        "linear_attn.in_proj_ba.weight",
        "self_attn.q_proj.bias",
    ):
        assert not is_quantised_by_default(layer + name, (8, 8))
    assert not is_quantised_by_default("lm_head.weight", (8, 8))
    assert not is_quantised_by_default(layer + "self_attn.q_proj.weight", (8,))


def test_tools_there_and_back(tmp_path, tiny_model_dir):
    """transformers, which reads such checkpoints itself, sees the same weights in it."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    from slime.weight_sync.fp8_convert import main_to_bf16, main_to_fp8

    fp8, back = tmp_path / "fp8", tmp_path / "bf16"
    assert main_to_fp8(["--model-dir", tiny_model_dir, "--save-dir", str(fp8), "--block-size", "16", "16"]) == 0
    config = json.loads((fp8 / "config.json").read_text())
    assert block_of(config) == (16, 16) and "lm_head" in config["quantization_config"]["modules_to_not_convert"]
    original, stored = load_file(f"{tiny_model_dir}/model.safetensors"), load_file(fp8 / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    values, scales = quantise(original[name], (16, 16))
    assert torch.equal(stored[name].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(stored[name + SCALE_SUFFIX], scales)
    assert torch.equal(stored["model.norm.weight"], original["model.norm.weight"])
    assert (fp8 / "tokenizer.json").exists()

    assert main_to_bf16(["--input-fp8-hf-path", str(fp8), "--output-bf16-hf-path", str(back)]) == 0
    plain = load_file(back / "model.safetensors")
    assert set(plain) == set(original) and "quantization_config" not in json.loads((back / "config.json").read_text())
    assert torch.equal(plain[name], dequantise(values, scales, (16, 16)).bfloat16())
    read = AutoModelForCausalLM.from_pretrained(
        fp8, quantization_config=FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    )
    theirs = dict(read.named_parameters())[name]
    torch.testing.assert_close(theirs.float(), dequantise(values, scales, (16, 16)), rtol=1e-2, atol=1e-4)


def test_tools_refuse(tmp_path, tiny_model_dir, capsys):
    from slime.weight_sync.fp8_convert import main_to_bf16, main_to_fp8

    with pytest.raises(SystemExit):
        main_to_bf16(["--input-fp8-hf-path", tiny_model_dir, "--output-bf16-hf-path", str(tmp_path / "x")])
    assert "has no FP8 weights" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main_to_fp8(["--model-dir", tiny_model_dir, "--save-dir", tiny_model_dir])
    assert "exists" in capsys.readouterr().err
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main_to_fp8(["--model-dir", str(tmp_path), "--save-dir", str(tmp_path / "y")])
    assert "no matrices" in capsys.readouterr().err
