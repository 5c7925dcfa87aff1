"""Single values out of range."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.arguments.parser import BY_DEST
from slime.arguments.problems import Problems

_Rule = tuple[str, Callable[[Any], bool]]
_POSITIVE: _Rule = ("must be greater than 0", lambda v: v > 0)
_NOT_NEGATIVE: _Rule = ("must not be negative", lambda v: v >= 0)
_FRACTION: _Rule = ("must be above 0 and at most 1", lambda v: 0 < v <= 1)
_UNIT: _Rule = ("must be from 0 to 1", lambda v: 0 <= v <= 1)
_BELOW_ONE: _Rule = ("must be from 0 to below 1", lambda v: 0 <= v < 1)
_ALL_OR_POSITIVE: _Rule = ("must be -1 or at least 1", lambda v: v == -1 or v >= 1)

_POSITIVE_FLAGS = """
    actor_num_nodes actor_num_gpus_per_node rollout_num_gpus_per_engine num_gpus_per_node
    distributed_timeout_minutes context_parallel_size rollout_batch_size n_samples_per_prompt
    global_batch_size num_steps_per_rollout micro_batch_size max_tokens_per_gpu
    log_probs_max_tokens_per_gpu over_sampling_batch_size num_epoch save_interval eval_interval
    n_samples_per_eval_prompt rollout_max_prompt_len rollout_max_response_len rollout_max_context_len
    rollout_temperature eval_max_prompt_len eval_max_response_len eval_max_context_len adam_eps
    lora_rank lora_alpha critic_num_nodes critic_num_gpus_per_node value_clip ref_update_interval
    lr_decay_iters lr_wsd_decay_iters update_weight_buffer_size rm_timeout_secs
    tis_clip mis_upper_bound mis_veto_threshold
    sglang_context_length sglang_max_running_requests sglang_max_total_tokens sglang_page_size
    sglang_chunked_prefill_size sglang_server_concurrency sglang_router_request_timeout_secs
    slime_router_timeout slime_router_max_connections slime_router_health_check_failure_threshold
    phase_timeout_secs rollout_health_check_interval rollout_health_check_timeout
    update_weights_interval memory_snapshot_num_steps
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    num_layers_per_virtual_pipeline_stage expert_model_parallel_size expert_tensor_parallel_size
    make_vocab_size_divisible_by data_pad_size_multiplier recompute_num_layers
"""

_NOT_NEGATIVE_FLAGS = """
    rollout_num_gpus num_rollout start_rollout_id lr min_lr lr_warmup_init lr_warmup_iters weight_decay
    clip_grad eps_clip eps_clip_high kl_coef kl_loss_coef entropy_coef eval_temperature eval_min_new_tokens
    seed rollout_seed max_weight_staleness rollout_health_check_first_wait tis_clip_low mis_lower_bound opd_kl_coef
    ckpt_step critic_lr critic_lr_warmup_iters num_critic_only_steps profile_step_start mtp_loss_scaling_factor
"""

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_POSITIVE_FLAGS.split(), _POSITIVE),
    **dict.fromkeys(_NOT_NEGATIVE_FLAGS.split(), _NOT_NEGATIVE),
    "lr_warmup_fraction": _UNIT,
    "gamma": _UNIT,
    "lambd": _UNIT,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "rollout_top_p": _FRACTION,
    "eval_top_p": _FRACTION,
    "load_debug_rollout_data_subsample": _FRACTION,
    "rollout_top_k": _ALL_OR_POSITIVE,
    "eval_top_k": _ALL_OR_POSITIVE,
    "log_probs_chunk_size": _ALL_OR_POSITIVE,
    "eps_clip_c": ("must be greater than 1", lambda v: v > 1),
    "sglang_mem_fraction_static": ("must be between 0 and 1", lambda v: 0 < v < 1),
    "sglang_router_port": ("must be from 1 to 65535", lambda v: 1 <= v <= 65535),
    "rollout_stop_token_ids": ("must not be negative", lambda v: min(v, default=0) >= 0),
}


def check(args: Namespace, problems: Problems) -> None:
    """Report values out of range; the default takes their place, so that the other rules can still be checked."""
    for dest, (rule, holds) in _RULES.items():
        value = getattr(args, dest)
        if value is None or holds(value):
            continue
        fix = "use --eval-temperature 0 for greedy evaluation" if dest == "rollout_temperature" else ""
        problems.add(BY_DEST[dest].name, value, rule, fix)
        setattr(args, dest, BY_DEST[dest].default)
