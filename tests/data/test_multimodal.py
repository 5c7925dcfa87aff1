"""Placeholders, media columns and the fields of a request."""

import base64

import pytest

from slime.utils.data import Dataset
from slime.utils.multimodal import place_media, request_fields
from slime.utils.rows import DataError
from tests.data.support import write_jsonl

pytestmark = pytest.mark.unit


def test_placeholders_take_items_in_order():
    messages = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": "first <image> then <image>, hear <audio>"},
        {"role": "user", "content": [{"type": "text", "text": "see <video>"}, {"type": "image"}]},
    ]
    media = {"image": ["a.png", "b.png", "c.png"], "video": ["v.mp4"], "audio": [{"url": "http://x/y.wav"}]}
    system, first, second = place_media(messages, media)
    assert system["content"] == "look"
    assert first["content"] == [
        {"type": "text", "text": "first "},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": " then "},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": ", hear "},
        {"type": "audio", "audio": {"url": "http://x/y.wav"}},
    ]
    assert second["content"] == [
        {"type": "text", "text": "see "},
        {"type": "video", "video": "v.mp4"},
        {"type": "image", "image": "c.png"},
    ]
    assert messages[1]["content"].startswith("first <image>")  # the row itself is not changed
    assert place_media("raw <image> text", {"image": ["a"]}) == "raw <image> text"


@pytest.mark.parametrize(
    "text, items, message",
    [
        ("no place", ["a.png"], "the text has 0 <image> placeholders for 1 image items"),
        ("<image> <image>", ["a.png"], "the text has 2 <image> placeholders for 1 image items"),
        ("<image>", None, "the text has 1 <image> placeholders for 0 image items"),
    ],
)
def test_counts_must_match(tmp_path, text, items, message):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": text, "pics": items}])
    with pytest.raises(DataError, match=rf"a.jsonl:1: 'input': {message} \(--multimodal-keys\)"):
        Dataset(path, multimodal_keys={"image": "pics"})


def test_rows_with_media_are_rendered_and_carried(tmp_path):
    class Tokenizer:
        def apply_chat_template(self, messages, **kwargs):
            parts = messages[0]["content"]
            return parts if isinstance(parts, str) else "".join(p.get("text", "[IMG]") for p in parts)

    rows = [{"input": "what is <image>?", "pics": ["a.png"]}, {"input": "no picture"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    dataset = Dataset(path, Tokenizer(), multimodal_keys={"image": "pics"}, apply_chat_template=True)
    assert dataset[0].prompt == "what is [IMG]?" and dataset[0].multimodal_inputs == {"image": ["a.png"]}
    assert dataset[1].prompt == "no picture" and dataset[1].multimodal_inputs is None
    assert dataset[0].clone().multimodal_inputs == {"image": ["a.png"]}


def test_request_fields(tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG")
    encoded = base64.b64encode(b"\x89PNG").decode()
    items = [str(picture), {"path": str(picture), "bytes": None}, b"\x89PNG", "https://x/a.png", {"image": "a/b+c=="}]
    fields = request_fields({"image": items, "audio": [{"url": "data:audio/wav;base64,AA=="}], "video": []})
    assert fields == {
        "image_data": [f"data:image/png;base64,{encoded}"] * 2 + [encoded, "https://x/a.png", "a/b+c=="],
        "audio_data": ["data:audio/wav;base64,AA=="],
    }
    assert request_fields(None) == {}
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        request_fields({"image": [str(tmp_path / "none.png")]})
    with pytest.raises(ValueError, match="image: nothing usable in an object with the keys"):
        request_fields({"image": [{"x": 1}]})
    with pytest.raises(ValueError, match="image: must be a URL, path"):
        request_fields({"image": [7]})
