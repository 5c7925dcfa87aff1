"""Prompt data: rows, slices, errors, filters, chat template, order."""

import random
import tracemalloc

import pytest

from slime.utils.data import Dataset
from slime.utils.processing_utils import load_tokenizer
from slime.utils.rows import DataError, JsonlRows, split_path
from tests.data.support import write_jsonl

pytestmark = pytest.mark.unit


def rows(count):
    return [{"input": f"w{i % 7} w{i % 5}", "label": i, "metadata": {"i": i}} for i in range(count)]


def ids(dataset):
    return [sample.metadata["i"] for sample in dataset]


def test_rows_become_samples(tmp_path):
    dataset = Dataset(write_jsonl(tmp_path / "a.jsonl", rows(3)), label_key="label")
    assert len(dataset) == 3
    assert [s.prompt for s in dataset] == ["w0 w0", "w1 w1", "w2 w2"]
    assert [s.label for s in dataset] == ["0", "1", "2"]
    assert dataset[1].metadata == {"i": 1}
    assert [s.prompt for s in dataset.samples[1:]] == ["w1 w1", "w2 w2"]


@pytest.mark.parametrize(
    "suffix, expected",
    [
        ("", range(10)),
        ("@[2:5]", range(2, 5)),
        ("@[-3:]", range(7, 10)),
        ("@[:4]", range(4)),
        ("@[:-8]", range(2)),
        ("@[8:99]", range(8, 10)),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices(tmp_path, suffix, expected, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, rows(10))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows(10)), path, row_group_size=3)
    assert ids(Dataset(f"{path}{suffix}")) == list(expected)


def test_split_path_refuses_half_a_slice():
    assert split_path("a/b.jsonl@[1:-2]") == ("a/b.jsonl", slice(1, -2))
    with pytest.raises(DataError, match=r"path@\[start:stop\]"):
        split_path("a.jsonl@[5]")


def test_blank_lines_and_missing_final_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"input": "a"}\n\n   \n{"input": "b"}')
    dataset = Dataset(str(path))
    assert [s.prompt for s in dataset] == ["a", "b"]
    assert dataset.rows.where(1) == f"{path}:5"


def test_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input": "a"}\n{"input": "b"}\n', encoding="utf-8-sig")
    assert [s.prompt for s in Dataset(str(path))] == ["a", "b"]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"input": "x"', r"a.jsonl:3: not valid JSON"),
        ('["x"]', r"a.jsonl:3: a row must be a JSON object, this is a list"),
        ('{"question": "x"}', r"a.jsonl:3: there is no 'input' \(--input-key\); the row has \['question'\]"),
        ('{"input": "x"}', r"a.jsonl:3: there is no 'label' \(--label-key\)"),
        ('{"input": null, "label": 1}', r"a.jsonl:3: 'input' \(--input-key\) is null"),
        ('{"input": 5, "label": 1}', r"a.jsonl:3: 'input' must be a string or a list of messages, not 5"),
        ('{"input": "x", "label": 1, "metadata": [1]}', r"a.jsonl:3: 'metadata' \(--metadata-key\) must be an object"),
        ('{"input": "x", "label": 1, "tools": "{"}', r"a.jsonl:3: 'tools' is not valid JSON"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path, line, message):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "a", "label": 1}, "", line])
    with pytest.raises(DataError, match=message):
        Dataset(path, label_key="label", tool_key="tools")


def test_other_file_errors(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        Dataset(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"must be .jsonl or .parquet"):
        (tmp_path / "a.csv").write_text("x")
        Dataset(str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match="no rows"):
        Dataset(write_jsonl(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match=r"a.jsonl@\[7:\]: no rows \(the file has 3\)"):
        Dataset(write_jsonl(tmp_path / "a.jsonl", rows(3)) + "@[7:]")
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="not a readable parquet"):
        Dataset(str(tmp_path / "a.parquet"))


def test_chat_template_tools_and_kwargs(tmp_path, tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir)
    row = {"input": [{"role": "user", "content": "how many apples"}], "tools": '[{"name": "add"}]'}
    path = write_jsonl(tmp_path / "a.jsonl", [row, {"input": "how many pens"}])
    dataset = Dataset(path, tokenizer, tool_key="tools", apply_chat_template=True)
    assert dataset[0].prompt == "<|im_start|> user how many apples <|im_end|> <|im_start|> assistant "
    assert dataset[0].metadata["tools"] == [{"name": "add"}]
    assert dataset[1].prompt == "<|im_start|> user how many pens <|im_end|> <|im_start|> assistant "
    assert Dataset(path, tokenizer)[0].prompt == row["input"]


def test_long_prompts_are_dropped(tmp_path, tiny_model_dir, caplog):
    tokenizer = load_tokenizer(tiny_model_dir)
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "a " * n, "metadata": {"i": n}} for n in range(1, 2100, 7)])
    dataset = Dataset(path, tokenizer, 50)
    assert ids(dataset) == list(range(1, 51, 7))
    assert "dropped 292 of 300 prompts longer than 50 tokens" in caplog.text
    with pytest.raises(DataError, match="no prompt left"):
        Dataset(path, tokenizer, 0)


def test_shuffle_is_that_of_the_contract(tmp_path):
    dataset = Dataset(write_jsonl(tmp_path / "a.jsonl", rows(20)), seed=7)
    dataset.shuffle(0)
    first = ids(dataset)
    dataset.shuffle(3)
    random.seed(7 + 3)
    expected = list(range(20))
    random.shuffle(expected)
    assert ids(dataset) == expected != first
    dataset.shuffle(0)
    assert ids(dataset) == first


def test_multimodal_columns_travel(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "<image> what", "pic": "a.png"}])
    dataset = Dataset(path, multimodal_keys={"image": "pic"})
    assert dataset[0].multimodal_inputs == {"image": ["a.png"]}


def test_rows_are_not_held_as_objects(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "x" * 1000}] * 5000)
    tracemalloc.start()
    found = JsonlRows(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 5000 and peak < 1_000_000
