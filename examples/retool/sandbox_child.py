"""The inside of the sandbox (see sandbox.py).

One process imports what code may use and then forks for every piece of code: the fork gives up its rights, runs what
comes on its socket, and prints to it.
"""

import ctypes
import os
import platform
import resource
import signal
import socket
import sys

MODULES = (
    "math cmath random statistics itertools functools collections fractions decimal datetime re json heapq bisect "
    "string operator typing copy time array numbers"
)
"""What code may import; they are loaded while files can still be opened."""

NAMES = (  # in the order of NUMBERS
    "read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64 madvise "
    "sched_yield mremap getpid exit gettimeofday sigaltstack futex clock_gettime clock_nanosleep nanosleep exit_group "
    "getrandom gettid restart_syscall"
).split()
NUMBERS = {
    "x86_64": (0xC000003E, [0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 17, 28, 24, 25, 39, 60, 96, 131, 202, 228, 230,
                            35, 231, 318, 186, 219]),
    "aarch64": (0xC00000B7, [63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 67, 233, 124, 216, 172, 93, 169,
                             132, 98, 113, 115, 101, 94, 278, 178, 128]),
}  # fmt: skip
"""Per machine: its audit architecture (linux/audit.h) and the numbers of the system calls that are left
(asm/unistd.h), which are `NAMES`."""

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
"""Classic BPF: load a word, jump if equal, return."""
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""Let it pass; fail with EPERM; end the process."""
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction))]


def confine():
    """Allow the system calls of `NAMES` only, from now on and for ever."""
    if sys.platform != "linux" or platform.machine() not in NUMBERS:
        raise OSError(f"no filter for {sys.platform} on {platform.machine()}")
    architecture, numbers = NUMBERS[platform.machine()]
    rows = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for number in numbers:
        rows += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    rows.append((RETURN, 0, 0, DENY))
    program = Program(len(rows), (Instruction * len(rows))(*(Instruction(*row) for row in rows)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp is not available")


def run(cpu_seconds, memory_bytes):
    """Run the code on standard input; returns its status."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    try:
        confine()
    except OSError as error:
        print(error, flush=True)
        return "unavailable"
    print("ready", os.getpid(), flush=True)
    try:
        exec(compile(sys.stdin.read(), "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
        return "error"
    finally:
        sys.stdout.flush()
    return "ok"


def serve(control):
    """Fork for every message: its two numbers are the limits, the socket with it is the code's input and output."""
    for name in MODULES.split():
        __import__(name)
    "".encode("idna")  # codecs are looked up in files
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            return
        if os.fork() == 0:
            os.setsid()
            os.dup2(sockets[0], 0)
            os.dup2(sockets[0], 1)
            os.closerange(3, 4096)
            status = run(*map(int, message.split()))
            os.write(1, b"\0" + status.encode())
            os._exit(0)
        os.close(sockets[0])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
