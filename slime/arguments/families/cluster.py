"""Machines, devices and who shares them."""

from slime.arguments import pending
from slime.arguments.flag import OPTIONAL_BOOL, STORE_TRUE, Family, Flag, integer, json_object, number, text

FAMILY = Family(
    "Cluster and devices",
    "How many processes train and generate, and where. With `--device cpu` a GPU in a flag name is a worker slot: "
    "`--actor-num-gpus-per-node 2` is two trainer processes over gloo.",
    (
        Flag(
            "--device",
            text,
            "auto",
            "What trainers and engines compute on; auto takes cuda where an NVIDIA GPU answers.",
            choices=("auto", "cpu", "cuda"),
        ),
        Flag("--actor-num-nodes", integer, 1, "Nodes used by the policy trainer."),
        Flag("--actor-num-gpus-per-node", integer, 8, "Trainer GPUs per node; world size = nodes x this."),
        Flag("--critic-num-nodes", integer, help="Critic nodes: the actor's, whose devices the critic shares."),
        Flag(
            "--critic-num-gpus-per-node",
            integer,
            help="Critic GPUs per node: the actor's, whose devices the critic shares.",
        ),
        Flag(
            "--rollout-num-gpus",
            integer,
            help="GPUs of all inference engines together. Required without --colocate; with it, the trainers' GPUs.",
        ),
        Flag("--rollout-num-gpus-per-engine", integer, 1, "GPUs per engine (its tensor-parallel size)."),
        Flag("--num-gpus-per-node", integer, 8, "GPUs per physical node, for the placement of engines."),
        Flag(
            "--colocate",
            action=STORE_TRUE,
            help="Trainers and engines share the same GPUs; implies --offload-train and --offload-rollout.",
        ),
        Flag("--offload", action=STORE_TRUE, help="Short for --offload-train --offload-rollout."),
        Flag(
            "--offload-train",
            action=OPTIONAL_BOOL,
            help="Trainers give GPU memory back between steps. Default: on under --colocate.",
        ),
        Flag(
            "--offload-rollout",
            action=OPTIONAL_BOOL,
            help="Engines release weights and KV cache while training. Default: on under --colocate.",
        ),
        Flag(
            "--distributed-backend",
            text,
            help="Backend of torch.distributed. Default: nccl on cuda, gloo on cpu.",
            choices=("nccl", "gloo"),
        ),
        Flag("--distributed-timeout-minutes", integer, 10, "Timeout of process groups."),
        Flag("--train-env-vars", json_object, {}, "JSON object of further environment variables for trainers."),
        Flag(
            "--train-memory-margin-bytes",
            integer,
            0,
            "Memory margin of torch_memory_saver.",
            pending="trainers give their memory back without torch_memory_saver",
        ),
        Flag(
            "--release-train",
            action=STORE_TRUE,
            help="End trainer actors during rollout and recreate them for each step.",
            pending=pending.RELEASE_TRAIN,
        ),
        Flag(
            "--phase-timeout-secs",
            number,
            help="End the run when it waits longer for one step, with what each process is doing. Default: only say "
            "so, every 30 minutes.",
        ),
    ),
)
