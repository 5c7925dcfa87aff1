"""From trainer to engines."""

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
            "Everything, or only what changed since the last version (through disk).",
            choices=("full", "delta"),
        ),
        Flag(
            "--update-weight-transport",
            text,
            "nccl",
            "Way to engines that share no device with a trainer: a process group (gloo on cpu), or files.",
            choices=("nccl", "disk"),
        ),
        Flag(
            "--update-weight-disk-dir",
            text,
            help="Directory that trainers and engines share; each version is published there as weight_v000001, ...",
        ),
        Flag(
            "--update-weight-disk-keep-files",
            action=STORE_TRUE,
            help="Keep the directories of earlier full versions.",
        ),
        Flag(
            "--update-weight-delta-encoding",
            text,
            "xor",
            "What a delta holds of a tensor that changed: its bytes XORed with the old ones, or the new ones.",
            choices=("xor", "overwrite"),
        ),
        Flag(
            "--update-weight-delta-checksum",
            text,
            "xxh3-128",
            "Digest of each tensor, compared by whoever pulls it.",
            choices=("xxh3-128", "blake3", "adler32"),
        ),
        Flag(
            "--custom-update-weight-post-write-path",
            function_path,
            help="hook(args, version_dir, rollout_engines), after a version is written; the engines are URLs.",
        ),
        Flag(
            "--update-weight-local-checkpoint-dir",
            text,
            help="Directory on each engine's host that versions are pulled into before engines load them.",
        ),
    ),
)
