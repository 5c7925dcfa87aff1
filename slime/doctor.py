"""`slime doctor`: what is installed, what fits together, what the machine offers; each problem with its fix.

Nothing heavy is imported: versions come from package metadata, GPUs from the driver's own tool.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from slime import __version__
from slime.backends.sglang_utils import compat

OK, NOTE, PROBLEM = "ok", "note", "problem"

PACKAGES = ("torch", "transformers", "ray", "aiohttp", "safetensors", "tokenizers")
OPTIONAL_PACKAGES = {
    "sglang": 'inference on GPUs: pip install "slime[sglang]"',
    "megatron-core": 'the Megatron trainer: pip install "slime[megatron]"',
    "wandb": 'tracking: pip install "slime[wandb]"',
}
TORCH_RANGE = ("2.11", "2.15")
TRANSFORMERS_RANGE = ("5.12", "6")
TRANSFORMERS_OF_SGLANG = (("0.5.17", "0.5.20", "5.12.1"), ("0.5.23", "0.5.23", "5.19.0"))
"""(first release, last release, the transformers that they pin)."""
MEGATRON_TESTED = ("0.16.1", "0.19.2")
GIB = 1 << 30
SHM_BYTES = 8 * GIB
OPEN_FILES = 8192
DISK_BYTES = 20 * GIB
EPHEMERAL_PORTS = 10000


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    status: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        mark = {OK: "ok     ", NOTE: "note   ", PROBLEM: "PROBLEM"}[self.status]
        return f"{mark}  {self.what}" + (f"\n         fix: {self.fix}" if self.fix else "")


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _between(version: str, low: str, high: str) -> bool:
    return compat.parse_version(low) <= compat.parse_version(version) < compat.parse_version(high)


def check_python() -> list[Finding]:
    what = f"slime {__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return [Finding(PROBLEM, what, "slime runs on Linux")]
    return [Finding(OK, what)]


def check_packages() -> list[Finding]:
    findings = []
    for package in PACKAGES:
        version = installed(package)
        if version is None:
            findings.append(Finding(PROBLEM, f"{package} is not installed", f"pip install {package}"))
        else:
            findings.append(Finding(OK, f"{package} {version}"))
    for package, use in OPTIONAL_PACKAGES.items():
        version = installed(package)
        findings.append(Finding(OK, f"{package} {version}") if version else Finding(NOTE, f"no {package} ({use})"))
    return findings


def check_versions() -> list[Finding]:
    """Do the installed versions fit each other?"""
    findings = []
    torch, transformers = installed("torch"), installed("transformers")
    for package, version, (low, high) in (
        ("torch", torch, TORCH_RANGE),
        ("transformers", transformers, TRANSFORMERS_RANGE),
    ):
        if version and not _between(version, low, high):
            wanted = f"{package} {version} is outside the supported range >={low},<{high}"
            findings.append(Finding(PROBLEM, wanted, f'pip install "{package}>={low},<{high}"'))
    sglang = compat.installed_version()
    if sglang:
        findings += _check_sglang(sglang, torch, transformers)
    megatron = installed("megatron-core")
    if megatron and not _between(megatron, MEGATRON_TESTED[0], "0.20"):
        low, high = MEGATRON_TESTED
        findings.append(Finding(NOTE, f"megatron-core {megatron} is outside what was tested ({low} to {high})"))
    if megatron and installed("psutil") is None:
        findings.append(
            Finding(PROBLEM, "megatron-core writes checkpoints through psutil, which is missing", "pip install psutil")
        )
    return findings or [Finding(OK, "installed versions fit together")]


def _check_sglang(sglang: str, torch: str | None, transformers: str | None) -> list[Finding]:
    findings = []
    warning = compat.version_warning(sglang)
    if warning:
        findings.append(Finding(NOTE, warning, f"pip install sglang=={compat.NEWEST_TESTED} if it misbehaves"))
    pinned = compat.pinned_torch(sglang)
    if torch and pinned and compat.parse_version(torch) != compat.parse_version(pinned):
        what = f"SGLang {sglang} is built for torch {pinned}, installed is {torch}: its CUDA kernels will not load"
        status = PROBLEM if "+cpu" not in torch else NOTE
        findings.append(Finding(status, what, f"pip install torch=={pinned} (on CPU any of {_torches()} works)"))
    for first, last, pin in TRANSFORMERS_OF_SGLANG:
        inside = compat.parse_version(first) <= compat.parse_version(sglang) <= compat.parse_version(last)
        if inside and transformers and compat.parse_version(transformers) != compat.parse_version(pin):
            what = f"SGLang {sglang} pins transformers {pin}, installed is {transformers}"
            findings.append(Finding(NOTE, what, f"pip install transformers=={pin} if SGLang does not start"))
    return findings or [Finding(OK, f"SGLang {sglang} fits torch {torch} and transformers {transformers}")]


def _torches() -> str:
    return ", ".join(torch for _, _, torch in compat.TORCH_OF_RELEASES)


def check_gpus() -> list[Finding]:
    if shutil.which("nvidia-smi") is None:
        return [Finding(NOTE, "no NVIDIA GPU: runs use --device cpu")]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [Finding(PROBLEM, f"nvidia-smi fails: {error}", "check the driver: dmesg | grep -i nvrm")]
    findings = []
    for index, line in enumerate(output.strip().splitlines()):
        name, total, used = (part.strip() for part in line.split(","))
        what = f"GPU {index}: {name}, {float(total) / 1024:.0f} GiB, {float(used) / 1024:.1f} in use"
        busy = float(used) > 0.05 * float(total)
        fix = "nvidia-smi shows by whom; end it, or leave the GPU out with CUDA_VISIBLE_DEVICES"
        findings.append(Finding(NOTE if busy else OK, what, fix if busy else ""))
    if findings and compat.installed_version() is None:
        findings.append(
            Finding(NOTE, "no SGLang: rollouts use the embedded engine", OPTIONAL_PACKAGES["sglang"].split(": ")[1])
        )
    return findings


def check_shared_memory() -> list[Finding]:
    """Ray's object store and colocated weight sync on CPU live there."""
    if not os.path.isdir("/dev/shm"):
        return [Finding(PROBLEM, "there is no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")]
    size = shutil.disk_usage("/dev/shm")
    what = f"/dev/shm: {size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free"
    if size.free < SHM_BYTES:
        fix = "start the container with --shm-size=16g; on a host: mount -o remount,size=16g /dev/shm"
        return [Finding(NOTE, what + ": large models need more", fix)]
    return [Finding(OK, what)]


def check_limits() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"open files: at most {soft} (can be raised to {hard})"
    if soft < OPEN_FILES:
        fix = f"ulimit -n {min(hard, 65536)}" if hard >= OPEN_FILES else "raise nofile in /etc/security/limits.conf"
        return [Finding(NOTE, f"{what}; long rollouts hold one per request", fix)]
    return [Finding(OK, what)]


def check_ports() -> list[Finding]:
    """Servers take free ports of the kernel's ephemeral range on the loopback."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        low, high = map(int, file.read().split())
    what = f"free ports are handed out from {low} to {high}"
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return [
            Finding(PROBLEM, f"no port can be bound on 127.0.0.1: {error}", "bring the loopback up: ip link set lo up")
        ]
    if high - low < EPHEMERAL_PORTS:
        fix = 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"'
        return [Finding(NOTE, f"{what}: few for thousands of requests in flight", fix)]
    return [Finding(OK, what)]


def check_host_name() -> list[Finding]:
    """Process groups resolve it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        fix = f"echo 127.0.0.1 {name} >> /etc/hosts"
        return [Finding(NOTE, f"the host name {name} has no address: gloo groups may not form", fix)]
    return [Finding(OK, f"host {name} is {address}")]


def check_disk() -> list[Finding]:
    findings = []
    for path, use in ((os.getcwd(), "runs and checkpoints"), ("/tmp", "Ray's sessions")):
        free = shutil.disk_usage(path).free
        what = f"{path}: {free / GIB:.0f} GiB free ({use})"
        if free < DISK_BYTES:
            fix = "--run-dir and --save on a larger disk" if path != "/tmp" else "free space, or mount a larger /tmp"
            findings.append(Finding(NOTE, what, fix))
        else:
            findings.append(Finding(OK, what))
    return findings


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "System": check_python,
    "Packages": check_packages,
    "Versions": check_versions,
    "GPUs": check_gpus,
    "Shared memory": check_shared_memory,
    "Open files": check_limits,
    "Ports": check_ports,
    "Host": check_host_name,
    "Disk": check_disk,
}


def main(argv: list[str] | None = None) -> int:
    """Print the report; 1 when there is a problem."""
    argv = sys.argv[1:] if argv is None else argv
    if argv:
        print("usage: slime doctor\n\nChecks this machine and what is installed on it.")
        return 0 if argv[0] in ("-h", "--help") else 2
    problems = 0
    for title, check in CHECKS.items():
        print(title)
        for finding in check():
            problems += finding.status == PROBLEM
            print(f"  {finding}")
    print(f"\n{problems} problem{'s' if problems != 1 else ''}" if problems else "\nno problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
