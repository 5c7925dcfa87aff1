"""Layers for multi-token prediction: loss and gradients equal a plain float64 model; the policy does not notice."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from slime.training.rollout_data import RankData
from tests.backends.megatron.families import save_family
from tests.backends.megatron.test_exactness import CP2, PACKED, PP2, READABLE, RECOMPUTED, TP2SP, gradients_of
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer
from tests.backends.trainers import rollout_batch, rollout_parts, run_world, trainer_args

pytestmark = pytest.mark.integration

DEPTHS, SCALE, WIDTH = 2, 0.3, 32
LAYOUTS = {
    "one rank": (1, {}),
    "recomputed": (1, RECOMPUTED),
    "TP2+SP": (2, TP2SP),
    "PP2": (2, PP2),
    "CP2": (2, CP2),
    "DP2": (2, {}),
}


def save_mimo(path: str) -> None:
    """Qwen2 with two further layers, as MiMo names them."""
    save_family("qwen2", path)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(4)
    for depth in range(DEPTHS):
        layer = {
            name.removeprefix(f"model.layers.{depth}."): t
            for name, t in tensors.items()
            if name.startswith(f"model.layers.{depth}.")
        }
        layer["input_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH) * 0.1
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            layer[f"{name}.weight"] = torch.ones(WIDTH)
        noisy = {name: t + 0.1 * torch.randn_like(t) for name, t in layer.items()}
        tensors |= {f"model.mtp_layers.{depth}.{name}": t for name, t in noisy.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((Path(path) / "config.json").read_text())
    config |= {"model_type": "mimo", "num_nextn_predict_layers": DEPTHS}
    (Path(path) / "config.json").write_text(json.dumps(config))


def batch_of() -> dict:
    batch = rollout_batch(0)
    batch["tokens"] = [[max(token, 1) for token in tokens] for tokens in batch["tokens"]]
    return batch


def megatron(rank, world_size, port, path, layouts, root):
    """{(layout, with drafts): (metrics, gradients, parameters before)}; parameters saved and resumed."""
    out = {}
    for name, layout in layouts.items():
        for drafts in (False, True):
            changes = {**layout, "data_pad_size_multiplier": 4, "make_vocab_size_divisible_by": 12}
            changes |= {"enable_mtp_training": drafts, "mtp_loss_scaling_factor": SCALE}
            args = trainer_args(path, *READABLE, *PACKED, **changes)
            trainer = start_trainer(args, rank, world_size, port)
            before = {key: value.clone() for key, value in parameters_of(trainer).items()}
            part = rollout_parts(args, batch_of(), dist.get_world_size(trainer.dp_group))[trainer.dp_rank]
            metrics = trainer.train_on(0, RankData(part))
            after = parameters_of(trainer)
            out[name, drafts] = (metrics, gradients_of(before, after), before)
            if name == "PP2":
                trainer.args.save = str(root / f"save-{drafts}")
                trainer.args.save_hf = str(root / f"hf-{drafts}")
                trainer.save_model(0)
                stop_trainer()
                changes |= {**PP2, "pipeline_model_parallel_size": 1, **TP2SP, "load": trainer.args.save}
                args = trainer_args(path, *READABLE, *PACKED, **changes, finetune=False)
                resumed = parameters_of(start_trainer(args, rank, world_size, port))
                out["resumed", drafts] = [name for name in after if not torch.equal(after[name], resumed[name])]
            stop_trainer()
    dist.destroy_process_group()
    return out


def draft_loss(model, layers) -> torch.Tensor:
    """mtp_loss in float64: minus the mean log-prob of the response tokens that draft layers predict.

    Args:
        model: the float64 model itself.
        layers: per depth: (hidden states [1, T, D] before it, embedded tokens [1, T, D] ahead) -> hidden states.
    """
    embedding, output = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    batch, total = batch_of(), torch.zeros((), dtype=torch.float64)
    num_tokens = sum(max(sum(mask), 1) for mask in batch["loss_masks"])
    for tokens, count, mask in zip(batch["tokens"], batch["response_lengths"], batch["loss_masks"], strict=True):
        ids = torch.tensor(tokens)
        hidden = model.model(input_ids=ids[None]).last_hidden_state.detach()
        for k, layer in enumerate(layers, 1):
            ahead = torch.cat([ids[k:], ids.new_zeros(k)])[: len(ids)]
            hidden = layer(hidden, embedding[ahead][None])
            log_probs = (hidden[0] @ output.T).log_softmax(-1)
            for j in range(count):
                place = len(ids) - count + j - 1 - k
                if mask[j] and place >= 0:
                    total = total - log_probs[place, ids[place + 1 + k]] / num_tokens / len(layers)
    return total


def reference(path: str) -> tuple[float, dict[str, torch.Tensor]]:
    """mtp_loss, and the gradients of the draft layers, in float64."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

    tensors = {name: t.double() for name, t in load_file(Path(path) / "model.safetensors").items()}
    config = json.loads((Path(path) / "config.json").read_text()) | {"model_type": "qwen2"}
    model = Qwen2ForCausalLM(Qwen2Config(**config)).double()
    model.load_state_dict({name: t for name, t in tensors.items() if "mtp" not in name})
    prefix = "model.mtp_layers.{}."
    parts = []
    for depth in range(DEPTHS):
        layer = Qwen2Model(Qwen2Config(**config | {"num_hidden_layers": 1, "layer_types": None})).double()
        own = {n.removeprefix(prefix.format(depth)): t for n, t in tensors.items() if prefix.format(depth) in n}
        extra = {n: own.pop(n).requires_grad_() for n in list(own) if n.split(".")[0] in EXTRA}
        state = {f"layers.0.{n}": t for n, t in own.items()} | {"norm.weight": own.pop("final_layernorm.weight")}
        state.pop("layers.0.final_layernorm.weight", None)
        layer.load_state_dict(state | {"embed_tokens.weight": model.model.embed_tokens.weight.detach()})
        parts.append((layer, extra))

    def run(layer, extra, hidden, ahead):
        normed = [
            torch.nn.functional.rms_norm(x, (WIDTH,), extra[f"{name}.weight"], config["rms_norm_eps"])
            for name, x in (("hidden_layernorm", hidden), ("token_layernorm", ahead))
        ]
        return layer(inputs_embeds=torch.cat(normed, -1) @ extra["input_proj.weight"].T).last_hidden_state

    total = draft_loss(model, [partial(run, *part) for part in parts])
    (SCALE * total).backward()
    gradients = {}
    for depth, (layer, extra) in enumerate(parts):
        for name, p in layer.named_parameters():
            name = name.removeprefix("layers.0.") if name != "norm.weight" else "final_layernorm.weight"
            if "embed_tokens" not in name:
                gradients[prefix.format(depth) + name] = p.grad
        gradients |= {prefix.format(depth) + name: t.grad for name, t in extra.items()}
    return total.item(), gradients


EXTRA = ("input_proj", "token_layernorm", "hidden_layernorm")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path, root = str(tmp_path_factory.mktemp("mimo")), tmp_path_factory.mktemp("root")
    save_mimo(path)
    ranks = []
    for size in (1, 2):
        fitting = {name: layout for name, (world, layout) in LAYOUTS.items() if world == size}
        ranks += run_world(megatron, size, path, fitting, root)
    return path, reference(path), ranks, root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draft_layers_equal_a_plain_model_and_leave_the_policy_alone(results, layout):
    path, (loss, wanted), ranks, _ = results
    checkpoint = load_file(Path(path) / "model.safetensors")
    largest = max(g.abs().max().item() for g in wanted.values())
    found = [rank for rank in ranks if (layout, True) in rank]
    assert found
    for rank in found:
        metrics, gradients, before = rank[layout, True]
        plain_metrics, plain, _ = rank[layout, False]
        assert before.keys() == checkpoint.keys()
        assert all(torch.equal(before[name], value) for name, value in checkpoint.items())
        assert metrics["train/mtp_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["train/loss"] == plain_metrics["train/loss"] and "train/mtp_loss" not in plain_metrics
        assert wanted.keys() | plain.keys() == gradients.keys()
        for name, gradient in wanted.items():
            assert (gradients[name] - gradient).abs().max().item() < 1e-5 * largest, name
        for name, gradient in plain.items():
            assert torch.equal(gradients[name], gradient), name


def test_they_are_saved_resumed_in_another_layout_and_kept(results):
    path, _, ranks, root = results
    found = [rank for rank in ranks if ("resumed", True) in rank]
    assert found
    for rank in found:
        assert rank["resumed", True] == [] == rank["resumed", False]
    checkpoint = load_file(Path(path) / "model.safetensors")
    drafts = {name: t for name, t in checkpoint.items() if "mtp" in name}
    for trained in (False, True):
        directory = root / f"hf-{trained}"
        index = json.loads((directory / "model.safetensors.index.json").read_text()) if not trained else {}
        written = load_file(directory / ("model.safetensors" if trained else index["weight_map"][next(iter(drafts))]))
        assert (set(index["weight_map"]) if index else written.keys()) == checkpoint.keys()
        assert all(torch.equal(written[name], t) for name, t in drafts.items()) != trained
