"""What the front lets through to SGLang's scheduler, which ends where a push is not what it expects."""

from multiprocessing.reduction import ForkingPickler

import pytest
import torch

pytest.importorskip("orjson", reason="a dependency of SGLang")

from slime.backends.sglang_utils.asgi import Refused
from slime.backends.sglang_utils.payloads import check_payload, check_shapes, checkpoint_shapes
from tests.conformance.requests import bucket, encode

pytestmark = pytest.mark.unit
SHAPES = {"a.weight": (4, 3), "b.weight": (5,)}
A, B = torch.zeros(4, 3), torch.zeros(5)


class Evil:
    def __reduce__(self):
        return (print, ("this must never run",))


def test_what_trainers_send_passes():
    check_payload(encode([("a.weight", A), ("b.weight", B), ("unknown", B)]), None, SHAPES)
    check_payload(encode([["a.weight", torch.nn.Parameter(A)]]), None, SHAPES)
    check_payload(encode(bucket({"a.weight": A, "b.weight": B})), "flattened_bucket", SHAPES)
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        flat = torch.empty(17).share_memory_()
        shared = encode(bucket({"a.weight": A, "b.weight": B}, flat), ForkingPickler)
        check_payload(shared, "flattened_bucket", SHAPES)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


@pytest.mark.parametrize(
    "payload, load_format, words",
    [
        (5, None, "base64 string"),
        ("%%%", None, "not base64"),
        ("AAAA", None, "cannot be unpickled"),
        (encode("text"), None, "list of (name, tensor)"),
        (encode([("a.weight", 1)]), None, "list of (name, tensor)"),
        (encode([("a.weight", B)]), None, "a.weight: shape (5,) given, the model has (4, 3)"),
        (encode([("a.weight", A)]), "flattened_bucket", "flattened_tensor"),
        (encode(bucket({"a.weight": A.T.contiguous()})), "flattened_bucket", "shape (3, 4) given"),
        (encode({"flattened_tensor": 1, "metadata": []}), "flattened_bucket", "flattened_tensor"),
    ],
)
def test_what_would_end_the_scheduler_is_refused(payload, load_format, words):
    with pytest.raises(Refused) as refused:
        check_payload(payload, load_format, SHAPES)
    assert words in str(refused.value)


def test_nothing_in_a_payload_is_called(capsys):
    check_payload(encode([("a.weight", A), ("x", Evil())]), None, SHAPES)  # SGLang's own unpickler refuses it
    assert capsys.readouterr().out == ""


def test_shapes_of_a_checkpoint(tiny_model_dir):
    shapes = checkpoint_shapes(tiny_model_dir)
    assert shapes["model.embed_tokens.weight"] == (128, 64) and shapes["model.norm.weight"] == (64,)
    assert checkpoint_shapes("/nowhere") == {}
    check_shapes([("model.norm.weight", [64]), ("other", [1])], shapes)
    with pytest.raises(Refused, match=r"shape \(63,\) given, the model has \(64,\)"):
        check_shapes([("model.norm.weight", [63])], shapes)
