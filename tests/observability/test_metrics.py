import json
from argparse import Namespace

import pytest

from slime.observability.console import Console
from slime.observability.metrics import MetricsLogger

pytestmark = pytest.mark.unit


@pytest.fixture
def args(tmp_path):
    return Namespace(
        run_dir=str(tmp_path / "run"),
        use_tensorboard=True,
        tb_project_name=None,
        tb_experiment_name=None,
        use_wandb=False,
        wandb_always_use_train_step=False,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        global_batch_size=4,
        loss_type="policy_loss",
    )


def test_jsonl_and_tensorboard(args, tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    logger = MetricsLogger(args)
    logger.log({"rollout/a": 1.5, "text": "left out", "rollout/bad": float("nan")}, "rollout/step", 3)
    logger.log({"train/loss": 0.25}, "train/step", 7)
    logger.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["rollout/step"] == 3 and lines[0]["rollout/a"] == 1.5 and lines[0]["rollout/bad"] == "nan"
    assert "text" not in lines[0]
    assert lines[1]["train/step"] == 7 and lines[1]["train/loss"] == 0.25

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(7, 0.25)]


def test_missing_wandb_says_what_to_install(args, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    args.use_wandb = True
    with pytest.raises(ImportError, match=r"slime\[wandb\]"):
        MetricsLogger(args)


def test_axes(args, tmp_path):
    logger = MetricsLogger(args)
    metrics = {"train/loss": 1.0, "train/step": 12, "rollout/raw_reward": 0.5, "perf/rollout_time": 1.0}
    logger.log_rollout(5, 10, metrics)
    logger.log_eval(6, {"eval/a": 0.5})
    args.wandb_always_use_train_step = True
    logger.log_rollout(5, 10, metrics)
    logger.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    train, rollout, evaluation, _, last = (json.loads(line) for line in lines)
    assert train["train/step"] == 12 and train["train/loss"] == 1.0 and "rollout/raw_reward" not in train
    assert rollout["rollout/step"] == 5 and rollout["rollout/raw_reward"] == 0.5 and "train/loss" not in rollout
    assert evaluation["eval/step"] == 6 and evaluation["eval/a"] == 0.5
    assert last["train/step"] == 10 and "rollout/step" not in last


def test_plain_console(tmp_path, capsys):
    console = Console(tmp_path / "driver.log")
    with console.phase("generating"):
        pass
    console.row(0, 3, {"rollout/raw_reward": 0.5, "train/loss": 0.123456, "perf/rollout_time": 2.0})
    console.evaluation(3, {"eval/held-out": 0.75, "eval/held-out/response_len/mean": 3, "eval/held-out-pass@1": 0.7})
    console.close()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "rollout 1/3  reward 0.500  loss 0.1235  generate 2.0s"
    assert out[1] == "eval after 3 rollouts  held-out 0.750"
    log = (tmp_path / "driver.log").read_text()
    assert "generating ..." in log and "rollout 1/3" in log


def test_supervised_rows_have_no_reward(args, tmp_path):
    args.loss_type = "sft_loss"
    logger = MetricsLogger(args)
    logger.log_rollout(0, 10, {"rollout/raw_reward": 0.0, "rollout/truncated_ratio": 0.0, "train/loss": 2.5})
    logger.close()
    assert (tmp_path / "run" / "logs" / "driver.log").read_text().endswith("rollout 1/10  loss 2.5\n")
