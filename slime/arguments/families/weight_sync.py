"""From trainer to engines."""

from slime.arguments import pending
from slime.arguments.flag import STORE_TRUE, Family, Flag, function_path, integer, text

FAMILY = Family(
    "Weight sync",
    "Colocated engines get weights through shared memory or CUDA IPC, others through gloo or NCCL.",
    (
        Flag("--update-weight-buffer-size", integer, 512 * 1024**2, "Bytes per bucket."),
        Flag(
            "--check-weight-update-equal",
            action=STORE_TRUE,
            help="After the first sync, compare the engines' weights with those sent.",
        ),
        Flag(
            "--update-weights-interval",
            integer,
            1,
            "Sync every N rollouts (asynchronous loop).",
        ),
        Flag(
            "--update-weights-pause-mode",
            text,
            None,
            "What an update does to requests in flight: end them with what they have (they are continued), compute "
            "their KV cache again with the new weights, or keep it. Default: in_place when generation goes on in the "
            "background, else abort.",
            choices=("abort", "retract", "in_place"),
        ),
        Flag(
            "--update-weight-mode",
            text,
            "full",
            "Everything, or what changed.",
            choices=("full", "delta"),
            pending_choices={"delta": pending.DELTA_OR_DISK},
        ),
        Flag(
            "--update-weight-transport",
            text,
            "nccl",
            "Way to engines that share no device with a trainer: a process group (gloo on cpu), or files.",
            choices=("nccl", "disk"),
            pending_choices={"disk": pending.DELTA_OR_DISK},
        ),
        Flag("--update-weight-disk-dir", text, help="Shared directory.", pending=pending.DELTA_OR_DISK),
        Flag(
            "--update-weight-disk-keep-files",
            action=STORE_TRUE,
            help="Keep the directories of full syncs.",
            pending=pending.DELTA_OR_DISK,
        ),
        Flag(
            "--update-weight-delta-encoding",
            text,
            "xor",
            "Encoding of deltas.",
            choices=("xor", "overwrite"),
            pending=pending.DELTA_OR_DISK,
        ),
        Flag(
            "--update-weight-delta-checksum",
            text,
            "xxh3-128",
            "Digest of each tensor.",
            choices=("xxh3-128", "blake3", "adler32"),
            pending=pending.DELTA_OR_DISK,
        ),
        Flag(
            "--custom-update-weight-post-write-path",
            function_path,
            help="hook(args, version_dir, rollout_engines), after a version is written.",
            pending=pending.DELTA_OR_DISK,
        ),
        Flag(
            "--update-weight-local-checkpoint-dir",
            text,
            help="Local base directory of each host.",
            pending=pending.DELTA_OR_DISK,
        ),
    ),
)
