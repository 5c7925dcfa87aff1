"""Grouped experts compute what the loop over experts does, forward and backward, in every layout.

The kernel needs a GPU; PyTorch's own loop behind the same function takes its place here.
"""

import pytest
import torch
import torch.distributed as dist

from tests.backends.megatron.families import save_family
from tests.backends.megatron.test_exactness import GRPO, PACKED, READABLE, gradients_of
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import run_world, trainer_args

pytestmark = pytest.mark.integration

EXPERTS, WIDTH, INNER = 5, 32, 16
ROWS = {"uneven": [7, 0, 1, 12, 0], "one expert": [0, 0, 9, 0, 0], "all experts": [3, 4, 5, 6, 7]}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest value; the products of bf16 are rounded twice before they meet again."""


def expert_formula(hidden, rows, probs, first, second):
    """float64: each row's SwiGLU with the weights of its expert, times its probability."""
    out = []
    for x, p, gate_up, down in zip(hidden.split(rows), probs.split(rows), first, second, strict=True):
        gate, up = (x @ gate_up.T).chunk(2, -1)
        out.append(gate * torch.sigmoid(gate) * up * p[:, None] @ down.T)
    return torch.cat(out)


def make_experts(number=EXPERTS, inner=INNER, dtype=torch.float32, **config):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.nn import functional as F

    from slime.backends.megatron_utils.experts import GroupedExperts

    fields = dict(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=inner,
        num_moe_experts=number,
        moe_router_topk=2,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        init_method=lambda weight: weight,
        output_layer_init_method=lambda weight: weight,
        moe_grouped_gemm=True,
    )
    torch.manual_seed(0)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
    experts = GroupedExperts(number, TransformerConfig(**{**fields, **config}), linears, pg_collection=groups)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(std=0.3)
    return experts


def passed(experts, rows, grouped=True):
    """Output and gradients (of input, probabilities, first and second weights), and whether it was grouped."""
    from slime.backends.megatron_utils.experts import GroupedLinear

    weights = [getattr(e, name).weight for name in ("linear_fc1", "linear_fc2") for e in experts.local_experts]
    generator = torch.Generator().manual_seed(sum(rows))
    hidden = torch.randn(sum(rows), WIDTH, generator=generator).to(weights[0].dtype).requires_grad_()
    probs = torch.rand(sum(rows), generator=generator).requires_grad_()
    experts.has_kernel = lambda x: grouped
    out, bias = experts(hidden, torch.tensor(rows), probs)
    assert bias is None
    used = type(out.grad_fn).__name__ == f"{GroupedLinear.__name__}Backward"
    needed = [tensor for tensor in (hidden, probs, *weights) if tensor.requires_grad]
    for tensor in needed:
        tensor.grad = None
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return (out.detach(), *(tensor.grad.clone() for tensor in needed)), used


def reference(experts, rows, dtype):
    """The same of the formula in float64."""
    generator = torch.Generator().manual_seed(sum(rows))
    hidden = torch.randn(sum(rows), WIDTH, generator=generator).to(dtype).double().requires_grad_()
    probs = torch.rand(sum(rows), generator=generator).double().requires_grad_()
    weights = [
        [getattr(e, name).weight.detach().double().requires_grad_() for e in experts.local_experts]
        for name in ("linear_fc1", "linear_fc2")
    ]
    out = expert_formula(hidden, rows, probs, *weights)
    upstream = torch.randn(out.shape, generator=generator).to(dtype).double()
    return (out.detach(), *torch.autograd.grad(out, [hidden, probs, *weights[0], *weights[1]], upstream))


def alone(rank, world_size, port):
    """What the tests of the layer alone look at."""
    from slime.backends.megatron_utils import compat

    compat.install()
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    from slime.backends.megatron_utils import parallel

    parallel.init_parallel(parallel.ParallelSizes(), seed=1, timeout_minutes=2)
    found = {}
    for dtype in TOLERANCE:
        experts = make_experts(dtype=dtype)
        for name, rows in ROWS.items():
            found[dtype, name] = (
                passed(experts, rows),
                passed(experts, rows, grouped=False),
                reference(experts, rows, dtype),
            )
    again = make_experts(recompute_granularity="selective", recompute_modules=["moe_act"])
    found["recomputed"] = passed(again, ROWS["uneven"])
    frozen = make_experts()
    for expert in frozen.local_experts[1:]:
        expert.requires_grad_(False)
    found["frozen"] = passed(frozen, ROWS["uneven"])
    with torch.no_grad():
        again.has_kernel = lambda x: True
        found["without gradients"] = again(torch.ones(25, WIDTH), torch.tensor(ROWS["all experts"]), torch.ones(25))[0]
        again.has_kernel = lambda x: False
        found["looped"] = again(torch.ones(25, WIDTH), torch.tensor(ROWS["all experts"]), torch.ones(25))[0]
    looped = {
        "one expert": (make_experts(number=1), [6]),
        "inner width 12 in bf16": (make_experts(inner=12, dtype=torch.bfloat16), ROWS["uneven"]),
        "switched off": (make_experts(moe_grouped_gemm=False), ROWS["uneven"]),
        "no tokens": (make_experts(), [0] * EXPERTS),
        "one token": (make_experts(), [0, 0, 1, 0, 0]),
    }
    found["fallbacks"] = {name: passed(*case)[1] for name, case in looped.items()}
    plain = make_experts()
    found["on a CPU"] = plain.has_kernel(torch.ones(1, WIDTH, dtype=torch.bfloat16))
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def layer():
    return run_world(alone, 1)[0]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_those_of_the_formula_and_of_the_loop(layer, dtype, rows):
    (grouped, used), (loop, looped), exact = layer[dtype, rows]
    assert used and not looped
    assert len(grouped) == 3 + 2 * EXPERTS
    for ours, stock, wanted in zip(grouped, loop, exact, strict=True):
        scale = max(wanted.abs().max().item(), 1e-3)
        assert (ours.double() - wanted).abs().max() <= TOLERANCE[dtype] * scale
        assert (stock.double() - wanted).abs().max() <= TOLERANCE[dtype] * scale
    for size, *weights in zip(ROWS[rows], grouped[3 : 3 + EXPERTS], grouped[3 + EXPERTS :], strict=True):
        assert all(bool(weight.any()) == (size > 0) for weight in weights)


def test_activations_that_are_computed_again_are_the_same(layer):
    (plain, _), (again, used) = layer[torch.float32, "uneven"][0], layer["recomputed"]
    assert used and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert (layer["without gradients"] - layer["looped"]).abs().max() < 1e-5


def test_frozen_experts_have_no_gradients(layer):
    (plain, _), (frozen, used) = layer[torch.float32, "uneven"][0], layer["frozen"]
    assert used and len(frozen) == 5
    kept = (*plain[:4], plain[3 + EXPERTS])
    assert all(torch.equal(a, b) for a, b in zip(kept, frozen, strict=True))


def test_what_the_kernel_does_not_cover_is_looped(layer):
    assert not any(layer["fallbacks"].values()), layer["fallbacks"]
    assert not layer["on a CPU"]


LAYOUTS = {
    "one rank": (1, {}),
    "every layer recomputed": (
        1,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "activation recomputed": (1, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}),
    "EP2": (2, {"expert_model_parallel_size": 2, "overlap_grad_reduce": True}),
    "TP2+SP ETP2": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2},
    ),
}


def steps(rank, world_size, port, path, layouts):
    """{layout: (passes through grouped experts, metrics, gradients)}; of "looped" with stock's forward."""
    from slime.backends.megatron_utils import compat

    compat.install()
    from slime.backends.megatron_utils.experts import GroupedExperts

    results = {}
    for name, layout in layouts.items():
        passes = []
        looped = name == "looped"
        GroupedExperts.has_kernel = lambda self, x, looped=looped, passes=passes: not looped and not passes.append(1)
        flags = ("--train-backend", "megatron", *READABLE, *GRPO, *PACKED)
        changes = {"data_pad_size_multiplier": 4, "make_vocab_size_divisible_by": 12, **layout}
        trainer = start_trainer(trainer_args(path, *flags, **changes), rank, world_size, port, with_ref=True)
        before = parameters_of(trainer)
        metrics = train_rollout(trainer, 0)
        results[name] = (len(passes), metrics, gradients_of(before, parameters_of(trainer)))
        stop_trainer()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("experts"))
    save_family("qwen3_moe", path)
    ranks = []
    for world in (1, 2):
        fitting = {name: layout for name, (size, layout) in LAYOUTS.items() if size == world}
        ranks += run_world(steps, world, path, ({"looped": {}} if world == 1 else {}) | fitting)
    return ranks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_the_same_gradients_in_every_layout(stepped, layout):
    passes, metrics, gradients = stepped[0]["looped"]
    assert passes == 0
    found = [rank[layout] for rank in stepped if layout in rank]
    assert len(found) == LAYOUTS[layout][0]
    for passes, ours, mine in found:
        assert passes > 0
        for key in ("train/loss", "train/grad_norm", "train/kl_loss"):
            assert ours[key] == pytest.approx(metrics[key], rel=1e-5, abs=1e-7)
        for name, wanted in gradients.items():
            assert (mine[name] - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max()), name
