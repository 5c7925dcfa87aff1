"""PPO's critic: values, returns and steps equal a plain float64 implementation; resume is bit-equal."""

import pytest
import torch

from slime.backends.fsdp_utils.critic import FSDPCriticRayActor
from slime.ray.roles import role_args
from slime.training.rollout_data import RankData
from tests.backends.trainers import make_trainer, rollout_batch, rollout_parts, run_world, trainer_args

pytestmark = pytest.mark.integration

PPO = "--advantage-estimator ppo --gamma 0.9 --lambd 0.8 --critic-lr 2e-3 --value-clip 0.05".split()
FLAGS = (*PPO, "--num-steps-per-rollout", "2", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "40")
KL_SEED = 17


class ExactCritic(FSDPCriticRayActor):
    """In float64."""

    def _load(self, path):
        from slime.backends.fsdp_utils.model import ModelOptions, build_policy
        from slime.backends.fsdp_utils.value_model import ValueModel

        options = ModelOptions(path, torch.float64, torch.float64)
        return build_policy(options, self.mesh, self.device, self.cp, ValueModel)


def log_probs_of(batch: dict) -> dict:
    """What the policy would share under --kl-coef."""
    generator = torch.Generator().manual_seed(KL_SEED)
    draw = [torch.randn(2, n, generator=generator, dtype=torch.float64) for n in batch["response_lengths"]]
    return {"log_probs": [d[0] for d in draw], "ref_log_probs": [d[1] for d in draw]}


def train(critic, seed: int) -> dict:
    batch = rollout_batch(seed)
    shared = log_probs_of(batch)
    data = RankData(
        rollout_parts(critic.args, batch, critic.world_size // critic.args.context_parallel_size)[critic.dp_rank]
    )
    for key, values in shared.items():
        data.set_flat(key, [values[index - 100] for index in data["sample_indices"]])
    metrics = critic.train_on(seed, data)
    return metrics | {"values": dict(zip(data["sample_indices"], critic.take_values()["values"], strict=True))}


def full_parameters(critic) -> dict:
    return {
        name: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
        for name, p in critic.model.hf_parameters().items()
    }


def run(rank, world_size, port, model_dir, root):
    """Two exact rollouts (KL in the reward); then straight and resumed fp32 ones."""
    torch.set_default_dtype(torch.float32)
    out = {}
    cp = ("--context-parallel-size", "2") if world_size == 4 else ()
    nodes = ("--actor-num-gpus-per-node", str(world_size))
    args = role_args(trainer_args(model_dir, *FLAGS, "--kl-coef", "0.1", *cp, *nodes), "critic")
    critic = make_trainer(ExactCritic, args, rank, world_size, port, role="critic")
    out["metrics"] = [train(critic, seed) for seed in range(2)]
    out["parameters"] = full_parameters(critic)
    if world_size == 2:
        flags = ("--kl-coef", "0.1", "--ci-test", *FLAGS, *nodes)
        straight = make_trainer(
            FSDPCriticRayActor,
            role_args(trainer_args(model_dir, *flags), "critic"),
            rank,
            world_size,
            port,
            role="critic",
        )
        for seed in range(2):
            train(straight, seed)
        save = trainer_args(model_dir, *flags, "--save", str(root))
        first = make_trainer(FSDPCriticRayActor, role_args(save, "critic"), rank, world_size, port, role="critic")
        train(first, 0)
        first.save_model(0)
        load = role_args(trainer_args(model_dir, *flags), "critic")
        load.load, load.finetune, load.no_load_optim, load.no_load_rng = str(root / "critic"), False, False, False
        resumed = make_trainer(FSDPCriticRayActor, load, rank, world_size, port, role="critic")
        train(resumed, 1)
        out["resumed"] = (full_parameters(straight), full_parameters(resumed))
    torch.distributed.destroy_process_group()
    return out


class ReferenceCritic:
    """Values and value loss of one process, sample by sample, AdamW by hand."""

    def __init__(self, args):
        from transformers import AutoModelForCausalLM

        self.args = args
        model = AutoModelForCausalLM.from_pretrained(
            args.hf_checkpoint, dtype=torch.float64, attn_implementation="sdpa"
        )
        self.body = model.model
        self.head = torch.nn.Parameter(torch.zeros(1, model.config.hidden_size, dtype=torch.float64))
        self.params = {f"model.{k}": p for k, p in self.body.named_parameters()} | {"value_head.weight": self.head}
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.params.items()}
        self.steps = 0

    def values(self, batch, i):
        tokens, length = torch.tensor(batch["tokens"][i]), batch["response_lengths"][i]
        hidden = self.body(tokens[None]).last_hidden_state[0, -length - 1 : -1]
        return hidden @ self.head[0]

    def train(self, batch):
        args, shared = self.args, log_probs_of(batch)
        with torch.no_grad():
            old = [self.values(batch, i) for i in range(len(batch["tokens"]))]
        returns = []
        for i, values in enumerate(old):
            mask = torch.tensor(batch["loss_masks"][i])
            x = shared["log_probs"][i] - shared["ref_log_probs"][i]
            rewards = -args.kl_coef * x * mask
            rewards[-1] += batch["rewards"][i]
            advantage, out = 0.0, torch.zeros_like(values)
            for t in reversed(range(len(values))):
                after = values[t + 1] if t + 1 < len(values) else 0.0
                advantage = rewards[t] + args.gamma * after - values[t] + args.gamma * args.lambd * advantage
                out[t] = advantage + values[t]
            returns.append(out)
        size = args.global_batch_size
        return old, [self.step(batch, range(s, s + size), old, returns) for s in range(0, len(old), size)]

    def step(self, batch, samples, old, returns):
        loss = torch.zeros((), dtype=torch.float64)
        for i in samples:
            mask = torch.tensor(batch["loss_masks"][i], dtype=torch.float64)
            values, clip = self.values(batch, i), self.args.value_clip
            clipped = old[i] + (values - old[i]).clamp(-clip, clip)
            per_token = torch.maximum((values - returns[i]) ** 2, (clipped - returns[i]) ** 2)
            loss = loss + (per_token * mask).sum() / mask.sum().clamp(min=1) / len(samples)
        loss.backward()
        self.adamw()
        return loss.item()

    @torch.no_grad()
    def adamw(self):
        args = self.args
        self.steps += 1
        norm = torch.stack([p.grad.square().sum() for p in self.params.values()]).sum().sqrt()
        for name, p in self.params.items():
            grad = p.grad * min(1.0, args.clip_grad / (norm.item() + 1e-6))
            first, second = self.moments[name]
            first.mul_(args.adam_beta1).add_(grad, alpha=1 - args.adam_beta1)
            second.mul_(args.adam_beta2).add_(grad.square(), alpha=1 - args.adam_beta2)
            mean, square = first / (1 - args.adam_beta1**self.steps), second / (1 - args.adam_beta2**self.steps)
            decay = args.weight_decay if p.ndim > 1 else 0.0
            p.sub_(args.lr * (mean / (square.sqrt() + args.adam_eps) + decay * p))
            p.grad = None


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_losses_and_parameters_equal_the_reference(tiny_model_dir, tmp_path, world_size):
    results = run_world(run, world_size, tiny_model_dir, tmp_path)
    reference = ReferenceCritic(role_args(trainer_args(tiny_model_dir, *FLAGS, "--kl-coef", "0.1"), "critic"))
    assert reference.args.lr == 2e-3
    for seed in range(2):
        values, losses = reference.train(rollout_batch(seed))
        found = {}
        for result in results:
            metrics = result["metrics"][seed]
            assert metrics["train/value_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-10)
            found |= metrics["values"]
        assert sorted(found) == [100 + i for i in range(8)]
        for i, expected in enumerate(values):
            assert torch.tensor(found[100 + i]).double() == pytest.approx(expected.numpy(), abs=1e-10)
    for result in results:
        assert result["parameters"].keys() == reference.params.keys()
        for name, value in reference.params.items():
            assert (result["parameters"][name] - value.detach()).abs().max() < 1e-10, name
        if "resumed" in result:
            straight, resumed = result["resumed"]
            assert [name for name, value in straight.items() if not torch.equal(value, resumed[name])] == []
