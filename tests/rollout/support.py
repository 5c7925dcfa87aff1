"""Arguments and prompt files for rollout tests."""

import argparse
import json

from slime.testing.scripted_engine import ScriptedEngine, served
from slime.utils.served_models import one_group

__all__ = ["DEFAULTS", "ScriptedEngine", "make_args", "served", "write_prompts"]

DEFAULTS = {
    "use_rollout_top_p_replay": False,
    "use_rollout_routing_replay": False,
    "hf_checkpoint": None,
    "trust_remote_code": False,
    "prompt_data": None,
    "input_key": "input",
    "label_key": "label",
    "tool_key": None,
    "metadata_key": "metadata",
    "multimodal_keys": None,
    "apply_chat_template": False,
    "apply_chat_template_kwargs": {},
    "rollout_global_dataset": True,
    "rollout_shuffle": False,
    "rollout_seed": 42,
    "rollout_max_prompt_len": None,
    "rollout_max_context_len": None,
    "rollout_max_response_len": 8,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": False,
    "rollout_batch_size": 4,
    "over_sampling_batch_size": 4,
    "n_samples_per_prompt": 2,
    "served_models": one_group(None, 1, 1),
    "sglang_model_routers": {},
    "lora_sync": "merged",
    "sglang_server_concurrency": 64,
    "sglang_router_ip": "127.0.0.1",
    "sglang_router_port": 0,
    "sglang_router_request_timeout_secs": 600,
    "partial_rollout": False,
    "max_weight_staleness": None,
    "update_weights_interval": 1,
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "mask_offpolicy_in_partial_rollout": False,
    "buffer_filter_path": None,
    "dynamic_sampling_filter_path": None,
    "custom_generate_function_path": None,
    "rollout_sample_hook_path": [],
    "rollout_sample_filter_path": None,
    "rollout_all_samples_process_path": None,
    "custom_rm_path": None,
    "debug_rollout_only": False,
    "eval_function_path": None,
    "rm_type": "math",
    "rm_url": None,
    "rm_timeout_secs": 20.0,
    "group_rm": False,
    "reward_key": None,
    "eval_datasets": [],
    "eval_max_context_len": None,
    "loss_mask_type": "qwen",
    "save": None,
    "load": None,
}


def make_args(**overrides) -> argparse.Namespace:
    unknown = set(overrides) - set(DEFAULTS)
    if unknown:
        raise KeyError(f"tests use unknown arguments {unknown}")
    return argparse.Namespace(**{**DEFAULTS, **overrides})


def write_prompts(path, count: int = 12) -> str:
    """Rows `what is the sum of i and 1 ?` -> i + 1."""
    with open(path, "w") as file:
        for i in range(count):
            row = {"input": f"what is the sum of {i} and 1 ?", "label": str(i + 1), "metadata": {"row": i}}
            file.write(json.dumps(row) + "\n")
    return str(path)
