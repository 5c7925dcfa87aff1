"""The Megatron trainer on one GPU: flash attention over packed rows, bf16, recomputation, offloading."""

import gc
import math

import pytest
import torch

from slime.modeling import cudnn_attention
from slime.training.rollout_data import RankData
from tests.backends.megatron.worlds import start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import long_rollout_batch, rollout_parts, run_world, trainer_args
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.system, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FLAGS = "--train-backend megatron --device cuda --ci-test --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3".split()
VARIANTS = {
    "fp32": ("--dtype", "float32"),
    "bf16": (),
    "recomputed": ("--gradient-checkpointing",),
    "moments on the host": ("--optimizer-cpu-offload", "--overlap-grad-reduce"),
}


def parameters_on_host(trainer):
    specs = trainer.weights.tensor_specs()
    out = [torch.empty(spec.shape, dtype=spec.dtype, device="cuda") for spec in specs]
    trainer.weights.gather(specs, out)
    return {spec.name: tensor.float().cpu() for spec, tensor in zip(specs, out, strict=True)}


def train_variants(rank, world_size, port, model_dir):
    """{(variant, offloaded in between): (metrics, parameters after two rollouts, memory left while offloaded)}"""
    results = {}
    for name, flags in VARIANTS.items():
        for offload in (False, True):
            gc.collect()
            base = torch.cuda.memory_allocated()
            trainer = start_trainer(trainer_args(model_dir, *FLAGS, *flags), rank, world_size, port, with_ref=True)
            first = train_rollout(trainer, 0)
            left = math.nan
            if offload:
                before, weights = torch.cuda.memory_allocated() - base, parameters_on_host(trainer)
                trainer.offload()
                left = (torch.cuda.memory_allocated() - base) / before
                sent = trainer.memory.with_parameters(lambda t=trainer: parameters_on_host(t))
                assert all(torch.equal(sent[key], weights[key]) for key in weights)
                trainer.onload()
            train_rollout(trainer, 1)
            results[name, offload] = (first, parameters_on_host(trainer), left)
            stop_trainer()
            del trainer
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("cuda-model"))
    save_tiny_model(path, head_dim=64, hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    return run_world(train_variants, 1, path)[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_offloading_changes_no_bit_and_frees_the_gpu(results, name):
    straight, offloaded = results[name, False], results[name, True]
    assert all(torch.equal(straight[1][key], offloaded[1][key]) for key in straight[1])
    assert offloaded[2] < 0.1


def test_bf16_is_fp32_within_its_precision(results):
    fp32, bf16 = results["fp32", False][0], results["bf16", False][0]
    assert bf16["train/grad_norm"] == pytest.approx(fp32["train/grad_norm"], rel=0.05)
    assert bf16["train/entropy_loss"] == pytest.approx(fp32["train/entropy_loss"], rel=0.01)


def test_recomputation_gives_the_same_gradients(results):
    plain, again = results["bf16", False][0], results["recomputed", False][0]
    assert again["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-3)


def test_moments_on_the_host_give_the_same_weights(results):
    device, host = results["bf16", False][1], results["moments on the host", False][1]
    for key, expected in device.items():
        assert (host[key] - expected).abs().max() <= 2 * expected.abs().max() * torch.finfo(torch.bfloat16).eps, key


def train_on_long_sequences(rank, world_size, port, model_dir):
    """Two rollouts, so that the second one's gradients are of what the first one's gave. --ci-test checks that
    log-prob passes and training have the same bits."""
    out = {}
    for recompute in ((), ("--gradient-checkpointing",)):
        for implementation in ("auto", "slime_varlen"):
            args = trainer_args(model_dir, *FLAGS, *recompute, "--attn-implementation", implementation)
            trainer = start_trainer(args, rank, world_size, port, with_ref=True)
            batch = long_rollout_batch([5000, 300, 4100, 20] * 2)
            metrics = [trainer.train_on(i, RankData(rollout_parts(args, batch, 1)[0])) for i in range(2)]
            out[implementation, recompute] = [m[f"train/{name}"] for m in metrics for name in ("loss", "grad_norm")]
            stop_trainer()
            del trainer
    return out, cudnn_attention.works.cache_info().misses


def test_long_sequences(tmp_path):
    """cuDNN's losses and gradients, also where attention is kept for recomputed layers, are the packed kernels'."""
    save_tiny_model(str(tmp_path / "model"), head_dim=64, hidden_size=1024, num_hidden_layers=4)
    ((results, trials),) = run_world(train_on_long_sequences, 1, str(tmp_path / "model"))
    assert trials == (torch.cuda.get_device_capability()[0] >= 9)
    expected = results["slime_varlen", ()]
    for got in results.values():
        assert got == pytest.approx(expected, rel=0.02, abs=2e-3)


def save_in_the_background(rank, world_size, port, model_dir, save):
    """{optimizer: (parameters when it was saved, those that were loaded)}"""
    results = {}
    for name, flags in {"device": (), "host": ("--optimizer-cpu-offload",)}.items():

        def trainer(flags=flags, **changes):
            args = trainer_args(model_dir, *FLAGS, *flags)
            args.load, args.no_load_optim, args.no_load_rng, args.finetune = None, False, False, False
            args.start_rollout_id = None
            vars(args).update(changes)
            return start_trainer(args, rank, world_size, port, with_ref=True)

        first = trainer(save=f"{save}/{name}", async_save=True)
        train_rollout(first, 0)
        first.save_model(0)
        saved = parameters_on_host(first)
        train_rollout(first, 1)  # changes what is being written
        first._finish_save(wait=True)
        straight = parameters_on_host(first)
        stop_trainer()
        second = trainer(load=f"{save}/{name}")
        loaded = parameters_on_host(second)
        train_rollout(second, 1)
        results[name] = (saved, loaded, straight, parameters_on_host(second))
        stop_trainer()
        del first, second
    return results


def test_a_checkpoint_in_the_background_is_of_its_moment(tmp_path):
    save_tiny_model(str(tmp_path / "model"), head_dim=64)
    found = run_world(save_in_the_background, 1, str(tmp_path / "model"), str(tmp_path))[0]
    for saved, loaded, straight, resumed in found.values():
        assert all(torch.equal(saved[key], loaded[key]) for key in saved)
        for key in straight:
            assert (straight[key] - resumed[key]).abs().max() <= 1e-2 * straight[key].abs().max(), key
