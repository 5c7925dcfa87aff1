"""Every rule across flags, and every derived value."""

import logging
import sys
from pathlib import Path

import pytest

from slime.arguments.validation import cluster, services

pytestmark = pytest.mark.unit


def test_a_right_configuration_passes(setup):
    args = setup.load()
    assert (args.device, args.dtype, args.distributed_backend) == ("cpu", "float32", "gloo")


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--lr", "-1"),
        ("--rollout-temperature", "0"),
        ("--rollout-top-p", "1.5"),
        ("--rollout-top-k", "0"),
        ("--n-samples-per-prompt", "0"),
        ("--eps-clip-c", "1"),
        ("--sglang-mem-fraction-static", "1"),
        ("--adam-beta2", "1"),
        ("--num-rollout", "-1"),
        ("--rm-timeout-secs", "0"),
        ("--rollout-stop-token-ids", "-5"),
        ("--global-batch-size", "0"),
    ],
)
def test_values_out_of_range(flag, value, one_error):
    message = one_error(flag, value)
    assert message.strip().startswith(flag) and "must" in message


class TestDevices:
    def test_cuda_defaults(self, setup):
        args = setup.load("--device", "cuda")
        assert (args.dtype, args.bf16, args.distributed_backend) == ("bfloat16", True, "nccl")

    @pytest.mark.parametrize("present, device", [(True, "cuda"), (False, "cpu")])
    def test_auto_asks_the_driver(self, present, device, setup, monkeypatch):
        monkeypatch.setattr(cluster, "cuda_present", lambda: present)
        assert setup.load("--device", "auto").device == device

    def test_dtype_flags(self, setup, one_error):
        assert setup.load("--bf16").dtype == "bfloat16"
        assert setup.load("--dtype", "bf16").bf16 is True
        assert "contradicts --bf16" in one_error("--bf16", "--dtype", "float32")

    def test_nccl_needs_cuda(self, one_error):
        assert "needs --device cuda" in one_error("--distributed-backend", "nccl")

    def test_true_on_policy_needs_samples_of_the_trained_weights(self, setup, one_error):
        assert setup.load("--true-on-policy-mode").true_on_policy_mode is True
        assert "older weights" in one_error("--true-on-policy-mode", "--partial-rollout")
        assert "no log-probs" in one_error("--true-on-policy-mode", "--loss-type", "sft_loss")
        assert "rounds differently" in one_error("--true-on-policy-mode", "--sglang-dtype", "bfloat16")
        assert "kernels of its own" in one_error("--true-on-policy-mode", "--fsdp-compile", "inductor")
        model = setup.write_model("experts", num_experts=4)
        assert "dense models only" in one_error("--true-on-policy-mode", "--hf-checkpoint", model)
        assert "dense models only" in one_error("--fsdp-compile", "aot_eager", "--hf-checkpoint", model)

    def test_profiling(self, setup, one_error):
        assert setup.load("--use-pytorch-profiler", "--profile-step-start", "0").profile_target == ["train_overall"]
        assert "greater than --profile-step-start 10" in one_error("--profile-step-end", "10")
        assert "cannot be nested" in one_error("--profile-target", "train_overall", "train_actor")
        assert "memory of a GPU" in one_error("--record-memory-history")
        assert "--record-memory-history" in one_error("--memory-snapshot-num-steps", "3")

    def test_cudnn_is_not_deterministic(self, setup, one_error):
        assert setup.load("--attn-implementation", "slime_cudnn")
        assert "any order" in one_error("--attn-implementation", "slime_cudnn", "--deterministic-mode")

    def test_routing_replay_needs_experts_and_an_engine_that_tells(self, setup, one_error):
        assert "a model with experts" in one_error("--use-routing-replay")
        model = ("--hf-checkpoint", setup.write_model("experts", num_experts=4))
        assert setup.load("--use-routing-replay", *model).use_routing_replay
        assert "returns its routing" in one_error("--use-rollout-routing-replay", *model)

    def test_context_parallel_ranks_divide_the_trainers_and_the_heads(self, setup, one_error):
        assert setup.load("--context-parallel-size", "2").context_parallel_size == 2
        assert "must divide the 2 trainer GPUs" in one_error("--context-parallel-size", "4")
        model = setup.write_model("narrow", num_attention_heads=3, num_key_value_heads=3)
        message = one_error("--context-parallel-size", "2", "--hf-checkpoint", model)
        assert "cannot share 3 attention heads with 3 key/value heads" in message and "divisor of 3" in message
        flags = ("--loss-type", "custom_loss", "--custom-loss-function-path", "math.sqrt")
        assert "logits of whole rows" in one_error("--context-parallel-size", "2", *flags)

    def test_embedded_engine_has_one_device(self, one_error):
        assert "not available yet" in one_error("--rollout-num-gpus-per-engine", "2")


class TestSizes:
    def test_colocate_shares_the_trainers_gpus_and_offloads(self, setup):
        args = setup.load()
        assert (args.rollout_num_gpus, args.offload_train, args.offload_rollout) == (2, True, True)
        assert args.sglang_mem_fraction_static == 0.6
        assert not hasattr(args, "offload")

    def test_colocate_replaces_another_size(self, setup, caplog):
        with caplog.at_level(logging.WARNING):
            assert setup.load("--rollout-num-gpus", "8").rollout_num_gpus == 2
        assert "--rollout-num-gpus 8 is replaced" in caplog.text

    def test_disaggregated_needs_a_size(self, setup, one_error):
        assert "is required without --colocate" in one_error(colocate=False)
        args = setup.load("--rollout-num-gpus", "2", colocate=False)
        assert (args.offload_train, args.offload_rollout, args.sglang_mem_fraction_static) == (False, False, 0.85)

    def test_offload(self, setup, one_error):
        args = setup.load("--rollout-num-gpus", "2", "--offload", colocate=False)
        assert args.offload_train and args.offload_rollout
        assert "contradicts --no-offload-train" in one_error("--offload", "--no-offload-train")

    def test_debug_rollout_only_sizes_by_the_engines(self, setup, one_error):
        args = setup.load("--debug-rollout-only", "--rollout-num-gpus", "16")
        assert (args.actor_num_nodes, args.actor_num_gpus_per_node) == (2, 8)
        assert (args.colocate, args.offload_train, args.offload_rollout) == (False, False, False)
        assert setup.load("--debug-rollout-only").rollout_num_gpus == 2
        assert "--rollout-num-gpus" in one_error("--debug-rollout-only", colocate=False)
        assert "multiple of --num-gpus-per-node" in one_error("--debug-rollout-only", "--rollout-num-gpus", "12")

    def test_debug_train_only_has_no_engines(self, setup):
        args = setup.load("--debug-train-only")
        assert (args.rollout_num_gpus, args.colocate, args.offload_train) == (0, False, False)


class TestModel:
    def test_is_required(self, one_error):
        assert "--hf-checkpoint: is required" in one_error(without=("--hf-checkpoint",))

    def test_must_exist(self, one_error):
        assert "hf download Qwen/Qwen3-0.6B" in one_error("--hf-checkpoint", "Qwen/Qwen3-0.6B")

    def test_must_hold_a_config_and_weights(self, setup, one_error):
        (setup.root / "empty").mkdir()
        assert "holds no config.json" in one_error("--hf-checkpoint", setup.root / "empty")
        setup.write("broken/config.json", "{")
        assert "config.json cannot be read" in one_error("--hf-checkpoint", setup.root / "broken")
        setup.write("bare/config.json", "{}")
        assert "holds no weights" in one_error("--hf-checkpoint", setup.root / "bare")

    def test_must_be_whole(self, setup, one_error):
        path = setup.write_model("sharded")
        setup.write(
            "sharded/model.safetensors.index.json", '{"weight_map": {"a": "model.safetensors", "b": "m2.safetensors"}}'
        )
        assert "1 of 2 weight files are missing, m2.safetensors first" in one_error("--hf-checkpoint", path)

    def test_must_be_readable_to_the_end(self, setup, one_error):
        path = Path(setup.write_model("cut"))
        header = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0" * 9)
        assert "model.safetensors is cut off: 7 bytes are missing" in one_error("--hf-checkpoint", path)
        (path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        message = one_error("--hf-checkpoint", path)
        assert "model.safetensors is no whole safetensors file" in message and "finish the download" in message

    def test_stop_tokens_are_in_the_vocabulary(self, setup, one_error):
        words = ("--hf-checkpoint", setup.write_model("small", vocab_size=128), "--rollout-stop-token-ids", "5")
        assert setup.load(*words).rollout_stop_token_ids == [5]
        assert "--rollout-stop-token-ids 128: is outside the model's vocabulary of 128" in one_error(*words, "128")

    def test_must_hold_a_tokenizer(self, setup, one_error):
        path = Path(setup.write_model("dumb"))
        (path / "tokenizer.json").unlink()
        assert "holds no tokenizer" in one_error("--hf-checkpoint", path)

    def test_prompt_and_response_must_fit(self, one_error):
        message = one_error("--rollout-max-prompt-len", "500")
        assert "--rollout-max-response-len 64: + --rollout-max-prompt-len 500 = 564 tokens" in message
        assert "max_position_embeddings 512" in message
        assert "leaves no room" in one_error("--rollout-max-response-len", "512")
        assert "--rollout-max-context-len 100" in one_error(
            "--rollout-max-prompt-len", "60", "--rollout-max-context-len", "100"
        )
        assert "--sglang-context-length 64" in one_error("--sglang-context-length", "64")

    def test_without_generation_the_response_needs_no_room(self, setup):
        words = ("--rollout-max-response-len", "512", "--debug-train-only", "--loss-type", "sft_loss")
        assert setup.load(*words).rollout_max_response_len == 512

    def test_context_flags_must_fit_the_model(self, one_error):
        assert "exceeds the model's context" in one_error("--rollout-max-context-len", "1000")
        assert "exceeds the model's context" in one_error("--sglang-context-length", "1000")

    def test_evaluation_must_fit(self, setup, one_error):
        data = ("--eval-interval", "1", "--eval-prompt-data", "a", setup.data)
        message = one_error(*data, "--eval-max-response-len", "500", "--eval-max-prompt-len", "20")
        assert "--eval-max-response-len (evaluation a) 500: + --eval-max-prompt-len 20 = 520 tokens" in message
        assert setup.load(*data, "--eval-max-response-len", "400", "--eval-max-prompt-len", "20")

    def test_stretched_context_is_not_bounded_by_config(self, setup):
        path = setup.write_model("yarn", rope_scaling={"type": "yarn", "factor": 4.0})
        assert setup.load("--hf-checkpoint", path, "--rollout-max-response-len", "1500")


class TestBatching:
    def test_whole_rollout_is_the_default(self, setup):
        args = setup.load()
        assert (args.global_batch_size, args.num_steps_per_rollout, args.over_sampling_batch_size) == (32, 1, 8)

    def test_steps_and_batch_size_fix_each_other(self, setup, one_error):
        assert setup.load("--num-steps-per-rollout", "4").global_batch_size == 8
        assert setup.load("--global-batch-size", "16").num_steps_per_rollout == 2
        assert setup.load("--global-batch-size", "16", "--num-steps-per-rollout", "2").global_batch_size == 16
        message = one_error("--global-batch-size", "8", "--num-steps-per-rollout", "2")
        assert "contradicts --num-steps-per-rollout 2" in message and "use --global-batch-size 16" in message

    def test_must_divide(self, one_error):
        assert "must divide 8 x 4 = 32 samples per rollout" in one_error("--global-batch-size", "12")
        assert "does not divide 8 x 4 = 32" in one_error("--num-steps-per-rollout", "3")

    def test_every_rank_has_work(self, one_error):
        assert "less than the 2 data-parallel ranks" in one_error("--global-batch-size", "1")

    def test_over_sampling(self, setup, one_error):
        assert setup.load("--over-sampling-batch-size", "16").over_sampling_batch_size == 16
        assert "must be at least --rollout-batch-size 8" in one_error("--over-sampling-batch-size", "4")

    def test_required(self, one_error):
        assert "--rollout-batch-size: is required" in one_error(without=("--rollout-batch-size",))
        assert "--num-rollout: or --num-epoch" in one_error(without=("--num-rollout",))

    def test_epochs(self, setup, one_error):
        assert setup.load("--num-epoch", "2", without=("--num-rollout",)).num_epoch == 2
        assert "needs a prompt data set" in one_error(
            *("--num-epoch", "2", "--disable-rollout-global-dataset"), without=("--num-rollout",)
        )

    def test_token_caps(self, setup, one_error):
        assert "needs --max-tokens-per-gpu" in one_error("--use-dynamic-batch-size")
        assert "only counts with --use-dynamic-batch-size" in one_error("--max-tokens-per-gpu", "99")
        dynamic = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "99")
        assert setup.load(*dynamic).log_probs_max_tokens_per_gpu == 99
        assert "must equal --max-tokens-per-gpu 99" in one_error(*dynamic, "--log-probs-max-tokens-per-gpu", "98")

    def test_flops_need_the_sizes_of_the_model(self, setup, one_error):
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
        model = setup.write_model("sized", **sizes)
        assert setup.load("--balance-by-flops", "--hf-checkpoint", model).balance_by_flops
        assert "config.json has no hidden_size" in one_error("--balance-by-flops")

    def test_dynamic_batch_size_keeps_the_number_of_steps(self, setup):
        args = setup.load("--use-dynamic-global-batch-size", "--global-batch-size", "16")
        assert args.use_dynamic_global_batch_size and args.num_steps_per_rollout == 2

    def test_masking_needs_partial_rollout(self, one_error):
        assert "needs --partial-rollout" in one_error("--mask-offpolicy-in-partial-rollout")


class TestAlgorithm:
    def test_clip_defaults(self, setup, one_error):
        assert setup.load("--eps-clip", "0.3").eps_clip_high == 0.3
        assert "must be at least --eps-clip 0.3" in one_error("--eps-clip", "0.3", "--eps-clip-high", "0.2")

    def test_single_samples_are_not_divided_by_their_deviation(self, setup, caplog):
        with caplog.at_level(logging.WARNING):
            args = setup.load("--n-samples-per-prompt", "1")
        assert args.grpo_std_normalization is False
        assert "all advantages are 0" in caplog.text

    @pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
    def test_reinforce_plus_plus_needs_whitening(self, name, one_error):
        assert "requires --normalize-advantages" in one_error("--advantage-estimator", name)

    def test_kl_in_one_place(self, setup, one_error):
        words = ("--ref-load", setup.model, "--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.1")
        assert "excludes --kl-loss-coef 0.1" in one_error(*words)

    @pytest.mark.parametrize("words", [("--kl-loss-coef", "0.1"), ("--use-unbiased-kl",)])
    def test_kl_loss_terms_need_the_loss(self, words, one_error):
        assert "has no effect without --use-kl-loss" in one_error(*words)

    @pytest.mark.parametrize("words", [("--use-kl-loss",), ("--kl-coef", "0.1")])
    def test_kl_needs_a_reference(self, words, setup, one_error):
        assert "--ref-load: is required with" in one_error(*words)
        assert "is not a directory" in one_error(*words, "--ref-load", "/nowhere")
        assert setup.load(*words, "--ref-load", setup.model).ref_load == setup.model

    def test_custom_loss(self, setup, one_error, monkeypatch):
        setup.write("my_loss.py", "def loss(args, batch, logits, reduce): ...\n")
        monkeypatch.syspath_prepend(str(setup.root))
        assert "needs --custom-loss-function-path" in one_error("--loss-type", "custom_loss")
        assert "has no effect with --loss-type policy_loss" in one_error("--custom-loss-function-path", "my_loss.loss")
        assert setup.load("--loss-type", "custom_loss", "--custom-loss-function-path", "my_loss.loss")

    def test_sft_computes_no_advantages(self, setup):
        assert setup.load("--loss-type", "sft_loss").compute_advantages_and_returns is False

    def test_schedule(self, setup, one_error):
        assert "needs --lr-wsd-decay-iters" in one_error("--lr-decay-style", "WSD")
        assert "has no effect without --lr-decay-style WSD" in one_error("--lr-wsd-decay-iters", "3")
        assert "excludes --lr-warmup-iters" in one_error("--lr-warmup-fraction", "0.1", "--lr-warmup-iters", "3")
        assert "must not exceed --lr" in one_error("--min-lr", "1")


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


# -- copies of the policy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--ref-update-interval", "2"], "--ref-update-interval 2: has no effect without a reference model"),
        (["--keep-old-actor", "--use-rollout-logprobs"], "--keep-old-actor: excludes --use-rollout-logprobs"),
        (["--freeze-params-name-list", "lm_head["], "--freeze-params-name-list lm_head[: is no regular expression"),
        (["--opd-teacher-load", "x"], "--opd-teacher-load x: has no effect without --use-opd"),
        (["--use-opd", "--opd-type", "megatron"], "--opd-type trainer: needs --opd-teacher-load"),
        (["--use-opd", "--opd-teacher-load", "/nowhere"], "--opd-teacher-load /nowhere: is not a directory"),
    ],
)
def test_copies(one_error, flags, expected):
    assert expected in one_error(*flags)


def test_a_teacher_has_the_policy_s_vocabulary(setup, one_error):
    student, teacher = setup.write_model("student", vocab_size=100), setup.write_model("teacher", vocab_size=90)
    flags = ("--hf-checkpoint", student, "--use-opd", "--opd-teacher-load")
    assert "vocabulary of 90 is not the 100" in one_error(*flags, teacher)
    assert setup.load(*flags, student).opd_type == "trainer"


def test_media_need_an_engine_and_a_trainer_that_take_them(setup, one_error):
    words = ("--multimodal-keys", '{"image": "pics"}')
    assert "the embedded engine takes text only" in one_error(*words)
    assert "must map image, video, audio to columns" in setup.errors("--multimodal-keys", '{"images": "pics"}')
    own = ("--custom-generate-function-path", "tests.rollout.hooks.generate_old_form")
    assert setup.load(*words, *own).multimodal_keys == {"image": "pics"}


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


def test_ifbench_needs_its_metadata(setup, one_error):
    assert "needs instruction_id_list and kwargs in column metadata" in one_error("--rm-type", "ifbench")
    row = {"input": "a", "metadata": {"instruction_id_list": ["format:emoji"], "kwargs": [{}]}}
    assert setup.load("--rm-type", "ifbench", "--prompt-data", setup.write_rows("i.jsonl", [row]))
