"""Hooks around the training of a rollout."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.utils.misc import load_hook, parameters


def call_data_postprocess(args: Namespace, rollout_id: int, data: Any) -> None:
    """`--rollout-data-postprocess-path` in any of its historical forms: (args), (args, rollout_data) or
    (args, rollout_id, rollout_data)."""
    hook = load_hook(args.rollout_data_postprocess_path, "--rollout-data-postprocess-path")
    forms = {1: (args,), 2: (args, data)}
    hook(*forms.get(len(parameters(hook)), (args, rollout_id, data)))
