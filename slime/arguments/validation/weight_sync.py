"""How weights travel: which flags belong to which way."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace

from slime.arguments.families.weight_sync import FAMILY
from slime.arguments.problems import Problems

_OF_DISK = (
    "update_weight_disk_dir update_weight_disk_keep_files custom_update_weight_post_write_path "
    "update_weight_local_checkpoint_dir update_weight_delta_encoding update_weight_delta_checksum"
).split()
_DEFAULTS = {flag.dest: flag.default for flag in FAMILY.flags}


def check(args: Namespace, problems: Problems) -> None:
    delta, disk = args.update_weight_mode == "delta", args.update_weight_transport == "disk"
    if delta and not disk:
        problems.add(
            "--update-weight-mode", "delta", "needs --update-weight-transport disk", "add it, or send full weights"
        )
    if not disk:
        for dest in _OF_DISK:
            if getattr(args, dest) != _DEFAULTS[dest]:
                flag = "--" + dest.replace("_", "-")
                problems.add(flag, None, "has no effect without --update-weight-transport disk", "add it")
        return
    if args.colocate:
        problems.add(
            "--update-weight-transport",
            "disk",
            "has no effect under --colocate: memory is shared",
            "drop one of the two",
        )
    if args.update_weight_disk_dir is None:
        problems.add("--update-weight-transport", "disk", "needs --update-weight-disk-dir", "name a shared directory")
    for dest in ("update_weight_disk_dir", "update_weight_local_checkpoint_dir"):
        path = getattr(args, dest)
        if path is not None and os.path.exists(path) and not os.path.isdir(path):
            problems.add("--" + dest.replace("_", "-"), path, "is not a directory", "name a directory, new or not")
    if delta and args.update_weight_local_checkpoint_dir is None:
        problems.add(
            "--update-weight-mode",
            "delta",
            "needs --update-weight-local-checkpoint-dir",
            "name a directory on the engines' hosts, such as one under /dev/shm",
        )
    if args.update_weight_delta_checksum == "blake3" and importlib.util.find_spec("blake3") is None:
        problems.add("--update-weight-delta-checksum", "blake3", "blake3 is not installed", "pip install blake3")
