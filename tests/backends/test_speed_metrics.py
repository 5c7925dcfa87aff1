"""Speed metrics against the formula by hand."""

import json
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

from slime.backends.common.critic import CriticRole
from slime.backends.common.metrics import model_flops, speed_metrics
from slime.observability.timer import Timer

pytestmark = pytest.mark.unit
CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 32,
}
WEIGHTS = 2 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16) + 8 * 32
"""Per layer attention (q, o: 2 heads of 4; k, v: 1) and a gated MLP; the output layer."""


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_speed_metrics(tmp_path, alone):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    times = {
        "perf/train_wait_time": 3.0,
        "perf/train_time": 1.0,
        "perf/actor_train_time": 0.5,
        "perf/ref_log_probs_time": 0.25,
    }
    lengths = [3, 5]
    metrics = speed_metrics(times, "actor", str(tmp_path), lengths, alone, torch.device("cpu"))
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    forward = 2 * WEIGHTS * sum(lengths) + 4 * 2 * 2 * 4 * pairs
    assert metrics == {
        "perf/step_time": 4.0,
        "perf/wait_time_ratio": 0.75,
        "perf/actor_train_tok_per_s": 16.0,
        "perf/ref_log_probs_tflops": pytest.approx(forward / 0.25 / 1e12),
        "perf/actor_train_tflops": pytest.approx(3 * forward / 0.5 / 1e12),
    }


def test_an_unusual_architecture_has_no_tflops(tmp_path, alone):
    (tmp_path / "config.json").write_text('{"d_model": 8}')
    assert model_flops(str(tmp_path)) is None
    times = {"perf/train_wait_time": 3.0, "perf/train_time": 1.0, "perf/actor_train_time": 0.5}
    assert "perf/actor_train_tflops" not in speed_metrics(
        times, "actor", str(tmp_path), [3], alone, torch.device("cpu")
    )


def test_a_critic_s_training_is_its_optimizer_steps(tmp_path, alone):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    critic = CriticRole.__new__(CriticRole)
    critic.args, critic.role, critic.dp_group = Namespace(hf_checkpoint=str(tmp_path)), "critic", alone
    critic.device, critic._peak_tflops, critic.timer = torch.device("cpu"), None, Timer()
    for name, seconds in (("train_wait", 3.0), ("values", 0.25), ("critic_train", 0.5), ("train", 1.0)):
        critic.timer.add(name, seconds)
    metrics = critic._perf_metrics({"total_lengths": [3, 5]})
    assert metrics["perf/critic_train_time"] == 0.5 and metrics["perf/critic_train_tok_per_s"] == 16.0
    assert metrics["perf/critic_values_time"] == 0.25 and metrics["perf/critic_step_time"] == 4.0
    assert all("critic" in name for name in metrics)
