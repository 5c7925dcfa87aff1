"""A server with `--batch-invariant` and a trainer in true on-policy mode give the same log-probs, bit for bit."""

import numpy as np
import pytest
import torch

from slime.backends.common.checks import InvariantError
from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.training.rollout_data import RankData
from tests.backends.trainers import make_trainer, rollout_parts, run_world, trainer_args
from tests.engine.server_process import Background, EngineServer
from tests.tiny_model import save_tiny_model

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.integration),
    pytest.param(
        "cuda",
        marks=[pytest.mark.system, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
    ),
]
FLAGS = "--true-on-policy-mode --rollout-temperature 0.7 --use-dynamic-batch-size --max-tokens-per-gpu 150".split()


def sampled(server) -> dict:
    """A rollout batch of requests that run together: some share a prefix, prompts come in pieces."""
    rng = np.random.default_rng(0)
    shared = rng.integers(4, 128, 30).tolist()
    prompts = [rng.integers(4, 128, int(n)).tolist() for n in rng.integers(1, 40, 4)]
    prompts += [shared + rng.integers(4, 128, int(n)).tolist() for n in rng.integers(1, 12, 4)]
    lengths = rng.integers(1, 70, 8).tolist()
    background = Background(server)
    try:
        calls = [
            background.generate(prompt, max_new_tokens=n, temperature=0.7, ignore_eos=True)
            for prompt, n in zip(prompts, lengths, strict=True)
        ]
        outputs = [[entry[:2] for entry in c.result()["meta_info"]["output_token_logprobs"]] for c in calls]
    finally:
        background.close()
    responses = [[int(token) for _, token in output] for output in outputs]
    return {
        "tokens": [p + r for p, r in zip(prompts, responses, strict=True)],
        "total_lengths": [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)],
        "response_lengths": [len(r) for r in responses],
        "loss_masks": [[1] * len(r) for r in responses],
        "rollout_log_probs": [[value for value, _ in output] for output in outputs],
        "rewards": [1.0, -1.0] * 4,
        "rollout_ids": list(range(8)),
        "sample_indices": list(range(8)),
    }


def train(rank, world_size, port, model_dir, device, batch, flags):
    """The metric of a rollout, and the error when one log-prob is off by a bit."""
    args = trainer_args(model_dir, *FLAGS, *flags, "--device", device, "--actor-num-gpus-per-node", str(world_size))
    trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
    dp_size = world_size // trainer.cp.size
    metrics = trainer.train_on(0, RankData(rollout_parts(args, batch, dp_size)[trainer.dp_rank]))
    trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
    batch["rollout_log_probs"][3][0] = float(np.nextafter(np.float32(batch["rollout_log_probs"][3][0]), np.float32(0)))
    with pytest.raises(InvariantError) as error:
        trainer.train_on(0, RankData(rollout_parts(args, batch, dp_size)[trainer.dp_rank]))
    trainer.dispose()
    return metrics["train/train_rollout_logprob_abs_diff"], metrics["train/grad_norm"], str(error.value)


@pytest.mark.parametrize("device", DEVICES)
def test_bits_of_trainer_and_engine(tmp_path, device):
    model_dir = str(tmp_path / "model")
    save_tiny_model(model_dir, head_dim=64, hidden_size=256, intermediate_size=512)
    flags = ["--device", device, "--batch-invariant", "--chunked-prefill-size", "16"]
    if device == "cuda":
        flags += ["--mem-fraction-static", "0.1"]
    server = EngineServer(model_dir, tmp_path, *flags)
    try:
        batch = sampled(server.wait())
    finally:
        server.stop()
    several_steps = ["--num-steps-per-rollout", "2", "--use-rollout-logprobs", "--gradient-checkpointing"]
    worlds = [(1, []), (1, several_steps)]
    if device == "cpu":
        worlds.append((2, ["--context-parallel-size", "2"]))
    for size, more in worlds:
        for difference, grad_norm, error in run_world(train, size, model_dir, device, batch, more):
            assert difference == 0 and grad_norm > 0
            assert "must be exactly 0" in error
