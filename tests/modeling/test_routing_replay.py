"""Routing recorded and replayed: the same numbers for the same weights, the recorded experts for others."""

import pytest
import torch

from slime.modeling.attention import PackedSequences
from slime.modeling.routing_replay import RoutingReplay
from tests.modeling.test_families import build

pytestmark = pytest.mark.unit
TOKENS = 11


def forward(model):
    torch.manual_seed(1)
    tokens = torch.randint(1, 64, (1, TOKENS))
    positions = torch.arange(TOKENS)[None]
    context = PackedSequences([TOKENS])
    return model(tokens, position_ids=positions, attention_context=context, use_cache=False).logits


def make(family):
    from slime.modeling.attention import register_attention

    torch.manual_seed(0)
    model = build(family, register_attention())
    return model, RoutingReplay(model, list(model.model.layers))


@pytest.mark.parametrize(("family", "layers"), [("Qwen3Moe", [0, 1]), ("DeepseekV3", [1])])
def test_replay_of_the_same_weights_changes_no_bit(family, layers):
    model, routing = make(family)
    assert routing.layers == layers
    plain = forward(model)
    routing.record()
    assert torch.equal(forward(model), plain)
    experts = routing.recorded()
    assert experts.shape == (TOKENS, len(layers), 2) and experts.dtype == torch.int16
    routing.replay(experts)
    assert torch.equal(forward(model), plain)
    routing.off()
    assert torch.equal(forward(model), plain)


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
def test_another_router_visits_the_recorded_experts_with_its_own_weights(family):
    model, routing = make(family)
    routing.record()
    forward(model)
    experts = routing.recorded()
    gate = model.model.layers[-1].mlp.gate
    with torch.no_grad():
        gate.weight.neg_()
    free = forward(model)
    routing.record()
    forward(model)
    assert not torch.equal(routing.recorded(), experts)
    routing.replay(experts)
    out = forward(model)
    assert not torch.equal(out, free)
    out[0, :, 3].sum().backward()
    assert gate.weight.grad.abs().sum() > 0
    # Only experts that were visited have a gradient, of those that any token was sent to.
    visited = set(experts[:, -1].flatten().tolist())
    grads = model.model.layers[-1].mlp.experts.down_proj.grad.abs().sum((1, 2))
    assert {i for i, g in enumerate(grads.tolist()) if g > 0} == visited


def test_layers_without_experts_are_left_out():
    model, routing = make("DeepseekV3")
    routing.record()
    plain = forward(model)
    experts = routing.recorded()
    of_all_layers = torch.cat([torch.zeros_like(experts), experts], 1)
    routing.replay(of_all_layers)
    assert torch.equal(forward(model), plain)


def test_filler_spreads_tokens():
    _, routing = make("Qwen3Moe")
    assert routing.filler(3)[:, 0].tolist() == [[0, 1], [2, 3], [0, 1]]


def test_errors():
    _, routing = make("Qwen3Moe")
    with pytest.raises(ValueError, match="routing of 3 layers, but the model has 2"):
        routing.replay(torch.zeros(5, 3, 2))
    with pytest.raises(ValueError, match="top-2"):
        routing.replay(torch.zeros(5, 2, 3))
    with pytest.raises(ValueError, match="not among the 4"):
        routing.replay(torch.full((5, 2, 2), 4))
    dense = build("Qwen3", "sdpa")
    with pytest.raises(ValueError, match="no expert layers"):
        RoutingReplay(dense, list(dense.model.layers))
