"""PPO's critic: its sizes, checkpoints and flags, and overrides per role."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from slime.arguments.families import optimizer
from slime.arguments.flag import Flag
from slime.arguments.problems import Problems, closest
from slime.arguments.validation.checkpoints import TRACKER, check_writable, iterations
from slime.arguments.validation.model import check_weights, read_hf_config
from slime.arguments.yaml_files import load_yaml

_FLAGS = ("critic_num_nodes", "critic_num_gpus_per_node", "critic_lr", "critic_load", "critic_save")
_ROLES = ("actor", "critic")
_OF_A_ROLE: dict[str, Flag] = {
    flag.dest: flag for flag in optimizer.FAMILY.flags if flag.dest != "megatron_config_path" and not flag.pending
}
_OWN_FLAGS = {"lr": "critic_lr", "lr_warmup_iters": "critic_lr_warmup_iters"}
_PATHS = {"load": "critic_load", "save": "critic_save"}


def complete(args: Namespace, problems: Problems) -> None:
    """Fill in role_overrides and all critic_* values; contradictions."""
    args.role_overrides = {}
    if args.megatron_config_path is not None:
        _read_overrides(args, problems)
    if not args.use_critic:
        _check_no_critic(args, problems)
        return
    _check_algorithm(args, problems)
    for name in ("num_nodes", "num_gpus_per_node"):
        critic, actor = getattr(args, f"critic_{name}"), getattr(args, f"actor_{name}")
        if critic not in (None, actor):
            problems.add(
                _flag(f"critic_{name}"),
                critic,
                f"must be {_flag(f'actor_{name}')} {actor}: the critic shares the policy's devices and its parts of "
                "the rollout",
                "leave it out",
            )
        setattr(args, f"critic_{name}", actor)
    if args.critic_lr is None:
        args.critic_lr = args.lr
    _complete_paths(args, problems)


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _check_no_critic(args: Namespace, problems: Problems) -> None:
    given = [(dest, getattr(args, dest)) for dest in _FLAGS if getattr(args, dest) is not None]
    given += [(dest, getattr(args, dest)) for dest in ("num_critic_only_steps", "critic_lr_warmup_iters")]
    given += [("critic_train_only", args.critic_train_only or None)]
    for dest, value in given:
        if value:
            problems.add(
                _flag(dest),
                None if value is True else value,
                "has no effect without a critic",
                "use --advantage-estimator ppo, or leave it out",
            )
    if args.role_overrides.get("critic"):
        problems.add(
            "--megatron-config-path",
            args.megatron_config_path,
            "has overrides for the critic, but there is none",
            "use --advantage-estimator ppo, or remove them",
        )


def _check_algorithm(args: Namespace, problems: Problems) -> None:
    if args.loss_type != "policy_loss":
        problems.add("--advantage-estimator", "ppo", f"excludes --loss-type {args.loss_type}", "use policy_loss")
    elif not args.compute_advantages_and_returns:
        problems.add(
            "--advantage-estimator",
            "ppo",
            "excludes --disable-compute-advantages-and-returns: the critic learns the returns",
            "leave it out",
        )


def _complete_paths(args: Namespace, problems: Problems) -> None:
    """critic_load and critic_save; a run that is resumed needs the critic of the same iteration."""
    if args.critic_save is None and args.save is not None:
        args.critic_save = os.path.join(args.save, "critic")
    elif args.critic_save is not None:
        check_writable("--critic-save", args.critic_save, problems)
    if args.critic_load is not None:
        _check_critic_load(args.critic_load, problems)
    if args.finetune or problems.concern("--load", "--ckpt-step", "--critic-load"):
        return
    if args.critic_load is None:
        args.critic_load = os.path.join(args.load, "critic")
    if os.path.isfile(os.path.join(args.critic_load, "config.json")):
        return
    there, wanted = iterations(args.critic_load), _resumed_iteration(args)
    args.role_overrides.setdefault("critic", {})["ckpt_step"] = wanted
    if wanted is not None and wanted not in there:
        problems.add(
            "--critic-load",
            args.critic_load,
            f"holds no checkpoint of iteration {wanted}, which --load {args.load} resumes",
            f"resume one of {', '.join(map(str, there))} with --ckpt-step" if there else "give the critic's directory",
        )


def _resumed_iteration(args: Namespace) -> int | None:
    if args.ckpt_step is not None:
        return args.ckpt_step
    with open(os.path.join(args.load, TRACKER), encoding="utf-8") as file:
        text = file.read().strip()
    return int(text) if text.isdigit() else None


def _check_critic_load(path: str, problems: Problems) -> None:
    if os.path.isfile(os.path.join(path, TRACKER)):
        return
    if read_hf_config(path, "--critic-load", problems) is not None:
        check_weights(path, "--critic-load", problems)


def _read_overrides(args: Namespace, problems: Problems) -> None:
    """`--megatron-config-path`: a mapping of roles to trainer flags."""
    import yaml

    flag, path = "--megatron-config-path", args.megatron_config_path
    try:
        with open(path, encoding="utf-8") as file:
            config = load_yaml(file)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        problems.add(flag, path, f"cannot be read ({' '.join(str(error).split())})")
        return
    if not isinstance(config, dict) or not all(isinstance(flags, dict) for flags in config.values()):
        problems.add(flag, path, "must map roles (actor, critic) to flags and their values")
        return
    for role, flags in config.items():
        if role not in _ROLES:
            problems.add(f"{role} (in {flag})", None, "is no role", "use actor and critic")
            continue
        for key, raw in flags.items():
            _take(args, role, str(key), raw, problems)


def _take(args: Namespace, role: str, key: str, raw: Any, problems: Problems) -> None:
    dest, shown = key.removeprefix("--").replace("-", "_"), f"{role}.{key} (in --megatron-config-path)"
    if role == "critic" and dest in _PATHS:
        _set_own(args, _PATHS[dest], str(raw), shown, problems)
        return
    if dest not in _OF_A_ROLE:
        close = closest(dest, _OF_A_ROLE)
        fix = f"did you mean {close}?" if close else "the flags of the optimizer can be set per role"
        problems.add(shown, raw, "cannot differ between roles", fix)
        return
    try:
        value = _OF_A_ROLE[dest].convert(raw)
    except ValueError as error:
        problems.add(shown, raw, str(error))
        return
    if role == "critic" and dest in _OWN_FLAGS:
        _set_own(args, _OWN_FLAGS[dest], value, shown, problems)
    else:
        args.role_overrides.setdefault(role, {})[dest] = value


def _set_own(args: Namespace, dest: str, value: Any, shown: str, problems: Problems) -> None:
    """A value that a flag of the critic could have set, too."""
    if getattr(args, dest) not in (None, 0, value):
        problems.add(shown, value, f"contradicts {_flag(dest)} {getattr(args, dest)}", "give one of the two")
    setattr(args, dest, value)
