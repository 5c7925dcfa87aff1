"""The arguments as each trainer role sees them: the critic has its own learning rate, checkpoints and overrides."""

from __future__ import annotations

import os
from argparse import Namespace


def role_args(args: Namespace, role: str) -> Namespace:
    """The arguments of `role` ("actor" or "critic").

    The critic reads `load`, `save`, `lr`, ... like any trainer; they are what the critic's flags say.
    """
    changes = dict(args.role_overrides.get(role, {}))
    if role == "critic":
        changes |= {
            "lr": args.critic_lr,
            "lr_warmup_iters": args.critic_lr_warmup_iters,
            "lr_warmup_fraction": None,
            "load": args.critic_load,
            "save": args.critic_save,
            "save_hf": None,
            # The teacher changes advantages, never the returns that the critic learns.
            "use_opd": False,
        }
        if args.critic_load is not None and os.path.isfile(os.path.join(args.critic_load, "config.json")):
            changes |= {"hf_checkpoint": args.critic_load, "ref_load": None, "load": None}
    return Namespace(**{**vars(args), **changes})
