"""Megatron ranks on GPUs: critic and teacher around offloading on one; layouts over NCCL on two, against one."""

import gc
import os

import pytest
import torch

from slime.backends.megatron_utils.critic import MegatronCriticRayActor
from slime.ray.roles import role_args
from slime.training.rollout_data import RankData
from tests.backends.megatron.families import save_family
from tests.backends.megatron.worlds import start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import rollout_batch, rollout_parts, run_world, trainer_args
from tests.tiny_model import save_tiny_model

# Asking whether there are GPUs must not bind the process to one: each rank picks its own.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
pytestmark = [pytest.mark.system, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GPU = ("--train-backend", "megatron", "--device", "cuda")
FP32 = (*GPU, "--dtype", "float32", "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3")
SHAPE = dict(head_dim=64, hidden_size=256, intermediate_size=512, num_attention_heads=4)
TWO = ("--actor-num-gpus-per-node", "2")
TP2SP = (*TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel")
LAYOUTS = {
    ("dense", "TP2+SP"): TP2SP,
    ("dense", "CP2"): (*TWO, "--context-parallel-size", "2"),
    ("deep", "PP2"): (*TWO, "--pipeline-model-parallel-size", "2"),
    ("deep", "PP2 VPP2"): (
        *(*TWO, "--pipeline-model-parallel-size", "2"),
        *("--virtual-pipeline-model-parallel-size", "2"),
    ),
    ("deepseek_v3", "TP2+SP EP2"): (
        *TP2SP,
        *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
    ),
    ("qwen3_moe", "EP2 replay"): (*TWO, "--expert-model-parallel-size", "2", "--use-routing-replay"),
}
ONE = {"qwen3_moe": ("--use-routing-replay",)}


def on_host(trainer):
    specs = trainer.weights.tensor_specs()
    out = [torch.empty(spec.shape, dtype=spec.dtype, device="cuda") for spec in specs]
    trainer.weights.gather(specs, out)
    return {spec.name: tensor.float().cpu() for spec, tensor in zip(specs, out, strict=True)}


def critic_rollout(critic, seed):
    data = RankData(rollout_parts(critic.args, rollout_batch(seed), 1)[0])
    return critic.train_on(seed, data)


def one_gpu(rank, world_size, port, model_dir):
    """Parameters after two rollouts, with and without offloading in between; memory left while offloaded."""
    out = {}
    ppo = (*GPU, "--advantage-estimator", "ppo", "--ci-test")
    distilled = (*GPU, "--keep-old-actor", "--use-opd", "--opd-type", "megatron", "--opd-teacher-load", model_dir)
    for name in ("critic", "teacher"):
        for offload in (False, True):
            gc.collect()
            torch.cuda.empty_cache()
            base = torch.cuda.memory_allocated()
            if name == "critic":
                args = role_args(trainer_args(model_dir, *ppo), "critic")
                trainer = start_trainer(args, rank, world_size, port, kind=MegatronCriticRayActor, role="critic")
                step = critic_rollout
            else:
                trainer = start_trainer(trainer_args(model_dir, *distilled), rank, world_size, port)
                step = train_rollout
            step(trainer, 0)
            before, left = torch.cuda.memory_allocated() - base, 0.0
            if name == "teacher":
                trainer._remember_sent(1)
            if offload:
                trainer.offload()
                left = (torch.cuda.memory_allocated() - base) / before
                trainer.onload()
            step(trainer, 1)
            out[name, offload] = (on_host(trainer), left)
            stop_trainer()
            del trainer
    return out


@pytest.fixture(scope="module")
def dirs(tmp_path_factory):
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in ("dense", "deep", "deepseek_v3", "qwen3_moe")}
    save_tiny_model(paths["dense"], **SHAPE)
    save_tiny_model(paths["deep"], num_hidden_layers=8, **SHAPE)
    for family in ("deepseek_v3", "qwen3_moe"):
        save_family(family, paths[family])
    return paths


@pytest.mark.parametrize("name", ["critic", "teacher"])
def test_offloading_changes_no_bit(dirs, name):
    results = run_world(one_gpu, 1, dirs["dense"])[0]
    straight, offloaded = results[name, False][0], results[name, True][0]
    assert all(torch.equal(value, offloaded[key]) for key, value in straight.items())
    assert results[name, True][1] < 0.1


def layouts(rank, world_size, port, dirs, cases):
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[rank]
    out = {}
    for case, (model, flags) in cases.items():
        changes = {"data_pad_size_multiplier": 4, "make_vocab_size_divisible_by": 12}
        args = trainer_args(dirs[model], *FP32, *flags, offload_train=world_size > 1, **changes)
        trainer = start_trainer(args, rank, world_size, port, with_ref=True)
        metrics = [train_rollout(trainer, 0)]
        if args.offload_train:  # which its groups leave, too
            trainer.offload()
            trainer.onload()
        metrics.append(train_rollout(trainer, 1))
        out[case] = (metrics, on_host(trainer))
        stop_trainer()
    torch.distributed.destroy_process_group()
    return out


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does(dirs):
    alone = run_world(layouts, 1, dirs, {m: (m, ONE.get(m, ())) for m in dirs})[0]
    for case, flags in LAYOUTS.items():
        for result in run_world(layouts, 2, dirs, {case: (case[0], flags)}):
            (metrics, parameters), (wanted, expected) = result[case], alone[case[0]]
            for ours, theirs in zip(metrics, wanted, strict=True):
                for key in ("loss", "grad_norm", "kl_loss"):
                    assert ours[f"train/{key}"] == pytest.approx(theirs[f"train/{key}"], rel=1e-3, abs=1e-5), case
            for name, value in expected.items():
                assert (parameters[name] - value).abs().max() < 1e-4, (case, name)
