"""Tiny random Qwen3 checkpoints with a word-level tokenizer and a chat template, for tests and benchmarks."""

import torch

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
WORDS = (
    "<pad> <unk> <|im_start|> <|im_end|> system user assistant what is the sum of and ? . , = + - * / ( ) answer "
    "boxed a an to in have has apples pens Tom Ann how many does left now gives buys more"
).split()


def build_tokenizer():
    """Words, the numbers 0-63 and filler words up to 128 entries; text is split on white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = WORDS + [str(n) for n in range(64)]
    words += [f"w{n}" for n in range(128 - len(words))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_model(path: str, seed: int = 0, **overrides) -> None:
    """Write a Hugging Face checkpoint directory; `overrides` go to Qwen3Config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=3,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **overrides}))
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)


def save_tiny_moe(path: str, seed: int = 0, **overrides) -> None:
    """The same with four experts per layer, two of which take each token; `overrides` go to Qwen3MoeConfig."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=3,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **overrides})).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
