"""The rules on data, user functions and checkpoints."""

import logging

import pytest

pytestmark = pytest.mark.unit


class TestData:
    def test_required_and_present(self, setup, one_error):
        assert "--prompt-data: is required" in one_error(without=("--prompt-data",))
        assert "did you mean" in one_error("--prompt-data", setup.data.replace("train", "tain"))
        assert "there is no directory" in one_error("--prompt-data", "/nowhere/a.jsonl")
        assert "must end in .jsonl or .parquet" in one_error("--prompt-data", setup.write("a.csv", "a"))
        assert (
            setup.load("--disable-rollout-global-dataset", without=("--prompt-data",)).rollout_global_dataset is False
        )

    def test_slices(self, setup, one_error):
        assert setup.load("--prompt-data", f"{setup.data}@[-100:]").prompt_data.endswith("@[-100:]")
        assert "a row slice is written" in one_error("--prompt-data", f"{setup.data}@[a:b]")

    def test_first_row(self, setup, one_error):
        assert "did you mean label?" in one_error("--label-key", "labels")
        assert "--input-key input: is no key of" in one_error(
            "--prompt-data", setup.write_rows("b.jsonl", [{"question": 1}])
        )
        assert "is not valid JSON" in one_error("--prompt-data", setup.write("c.jsonl", "{"))
        assert "must be a JSON object" in one_error("--prompt-data", setup.write("d.jsonl", "\n[1]\n"))
        assert "has no rows" in one_error("--prompt-data", setup.write("e.jsonl", "\n"))
        marked = setup.write("f.jsonl", '\ufeff{"input": "1 + 1 =", "label": "2"}\n')
        assert setup.load("--prompt-data", marked).prompt_data == marked

    def test_other_encodings(self, setup, one_error):
        path = setup.root / "latin.jsonl"
        path.write_bytes('{"input": "café", "label": "2"}\n'.encode("latin-1"))
        assert "is not UTF-8 text" in one_error("--prompt-data", path)

    def test_parquet_is_whole(self, setup, one_error):
        path = setup.root / "a.parquet"
        for content, rule in ((b"input,label", "is not a parquet file"), (b"PAR1 half of it", "is cut off")):
            path.write_bytes(content)
            assert f"--prompt-data {path}: {rule}" in one_error("--prompt-data", path)
        path.write_bytes(b"PAR1 the rows PAR1")
        assert setup.load("--prompt-data", path)

    def test_directories(self, setup, one_error):
        assert "is a directory\n    fix: give one of its files: train.jsonl" in one_error("--prompt-data", setup.root)
        assert "fix: give a file (.jsonl, .parquet)" in one_error("--prompt-data", setup.model)

    def test_something_must_score(self, setup, one_error):
        assert "--rm-type: is required" in one_error(without=("--rm-type",))
        rows = setup.write_rows("rm.jsonl", [{"input": "a", "metadata": {"rm_type": "math"}}])
        assert setup.load("--prompt-data", rows, without=("--rm-type",)).rm_type is None

    def test_reward_types(self, one_error):
        assert "needs --rm-url" in one_error("--rm-type", "remote_rm")
        assert "--reward-key score" in one_error("--rm-type", "dapo")


class TestFunctions:
    def test_module_and_name_must_exist(self, setup, one_error, monkeypatch):
        setup.write("my_pkg/__init__.py", "")
        setup.write(
            "my_pkg/rewards.py", "import torch\nfrom os.path import join\nX = 1\nasync def score(args, sample): ...\n"
        )
        setup.write("my_pkg/dynamic.py", "from os.path import *\n")
        monkeypatch.syspath_prepend(str(setup.root))
        for name in ("rewards.score", "rewards.join", "rewards.X", "dynamic.anything"):
            assert setup.load("--custom-rm-path", f"my_pkg.{name}")
        assert "did you mean my_pkg.rewards.score?" in one_error("--custom-rm-path", "my_pkg.rewards.scor")
        assert "did you mean my_pkg.rewards?" in one_error("--custom-rm-path", "my_pkg.reward.score")
        assert "PYTHONPATH" in one_error("--custom-rm-path", "nowhere_at_all.score")
        assert "defines no nothing" in one_error("--rollout-sample-hook-path", "my_pkg.rewards.nothing")

    @pytest.mark.parametrize(
        ("flag", "source", "rule"),
        [
            ("custom-rm-path", "def f(:", "my_hook.py:1 is not valid Python"),
            ("custom-rm-path", "\ndef f(args): ...", "my_hook.py:2 takes (args), but is called with (args, sample)"),
            ("custom-rm-path", "def f(args, sample, label): ...", "takes (args, sample, label)"),
            ("custom-generate-function-path", "def f(args, s, p, *, key): ...", "(args, s, p, *, key)"),
            (
                "buffer-filter-path",
                "def f(args, buffer, n): ...",
                "called with (args, rollout_id, buffer, num_samples)",
            ),
            ("data-source-path", "class f:\n def __init__(self): ...", "my_hook.py:2 takes (), but"),
            ("custom-rm-path", "async def f(a, b=1, *rest): ...", None),
            ("custom-rm-path", "def f(*args, **kwargs): ...", None),
            ("custom-generate-function-path", "def f(a, s, p, evaluation): ...", None),
            ("custom-rm-path", "@wrapped\ndef f(): ...", None),
            ("custom-rm-path", "if 1:\n def f(a, b): ...\nelse:\n def f(): ...", None),
            ("data-source-path", "class f(dict): ...", None),
        ],
    )
    def test_source_and_parameters(self, setup, one_error, monkeypatch, flag, source, rule):
        setup.write("my_hook.py", source)
        monkeypatch.syspath_prepend(str(setup.root))
        if rule is None:
            assert setup.load(f"--{flag}", "my_hook.f")
        else:
            assert rule in one_error(f"--{flag}", "my_hook.f")


def test_a_function_in_nested_folders_without_init(tmp_path, monkeypatch):
    """Namespace packages are found without being imported."""
    import slime.arguments.validation.functions as functions
    from slime.arguments.problems import Problems

    (tmp_path / "spaces" / "inner").mkdir(parents=True)
    (tmp_path / "spaces" / "inner" / "leaf.py").write_text("def reward(args, sample): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    problems = Problems()
    functions.check_path("--custom-rm-path", "spaces.inner.leaf.reward", problems)
    assert problems == []
    functions.check_path("--custom-rm-path", "spaces.inner.leaf.rewrd", problems)
    functions.check_path("--custom-rm-path", "spaces.other.leaf.reward", problems)
    assert ["did you mean spaces.inner.leaf.reward?" in str(problems[0]), "no module" in str(problems[1])] == [
        True
    ] * 2


class TestCheckpoints:
    def checkpoint(self, setup, tracker="7", step="iter_0000007") -> str:
        setup.write(f"ckpt/{step}/meta.json", "{}")
        setup.write("ckpt/latest_checkpointed_iteration.txt", tracker)
        return str(setup.root / "ckpt")

    def test_resume(self, setup):
        path = self.checkpoint(setup)
        args = setup.load("--load", path)
        assert (args.load, args.finetune, args.start_rollout_id, args.no_load_optim) == (path, False, None, False)

    def test_first_start_falls_back_to_the_reference(self, setup, caplog):
        with caplog.at_level(logging.WARNING):
            args = setup.load("--load", "/not/yet", "--ref-load", setup.model, "--start-rollout-id", "5")
        assert (args.load, args.finetune, args.start_rollout_id) == (setup.model, True, 0)
        assert args.no_load_optim and args.no_load_rng
        assert "--start-rollout-id 5 is replaced by 0" in caplog.text
        assert "--load /not/yet holds no latest_checkpointed_iteration.txt: nothing is resumed" in caplog.text
        caplog.clear()
        setup.load("--load", setup.root / "out", "--save", setup.root / "out")
        assert "nothing is resumed" not in caplog.text
        assert setup.load().load is None

    def test_empty_paths(self, one_error):
        for flag in ("--save", "--load", "--run-dir"):
            assert f"{flag} '': is empty" in one_error(flag, "")

    def test_quantised_weights_are_not_trained(self, setup, one_error):
        model = setup.write_model("fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
        assert f"--hf-checkpoint {model}: its weights are quantised" in one_error("--hf-checkpoint", model)
        assert f"--ref-load {model}: its weights are quantised" in one_error("--ref-load", model)
        # Beside others they are the engines'.
        assert "need SGLang" in one_error("--hf-checkpoint", model, "--ref-load", setup.model)

    def test_finetune_starts_at_zero(self, setup):
        path = self.checkpoint(setup)
        args = setup.load("--load", path, "--finetune", "--start-rollout-id", "0")
        assert (args.load, args.start_rollout_id, args.no_load_optim) == (path, 0, True)

    def test_broken_tracker(self, setup, one_error):
        assert "must hold a number, not 'x'" in one_error("--load", self.checkpoint(setup, tracker="x"))
        message = one_error("--load", self.checkpoint(setup, tracker="9"))
        assert "names iter_0000009, which is not there" in message and "iter_0000007" in message

    def test_checkpoint_that_was_being_replaced(self, setup):
        path = self.checkpoint(setup, step=".iter_0000007.old")
        assert setup.load("--load", path).load == path

    def test_save(self, setup, one_error):
        assert "needs --save" in one_error("--save-interval", "1")
        assert "is a file" in one_error("--save", setup.data)
        assert "use {rollout_id}" in one_error("--save-hf", "hf-{step}", "--save", setup.root / "out")
        assert "add --save DIRECTORY" in one_error("--save-hf", "hf-{rollout_id}")
        assert setup.load("--save", setup.root / "a" / "b", "--save-interval", "1").save_interval == 1


def test_a_wanted_step_is_not_silently_another_one(one_error):
    assert "--ckpt-step 5: --load /not/yet holds no latest" in one_error("--load", "/not/yet", "--ckpt-step", "5")
    assert "--ckpt-step 5: needs --load" in one_error("--ckpt-step", "5")


def test_ifbench_needs_its_metadata(setup, one_error):
    assert "needs instruction_id_list and kwargs in column metadata" in one_error("--rm-type", "ifbench")
    row = {"input": "a", "metadata": {"instruction_id_list": ["format:emoji"], "kwargs": [{}]}}
    assert setup.load("--rm-type", "ifbench", "--prompt-data", setup.write_rows("i.jsonl", [row]))
