"""The rules across flags on devices, sizes, models and batches, and every derived value."""

import logging
from pathlib import Path

import pytest

from slime.arguments.validation import cluster, megatron

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

    def test_trainer_of_the_machine(self, setup, monkeypatch):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
        known = ("--hf-checkpoint", setup.write_model("known", model_type="qwen3", **heads, **sizes))
        gpu = ("--device", "cuda")
        assert setup.load(*known, *gpu).train_backend == "megatron"
        assert setup.load(*known, *gpu, "--train-backend", "fsdp").train_backend == "fsdp"
        assert setup.load(*known).train_backend == "fsdp"
        assert setup.load(*gpu).train_backend == "fsdp"
        assert setup.load(*known, *gpu, "--fsdp-offload-activations").train_backend == "fsdp"
        monkeypatch.setattr(megatron, "config_fields", dict)
        assert setup.load(*known, *gpu).train_backend == "fsdp"

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


def test_media_need_an_engine_and_a_trainer_that_take_them(setup, one_error):
    words = ("--multimodal-keys", '{"image": "pics"}')
    assert "the embedded engine takes text only" in one_error(*words)
    assert "must map image, video, audio to columns" in setup.errors("--multimodal-keys", '{"images": "pics"}')
    own = ("--custom-generate-function-path", "tests.rollout.hooks.generate_old_form")
    assert setup.load(*words, *own).multimodal_keys == {"image": "pics"}
