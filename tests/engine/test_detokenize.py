import pytest

from slime.engine.detokenize import IncrementalDetokenizer, decode, final_text, find_stop_string
from slime.engine.protocol import Request, SamplingParams
from slime.engine.sequence import Sequence

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token per byte, so characters and stop strings span tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TEXT = "straße 雪 → 🙂 done"


def test_growing_text_never_shows_half_a_character(byte_tokenizer):
    ids = byte_tokenizer(TEXT)["input_ids"]
    growing = IncrementalDetokenizer(byte_tokenizer, SamplingParams())
    texts = [growing.feed(ids[: i + 1]) for i in range(len(ids))]
    assert texts[-1] == TEXT == decode(byte_tokenizer, ids, SamplingParams())
    for text in texts:
        assert TEXT.startswith(text)
    jumps = IncrementalDetokenizer(byte_tokenizer, SamplingParams())
    assert [jumps.feed(ids[:i]) for i in (9, len(ids))][-1] == TEXT


def test_stop_string_over_many_tokens(byte_tokenizer):
    params = SamplingParams(stop=["雪 →", "zzz"])
    prompt = byte_tokenizer("雪 → is in the prompt only")["input_ids"]
    seq = Sequence(Request("r", prompt, params), 0, frozenset(), lambda seq: None)
    for token in byte_tokenizer(TEXT)["input_ids"]:
        seq.token_ids.append(token)
        matched = find_stop_string(byte_tokenizer, seq)
        if matched:
            break
    seq.finish({"type": "stop", "matched": matched})
    assert decode(byte_tokenizer, seq.output_ids, params) == "straße 雪 →"
    assert final_text(byte_tokenizer, seq) == "straße "
    params.no_stop_trim = True
    assert final_text(byte_tokenizer, seq) == "straße 雪 →"
