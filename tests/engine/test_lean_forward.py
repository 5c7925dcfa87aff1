"""Few operations against transformers' own code, for the families that are built like Llama; others are refused."""

import pytest
import torch
import transformers

from slime.engine.forward import model_logits
from slime.engine.lean_forward import lean_forward
from slime.engine.weights import WeightStore
from slime.modeling.attention import PackedSequences, register_attention
from tests.modeling.test_families import FAMILIES, SIZES

pytestmark = pytest.mark.unit

LEAN = {"Llama", "Mistral", "Qwen2", "Qwen3"}
LENGTHS = [9, 1, 14]


def build(family, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=register_attention(), experts_implementation="eager"
    )
    with torch.no_grad():
        for p in model.parameters():  # norms of ones and biases of zeros would hide a mistake
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def logits(model, lean):
    ids = torch.randint(1, 64, (sum(LENGTHS),))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    context, keep = PackedSequences(LENGTHS), torch.tensor([3, 8, 23])
    with torch.inference_mode():
        expected = model_logits(model, ids[None], positions[None], context, keep)
        return lean(ids, positions, context, keep, max(LENGTHS)), expected


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model = build(family)
    lean = lean_forward(model)
    assert (lean is not None) == (family in LEAN)
    if lean is not None:
        got, expected = logits(model, lean)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1, "num_attention_heads": 3, "head_dim": 16},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ],
)
def test_variants(changes):
    model = build("Qwen3", **changes)
    got, expected = logits(model, lean_forward(model))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ],
)
def test_what_it_cannot_do_is_left_to_the_model(changes):
    model = build("Llama", **changes)
    lean = lean_forward(model)
    if lean is not None:  # biases everywhere are fine
        got, expected = logits(model, lean)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    else:
        assert "hidden_act" in changes or "rope_parameters" in changes


def test_updates_in_place_and_released_weights():
    model, other = build("Qwen2"), build("Qwen2", initializer_range=0.1)
    store = WeightStore(model)
    lean = lean_forward(model)
    store.load([(name, p.detach()) for name, p in other.named_parameters()])
    lean.refresh()
    got, expected = logits(other, lean)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    store.release()
    lean.refresh()
    assert all(projection.weight_IO.numel() == 0 for projection in lean.projections())
    store.resume()
    lean.refresh()
    assert all(projection.packed for projection in lean.projections())
    store.load([(name, p.detach()) for name, p in other.named_parameters()])
    lean.refresh()
    got, expected = logits(other, lean)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
