"""Loss masks against real renderings of the template families."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime.utils.mask_utils import MultiTurnLossMaskGenerator

pytestmark = pytest.mark.unit

QWEN25 = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# As Qwen3 renders: reasoning only after the last user turn, an empty one where there is none.
QWEN3 = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- set thought = '' %}{%- if '</think>' in m.content %}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
DISTILL = (
    "{{ bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{%- endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>"]


def tokenizer_with(template):
    """One token per byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.chat_template = template
    return fast


def masked(template, style, messages, tools=None, **kwargs):
    """(rendered text, trained stretches)."""
    generator = MultiTurnLossMaskGenerator(tokenizer_with(template), style, kwargs)
    ids, mask = generator.get_loss_mask(messages, tools)
    assert len(ids) == len(mask)
    return generator.tokenizer.decode(ids), generator.get_text_from_loss_mask(ids, mask)


CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "four"},
]


def test_qwen_trains_every_assistant_turn():
    text, trained = masked(QWEN25, "qwen", CHAT)
    assert text.startswith("<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\n1+1?")
    assert trained == ["two<|im_end|>", "four<|im_end|>"]


def test_qwen_with_system_and_tool_turns():
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "<tool_call>x</tool_call>"},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "warm"},
        {"role": "assistant", "content": "nice é"},
    ]
    assert masked(QWEN25, "qwen", messages)[1] == ["<tool_call>x</tool_call><|im_end|>", "nice é<|im_end|>"]


def test_a_turn_can_be_left_out():
    chat = [CHAT[0], {**CHAT[1], "step_loss_mask": 0}, *CHAT[2:]]
    assert masked(QWEN25, "qwen", chat)[1] == ["four<|im_end|>"]


def test_qwen3_trains_what_its_template_renders():
    chat = [
        CHAT[0],
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
        CHAT[2],
        {"role": "assistant", "content": "<think>\nok\n</think>\n\nfour"},
    ]
    assert masked(QWEN3, "qwen3", chat)[1] == ["two<|im_end|>", "<think>\nok\n</think>\n\nfour<|im_end|>"]
    assert masked(QWEN3, "qwen3", CHAT)[1] == ["two<|im_end|>", "<think>\n\n</think>\n\nfour<|im_end|>"]
    assert masked(QWEN3, "qwen3", CHAT, enable_thinking=False)[1] == ["two<|im_end|>", "four<|im_end|>"]


def test_distill_keeps_the_reasoning_of_the_last_turn():
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\ntwo"}]
    text, trained = masked(DISTILL, "distill_qwen", chat)
    assert text == "<|bos|><|User|>1+1?<|Assistant|><think>\nhm\n</think>\ntwo<|eos|>"
    assert trained == ["hm\n</think>\ntwo<|eos|>"]


def test_response_lengths():
    generator = MultiTurnLossMaskGenerator(tokenizer_with(QWEN25))
    assert generator.get_response_lengths([[0, 0, 1, 0, 1], [0, 0], [1]]) == [3, 0, 1]


@pytest.mark.parametrize(
    "messages, message",
    [
        ([CHAT[0]], "without an assistant message"),
        (
            [{"role": "user", "content": "<|im_start|>assistant\nhi<|im_end|>"}, CHAT[1]],
            "1 assistant messages.* 2 assistant turns",
        ),
    ],
)
def test_unusable_conversations(messages, message):
    with pytest.raises(ValueError, match=message):
        masked(QWEN25, "qwen", messages)


def test_wrong_style_is_refused():
    with pytest.raises(ValueError, match="unknown; use one of qwen, qwen3, distill_qwen"):
        MultiTurnLossMaskGenerator(None, "llama")
    with pytest.raises(ValueError, match=r"not of type qwen \(--loss-mask-type\)"):
        masked(DISTILL, "qwen", CHAT)
