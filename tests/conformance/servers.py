"""A stock SGLang server on CPU as a child process, launched as slime's engine actor launches it."""

from __future__ import annotations

import time
import urllib.error

from slime.arguments.parser import resolve
from slime.backends.sglang_utils.command import launch_command, launch_env
from tests.engine.server_process import EngineServer

CPU_WORDS = "--device cpu --dtype float32 --rollout-engine sglang --sglang-max-total-tokens 8192".split()


class SGLangServer(EngineServer):
    kind = "sglang"
    start_seconds = 800

    def command(self, model_path: str) -> tuple[list[str], dict[str, str]]:
        args = resolve([*CPU_WORDS, "--hf-checkpoint", model_path])
        args.offload_rollout = True
        return launch_command(args, rank=0, host="127.0.0.1"), launch_env(args, [])

    def stop(self) -> None:
        """Its processes end with it; asked politely it takes its time, half a minute on a busy machine."""
        self.process.kill()
        self.process.wait(30)

    def wait(self) -> SGLangServer:
        super().wait()
        self.wait_healthy()
        return self

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while True:
            try:
                if self.request("/health", timeout=5)[0] == 200:
                    return
            except (urllib.error.URLError, OSError):
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)
