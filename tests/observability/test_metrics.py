import json
import os
import pty
import re
import struct
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from slime.arguments.families.observability import FAMILY as OBSERVABILITY
from slime.observability.console import Console
from slime.observability.metrics import MetricsLogger, TrackerError

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
    with pytest.raises(TrackerError, match=r"slime\[wandb\]"):
        MetricsLogger(args)


@pytest.fixture
def wandb_args(args, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = {flag.dest: None for flag in OBSERVABILITY.flags if flag.dest.startswith("wandb_")}
    vars(args).update(flags, use_wandb=True, use_tensorboard=False, wandb_always_use_train_step=False)
    vars(args).update(wandb_mode="offline", wandb_group="sums", wandb_random_suffix=True)
    return args


def wandb_records(run_dir: str) -> list:
    """What a run without a server wrote. wandb's own process writes it, the last record after the run has ended."""
    (path,) = Path(run_dir, "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30
    records = read_wandb(path)
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, f"{len(records)} records, none of the end"
        time.sleep(0.05)
        records = read_wandb(path)
    return records


def read_wandb(path: Path) -> list:
    """Records in the format of LevelDB's log, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, records = path.read_bytes(), 7, b"", []
    while at + 7 < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(whole))
            whole = b""
    return records


def test_wandb(wandb_args, monkeypatch):
    wandb_args.wandb_key = "secret" * 7
    monkeypatch.setattr(sys, "argv", ["train.py", "--wandb-key", wandb_args.wandb_key, "--lr=1"])
    logger = MetricsLogger(wandb_args)
    logger.log_rollout(3, 10, {"train/loss": 0.25, "train/step": 8, "rollout/raw_reward": 0.5})
    logger.log_eval(4, {"eval/a": 0.75})
    logger.close(exit_code=1)
    assert sys.argv[2] == wandb_args.wandb_key

    records = wandb_records(wandb_args.run_dir)
    rows = [{i.nested_key[0]: i.value_json for i in r.history.item} for r in records if r.HasField("history")]
    assert [{key: row[key] for key in row if "/" in key} for row in rows] == [
        {"train/step": "8", "train/loss": "0.25"},
        {"rollout/step": "3", "rollout/raw_reward": "0.5"},
        {"eval/step": "4", "eval/a": "0.75"},
    ]
    (run,) = (r.run for r in records if r.HasField("run"))
    assert run.run_group == "sums" and run.display_name.startswith("sums_")
    assert {item.key: item.value_json for item in run.config.update}["n_samples_per_prompt"] == "2"
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["rollout/*"] == "rollout/step" and axes["train/*"] == "train/step"
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [1]
    assert not any(b"secretsecret" in r.SerializeToString() for r in records)
    assert any(b"--lr=1" in r.SerializeToString() for r in records)


def test_wandb_without_a_key(wandb_args, monkeypatch, tmp_path):
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb_args.wandb_mode = "online"
    with pytest.raises(TrackerError, match=r"(?s)--use-wandb: .*API key.*fix: "):
        MetricsLogger(wandb_args)


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


def test_a_full_disk_is_an_error_of_the_metrics_alone(args, tmp_path, capsys):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    for path in (logs / "driver.log", tmp_path / "run" / "metrics.jsonl"):
        path.symlink_to("/dev/full")
    args.use_tensorboard = False
    logger = MetricsLogger(args)
    logger.console.line("goes on")
    with pytest.raises(OSError, match="No space left"):
        logger.log({"rollout/a": 1.5})
    logger.close(exit_code=1)
    assert capsys.readouterr().out == "goes on\n"


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


ON_A_TERMINAL = """
import pathlib, sys, time
from slime.observability.console import Console
console = Console(pathlib.Path(sys.argv[1]))
with console.phase("rollout 1/3: generating"):
    console.progress("12/64 samples")
    time.sleep(0.6)
console.row(0, 3, {"rollout/raw_reward": 0.5})
console.line("[bold] is no markup")
console.close()
"""


def test_console_of_a_terminal_shows_progress(tmp_path):
    """In a terminal of its own, as a user sees it."""
    shown = bytearray()

    def read(fd):
        shown.extend(os.read(fd, 4096))
        return b"."

    with open(os.devnull, "wb") as nothing, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pty, "STDOUT_FILENO", nothing.fileno())
        status = pty.spawn([sys.executable, "-c", ON_A_TERMINAL, str(tmp_path / "driver.log")], read)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert os.waitstatus_to_exitcode(status) == 0, text
    assert "rollout 1/3: generating 12/64 samples" in text and "0:00:0" in text
    assert "rollout 1/3  reward 0.500" in text and "[bold] is no markup" in text
    assert "12/64" not in (tmp_path / "driver.log").read_text()


def test_supervised_rows_have_no_reward(args, tmp_path):
    args.loss_type = "sft_loss"
    logger = MetricsLogger(args)
    logger.log_rollout(0, 10, {"rollout/raw_reward": 0.0, "rollout/truncated_ratio": 0.0, "train/loss": 2.5})
    logger.close()
    assert (tmp_path / "run" / "logs" / "driver.log").read_text().endswith("rollout 1/10  loss 2.5\n")
