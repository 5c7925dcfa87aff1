"""A small retrieval server: BM25 over a file of passages.

    python -m examples.search_r1.retrieval --corpus corpus.jsonl --port-file port

`POST /retrieve {"queries": [...], "topk": 3}` answers, per query, with its passages and their scores:
`{"result": [[{"document": {"id", "contents"}, "score"}, ...]]}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
from collections import Counter
from pathlib import Path

from aiohttp import web

from slime.utils.misc import atomic_write

K1, B = 1.2, 0.75


class BM25:
    """Robertson and Zaragoza 2009, eq. 3.15, with the idf that is never negative."""

    def __init__(self, passages: list[dict[str, str]]) -> None:
        self.passages = passages
        self.words = [Counter(tokenize(passage["contents"])) for passage in passages]
        self.lengths = [sum(words.values()) for words in self.words]
        self.mean_length = sum(self.lengths) / max(1, len(passages))
        self.postings: dict[str, list[int]] = {}
        for position, words in enumerate(self.words):
            for word in words:
                self.postings.setdefault(word, []).append(position)

    def search(self, query: str, count: int) -> list[tuple[dict[str, str], float]]:
        """The best passages with their scores, best first."""
        scores: Counter[int] = Counter()
        for word in tokenize(query):
            found = self.postings.get(word, [])
            idf = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for position in found:
                frequency = self.words[position][word]
                norm = K1 * (1 - B + B * self.lengths[position] / self.mean_length)
                scores[position] += idf * frequency * (K1 + 1) / (frequency + norm)
        best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:count]
        return [(self.passages[position], score) for position, score in best]


def tokenize(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def application(index: BM25) -> web.Application:
    async def retrieve(request: web.Request) -> web.Response:
        body = await request.json()
        results = [
            [{"document": passage, "score": score} for passage, score in index.search(query, body.get("topk", 3))]
            for query in body["queries"]
        ]
        return web.json_response({"result": results})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help='json lines with "id" and "contents"')
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", help="the port is written here once the server listens")
    options = parser.parse_args()
    passages = [json.loads(line) for line in options.corpus.read_text().splitlines()]

    asyncio.run(serve(application(BM25(passages)), options))


async def serve(app: web.Application, options: argparse.Namespace) -> None:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    port = runner.addresses[0][1]
    if options.port_file:
        atomic_write(options.port_file, str(port).encode())
    print(f"passages at http://{options.host}:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
