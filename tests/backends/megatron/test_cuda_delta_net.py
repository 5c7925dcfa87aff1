"""Gated delta nets on one GPU: rule and convolution are those of the CPU, a step in bf16 is that in fp32."""

import pytest
import torch

from slime.backends.megatron_utils.delta_rule import causal_conv, gated_delta_rule
from tests.backends.megatron.families import save_family
from tests.backends.megatron.worlds import start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import run_world, trainer_args

pytestmark = [pytest.mark.system, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = [5, 700, 1, 64, 130, 2000]
FLAGS = "--train-backend megatron --device cuda --ci-test --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3".split()
VARIANTS = {
    "fp32": ("--dtype", "float32"),
    "bf16": (),
    "recomputed": ("--gradient-checkpointing",),
    "deterministic": ("--deterministic-mode",),
}


def inputs(dtype, heads=4, dim=128):
    generator = torch.Generator("cuda").manual_seed(0)
    kwargs = {"generator": generator, "device": "cuda"}
    query, key, value = torch.randn(3, sum(LENGTHS), heads, dim, **kwargs).to(dtype)
    log_decay = -torch.rand(sum(LENGTHS), heads, **kwargs)
    beta = torch.rand(sum(LENGTHS), heads, **kwargs).to(dtype)
    return [query, key, value, log_decay, beta]


def test_the_rule_is_that_of_the_cpu():
    packed = inputs(torch.float32)
    expected = gated_delta_rule(*(x.cpu().double() for x in packed), LENGTHS)
    assert (gated_delta_rule(*packed, LENGTHS).cpu() - expected).abs().max() < 1e-4 * expected.abs().max()


def test_convolution():
    generator = torch.Generator("cuda").manual_seed(0)
    row, weight = (torch.randn(n, 4, generator=generator, device="cuda") for n in (sum(LENGTHS), 4))
    expected = causal_conv(row.cpu().double(), weight.cpu().double(), LENGTHS)
    assert (causal_conv(row, weight, LENGTHS).cpu() - expected).abs().max() < 1e-4
    in_bf16 = causal_conv(row.bfloat16(), weight.bfloat16(), LENGTHS).cpu().double()
    assert (in_bf16 - expected).norm() < 2e-2 * expected.norm()


def train_variants(rank, world_size, port, path):
    results = {}
    for name, flags in VARIANTS.items():
        trainer = start_trainer(trainer_args(path, *FLAGS, *flags), rank, world_size, port, with_ref=True)
        results[name] = [train_rollout(trainer, rollout_id) for rollout_id in range(2)]
        stop_trainer()
        del trainer
    return results


def test_steps_agree(tmp_path):
    save_family("qwen3_next", str(tmp_path))
    results = run_world(train_variants, 1, str(tmp_path))[0]
    expected = results.pop("fp32")[0]
    for name, (first, _) in results.items():
        assert first["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.1), name
        assert first["train/entropy_loss"] == pytest.approx(expected["train/entropy_loss"], rel=0.02), name
