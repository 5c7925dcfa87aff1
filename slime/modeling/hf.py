"""Load Hugging Face causal language models with the shared attention."""

from __future__ import annotations

from pathlib import Path

import torch

from slime.modeling.attention import register_attention


def load_config(path: str, trust_remote_code: bool = False):
    """The model's `config.json` as a transformers config.

    Raises:
        FileNotFoundError: `path` is no directory with a config.json.
    """
    from transformers import AutoConfig

    if not (Path(path) / "config.json").is_file():
        raise FileNotFoundError(f"{path!r} has no config.json: give a Hugging Face checkpoint directory")
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def _refuse_states(model: torch.nn.Module) -> None:
    if model._is_stateful:
        raise ValueError(
            f"{type(model).__name__} carries a state from token to token beside attention: in packed rows it would go "
            "from one sequence into the next. Use --train-backend megatron and --rollout-engine sglang, which know "
            "some of these models"
        )


def load_causal_lm(
    path: str, dtype: torch.dtype, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> torch.nn.Module:
    """`AutoModelForCausalLM` in eval mode with weights of `path` and slime's attention.

    Raises:
        ValueError: the model carries something other than keys and values from token to token.
    """
    from transformers import AutoModelForCausalLM

    load_config(path, trust_remote_code)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=register_attention(), trust_remote_code=trust_remote_code
    )
    _refuse_states(model)
    return model.to(device).eval()


def empty_causal_lm(path: str, dtype: torch.dtype, trust_remote_code: bool = False) -> torch.nn.Module:
    """The same model on the meta device: shapes without memory. Raises as `load_causal_lm`."""
    from transformers import AutoModelForCausalLM

    config = load_config(path, trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register_attention(), trust_remote_code=trust_remote_code
        )
    _refuse_states(model)
    return model
