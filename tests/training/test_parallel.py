"""Parallel equals serial: advantages, losses and gradients over real process groups, for every algorithm."""

import pytest
import torch
import torch.distributed as dist

from slime.training.advantages import compute_advantages
from slime.training.context_parallel import ALONE, ContextParallel
from tests.processes import run_ranks
from tests.training.batches import make_args, random_tokens, rank_data
from tests.training.problem import ALGORITHMS, Problem, gradients

pytestmark = pytest.mark.integration

CASES = {
    **ALGORITHMS,
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus",
        "gamma": 0.98,
        "kl_coef": 0.05,
        "normalize_advantages": True,
    },
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "kl_coef": 0.05,
        "normalize_advantages": True,
    },
    "ppo": {"advantage_estimator": "ppo", "gamma": 0.99, "lambd": 0.9, "kl_coef": 0.05, "normalize_advantages": True},
    "on_policy_distillation": {"advantage_estimator": "on_policy_distillation"},
    "grpo_distilled": {"use_opd": True, "opd_kl_coef": 0.5, "normalize_advantages": True},
    "sft": {"loss_type": "sft_loss"},
}
LAYOUTS = [
    (2, 1, {"micro_batch_size": 2}),
    (1, 2, {"max_tokens": 24}),
    (1, 4, {"micro_batch_size": 1}),
    (2, 2, {"max_tokens": 30}),
    (4, 1, {"micro_batch_size": 1}),
]


def train(name, per_token, dp=(0, 1), cp=ALONE, dp_group=None, **schedule):
    """One rank's part of the step: (metrics summed over its micro-batches, gradients of its tokens)."""
    problem = Problem(seed=7)
    problem.columns["values"] = [
        x[:, 0] + n for x, n in zip(problem.logits, problem.columns["advantages"], strict=True)
    ]
    problem.columns["teacher_log_probs"] = random_tokens(11, problem.batch)
    del problem.columns["advantages"]
    args = make_args(**CASES[name], calculate_per_token_loss=per_token)
    data = rank_data(problem.batch, problem.columns, dp_size=dp[1], balance=True, **schedule)[dp[0]]
    if args.loss_type == "policy_loss":
        compute_advantages(args, data, dp_group)
    leaves = problem.leaves()
    return problem.losses_of(args, data, leaves, per_token, cp), gradients(leaves)


def worker(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=4)
    results = {}
    for dp_size, cp_size, schedule in LAYOUTS:
        # All ranks take part in making the groups; rank = dp rank * cp_size + cp rank.
        world = dist.new_group(range(dp_size * cp_size))
        cp_groups = [dist.new_group([d * cp_size + c for c in range(cp_size)]) for d in range(dp_size)]
        dp_groups = [dist.new_group([d * cp_size + c for d in range(dp_size)]) for c in range(cp_size)]
        if rank >= dp_size * cp_size:
            continue
        cp = ContextParallel.of(cp_groups[rank // cp_size])
        dp_group = dp_groups[rank % cp_size]
        for number, name in enumerate(CASES):
            metrics, grads = train(name, bool(number % 2), (rank // cp_size, dp_size), cp, dp_group, **schedule)
            values = torch.stack([value.double() for value in metrics.values()])
            dist.all_reduce(values, group=dp_group)
            for grad in grads:
                dist.all_reduce(grad, group=world)
            results[dp_size, cp_size, name] = dict(zip(metrics, values.tolist(), strict=True)), grads
    torch.save(results, f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("parallel"))
    run_ranks(worker, 4, path)
    return [torch.load(f"{path}/{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(name, results):
    number = list(CASES).index(name)
    want, want_grads = train(name, bool(number % 2), micro_batch_size=9)
    assert sum(grad.abs().sum() for grad in want_grads) > 0
    for dp_size, cp_size, _ in LAYOUTS:
        for rank in range(dp_size * cp_size):
            metrics, grads = results[rank][dp_size, cp_size, name]
            for key, value in want.items():
                assert metrics[key] == pytest.approx(value.item(), rel=1e-10, abs=1e-13), (dp_size, cp_size, rank, key)
            for got, grad in zip(grads, want_grads, strict=True):
                torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-13)
