"""What /generate answers, against plain transformers, over HTTP."""

import itertools
import json
import random
import socket

import pytest
import torch

pytestmark = pytest.mark.integration

EOS = 3


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 128) for _ in range(rng.randint(low, high))] for _ in range(count)]


def reference_logprobs(model, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [T - 1] of ids[1:] by one forward."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def output_logprobs(reply) -> torch.Tensor:
    entries = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in entries] == reply["output_ids"]
    return torch.tensor([logprob for logprob, _, _ in entries], dtype=torch.float64)


def test_greedy_is_what_transformers_generates(server, hf_model):
    batch = prompts(6)
    replies = server.generate(batch, max_new_tokens=20, temperature=0, ignore_eos=True)
    for ids, reply in zip(batch, replies, strict=True):
        with torch.inference_mode():
            expected = hf_model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=20, min_new_tokens=20, pad_token_id=0
            )
        expected = expected[0, len(ids) :].tolist()
        # transformers bans the end token to reach min_new_tokens; a tiny model never picks it here.
        assert reply["output_ids"] == expected
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_teacher_forced_forward(server, hf_model, temperature):
    batch = prompts(8, seed=1)
    params = {"temperature": temperature, "top_p": 0.9, "top_k": 50, "max_new_tokens": 30, "ignore_eos": True}
    for ids, reply in zip(batch, server.generate(batch, **params), strict=True):
        expected = reference_logprobs(hf_model, ids + reply["output_ids"], temperature)[len(ids) - 1 :]
        assert (output_logprobs(reply) - expected).abs().max() <= 1e-5


def test_input_logprobs(server, hf_model):
    ids = prompts(1, seed=2, low=50)[0]
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
    for start in (0, 7):
        # The second time the prompt is cached, which must not cost log-probs.
        reply = server.ok("/generate", {**body, "logprob_start_len": start})
        entries = reply["meta_info"]["input_token_logprobs"]
        assert reply["output_ids"] == [] and reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert [token for _, token, _ in entries] == ids[start:]
        assert entries.pop(0) == [None, ids[start], None]
        got = torch.tensor([logprob for logprob, _, _ in entries], dtype=torch.float64)
        assert (got - reference_logprobs(hf_model, ids)[start:]).abs().max() <= 1e-5


def test_same_seed_same_tokens_in_any_batch(server):
    batch = prompts(12, seed=3)
    params = [{"sampling_seed": 100 + i, "max_new_tokens": 24, "ignore_eos": True, "top_p": 0.95} for i in range(12)]
    params[5]["top_p"] = 1.0
    together = server.ok("/generate", {"input_ids": batch, "sampling_params": params, "return_logprob": True})
    for i in (0, 5, 11):
        alone = server.generate(batch[i], **params[i])
        assert alone["output_ids"] == together[i]["output_ids"]
        assert (output_logprobs(alone) - output_logprobs(together[i])).abs().max() <= 1e-5


def test_a_continued_request_draws_the_same_numbers(server):
    """A partial output sent back as prompt continues as if it had never stopped."""
    ids = prompts(1, seed=4)[0]
    whole = server.generate(ids, sampling_seed=5, max_new_tokens=30, ignore_eos=True)["output_ids"]
    rest = server.generate(ids + whole[:11], sampling_seed=5, max_new_tokens=19, ignore_eos=True)["output_ids"]
    assert whole[:11] + rest == whole


def test_without_a_seed_samples_differ(server):
    ids = prompts(1, seed=5)[0]
    outputs = {tuple(server.generate(ids, max_new_tokens=12, ignore_eos=True)["output_ids"]) for _ in range(4)}
    assert len(outputs) == 4


def test_n_samples(server):
    ids, other = prompts(2, seed=6, low=40)
    body = {
        "input_ids": ids,
        "sampling_params": {"n": 4, "max_new_tokens": 10, "ignore_eos": True, "sampling_seed": 1},
    }
    replies = server.ok("/generate", body)
    assert len({tuple(r["output_ids"]) for r in replies}) == 4
    assert sum(r["meta_info"]["cached_tokens"] > 0 for r in replies) == 3
    assert [r["output_ids"] for r in server.ok("/generate", body)] == [r["output_ids"] for r in replies]
    params = [{"n": 2, "max_new_tokens": 3}, {"n": 1, "max_new_tokens": 3}]
    assert len(server.ok("/generate", {"input_ids": [ids, other], "sampling_params": params})) == 3


def test_prefix_cache(server):
    ids = prompts(1, seed=7, low=60)[0]
    first = server.generate(ids, max_new_tokens=8, temperature=0, ignore_eos=True)
    again = server.generate(ids, max_new_tokens=8, temperature=0, ignore_eos=True)
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == (len(ids) - 1) // 16 * 16
    assert again["output_ids"] == first["output_ids"]
    assert (output_logprobs(again) - output_logprobs(first)).abs().max() <= 1e-5
    server.ok("/flush_cache")
    assert server.generate(ids, max_new_tokens=1)["meta_info"]["cached_tokens"] == 0


def test_text_and_batch_forms(server):
    reply = server.ok("/generate", {"text": "what is 3 + 4 ?", "sampling_params": {"max_new_tokens": 4}})
    assert reply["meta_info"]["prompt_tokens"] == 6
    replies = server.ok("/generate", {"text": ["what is 3", "now"], "sampling_params": {"max_new_tokens": 2}})
    assert [r["meta_info"]["prompt_tokens"] for r in replies] == [3, 1]
    assert "output_token_logprobs" not in reply["meta_info"]
    one = server.ok("/generate", {"input_ids": [[5, 6]], "sampling_params": {"max_new_tokens": 1}})
    assert isinstance(one, list) and len(one) == 1


def find_greedy(server, ids, length=24):
    return server.generate(ids, max_new_tokens=length, temperature=0, ignore_eos=True)


def sampled(server, ids):
    """A sampled output with distinct neighbours, and the parameters that reproduce it."""
    params = {"sampling_seed": 9, "max_new_tokens": 16, "ignore_eos": True}
    return server.generate(ids, **params), params


def test_stop_token_and_string(server):
    ids = prompts(1, seed=8)[0]
    reply, params = sampled(server, ids)
    target = reply["output_ids"][6]
    first = reply["output_ids"].index(target)
    stopped = server.generate(ids, **params, stop_token_ids=[target])
    assert stopped["output_ids"] == reply["output_ids"][: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": target}
    words = reply["text"].split()
    stop = f"{words[5]} {words[6]}"
    stopped = server.generate(ids, **params, stop=["never this", stop])
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["output_ids"] == reply["output_ids"][:7]
    assert stopped["text"].split() == words[:5]
    kept = server.generate(ids, **params, stop=stop, no_stop_trim=True)
    assert kept["text"].split() == words[:7]


def test_end_token_min_new_tokens_and_special_tokens(server):
    """The end token is made likely by stopping on what greedy decoding picks."""
    ids = prompts(1, seed=9)[0]
    greedy = find_greedy(server, ids)
    target = greedy["output_ids"][0]
    early = server.generate(ids, temperature=0, max_new_tokens=8, stop_token_ids=[target])
    assert early["output_ids"] == [target]
    late = server.generate(ids, temperature=0, max_new_tokens=8, min_new_tokens=5, stop_token_ids=[target])
    assert target not in late["output_ids"][:5] and len(late["output_ids"]) >= 5
    texts = [
        server.generate([5, 6], sampling_seed=1, max_new_tokens=400, ignore_eos=True, skip_special_tokens=skip)["text"]
        for skip in (True, False)
    ]
    assert "<|im_end|>" not in texts[0] and "<|im_end|>" in texts[1]


def test_eos_stops_unless_ignored(server):
    params = {"sampling_seed": 1, "max_new_tokens": 400}
    free = server.generate([5, 6], **params, ignore_eos=True)["output_ids"]
    assert EOS in free
    stopped = server.generate([5, 6], **params)
    assert stopped["output_ids"] == free[: free.index(EOS) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert "<|im_end|>" not in stopped["text"]


def test_streams_are_cumulative(server):
    ids = prompts(1, seed=10)[0]
    body = {"input_ids": ids, "return_logprob": True}
    body["sampling_params"] = {"max_new_tokens": 20, "sampling_seed": 3, "ignore_eos": True}
    chunks = server.stream(body)
    whole = server.ok("/generate", body)
    assert chunks[-1]["output_ids"] == whole["output_ids"] and chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    for before, after in itertools.pairwise(chunks):
        count = before["meta_info"]["completion_tokens"]
        assert before["meta_info"]["finish_reason"] is None
        assert before["output_ids"] == after["output_ids"][:count]
        assert after["text"].startswith(before["text"])
    many = server.stream({"input_ids": [ids, ids[:5]], "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}})
    assert {c["index"] for c in many if c["meta_info"]["finish_reason"]} == {0, 1}


def test_top_logprobs(server):
    body = {"input_ids": [7, 8, 9], "return_logprob": True, "top_logprobs_num": 3}
    reply = server.ok("/generate", {**body, "sampling_params": {"max_new_tokens": 4, "temperature": 0}})
    for (logprob, token, _), top in zip(
        reply["meta_info"]["output_token_logprobs"], reply["meta_info"]["output_top_logprobs"], strict=False
    ):
        assert len(top) == 3 and top[0][1] == token and top[0][0] == pytest.approx(logprob)


def test_kept_tokens_and_log_probs_over_them(server, hf_model):
    params = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.6, "ignore_eos": True}
    body = {"input_ids": [7, 8, 9], "return_logprob": True, "return_sampling_mask": True, "sampling_params": params}
    reply = server.ok("/generate", body)
    meta, ids = reply["meta_info"], [7, 8, 9, *reply["output_ids"]]
    kept, among = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    with torch.inference_mode():
        logits = hf_model(torch.tensor([ids])).logits[0, 2:-1].double() / 0.8
    assert len(kept) == 12
    for row, token, some, got, whole in zip(
        logits, reply["output_ids"], kept, among, output_logprobs(reply), strict=True
    ):
        assert token in some and row.softmax(-1)[some].sum() >= 0.6 - 1e-6
        assert got == pytest.approx((row[token] - row[some].logsumexp(0)).item(), abs=1e-5)
        assert whole.item() == pytest.approx((row[token] - row.logsumexp(0)).item(), abs=1e-5)
    plain = server.ok("/generate", {**body, "return_sampling_mask": False})
    assert "output_token_sampling_mask" not in plain["meta_info"]


def test_a_client_that_goes_away_is_aborted(server):
    body = json.dumps({"input_ids": [5] * 8, "sampling_params": {"max_new_tokens": 490, "ignore_eos": True}}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        server.ok("/pause_generation", {"mode": "in_place"})
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        server.wait_load(lambda load: load["num_total_reqs"] == 1)
    server.wait_load(lambda load: load["num_total_reqs"] == 0)


def test_information(server, tiny_model_dir):
    assert server.request("/health")[0] == server.request("/health_generate")[0] == 200
    info = server.ok("/get_model_info")
    assert info == server.ok("/model_info") and info["model_path"] == tiny_model_dir and info["vocab_size"] == 128
    assert server.ok("/server_info")["max_running_requests"] == 32
    assert server.ok("/get_weight_version") == {"weight_version": "default"}
    assert server.ok("/v1/models")["data"][0]["id"] == tiny_model_dir


def test_profile(server, tmp_path):
    server.ok("/start_profile", {"output_dir": str(tmp_path)})
    server.generate([5, 6], max_new_tokens=2)
    server.ok("/stop_profile", {})
    assert list(tmp_path.glob("*.trace.json.gz"))
    assert "no profile" in server.error("/stop_profile", {})


BAD = [
    ({}, "exactly one of text and input_ids"),
    ({"input_ids": [5, 128]}, "token id 128 is outside the vocabulary of 128"),
    ({"input_ids": [5, -1]}, "token id -1"),
    ({"input_ids": []}, "non-empty"),
    ({"input_ids": [[]]}, "non-empty"),
    ({"input_ids": [1.5]}, "integers"),
    ({"input_ids": [5] * 512}, "the prompt has 512 tokens; the context of 512"),
    ({"text": ""}, "text"),
    ({"text": "a", "input_ids": [5]}, "exactly one"),
    ({"input_ids": [5], "rid": 7}, "rid"),
    ({"input_ids": [5], "stream": "yes"}, "stream"),
    ({"input_ids": [5], "logprob_start_len": 9}, "logprob_start_len"),
    ({"input_ids": [5], "return_logprob": "yes"}, "return_logprob"),
    ({"input_ids": [5], "image_data": "x"}, "image_data is not supported"),
    ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "1 entries for 2 prompts"),
]
BAD_PARAMS = [
    ({"temperature": -1}, "temperature must be >= 0"),
    ({"temperature": "hot"}, "temperature must be a finite number"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer"),
    ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens"),
    ({"stop": 7}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [128]}, "outside the vocabulary"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"n": 0}, "n must be"),
    ({"sampling_seed": 1.5}, "sampling_seed"),
    ({"temprature": 1}, "unknown field 'temprature'"),
    ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not supported"),
    ("greedy", "must be an object"),
]


def test_bad_input_is_a_400_and_the_server_lives(server):
    for body, message in BAD + [({"input_ids": [5], "sampling_params": p}, m) for p, m in BAD_PARAMS]:
        assert message in server.error("/generate", body), body
    assert "not JSON" in server.error("/generate", raw=b"{nope")
    assert "JSON object" in server.error("/generate", raw=b"[1]")
    assert "rid or abort_all" in server.error("/abort_request", {})
    assert "pause mode" in server.error("/pause_generation", {"mode": "nap"})
    server.error("/no_such_path", {}, status=404)
    neutral = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "max_new_tokens": 1}
    assert len(server.generate([5], **neutral)["output_ids"]) == 1
