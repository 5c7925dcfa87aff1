"""What /generate answers: the same requests and assertions for every engine, against plain transformers."""

import itertools
import time

import pytest
import torch

from tests.conformance.requests import (
    EOS,
    LONG_PROMPT,
    TOLERANCE,
    error_to,
    output_logprobs,
    prompts,
    reference_logprobs,
    start_long,
)

pytestmark = pytest.mark.integration


def test_fields_of_a_reply(server):
    ids = prompts(1)[0]
    reply = server.generate(ids, max_new_tokens=5, temperature=0, ignore_eos=True)
    meta = reply["meta_info"]
    assert isinstance(reply["text"], str) and len(reply["output_ids"]) == 5
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(ids), 5, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["weight_version"] == "default"
    assert meta["input_token_logprobs"] == []
    assert [len(entry) for entry in meta["output_token_logprobs"]] == [3] * 5
    assert meta["e2e_latency"] > 0 and isinstance(meta["id"], str)
    without = server.ok("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})
    assert "output_token_logprobs" not in without["meta_info"]


def test_greedy_is_what_transformers_generates(server, hf_model):
    batch = prompts(6)
    replies = server.generate(batch, max_new_tokens=20, temperature=0, ignore_eos=True)
    for ids, reply in zip(batch, replies, strict=True):
        with torch.inference_mode():
            expected = hf_model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=20, min_new_tokens=20, pad_token_id=0
            )
        assert reply["output_ids"] == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 50}])
def test_logprobs_equal_a_teacher_forced_forward(server, hf_model, params):
    batch = prompts(6, seed=1)
    replies = server.generate(batch, max_new_tokens=24, ignore_eos=True, **params)
    for ids, reply in zip(batch, replies, strict=True):
        assert error_to(hf_model, ids, reply, params.get("temperature", 1.0)) <= TOLERANCE


def test_top_p_and_top_k_bound_what_is_sampled(server, hf_model):
    ids = prompts(1, seed=2)[0]
    with torch.inference_mode():
        best = set(hf_model(torch.tensor([ids])).logits[0, -1].topk(2).indices.tolist())
    replies = server.generate([ids] * 8, max_new_tokens=1, ignore_eos=True, top_k=2)
    assert {reply["output_ids"][0] for reply in replies} <= best
    greedy = server.generate(ids, max_new_tokens=4, temperature=0, ignore_eos=True)["output_ids"]
    assert server.generate(ids, max_new_tokens=4, top_k=1, ignore_eos=True)["output_ids"] == greedy


def test_input_logprobs(server, hf_model):
    ids = prompts(1, seed=2, low=50)[0]
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    for start in (0, 7):
        # The second time the prompt is cached, which must not cost log-probs.
        reply = server.ok("/generate", {**body, "logprob_start_len": start})
        entries = reply["meta_info"]["input_token_logprobs"]
        assert [token for _, token, *_ in entries] == ids[start:]
        assert entries[0][0] is None
        scored = [(p, logprob) for p, (logprob, *_) in enumerate(entries[1:], start=start + 1)]
        expected = reference_logprobs(hf_model, ids)
        assert max(abs(logprob - expected[p - 1].item()) for p, logprob in scored) <= TOLERANCE


def test_prompt_only(server):
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0}
    reply = server.ok("/generate", {**body, "sampling_params": {"max_new_tokens": 0, "temperature": 0}})
    assert reply["output_ids"] == [] and reply["meta_info"]["completion_tokens"] == 0
    assert len(reply["meta_info"]["input_token_logprobs"]) == 3
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_top_logprobs(server):
    ids = prompts(1, seed=3)[0]
    body = {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 3}
    reply = server.ok("/generate", {**body, "sampling_params": {"max_new_tokens": 4, "temperature": 0}})
    top = reply["meta_info"]["output_top_logprobs"]
    assert [len(entries) for entries in top] == [3] * 4
    for (logprob, token, *_), entries in zip(reply["meta_info"]["output_token_logprobs"], top, strict=True):
        assert entries[0][1] == token and abs(entries[0][0] - logprob) <= TOLERANCE
        assert entries[0][0] >= entries[1][0] >= entries[2][0]


def test_what_a_token_was_sampled_among(server, hf_model):
    """The smallest set of mass top_p among the top_k, and the token's log-prob within it."""
    ids = prompts(1, seed=4)[0]
    params = {"max_new_tokens": 16, "temperature": 0.8, "top_p": 0.6, "top_k": 20, "ignore_eos": True}
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": params}
    reply = server.ok("/generate", {**body, "return_sampling_mask": True})
    meta, tokens = reply["meta_info"], reply["output_ids"]
    with torch.inference_mode():
        logits = hf_model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].double() / 0.8
    masks, among = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    for row, token, kept, logprob in zip(logits, tokens, masks, among, strict=True):
        probs, order = row.softmax(-1).sort(descending=True)
        size = min(20, int((probs.cumsum(0) - probs < 0.6).sum()))
        assert token in kept and sorted(kept) == sorted(order[:size].tolist())
        assert logprob == pytest.approx((row[token] - row[kept].logsumexp(0)).item(), abs=TOLERANCE)
    assert any(len(kept) > 1 for kept in masks)
    assert error_to(hf_model, ids, reply, 0.8) <= TOLERANCE  # the plain ones stay those of the whole vocabulary
    assert "output_token_sampling_mask" not in server.ok("/generate", body)["meta_info"]


def test_without_a_seed_samples_differ(server):
    ids = prompts(1, seed=5)[0]
    outputs = {tuple(server.generate(ids, max_new_tokens=12, ignore_eos=True)["output_ids"]) for _ in range(4)}
    assert len(outputs) == 4


def test_n_samples(server):
    ids, other = prompts(2, seed=6, low=40)
    body = {"input_ids": ids, "sampling_params": {"n": 4, "max_new_tokens": 10, "ignore_eos": True}}
    replies = server.ok("/generate", body)
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 4
    pairs = server.ok("/generate", {**body, "input_ids": [ids, other], "sampling_params": {"n": 2}})
    assert [reply["meta_info"]["prompt_tokens"] for reply in pairs] == [len(ids)] * 2 + [len(other)] * 2


def test_prefix_cache(server):
    ids = prompts(1, seed=7, low=60)[0]
    first = server.generate(ids, max_new_tokens=8, temperature=0, ignore_eos=True)
    again = server.generate(ids, max_new_tokens=8, temperature=0, ignore_eos=True)
    assert first["meta_info"]["cached_tokens"] == 0
    assert len(ids) - 17 < again["meta_info"]["cached_tokens"] < len(ids)
    assert again["output_ids"] == first["output_ids"]
    assert (output_logprobs(again) - output_logprobs(first)).abs().max() <= TOLERANCE
    server.ok("/flush_cache")
    assert server.generate(ids, max_new_tokens=1)["meta_info"]["cached_tokens"] == 0


def test_text_and_batch_forms(server):
    reply = server.ok("/generate", {"text": "what is 3 + 4 ?", "sampling_params": {"max_new_tokens": 4}})
    assert reply["meta_info"]["prompt_tokens"] == 6
    replies = server.ok("/generate", {"text": ["what is 3", "now"], "sampling_params": {"max_new_tokens": 2}})
    assert [r["meta_info"]["prompt_tokens"] for r in replies] == [3, 1]
    one = server.ok("/generate", {"input_ids": [[5, 6]], "sampling_params": {"max_new_tokens": 1}})
    assert isinstance(one, list) and len(one) == 1
    params = [{"max_new_tokens": 2, "ignore_eos": True}, {"max_new_tokens": 4, "ignore_eos": True}]
    replies = server.ok("/generate", {"input_ids": [[5, 6], [7]], "sampling_params": params, "rid": ["a", "b"]})
    assert [len(r["output_ids"]) for r in replies] == [2, 4]
    assert [r["meta_info"]["id"] for r in replies] == ["a", "b"]


def test_stop_token(server):
    ids = prompts(1, seed=8)[0]
    target = server.generate(ids, max_new_tokens=8, temperature=0, ignore_eos=True)["output_ids"][0]
    stopped = server.generate(ids, max_new_tokens=8, temperature=0, stop_token_ids=[target])
    assert stopped["output_ids"] == [target]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": target}
    late = server.generate(ids, temperature=0, max_new_tokens=8, min_new_tokens=5, stop_token_ids=[target])
    assert target not in late["output_ids"][:5] and len(late["output_ids"]) >= 5


def test_stop_string(server):
    ids = prompts(1, seed=9)[0]
    whole = server.generate(ids, max_new_tokens=16, temperature=0, ignore_eos=True)
    words = whole["text"].split()
    stop = f"{words[1]} {words[2]}"
    end = next(i for i in range(1, 16) if f"{words[i - 1]} {words[i]}" == stop)  # greedy output repeats itself
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    stopped = server.generate(ids, **params, stop=["never this", stop])
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["output_ids"] == whole["output_ids"][: end + 1]
    assert stopped["text"].split() == words[: end - 1]
    kept = server.generate(ids, **params, stop=stop, no_stop_trim=True)
    assert kept["text"].split() == words[: end + 1]


def test_end_token(server):
    """It is rare in a random model: many samples hold one."""
    params = {"max_new_tokens": 400, "n": 8}
    replies = server.ok("/generate", {"input_ids": [5, 6], "sampling_params": {**params, "ignore_eos": True}})
    assert any(EOS in reply["output_ids"] for reply in replies)
    assert {len(reply["output_ids"]) for reply in replies} == {400}
    replies = server.ok("/generate", {"input_ids": [5, 6], "sampling_params": params})
    stopped = [r for r in replies if r["meta_info"]["finish_reason"]["type"] == "stop"]
    assert stopped
    for reply in stopped:
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
        assert reply["output_ids"].index(EOS) == len(reply["output_ids"]) - 1
        assert "<|im_end|>" not in reply["text"]


def test_streams_are_cumulative(server):
    body = {"input_ids": prompts(1, seed=10)[0], "return_logprob": True}
    chunks = server.stream({**body, "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}})
    ids = [chunk["output_ids"] for chunk in chunks]
    assert all(b[: len(a)] == a for a, b in itertools.pairwise(ids)) and len(ids[-1]) == 12
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(chunks))
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    batch = server.stream({"input_ids": [[5, 6], [7]], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}})
    assert {chunk["index"] for chunk in batch} == {0, 1}


def test_requests_run_together(server, background, hf_model):
    batch = prompts(12, seed=11)
    futures = [background.generate(ids, max_new_tokens=20, ignore_eos=True) for ids in batch]
    for ids, future in zip(batch, futures, strict=True):
        assert error_to(hf_model, ids, future.result(60)) <= TOLERANCE


def test_abort_returns_what_there_is(server, background, hf_model):
    first, second = (start_long(server, background, rid) for rid in ("one", "two"))
    server.ok("/abort_request", {"rid": "one"})
    reply = first.result(30)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < 400
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])
    assert error_to(hf_model, LONG_PROMPT, reply) <= TOLERANCE
    assert not second.done()
    server.ok("/abort_request", {"abort_all": True})
    assert second.result(30)["meta_info"]["finish_reason"]["type"] == "abort"
    server.ok("/abort_request", {"rid": "nobody"})


def test_a_partial_output_continues_from_its_tokens(server, hf_model):
    ids = prompts(1, seed=12)[0]
    whole = server.generate(ids, max_new_tokens=20, temperature=0, ignore_eos=True)["output_ids"]
    rest = server.generate(ids + whole[:9], max_new_tokens=11, temperature=0, ignore_eos=True)
    assert rest["output_ids"] == whole[9:]


@pytest.mark.parametrize(
    "body, words",
    [
        ({}, "text"),
        ({"input_ids": []}, ""),
        ({"input_ids": [5, 128]}, "128"),
        ({"input_ids": [[5], [-1]]}, "-1"),
        ({"input_ids": [10**12]}, "vocabulary"),
        ({"input_ids": ["a"]}, "integers"),
        ({"input_ids": list(range(4, 100)) * 6}, "context"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [5], "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens"),
        ({"input_ids": [5], "sampling_params": {"no_such_field": 1}}, "no_such_field"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_input_is_refused_and_harmless(server, body, words):
    assert words in server.error("/generate", body)
    assert server.generate([5, 6], max_new_tokens=1)["meta_info"]["completion_tokens"] == 1


def test_what_is_no_json_is_refused(server):
    assert server.request("/generate", raw=b"{")[0] in (400, 422)
    assert server.request("/generate", raw=b"[1]")[0] in (400, 422)
    assert server.request("/no_such_path")[0] == 404


def test_unknown_top_level_fields_are_ignored(server):
    server.ok("/generate", {"input_ids": [5], "no_such_field": 1, "sampling_params": {"max_new_tokens": 1}})


def test_a_request_that_reaches_the_end_of_the_context(server):
    """512 positions in the model: the output is cut to what fits, or the request is refused as too long."""
    status, reply = server.request(
        "/generate", {"input_ids": prompts(1, low=60)[0], "sampling_params": {"max_new_tokens": 100000}}
    )
    if status == 200:
        assert reply["meta_info"]["finish_reason"]["type"] in ("length", "stop")
        assert reply["meta_info"]["prompt_tokens"] + reply["meta_info"]["completion_tokens"] <= 512
    else:
        assert status == 400


def test_a_client_that_goes_away_frees_its_request(server):
    """The connection is closed in mid-request: the engine stops computing it."""
    import http.client
    import json
    from urllib.parse import urlsplit

    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 450, "ignore_eos": True}}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().readline()
    connection.close()
    deadline = time.monotonic() + 60
    while server.request("/flush_cache", {})[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
