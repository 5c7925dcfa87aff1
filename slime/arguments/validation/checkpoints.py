"""Where weights come from and go to."""

from __future__ import annotations

import logging
import os
import string
from argparse import Namespace

from slime.arguments.problems import Problems
from slime.arguments.validation.model import check_weights, read_hf_config
from slime.utils.checkpoint_files import QuantisedError, is_hf_directory, refuse_quantised

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def complete(args: Namespace, problems: Problems) -> None:
    """ref_load must exist where KL is wanted; load falls back to it; save must be writable."""
    _check_reference(args, problems)
    if args.load == "":
        problems.add("--load", args.load, "is empty", "give a directory, or leave it out")
    _complete_load(args, problems)
    if args.async_save and args.train_backend != "megatron":
        problems.add("--async-save", None, f"has no effect with --train-backend {args.train_backend}", "leave it out")
    if args.ref_ckpt_step is not None and not is_torch_dist(args.ref_load):
        problems.add("--ref-ckpt-step", args.ref_ckpt_step, "needs --ref-load with torch_dist checkpoints")
    if args.save_interval is not None and args.save is None:
        problems.add("--save-interval", args.save_interval, "needs --save", "add --save DIRECTORY")
    if args.save is not None:
        check_writable("--save", args.save, problems)
    if args.save_hf is not None and args.save is None:
        problems.add("--save-hf", args.save_hf, "is written with the checkpoints of --save", "add --save DIRECTORY")
    elif args.save_hf is not None:
        check_template("--save-hf", args.save_hf, {"rollout_id"}, required=set(), problems=problems)


def check_quantised(args: Namespace, problems: Problems) -> None:
    """No trainer starts from quantised weights, and --save-hf copies the config.json of --hf-checkpoint.

    With --ref-load the engines alone read the weights of --hf-checkpoint, and they take FP8.
    """
    if args.debug_rollout_only:
        return
    for flag, path in (
        ("--hf-checkpoint", args.hf_checkpoint if args.ref_load is None or args.save_hf is not None else None),
        ("--ref-load", args.ref_load),
        ("--load", args.load),
        ("--critic-load", args.critic_load),
        ("--opd-teacher-load", args.opd_teacher_load),
    ):
        if is_hf_directory(path) and not problems.concern(flag):
            try:
                refuse_quantised(path)
            except QuantisedError as error:
                problems.add(flag, path, str(error))
                return


def _check_reference(args: Namespace, problems: Problems) -> None:
    wanted = "--use-kl-loss" if args.use_kl_loss else f"--kl-coef {args.kl_coef}"
    if (args.use_kl_loss or args.kl_coef != 0) and not args.debug_rollout_only and args.ref_load is None:
        problems.add(
            "--ref-load",
            None,
            f"is required with {wanted}",
            f"give the reference checkpoint, --ref-load {args.hf_checkpoint or 'DIRECTORY'} for example",
        )
    if args.ref_load is not None:
        if not os.path.isdir(args.ref_load):
            problems.add("--ref-load", args.ref_load, "is not a directory", "give an existing checkpoint")
        elif args.train_backend == "megatron" and is_torch_dist(args.ref_load):
            check_iteration("--ref-ckpt-step", args.ref_ckpt_step, "--ref-load", args.ref_load, problems)
        elif read_hf_config(args.ref_load, "--ref-load", problems) is not None:
            check_weights(args.ref_load, "--ref-load", problems)


def _complete_load(args: Namespace, problems: Problems) -> None:
    """A --load without a finished checkpoint means a first start: weights of --ref-load, rollout 0."""
    resumes = args.load is not None and os.path.isfile(os.path.join(args.load, TRACKER))
    if resumes:
        _check_tracker(args, problems)
        # "release": weights that no training step has touched, as Megatron's converters write them
        args.finetune = args.finetune or (args.ckpt_step is None and _tracked(args.load) == RELEASE)
    elif args.train_backend == "megatron" and is_hf_directory(args.load):  # it starts from such a model directly
        check_weights(args.load, "--load", problems)
    else:
        if args.ckpt_step is not None:
            rule = f"--load {args.load} holds no {TRACKER}" if args.load else "needs --load"
            problems.add("--ckpt-step", args.ckpt_step, rule, "give the directory of --save of an earlier run")
        if args.load not in (None, args.save):  # that is how scripts start which resume
            logger.warning("--load %s holds no %s: nothing is resumed, the run starts anew", args.load, TRACKER)
        args.load = args.ref_load
    if resumes and not args.finetune:
        return
    if args.start_rollout_id:
        logger.warning("--start-rollout-id %d is replaced by 0: nothing is resumed", args.start_rollout_id)
    args.finetune = args.no_load_optim = args.no_load_rng = True
    args.start_rollout_id = 0


def _check_tracker(args: Namespace, problems: Problems) -> None:
    load = args.load
    if args.ckpt_step is not None:
        check_iteration("--ckpt-step", args.ckpt_step, "--load", load, problems)
        return
    content = _tracked(load)
    if content == RELEASE:
        return
    if not content.isdigit():
        problems.add(
            "--load", load, f"{TRACKER} must hold a number, not {content[:40]!r}", "write the last step there"
        )
        return
    name = f"iter_{int(content):07d}"
    # `.iter_*.old` is what a run that was killed while it replaced that checkpoint leaves behind
    if not any(os.path.isdir(os.path.join(load, found)) for found in (name, f".{name}.old")):
        there = sorted(entry for entry in os.listdir(load) if entry.startswith("iter_"))
        fix = f"write the step of {there[-1]} into {TRACKER}" if there else ""
        problems.add("--load", load, f"{TRACKER} names {name}, which is not there", fix)


def check_iteration(flag: str, step: int | None, of: str, root: str, problems: Problems) -> None:
    """A directory of torch_dist checkpoints must hold the one that `flag` asks for."""
    there = iterations(root)
    if step is not None and step not in there:
        fix = f"choose one of {', '.join(map(str, there))}" if there else ""
        problems.add(flag, step, f"{of} {root} holds no iteration {step}", fix)


def _tracked(root: str) -> str:
    with open(os.path.join(root, TRACKER), encoding="utf-8", errors="replace") as opened:
        return opened.read().strip()


def is_torch_dist(path: str | None) -> bool:
    """Whether Megatron's checkpoints lie there: a directory with a tracker, or one iteration."""
    return path is not None and any(os.path.isfile(os.path.join(path, name)) for name in (TRACKER, "metadata.json"))


def iterations(root: str) -> list[int]:
    """Numbers of the checkpoints in a directory."""
    names = os.listdir(root) if os.path.isdir(root) else []
    return sorted(int(name[5:]) for name in names if name.startswith("iter_") and name[5:].isdigit())


def check_writable(flag: str, path: str, problems: Problems) -> None:
    if not path:
        problems.add(flag, path, "is empty", "give a directory, or leave it out")
        return
    parent = os.path.abspath(path)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        problems.add(flag, path, f"{parent} is a file", "give a directory")
    elif not os.access(parent, os.W_OK | os.X_OK):
        problems.add(flag, path, f"{parent} is not writable", "choose another directory")


def check_template(flag: str, template: str, known: set[str], required: set[str], problems: Problems) -> None:
    """Placeholders of a path template are known, and those that tell files apart are there."""
    allowed = ", ".join("{" + name + "}" for name in sorted(known))
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        problems.add(flag, template, f"is not a valid template ({error})")
        return
    unknown = sorted(fields - known)
    if unknown:
        problems.add(flag, template, f"{{{unknown[0]}}} is unknown", f"use {allowed}")
    for name in sorted(required - fields):
        problems.add(flag, template, f"lacks {{{name}}}, so later files would replace earlier ones", f"use {allowed}")
