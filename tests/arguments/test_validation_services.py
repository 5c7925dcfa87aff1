"""The rules across flags on engines, router, trackers, dumps and the run directory."""

import sys

import pytest

from slime.arguments.validation import services

pytestmark = pytest.mark.unit


class TestDebug:
    def test_halves_exclude_each_other(self, setup, one_error):
        assert "excludes --debug-train-only" in one_error("--debug-rollout-only", "--debug-train-only")
        dump = ("--load-debug-rollout-data", f"{setup.root}/{{rollout_id}}.pt")
        assert setup.load(*dump).debug_train_only is True
        assert "excludes --load-debug-rollout-data" in one_error("--debug-rollout-only", *dump)

    def test_dump_details_sets_both_templates(self, setup):
        args = setup.load("--dump-details", "/d")
        assert args.save_debug_rollout_data == "/d/rollout_data/{rollout_id}.pt"
        assert args.save_debug_train_data == "/d/train_data/{rollout_id}_{rank}.pt"

    def test_templates(self, one_error):
        assert "lacks {rollout_id}" in one_error("--save-debug-rollout-data", "a.pt")
        assert "{step} is unknown" in one_error("--save-debug-train-data", "{rollout_id}_{rank}_{step}.pt")
        assert "not a valid template" in one_error("--save-debug-rollout-data", "{rollout_id.pt")

    def test_missing_dumps(self, setup, one_error):
        assert "there is no directory" in one_error("--load-debug-rollout-data", "/nowhere/{rollout_id}.pt")
        wrong = str(setup.root / "{rolout_id}.pt")
        assert "{rolout_id} is unknown" in one_error("--load-debug-rollout-data", wrong, colocate=False)
        assert "has no effect without" in one_error("--load-debug-rollout-data-subsample", "0.5")

    def test_checker_flag_needs_the_check(self, one_error):
        assert "has no effect without --ci-test" in one_error("--ci-disable-kl-checker")


class TestServices:
    def test_external_engines(self, setup, one_error):
        apart = {"colocate": False}
        addresses = ("--rollout-external-engine-addrs", "10.0.0.1:30000", "[::1]:30001")
        args = setup.load("--rollout-external", *addresses, colocate=False)
        assert args.rollout_num_gpus == 2
        assert "has no effect without --rollout-external" in one_error(*addresses)
        assert "needs --rollout-external-engine-addrs" in one_error(
            "--rollout-external", "--rollout-num-gpus", "1", **apart
        )
        assert "excludes --use-fault-tolerance" in one_error(
            "--rollout-external", *addresses, "--use-fault-tolerance", **apart
        )
        for wrong in ("10.0.0.1", "http://h:1", "h:port", ":1", "h:70000"):
            message = one_error("--rollout-external", addresses[0], wrong, **apart)
            assert f"{wrong}: is not host:port" in message
        assert "is given twice" in one_error("--rollout-external", addresses[0], "h:1", "h:1", **apart)

    def test_weights_through_disk(self, one_error, tmp_path):
        directory = ("--update-weight-disk-dir", str(tmp_path))
        disk = ("--update-weight-transport", "disk")
        apart = {"colocate": False}
        delta = ("--update-weight-mode", "delta")
        gpus = ("--rollout-num-gpus", "1")
        assert "needs --update-weight-transport disk" in one_error(*delta, *gpus, **apart)
        assert "has no effect without" in one_error(*directory, *gpus, **apart)
        assert "has no effect without" in one_error("--update-weight-delta-encoding", "overwrite", *gpus, **apart)
        assert "needs --update-weight-disk-dir" in one_error(*disk, *gpus, **apart)
        assert "needs --update-weight-local" in one_error(*disk, *directory, *delta, *gpus, **apart)
        file = tmp_path / "file"
        file.write_text("")
        rule = f"--update-weight-disk-dir {file}: is not a directory"
        assert rule in one_error(*disk, "--update-weight-disk-dir", str(file), *gpus, **apart)
        blake3 = ("--update-weight-delta-checksum", "blake3")
        assert "pip install blake3" in one_error(*disk, *directory, *blake3, *gpus, **apart)
        assert "no effect under --colocate" in one_error(*disk, *directory)

    def test_router_flags_belong_to_one_router(self, setup, one_error):
        middleware = ("--slime-router-middleware-paths", "tests.router.test_server.Shout")
        assert "it is not installed" in one_error("--router-policy", "manual")
        assert "--use-slime-router is given" in one_error("--router-policy", "manual", "--use-slime-router")
        assert "has no Python" in one_error("--sglang-router-env", "/nowhere")
        environment = ("--sglang-router-env", sys.executable)
        assert "add --use-slime-router" in one_error(*environment, *middleware)
        assert "contradicts --sglang-router-env" in one_error(*environment, "--use-slime-router")
        address = ("--sglang-router-ip", "10.0.0.1", "--sglang-router-port", "3000")
        assert "no effect on the running router" in one_error(*address, *middleware)
        assert "greater than 0" in one_error("--slime-router-health-check-failure-threshold", "0")

    def test_router_address_is_a_pair(self, one_error):
        assert "needs --sglang-router-port" in one_error("--sglang-router-ip", "127.0.0.1")
        assert "needs --sglang-router-ip" in one_error("--sglang-router-port", "3000")

    def test_settings_of_what_is_off_are_said(self, setup, caplog):
        setup.load("--wandb-project", "x", "--tb-project-name", "y", "--rollout-health-check-interval", "5")
        assert "--wandb-project: no effect without --use-wandb" in caplog.text
        assert "--tb-project-name: no effect without --use-tensorboard" in caplog.text
        assert "--rollout-health-check-interval: no effect without --use-fault-tolerance" in caplog.text
        caplog.clear()
        setup.load("--use-tensorboard", "--tb-project-name", "y")
        assert "no effect" not in caplog.text

    def test_wandb_must_be_installed(self, setup, one_error, monkeypatch):
        monkeypatch.setattr(services.importlib.util, "find_spec", lambda name: None)
        assert 'pip install "slime[wandb]"' in one_error("--use-wandb")
        assert setup.load("--use-wandb", "--wandb-mode", "disabled").use_wandb

    def test_run_directory(self, setup, one_error):
        first, second = setup.load().run_dir, setup.load().run_dir
        assert first.startswith("runs/") and first.endswith("-model") and first != second
        assert "is a file" in one_error("--run-dir", setup.data)
