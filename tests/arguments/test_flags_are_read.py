"""No flag is silently ignored: what is available is read somewhere in the package."""

import re
from pathlib import Path

import pytest

import slime
from slime.arguments.families import FLAGS, sglang_router
from slime.arguments.validation import megatron

pytestmark = pytest.mark.unit
PACKAGE = Path(slime.__file__).parent

CONSUMED_HERE = {
    "custom_config_path": "read by the parser",
    "megatron_config_path": "becomes role_overrides",
    "critic_num_nodes": "must equal the actor's",
    "critic_num_gpus_per_node": "must equal the actor's",
    "print_config": "read by parse_args",
    "bf16": "becomes dtype",
    "num_gpus_per_node": "sizes --debug-rollout-only",
    "sglang_config": "becomes served_models",
    "prefill_num_servers": "becomes served_models",
    "sglang_enable_deterministic_inference": "passed on to SGLang",
    "log_probs_max_tokens_per_gpu": "must equal max_tokens_per_gpu",
    "num_steps_per_rollout": "becomes global_batch_size",
    "offload": "becomes offload_train and offload_rollout",
    "dump_details": "becomes both dump templates",
    "eval_reward_key": "part of eval_datasets",
    **dict.fromkeys(
        (f"eval_{key}" for key in ("prompt_data", "config", "input_key", "label_key", "tool_key")),
        "part of eval_datasets",
    ),
    **dict.fromkeys(
        (f"eval_{key}" for key in ("temperature", "top_p", "top_k", "max_prompt_len", "max_response_len")),
        "part of eval_datasets",
    ),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), "must be 0"),
    **dict.fromkeys(
        (
            *("accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32", "attention_backend"),
            *("recompute_loss_function", "overlap_cpu_optimizer_d2h_h2d", "disable_weights_backuper"),
        ),
        "what is always done",
    ),
    "use_precision_aware_optimizer": "must go with exp_avg_dtype and exp_avg_sq_dtype",
    "padded_vocab_size": "must agree with the checkpoint",
    "num_layers_per_virtual_pipeline_stage": "becomes virtual_pipeline_model_parallel_size",
    **dict.fromkeys((*megatron.DESCRIBED, *megatron.SWITCHES, "add_bias_linear"), "must agree with the checkpoint"),
    **dict.fromkeys(
        ("eval_min_new_tokens", "eval_max_context_len", "n_samples_per_eval_prompt"), "part of eval_datasets"
    ),
}


def source() -> str:
    files = [
        path for path in PACKAGE.rglob("*.py") if path.parent.parts[-1] not in ("arguments", "families", "validation")
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_available_flags_are_read():
    read = set(re.findall(r"args\.([a-z]\w*)", source()))
    ignored = [
        flag.name
        for flag in FLAGS
        if not flag.pending
        and flag.dest not in read
        and flag.dest not in CONSUMED_HERE
        and flag not in sglang_router.FAMILY.flags  # passed on together
        and len(flag.choices) - len(flag.pending_choices) != 1
    ]
    assert ignored == []
