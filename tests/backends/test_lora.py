"""Adapters: what is trained, saved, merged and sent; the reference without a second copy."""

import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.backends.fsdp_utils.model import full_tensor
from slime.backends.fsdp_utils.weights import AdapterWeights
from tests.backends.trainers import make_trainer, parameters_of, run_world, train_rollout, trainer_args

pytestmark = pytest.mark.integration

LORA = ("--lora-rank", "4", "--lora-alpha", "12", "--ci-test", "--num-steps-per-rollout", "2")
KL = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3")


def adapters_of(trainer) -> dict:
    return {name: full_tensor(p).clone() for name, p in trainer.model.hf_parameters().items() if "lora_" in name}


def run(rank, world_size, port, model_dir, root):
    def make(*flags, kind=FSDPTrainRayActor, **init):
        return make_trainer(kind, trainer_args(model_dir, *LORA, *flags), rank, world_size, port, **init)

    out = {}
    hf = str(root / "hf_{rollout_id}")
    straight = make(*KL, "--save", str(root / "run"), "--save-hf", hf, with_ref=True)
    out["initial"] = parameters_of(straight)
    out["first"] = train_rollout(straight, 0)
    straight.save_model(0)
    out["merged"], out["adapters"] = parameters_of(straight), adapters_of(straight)
    sent = AdapterWeights(straight.weights, straight.lora)
    specs = sent.tensor_specs()
    tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    sent.gather(specs, tensors)
    out["sent"] = {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}, sent.config()
    out["reference bytes"] = sum(straight.reference.sizes) * world_size
    train_rollout(straight, 1)
    resumed = make(*KL, "--load", str(root / "run"), with_ref=True)
    out["start"] = resumed.start_rollout_id
    train_rollout(resumed, 1)
    out["resumed"] = (adapters_of(straight), adapters_of(resumed))
    some = make("--lora-target-modules", "q_proj", "v_proj", "--gradient-checkpointing", "--dtype", "bfloat16")
    train_rollout(some, 0)
    out["some"] = {name: p.dtype for name, p in some.model.hf_parameters().items()}
    out["some metrics"] = train_rollout(some, 1)
    torch.distributed.destroy_process_group()
    return out


@pytest.fixture(scope="module", params=[1, 2])
def results(request, tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    return root, run_world(run, request.param, tiny_model_dir, root)


def test_adapters_start_as_the_base_and_reference_is_the_base(results, tiny_model_dir):
    from transformers import AutoModelForCausalLM

    base = dict(AutoModelForCausalLM.from_pretrained(tiny_model_dir).named_parameters())
    for result in results[1]:
        assert result["initial"].keys() == base.keys()
        assert all(torch.equal(result["initial"][name], value) for name, value in base.items())
        moved = {name for name, value in base.items() if not torch.equal(result["merged"][name], value)}
        assert moved == {name for name in base if name.endswith("_proj.weight")}
        assert result["reference bytes"] < sum(p.numel() for p in base.values()) * 4 / 2
        assert result["first"]["train/kl_loss"] > 0  # of the second step; --ci-test has checked the first


def test_merged_weights_are_those_of_peft(results, tiny_model_dir):
    """The adapter directory, read and merged by peft, is what engines and --save-hf get."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    root, ranks = results
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    merged = PeftModel.from_pretrained(base, str(root / "run" / "iter_0000001" / "adapter")).merge_and_unload()
    exported = dict(AutoModelForCausalLM.from_pretrained(root / "hf_0").named_parameters())
    for name, value in merged.named_parameters():
        assert torch.allclose(exported[name], value, atol=1e-7), name
        assert all(torch.equal(result["merged"][name], exported[name]) for result in ranks)


def test_what_engines_get_of_adapters_is_the_adapter_directory(results):
    from peft import LoraConfig
    from safetensors.torch import load_file

    root, ranks = results
    directory = root / "run" / "iter_0000001" / "adapter"
    saved, config = load_file(directory / "adapter_model.safetensors"), LoraConfig.from_pretrained(directory)
    for result in ranks:
        tensors, sent = result["sent"]
        assert tensors.keys() == saved.keys()
        assert all(torch.equal(tensors[name], saved[name]) for name in saved)
        assert (sent["r"], sent["lora_alpha"]) == (config.r, config.lora_alpha)
        modules = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in saved}
        assert set(sent["target_modules"]) == modules


def test_checkpoints_hold_adapters_only_and_resume(results):
    root, ranks = results
    path = root / "run" / "iter_0000001"
    for kind in ("model", "optimizer"):
        keys = torch.distributed.checkpoint.FileSystemReader(path / kind).read_metadata().state_dict_metadata
        assert keys and all(".lora_" in key for key in keys)
    for result in ranks:
        straight, resumed = result["resumed"]
        assert result["start"] == 1
        assert [name for name, value in straight.items() if not torch.equal(value, resumed[name])] == []
        assert any(not torch.equal(value, result["adapters"][name]) for name, value in straight.items())


def test_only_the_named_modules_and_a_base_in_the_precision_of_computation(results):
    for result in results[1]:
        for name, dtype in result["some"].items():
            assert (".lora_" in name) == (dtype == torch.float32), name
            assert ".lora_" not in name or "q_proj" in name or "v_proj" in name
        assert result["some metrics"]["train/skipped_steps"] == 0
