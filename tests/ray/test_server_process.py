import os
import sys
import threading

import psutil
import pytest

from slime.ray.server_process import ServerError, ServerProcess, http_json

pytestmark = pytest.mark.integration

SERVER = """
import argparse, http.server, os, subprocess, sys
parser = argparse.ArgumentParser()
parser.add_argument("--port-file"); parser.add_argument("--parent-pid")
args = parser.parse_args()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"ok": true}' if self.path == "/health" else b"no such page"
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
child = subprocess.Popen(["sleep", "1000"])
print("listening", child.pid, flush=True)
open(args.port_file + ".tmp", "w").write(str(server.server_port))
os.rename(args.port_file + ".tmp", args.port_file)
server.serve_forever()
"""


def start(tmp_path, code=SERVER):
    return ServerProcess("engine-7", [sys.executable, "-c", code], tmp_path / "engine-7.log", "127.0.0.1")


def test_life(tmp_path):
    server = start(tmp_path)
    url = server.wait_until_healthy(timeout=30)
    assert http_json("GET", url + "/health") == {"ok": True}
    with pytest.raises(ServerError, match="404: no such page"):
        http_json("GET", url + "/other")
    child = int((tmp_path / "engine-7.log").read_text().split()[1])
    deaths = []
    waiter = threading.Thread(target=lambda: deaths.append(server.wait_for_death()))
    waiter.start()
    server.close()
    waiter.join(10)
    assert deaths == [None]
    assert not server.is_alive()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(ServerError):
        http_json("GET", url + "/health", timeout=2)


def test_a_server_that_dies_at_start_shows_its_log(tmp_path):
    server = start(tmp_path, "import sys; sys.exit('no such model')")
    with pytest.raises(ServerError, match=r"engine-7 .* exited with code 1[\s\S]*no such model"):
        server.wait_until_healthy(timeout=30)
    server.close()


def test_a_server_that_never_listens(tmp_path):
    server = start(tmp_path, "import time; time.sleep(1000)")
    with pytest.raises(ServerError, match="engine-7 is not healthy after 0 s"):
        server.wait_until_healthy(timeout=0.2)
    server.close()


def test_a_killed_server_is_reported(tmp_path):
    server = start(tmp_path)
    server.wait_until_healthy(timeout=30)
    os.kill(server.pid, 9)
    assert "engine-7" in server.wait_for_death() and "SIGKILL" in server.describe_death(-9)
    with pytest.raises(ServerError, match="SIGKILL"):
        server.raise_if_dead()
    server.close()
