"""Grouped experts on a GPU: the loop's values and gradients within bf16, the same bits twice; a step of a trainer."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.backends.megatron.test_experts import make_experts
from tests.backends.megatron.worlds import start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import run_world, trainer_args
from tests.tiny_model import save_tiny_moe

pytestmark = [pytest.mark.system, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WIDTH, INNER, EXPERTS = 256, 128, 16
ROWS = {
    "uneven": [3, 0, 1, 250, 0, 77, 8, 15, 0, 129, 64, 1, 1, 0, 31, 200],
    "one expert": [0] * 5 + [333] + [0] * 10,
    "many rows": [1000 + 13 * i for i in range(EXPERTS)],
}
SHAPE = dict(
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    head_dim=64,
    num_attention_heads=4,
    num_experts=16,
    num_experts_per_tok=4,
)
FLAGS = (
    *("--train-backend", "megatron", "--device", "cuda", "--ci-test", "--clip-grad", "0"),
    *("--use-kl-loss", "--kl-loss-coef", "0.1"),
)
VARIANTS = {
    "loop": ("--no-moe-grouped-gemm",),
    "grouped": (),
    "every layer recomputed": ("--gradient-checkpointing",),
    "activation recomputed": ("--recompute-granularity", "selective", "--recompute-modules", "moe_act"),
    "gradients overlapped": ("--overlap-grad-reduce", "--ddp-bucket-size", "100000"),
}


def passed(experts, rows):
    """Output and gradients of input, probabilities and weights, on the host."""
    torch.manual_seed(sum(rows))
    hidden = torch.randn(sum(rows), WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
    probs = torch.rand(sum(rows), device="cuda").requires_grad_()
    upstream = torch.randn_like(hidden)
    out, _ = experts(hidden, torch.tensor(rows), probs)
    weights = list(experts.parameters())
    for weight in weights:
        weight.grad = None
    out.backward(upstream)
    return [t.detach().float().cpu() for t in (out, hidden.grad, probs.grad, *(w.grad for w in weights))]


def layer(rank, world_size, port):
    from slime.backends.megatron_utils import compat

    compat.install()
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world_size)
    from slime.backends.megatron_utils import parallel

    parallel.init_parallel(parallel.ParallelSizes(), seed=1, timeout_minutes=2)
    sizes = dict(number=EXPERTS, inner=INNER, hidden_size=WIDTH, dtype=torch.bfloat16)
    grouped = make_experts(**sizes).cuda()
    loop = make_experts(moe_grouped_gemm=False, **sizes).cuda()
    again = make_experts(recompute_granularity="selective", recompute_modules=["moe_act"], **sizes).cuda()
    with torch.no_grad():
        for ours, *others in zip(grouped.parameters(), loop.parameters(), again.parameters(), strict=True):
            for other in others:
                other.copy_(ours)
    assert grouped.has_kernel(torch.empty(1, WIDTH, device="cuda", dtype=torch.bfloat16)), "not a Hopper or Blackwell"
    kinds = (grouped, grouped, again, loop)
    found = {name: [passed(experts, rows) for experts in kinds] for name, rows in ROWS.items()}
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def layers():
    return run_world(layer, 1)[0]


@pytest.mark.parametrize("rows", ROWS)
def test_grouped_is_the_loop_within_bf16(layers, rows):
    for ours, twice, recomputed, wanted in zip(*layers[rows], strict=True):
        assert torch.equal(ours, twice) and torch.equal(ours, recomputed)
        # One rounding apart: sums in another order.
        assert (ours - wanted).abs().max() <= 2**-6 * wanted.abs().max()


def expert_gradients(trainer):
    """Of the last step, all in one vector."""
    named = [pair for chunk in trainer.chunks for pair in chunk.named_parameters()]
    return torch.cat([weight.main_grad.flatten() for name, weight in named if "local_experts" in name]).cpu()


def steps(rank, world_size, port, path, variants):
    """{variant: (passes through the grouped product, metrics and experts' gradients of the first step)}"""
    from slime.backends.megatron_utils import compat

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as --deterministic-mode has it
    compat.install()
    from slime.backends.megatron_utils import experts

    product, calls, results = experts.F.grouped_mm, [], {}

    class Counting:
        def __getattr__(self, name):
            return getattr(torch.nn.functional, name)

        def grouped_mm(self, *args, **kwargs):
            calls.append(1)
            return product(*args, **kwargs)

    experts.F = Counting()
    for name, flags in variants.items():
        calls.clear()
        trainer = start_trainer(trainer_args(path, *FLAGS, *flags), rank, world_size, port, with_ref=True)
        metrics = train_rollout(trainer, 0)
        results[name] = (len(calls), metrics, expert_gradients(trainer))
        stop_trainer()
        del trainer
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("experts"))
    save_tiny_moe(path, **SHAPE)
    return path


@pytest.fixture(scope="module")
def stepped(model_dir):
    return run_world(steps, 1, model_dir, VARIANTS)[0]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "loop"])
def test_a_step_is_that_of_the_loop(stepped, name):
    (none, wanted, expected), (calls, metrics, gradients) = stepped["loop"], stepped[name]
    assert none == 0 and calls > 0
    assert metrics["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.02)
    assert metrics["train/entropy_loss"] == pytest.approx(wanted["train/entropy_loss"], rel=1e-3)
    # Roundings, and tokens whose next experts they change.
    assert expected.norm() > 0 and (gradients - expected).norm() <= 0.1 * expected.norm()


def test_a_deterministic_step_has_the_same_bits_twice(model_dir):
    twice = {"first": ("--deterministic-mode",), "second": ("--deterministic-mode",)}
    (calls, _, first), (_, _, second) = run_world(steps, 1, model_dir, twice)[0].values()
    assert calls > 0 and torch.equal(first, second)
