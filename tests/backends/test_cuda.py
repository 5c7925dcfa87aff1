"""The trainer on a GPU: bf16 over fp32 weights, offloading, weights to an engine on the same GPU by CUDA IPC."""

import gc
import math

import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.backends.fsdp_utils.model import local_tensor
from slime.training.rollout_data import RankData
from tests.backends.trainers import (
    long_rollout_batch,
    make_trainer,
    rollout_parts,
    run_world,
    train_rollout,
    trainer_args,
)
from tests.engine.server_process import EngineServer
from tests.tiny_model import save_tiny_model
from tests.weight_sync.test_transports import PROMPT, generate

pytestmark = [pytest.mark.system, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FLAGS = "--device cuda --ci-test --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3 --num-steps-per-rollout 2".split()
VARIANTS = {
    "bf16": (),
    "fp32": ("--dtype", "float32"),
    "host": ("--fsdp-cpu-offload",),
    "checkpointed": ("--gradient-checkpointing",),
    "compiled": ("--fsdp-compile", "inductor"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    """Large enough to be seen in the GPU's memory."""
    path = str(tmp_path_factory.mktemp("cuda-model"))
    save_tiny_model(path, head_dim=64, hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    return path


def masters(trainer):
    return {name: local_tensor(p).float().cpu().clone() for name, p in trainer.model.hf_parameters().items()}


def train_variants(rank, world_size, port, model_dir):
    """Two rollouts of each variant, offloaded in between or not: fp32 weights and memory while offloaded."""
    out = {}
    for name, flags in VARIANTS.items():
        for offload in (False, True):
            gc.collect()
            base = torch.cuda.memory_allocated()
            args = trainer_args(model_dir, *FLAGS, *flags)
            trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port, with_ref=True)
            metrics = train_rollout(trainer, 0)
            left = math.nan
            if offload:
                before = torch.cuda.memory_allocated() - base
                trainer.offload()
                left = (torch.cuda.memory_allocated() - base) / before
                sent = parameters_of_released(trainer)
                trainer.onload()
                assert all(torch.equal(a, b) for a, b in zip(sent, parameters_on_device(trainer), strict=True))
            metrics = train_rollout(trainer, 1)
            dtypes = {p.dtype for p in trainer.model.parameters()}
            out[name, offload] = (masters(trainer), metrics, left, dtypes)
            del trainer
    return out


def parameters_on_device(trainer):
    specs = trainer.weights.tensor_specs()
    out = [torch.empty(spec.shape, dtype=spec.dtype, device="cuda") for spec in specs]
    trainer.weights.gather(specs, out)
    return [tensor.cpu() for tensor in out]


def parameters_of_released(trainer):
    return trainer.memory.with_parameters(lambda: parameters_on_device(trainer))


def test_offloading_changes_no_bit_and_frees_the_gpu(model_dir):
    (results,) = run_world(train_variants, 1, model_dir)
    for name in VARIANTS:
        straight, metrics, _, dtypes = results[name, False]
        offloaded, _, left, _ = results[name, True]
        assert dtypes == {torch.float32}
        assert math.isfinite(metrics["train/loss"]) and metrics["train/skipped_steps"] == 0
        different = [key for key in straight if not torch.equal(straight[key], offloaded[key])]
        # Attention's backward adds in any order.
        assert all((straight[k] - offloaded[k]).abs().max() < 1e-3 for k in different), (name, different)
        if name != "host":
            assert left < 0.1, (name, left)


def train_on_long_sequences(rank, world_size, port, model_dir):
    """Two steps, of which --ci-test checks the first: log-prob passes and training have the same bits."""
    from slime.modeling import cudnn_attention

    out = {}
    for recompute in ((), ("--gradient-checkpointing",)):
        for implementation in ("auto", "slime_varlen"):
            args = trainer_args(model_dir, *FLAGS, *recompute, "--attn-implementation", implementation)
            trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port, with_ref=True)
            batch = long_rollout_batch([5000, 300, 4100, 20] * 2)
            metrics = trainer.train_on(0, RankData(rollout_parts(args, batch, 1)[0]))
            out[implementation, recompute] = metrics["train/loss"], metrics["train/grad_norm"]
            del trainer
    return out, cudnn_attention.works.cache_info().misses


def test_long_sequences(model_dir):
    """cuDNN's losses and gradients are those of the packed kernels."""
    ((results, trials),) = run_world(train_on_long_sequences, 1, model_dir)
    assert trials == (torch.cuda.get_device_capability()[0] >= 9)
    expected = results["slime_varlen", ()]
    for got in results.values():
        assert got == pytest.approx(expected, rel=0.02, abs=2e-3)


def sync(rank, world_size, port, model_dir, url, root):
    """Updates while offloaded; memory after each, the engine's answer, the weights it should hold."""
    args = trainer_args(model_dir, *FLAGS, "--update-weight-buffer-size", "20000000", "--save", root, colocate=True)
    trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port, with_ref=True)
    trainer.node_address = lambda: "127.0.0.1"
    trainer.set_rollout_engines([url], [[0]])
    memory = []
    for rollout_id in range(4):
        train_rollout(trainer, rollout_id)
        trainer.offload(keep_parameters=True)
        trainer.update_weights()
        trainer.offload()
        memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        trainer.onload()
    trainer.check_weights()
    tensor_reply = generate(url)
    trainer.offload()
    trainer.save_model(3)
    assert trainer.memory.parameters_released
    trainer.onload()
    held = masters(trainer)
    resumed = make_trainer(
        FSDPTrainRayActor, trainer_args(model_dir, *FLAGS, "--load", root), rank, world_size, port, with_ref=True
    )
    assert all(torch.equal(value, held[name]) for name, value in masters(resumed).items())
    assert resumed.start_rollout_id == 4
    ids = PROMPT + tensor_reply["output_ids"]
    trainer.dispose()
    return memory, tensor_reply, served_log_probs(held, model_dir, ids)


def served_log_probs(weights, model_dir, ids):
    from slime.modeling.attention import PackedSequences
    from slime.modeling.hf import load_causal_lm

    model = load_causal_lm(model_dir, torch.bfloat16, "cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        logits = model(
            torch.tensor([ids], device="cuda"),
            position_ids=torch.arange(len(ids), device="cuda")[None],
            attention_context=PackedSequences([len(ids)], torch.device("cuda")),
            use_cache=False,
        ).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(ids[1:], device="cuda")[:, None])[:, 0].cpu()


def test_weights_reach_an_engine_on_the_same_gpu(model_dir, tmp_path):
    server = EngineServer(
        model_dir, tmp_path, "--device", "cuda", "--dtype", "bfloat16", "--mem-fraction-static", "0.1"
    )
    try:
        server.wait()
        ((memory, reply, expected),) = run_world(sync, 1, model_dir, server.url, str(tmp_path / "run"))
    finally:
        server.stop()
    assert memory[-1] <= max(memory[:2]), memory  # nothing piles up
    served = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    assert (served - expected[-len(served) :]).abs().max() < 0.05
    assert reply["meta_info"]["weight_version"] == "4"
