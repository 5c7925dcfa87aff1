"""Published configurations, the model scripts, and what contradicts them."""

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from slime.arguments.entry import load_args
from slime.arguments.problems import ConfigError
from slime.backends.megatron_utils.architecture import UnsupportedModelError, architecture_of
from tests.backends.megatron.published import CONFIGS

pytestmark = pytest.mark.unit
SCRIPTS = Path(__file__).parents[3] / "scripts" / "models"


def script_words(name: str) -> list[str]:
    command = f'source "{SCRIPTS / name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split()


def write_checkpoint(directory: Path, config: dict) -> Path:
    """A Hugging Face directory of this model without weights."""
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def resolved(tmp_path, config: dict, *flags: str) -> Namespace:
    """The arguments of these flags for a model with this config.json."""
    checkpoint = write_checkpoint(tmp_path, config)
    argv = f"--hf-checkpoint {checkpoint} --device cpu --train-backend megatron --debug-train-only --num-rollout 1"
    argv += " --load-debug-rollout-data none_{rollout_id}.pt --rollout-batch-size 8 --actor-num-gpus-per-node 8"
    return load_args([*argv.split(), *flags])


def problems(tmp_path, config: dict, *flags: str) -> str:
    """What is wrong with them; empty if nothing."""
    try:
        resolved(tmp_path, config, *flags)
    except ConfigError as error:
        return str(error)
    return ""


def test_every_script_has_its_published_numbers():
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_script_describes_the_published_model(tmp_path, name):
    words = script_words(name)
    assert problems(tmp_path, CONFIGS[name], *words) == ""
    for flag in ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--vocab-size"):
        assert flag in words
    wrong = [str(int(word) + 1) if words[i - 1] == "--hidden-size" else word for i, word in enumerate(words)]
    assert "--hidden-size" in problems(tmp_path, CONFIGS[name], *wrong)


def test_every_difference_is_named(tmp_path):
    text = problems(tmp_path, CONFIGS["qwen3-4B"], *script_words("qwen2.5-7B"))
    flags = ("--num-layers 28", "--hidden-size 3584", "--num-query-groups 4", "--vocab-size 152064", "--add-qkv-bias")
    for flag in (*flags, "--untie-embeddings-and-output-weights"):
        assert f"{flag}: contradicts --hf-checkpoint" in text


def test_derived_numbers_of_deepseek_v3():
    architecture = architecture_of(CONFIGS["deepseek-v3"])
    assert architecture.moe_layers == [False] * 3 + [True] * 58
    assert (architecture["rotary_scaling_factor"], architecture["mscale_all_dim"]) == (40, 1.0)
    assert architecture["moe_shared_expert_intermediate_size"] == 2048
    assert architecture.mtp_layers == architecture_of(CONFIGS["glm4.5-355B-A32B"]).mtp_layers == 1


def test_kimi_k2_rotates_other_than_deepseek_v3():
    architecture = architecture_of(CONFIGS["kimi-k2"])
    names = ("rotary_base", "rotary_scaling_factor", "beta_fast", "beta_slow", "mscale_all_dim")
    assert [architecture[name] for name in names] == [50000.0, 32.0, 1.0, 1.0, 1.0]


def test_derived_numbers_of_qwen3_next():
    architecture = architecture_of(CONFIGS["qwen3-next-80B-A3B"])
    assert architecture.delta_net_layers == [True, True, True, False] * 12
    assert architecture.moe_layers == [True] * 48 and not architecture["moe_router_pre_softmax"]
    assert (architecture.rope.dim, architecture.rope.theta, architecture.mtp_layers) == (64, 1e7, 0)
    listed = {"layer_types": ["linear_attention"] * 46 + ["full_attention"] * 2}
    architecture = architecture_of(CONFIGS["qwen3-next-80B-A3B"] | listed)
    assert architecture.delta_net_layers == [True] * 46 + [False] * 2


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--context-parallel-size 2", "is not built for the model's gated delta nets"),
        ("--tensor-model-parallel-size 4 --sequence-parallel", "2 key/value heads"),
        ("--enable-mtp-training", "kept as they are"),
        ("--linear-attention-freq 3", "--linear-attention-freq 1 1 0 1"),
        ("--linear-num-key-heads 8", "contradicts --hf-checkpoint"),
        ("--train-backend fsdp", "has no linear attention"),
    ],
)
def test_rules_of_qwen3_next(tmp_path, flags, named):
    assert named in problems(tmp_path, CONFIGS["qwen3-next-80B-A3B"], *flags.split())


def test_engines_of_qwen3_next(tmp_path):
    checkpoint = write_checkpoint(tmp_path, CONFIGS["qwen3-next-80B-A3B"])
    flags = f"--hf-checkpoint {checkpoint} --device cpu --debug-rollout-only --num-rollout 1 --rollout-batch-size 8"
    with pytest.raises(ConfigError, match="--rollout-engine embedded: has no linear attention"):
        load_args([*flags.split(), "--rollout-engine", "embedded"])


def test_key_heads_of_delta_nets_must_come_out_even(tmp_path):
    config = CONFIGS["qwen3-next-80B-A3B"] | {"linear_num_key_heads": 1}
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert "1 key heads of gated delta nets" in problems(tmp_path, config, *flags)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "gpt_oss"}, "gpt_oss"),
        ({"hidden_act": "gelu"}, "gelu"),
        (CONFIGS["qwen3-next-80B-A3B"] | {"layer_types": ["mamba"] * 48}, "mamba"),
        (CONFIGS["qwen3-next-80B-A3B"] | {"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        architecture_of(CONFIGS["qwen3-4B"] | changes)


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--tensor-model-parallel-size 3", "must divide the 8 trainer GPUs"),
        ("--tensor-model-parallel-size 8", "4 key/value heads"),
        ("--tensor-model-parallel-size 2", "--sequence-parallel"),
        ("--pipeline-model-parallel-size 5", "48 layers"),
        ("--expert-model-parallel-size 3", "128 experts"),
        ("--expert-model-parallel-size 16", "8 GPUs of a pipeline stage"),
        ("--recompute-granularity full", "--recompute-method"),
        ("--recompute-method uniform", "--recompute-granularity full"),
        ("--recompute-granularity selective --recompute-num-layers 1", "--recompute-num-layers 1: needs"),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 10", "leaves 38 of the model's 48"),
        ("--decoder-last-pipeline-num-layers 10", "leaves 38 of the model's 48 layers to 0 other stages"),
        ("--pipeline-model-parallel-size 4 --account-for-loss-in-pipeline-split", "48 layers + 1 counted as such"),
        ("--virtual-pipeline-model-parallel-size 2", "no effect without pipeline stages"),
        ("--pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 5", "5 must divide the model's 48"),
        ("--enable-mtp-training", "needs layers for multi-token prediction"),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5", "the 12 layers of a pipeline"),
    ],
)
def test_rules_of_ranks(tmp_path, flags, named):
    assert named in problems(tmp_path, CONFIGS["qwen3-30B-A3B"], *flags.split())


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--ref-load"])
def test_quantised_weights_are_not_taken_for_weights(tmp_path, flag):
    config = CONFIGS["qwen3-4B"]
    quantised = tmp_path / "fp8"
    quantised.mkdir()
    for path, changes in ((quantised, {"quantization_config": {"quant_method": "fp8"}}), (tmp_path, {})):
        assert problems(path, config | changes) == "" or path == quantised
    refusal = problems(tmp_path, config, flag, str(quantised))
    assert f"{flag} {quantised}: its weights are quantised" in refusal and "fp8-to-bf16" in refusal


def test_engines_may_have_quantised_weights_beside_those_that_are_trained(tmp_path):
    trained, served = tmp_path / "bf16", tmp_path / "fp8"
    config = CONFIGS["qwen3-4B"]
    for path, changes in ((trained, {}), (served, {"quantization_config": {"quant_method": "fp8"}})):
        path.mkdir()
        assert not problems(path, config | changes) or path == served
    flags = ("--hf-checkpoint", str(served), "--ref-load", str(trained))
    assert problems(tmp_path, config, *flags) == ""
    exported = problems(tmp_path, config, *flags, "--save", str(tmp_path / "s"), "--save-hf", str(tmp_path / "hf"))
    assert f"--hf-checkpoint {served}: its weights are quantised" in exported


def test_latent_attention_must_come_out_even(tmp_path):
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert not problems(tmp_path, CONFIGS["moonlight-16B-A3B"], *flags)
    odd = CONFIGS["moonlight-16B-A3B"] | {"kv_lora_rank": 511}
    assert "575 columns of keys and values" in problems(tmp_path, odd, *flags)


def test_stages_of_different_length(tmp_path):
    for ends in ("first-pipeline-num-layers 15", "first-pipeline-num-layers 9 --decoder-last-pipeline-num-layers 9"):
        flags = f"--pipeline-model-parallel-size 4 --decoder-{ends}"
        assert problems(tmp_path, CONFIGS["qwen3-30B-A3B"], *flags.split()) == ""
    flags = "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split "
    flags += "--account-for-embedding-in-pipeline-split"
    assert problems(tmp_path, CONFIGS["qwen3-30B-A3B"], *flags.split()) == ""
    flags = "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 15".split()
    flags += ["--virtual-pipeline-model-parallel-size", "2"]
    assert "of 2 chunks each" in problems(tmp_path, CONFIGS["qwen3-30B-A3B"], *flags)


def test_sequence_parallelism_of_one_rank_is_none(tmp_path, caplog):
    """Megatron's own command line takes it so, and launch scripts rely on it."""
    args = resolved(tmp_path, CONFIGS["qwen3-4B"], "--sequence-parallel")
    assert args.sequence_parallel is False and "--sequence-parallel has no effect" in caplog.text
    flags = ("--sequence-parallel", "--tensor-model-parallel-size", "2")
    assert resolved(tmp_path, CONFIGS["qwen3-4B"], *flags).sequence_parallel is True


def test_layers_per_virtual_stage(tmp_path):
    flags = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 6"
    more = "--virtual-pipeline-model-parallel-size 3"
    assert not problems(tmp_path, CONFIGS["qwen3-30B-A3B"], *flags.split())
    assert "contradicts" in problems(tmp_path, CONFIGS["qwen3-30B-A3B"], *flags.split(), *more.split())
