"""The light tokenizer gives what transformers gives, without importing it."""

import json
import shutil
import subprocess
import sys

import pytest

from slime.utils.processing_utils import LightTokenizer, load_tokenizer

pytestmark = pytest.mark.unit

CHATML = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not thinking|default(true) %}<think></think>{% endif %}{%- endif %}"
)
MESSAGES = [{"role": "user", "content": "how many apples 'é' <b>"}, {"role": "assistant", "content": "3"}]


@pytest.fixture(scope="module")
def byte_level_dir(tmp_path_factory):
    """A byte-level BPE tokenizer as Qwen's, with special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["how many apples does the user have", "the assistant answers 3"] * 10, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    path = tmp_path_factory.mktemp("byte-level")
    fast.save_pretrained(path)
    return str(path)


def both(directory):
    from transformers import AutoTokenizer

    light = load_tokenizer(directory)
    assert isinstance(light, LightTokenizer)
    return light, AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("which", ["tiny_model_dir", "byte_level_dir"])
def test_same_as_transformers(which, request):
    light, full = both(request.getfixturevalue(which))
    texts = ["how many apples ?", " 3 + 4 = 7 . <|im_end|>\n  x", "żółć 你好 🙂", ""]
    for text in texts:
        for special in (True, False):
            assert light.encode(text, add_special_tokens=special) == full.encode(text, add_special_tokens=special)
        ids = full.encode(text)
        for skip in (True, False):
            assert light.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
    assert light(texts)["input_ids"] == full(texts)["input_ids"]
    assert light("how many", return_offsets_mapping=True)["offset_mapping"] == [
        tuple(span) for span in full("how many", return_offsets_mapping=True)["offset_mapping"]
    ]
    for name in ("eos_token", "eos_token_id", "pad_token_id", "unk_token_id", "bos_token_id", "vocab_size"):
        assert getattr(light, name) == getattr(full, name), name
    assert len(light) == len(full)
    assert light.convert_tokens_to_ids(["<|im_end|>", "nonsense"]) == full.convert_tokens_to_ids(
        ["<|im_end|>", "nonsense"]
    )
    assert light.convert_ids_to_tokens([0, 5]) == full.convert_ids_to_tokens([0, 5])
    assert light.all_special_ids == full.all_special_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"tools": [{"n": "<é>"}]},
        {"thinking": False, "add_generation_prompt": True},
    ],
)
def test_same_chat_template(byte_level_dir, options):
    light, full = both(byte_level_dir)
    text = full.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert light.apply_chat_template(MESSAGES, tokenize=False, **options) == text
    assert light.apply_chat_template(MESSAGES, **options) == full.apply_chat_template(
        MESSAGES, return_dict=False, **options
    )


def test_other_classes_and_remote_code_go_to_transformers(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for change in (
        {"tokenizer_class": "LlamaTokenizer"},
        {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
        {"add_bos_token": True},
    ):
        path.write_text(json.dumps({**config, **change}))
        assert LightTokenizer.try_load(str(tmp_path / "m")) is None


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"--hf-checkpoint '{tmp_path}' holds no usable tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.integration
def test_no_heavy_import(tiny_model_dir):
    code = (
        "import sys; from slime.utils.processing_utils import load_tokenizer\n"
        "import slime.rollout.sglang_rollout, slime.rollout.data_source\n"
        f"t = load_tokenizer({tiny_model_dir!r}); t.apply_chat_template([{{'role': 'user', 'content': 'a'}}])\n"
        "print(sorted(m for m in ('torch', 'transformers', 'ray', 'sympy', 'pyarrow') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
