"""Saving and resuming."""

from slime.arguments.flag import STORE_TRUE, Family, Flag, integer, text

FAMILY = Family(
    "Checkpoints",
    "A checkpoint holds weights, optimizer, RNG, schedule, data position and the partial-rollout buffer.",
    (
        Flag(
            "--load",
            text,
            help="Checkpoint directory to resume. Without latest_checkpointed_iteration.txt in it the run starts "
            "from --ref-load, else from --hf-checkpoint. With --train-backend megatron also a Hugging Face directory "
            "to start from.",
        ),
        Flag("--save", text, help="Checkpoint directory to write.", aliases=("--output-dir",)),
        Flag("--save-interval", integer, help="Save every N rollouts; needs --save."),
        Flag("--save-hf", text, help="Also export a Hugging Face directory; {rollout_id} is filled in."),
        Flag("--no-save-optim", action=STORE_TRUE, help="Save weights only."),
        Flag(
            "--ref-load",
            text,
            help="Checkpoint of the reference model: a Hugging Face directory; with --train-backend megatron also a "
            "torch_dist checkpoint.",
        ),
        Flag("--ckpt-step", integer, help="Iteration of --load to resume, instead of the latest."),
        Flag("--ref-ckpt-step", integer, help="Iteration of a torch_dist --ref-load, instead of the latest."),
        Flag(
            "--async-save",
            action=STORE_TRUE,
            help="Write checkpoints while training goes on (--train-backend megatron).",
        ),
        Flag(
            "--finetune",
            action=STORE_TRUE,
            help="Take only weights from --load and start at rollout 0.",
        ),
        Flag("--no-load-optim", action=STORE_TRUE, help="Do not load the optimizer's state."),
        Flag("--no-load-rng", action=STORE_TRUE, help="Do not load RNG states."),
        Flag(
            "--critic-load",
            text,
            help="Critic to start from: a Hugging Face directory, or what --critic-save wrote. Default: LOAD/critic "
            "of a run that is resumed, else the policy's initial weights.",
        ),
        Flag("--critic-save", text, help="Checkpoint directory of the critic. Default: SAVE/critic."),
    ),
)
