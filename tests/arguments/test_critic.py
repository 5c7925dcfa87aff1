"""Flags of PPO's critic, overrides per role, adapters and what the optimizer keeps where."""

import pytest

from slime.ray.roles import role_args

pytestmark = pytest.mark.unit
PPO = ("--advantage-estimator", "ppo")


@pytest.fixture
def checkpoint(setup):
    """A directory with finished checkpoints of policy and critic."""

    def write(name: str, *iterations: int, critic: tuple[int, ...] = ()) -> str:
        for root, numbers in ((name, iterations), (f"{name}/critic", critic)):
            for number in numbers:
                setup.write(f"{root}/iter_{number:07d}/meta.json", "{}")
                setup.write(f"{root}/latest_checkpointed_iteration.txt", str(number))
        return str(setup.root / name)

    return write


@pytest.mark.parametrize(
    "flags, expected",
    [
        (("--critic-lr", "1e-5"), "--critic-lr 1e-05: has no effect without a critic"),
        (("--num-critic-only-steps", "2"), "--num-critic-only-steps 2: has no effect without a critic"),
        (("--critic-train-only",), "--critic-train-only: has no effect without a critic"),
        ((*PPO, "--critic-num-gpus-per-node", "1"), "must be --actor-num-gpus-per-node 2"),
        ((*PPO, "--loss-type", "sft_loss"), "--advantage-estimator ppo: excludes --loss-type sft_loss"),
        ((*PPO, "--critic-load", "/nowhere"), "--critic-load /nowhere: is not a directory"),
        ((*PPO, "--lambd", "1.5"), "--lambd 1.5: must be from 0 to 1"),
        (("--lora-alpha", "8"), "--lora-alpha 8.0: has no effect without --lora-rank"),
        (("--optimizer", "cpu_adam", "--fsdp-cpu-offload"), "--optimizer cpu_adam: has no effect"),
    ],
)
def test_contradictions(setup, flags, expected):
    assert expected in setup.errors(*flags)


def test_the_critic_s_values(setup):
    args = setup.load(*PPO, "--save", str(setup.root / "save"), "--lr", "1e-6", "--lr-warmup-iters", "5")
    critic = role_args(args, "critic")
    assert (args.critic_num_nodes, args.critic_num_gpus_per_node) == (1, 2)
    assert (critic.lr, critic.lr_warmup_iters, critic.save) == (1e-6, 0, str(setup.root / "save" / "critic"))
    assert role_args(args, "actor").lr_warmup_iters == 5
    model = setup.write_model("reward-model")
    from_model = role_args(setup.load(*PPO, "--critic-load", model, "--critic-lr", "1e-5"), "critic")
    assert (from_model.hf_checkpoint, from_model.load, from_model.lr) == (model, None, 1e-5)


def test_both_roles_resume_the_same_iteration(setup, checkpoint):
    load = checkpoint("run", 1, 2, critic=(1, 2, 3))  # killed after the critic was saved
    critic = role_args(setup.load(*PPO, "--load", load), "critic")
    assert (critic.load, critic.ckpt_step, critic.finetune) == (f"{load}/critic", 2, False)
    assert role_args(setup.load(*PPO, "--load", load, "--ckpt-step", "1"), "critic").ckpt_step == 1
    assert "holds no iteration 7" in setup.errors(*PPO, "--load", load, "--ckpt-step", "7")
    alone = checkpoint("alone", 4)
    assert "holds no checkpoint of iteration 4" in setup.errors(*PPO, "--load", alone)
    assert role_args(setup.load(*PPO, "--load", alone, "--finetune"), "critic").load is None


def test_overrides_per_role(setup):
    text = "actor:\n  lr: 2.0e-6\n  adam-beta2: 0.95\ncritic:\n  lr: 1.0e-5\n  clip_grad: 0.5\n  save: elsewhere\n"
    flags = (*PPO, "--megatron-config-path", setup.write("roles.yaml", text))
    args = setup.load(*flags)
    actor, critic = role_args(args, "actor"), role_args(args, "critic")
    assert (actor.lr, actor.adam_beta2, actor.clip_grad) == (2e-6, 0.95, 1.0)
    assert (critic.lr, critic.adam_beta2, critic.clip_grad, critic.save) == (1e-5, 0.999, 0.5, "elsewhere")
    assert "contradicts --critic-lr 0.001" in setup.errors(*flags, "--critic-lr", "1e-3")
    for wrong, expected in {
        "actor: {lrr: 1}": "did you mean lr?",
        "actor: {hf_checkpoint: x}": "cannot differ between roles",
        "critic: {lr: fast}": "must be a number",
        "teacher: {lr: 1}": "teacher (in --megatron-config-path): is no role",
        "- actor": "must map roles",
    }.items():
        assert expected in setup.errors(*PPO, "--megatron-config-path", setup.write("wrong.yaml", wrong)), wrong
