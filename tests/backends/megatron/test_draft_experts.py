"""Draft layers with experts, as DeepSeek-V3 and GLM-4.5 have them: equal to a plain float64 model."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.backends.megatron.families import save_family
from tests.backends.megatron.test_drafts import SCALE, WIDTH, draft_loss, megatron
from tests.backends.megatron.test_exactness import CP2, EP2, PP2, TP2SP, split_experts
from tests.backends.trainers import run_world

pytestmark = pytest.mark.integration

CASES = ("deepseek_v3", "glm4_moe")
LAYERS = 4
PREFIX = f"model.layers.{LAYERS}."
OWN = ("enorm", "hnorm", "eh_proj", "shared_head")
LAYOUTS = {"one rank": (1, {}), "TP2+SP": (2, TP2SP), "PP2": (2, PP2), "CP2 EP2": (2, CP2 | EP2)}


def save_with_drafts(case: str, path: str) -> None:
    """The case with a further layer after its own, and in it copies of embedding and head as published files have."""
    save_family(case, path)
    file, config = Path(path) / "model.safetensors", Path(path) / "config.json"
    tensors = load_file(file)
    last = f"model.layers.{LAYERS - 1}."
    torch.manual_seed(5)
    layer = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    layer["eh_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH) * 0.1
    layer |= {f"{name}.weight": torch.ones(WIDTH) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {PREFIX + name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in layer.items()}
    tensors[PREFIX + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[PREFIX + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))


def plain(path: Path):
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **options)


def reference(path: str, directory: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """mtp_loss, and the gradients of the draft layer under the checkpoint's names."""
    tensors = load_file(Path(path) / "model.safetensors")
    config = json.loads((Path(path) / "config.json").read_text())
    own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    extra = {name: own.pop(name).double().requires_grad_() for name in list(own) if name.split(".")[0] in OWN}
    single = {f"model.layers.0.{name}": tensor for name, tensor in own.items() if name != "embed_tokens.weight"}
    single |= {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    single["model.norm.weight"] = extra.pop("shared_head.norm.weight").detach().float()
    directory.mkdir()
    save_file(single, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "first_k_dense_replace": 0}))
    layer, eps = plain(directory).model, config["rms_norm_eps"]

    def run(hidden, ahead):
        norm = partial(torch.nn.functional.rms_norm, normalized_shape=(WIDTH,), eps=eps)
        normed = [norm(ahead, weight=extra["enorm.weight"]), norm(hidden, weight=extra["hnorm.weight"])]
        return layer(inputs_embeds=torch.cat(normed, -1) @ extra["eh_proj.weight"].T).last_hidden_state

    total = draft_loss(plain(Path(path)), [run])
    (SCALE * total).backward()
    gradients = {name.removeprefix("layers.0."): p.grad for name, p in layer.named_parameters()}
    gradients["shared_head.norm.weight"] = gradients.pop("norm.weight")
    gradients |= {name: tensor.grad for name, tensor in extra.items() if "head" not in name}
    del gradients["embed_tokens.weight"]
    return total.item(), {PREFIX + name: gradient for name, gradient in split_experts(gradients).items()}


@pytest.fixture(scope="module", params=CASES)
def results(request, tmp_path_factory):
    path, root = str(tmp_path_factory.mktemp(request.param)), tmp_path_factory.mktemp("root")
    save_with_drafts(request.param, path)
    ranks = []
    for size in (1, 2):
        fitting = {name: layout for name, (world, layout) in LAYOUTS.items() if world == size}
        ranks += run_world(megatron, size, path, fitting, root)
    return path, reference(path, root / "layer"), ranks, root


def test_they_equal_a_plain_model_in_every_layout(results):
    path, (loss, wanted), ranks, _ = results
    checkpoint = load_file(Path(path) / "model.safetensors")
    copies = {PREFIX + "embed_tokens.weight", PREFIX + "shared_head.head.weight"}
    fixed = {PREFIX + "mlp.gate.e_score_correction_bias"}
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    found = {
        (layout, i): rank[layout, True] for i, rank in enumerate(ranks) for layout in LAYOUTS if (layout, True) in rank
    }
    assert {layout for layout, _ in found} == set(LAYOUTS)
    for (layout, rank), (metrics, gradients, before) in found.items():
        alone, without, _ = ranks[rank][layout, False]
        assert before.keys() == checkpoint.keys() - copies
        assert all(torch.equal(before[name], checkpoint[name]) for name in before), layout
        assert metrics["train/mtp_loss"] == pytest.approx(loss, rel=1e-5), layout
        assert metrics["train/loss"] == alone["train/loss"]
        assert wanted.keys() | without.keys() | fixed == gradients.keys()
        assert all(torch.equal(gradients[name], gradient) for name, gradient in without.items()), layout
        for name, gradient in wanted.items():
            assert (gradients[name] - gradient).abs().max().item() < 1e-5 * largest, (layout, name)


def test_they_are_resumed_in_another_layout_and_written_with_all_their_tensors(results):
    path, _, ranks, root = results
    assert [rank["resumed", True] for rank in ranks if ("resumed", True) in rank] == [[], []]
    names = set(load_file(Path(path) / "model.safetensors"))
    for trained in (False, True):
        index = json.loads((root / f"hf-{trained}" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == names
