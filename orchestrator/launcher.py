"""The launcher: one process beside the supervisor that imports torch once, forks workers and reaps them.

It never touches CUDA, so a worker may still choose its device. When the supervisor goes away, by whatever death, the
socket between them closes and the launcher kills every worker's process group before it ends. While it imports it has
no workers, and is killed itself.

Run as ``python -m orchestrator.launcher FD MODULE...``; requests come over the socket with the worker's channel
attached.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback

from orchestrator import processes, worker

MAX_REQUEST = 1 << 16
ALL_OF_PYTEST = ["--version", "--version", "-c", os.devnull, "--noconftest"]
"""Makes pytest import its plugins: a single ``--version`` is answered without them."""
DRIVER = "libcuda.so.1"


class Launcher:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.workers: dict[int, str] = {}
        self.wake, alarm = socket.socketpair()
        self.wake.setblocking(False)
        alarm.setblocking(False)
        self.alarm = alarm
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def say(self, **message: object) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> None:
        """Answer requests until the supervisor closes its end."""
        selector = selectors.DefaultSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(self.wake, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select(timeout=1.0)}
            if self.wake in ready:
                self.wake.recv(4096)
            self.reap()
            if self.control in ready:
                data, fds, _, _ = socket.recv_fds(self.control, MAX_REQUEST, 1)
                if not data:
                    return
                self.spawn(json.loads(data), fds[0])

    def spawn(self, request: dict[str, object], channel: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become_worker(request, channel, parent)
        with contextlib.suppress(OSError):  # the child does the same; whoever comes first
            os.setpgid(pid, pid)
        os.close(channel)
        self.workers[pid] = str(request["name"])
        self.say(spawned=request["name"], pid=pid)

    def become_worker(self, request: dict[str, object], channel: int, parent: int) -> None:
        """In the child: leave everything of the launcher behind, then work, then end without its clean-up."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            processes.die_with_parent(parent)
            for sock in (self.control, self.wake, self.alarm):
                sock.close()
            if request["fresh"]:
                os.set_inheritable(channel, True)
                argv = [sys.executable, "-m", "orchestrator.worker", str(channel), json.dumps(request)]
                os.execv(sys.executable, argv)
            code = worker.main(request, channel)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)

    def reap(self) -> None:
        """Collect dead children; what a worker left behind in its process group dies with it."""
        while True:
            pid = self.dead_child()
            if pid is None:
                return
            if pid in self.workers:
                processes.kill_group(pid)  # before reaping, while the id cannot name another group
            _, status = os.waitpid(pid, 0)
            name = self.workers.pop(pid, None)
            if name is not None:
                self.say(exited=name, status=status)

    def dead_child(self) -> int | None:
        """A child that has ended and is not reaped yet."""
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        return found.si_pid if found is not None else None

    def end(self) -> None:
        """Kill what is left, also processes that moved to another group: they are this process's children now."""
        for pid in self.workers:
            processes.kill_group(pid)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            for pid in processes.children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
            except ChildProcessError:
                return


def preload(names: list[str]) -> str:
    """Import what every worker needs; a module that cannot be had is each worker's own matter. Returns why no worker
    may be forked from here, if so.

    No garbage is collected meanwhile: imports leave next to none, and looking for it takes an eighth of their time.
    """
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if "pytest" in sys.modules:  # it imports most of itself only when it is first used
        importlib.import_module("orchestrator.worker_plugin")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            sys.modules["pytest"].main(ALL_OF_PYTEST)
    gc.freeze()  # or every worker would look through all of it at each collection, and copy its pages
    gc.enable()
    return f"importing {', '.join(names)} initialised CUDA" if cuda_is_initialized() else ""


def cuda_is_initialized() -> bool:
    """Whether this process has, through torch or past it: its children could not use a GPU then."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return True
    try:
        with open("/proc/self/maps") as file:
            if DRIVER.removesuffix("1") not in file.read():  # the kernel names the file, with the whole version
                return False
        return bool(ctypes.CDLL(DRIVER).cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)
    except (OSError, AttributeError):
        return False


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    # Nobody listens to the line during an import. What that import has started stays then, as after any SIGKILL.
    processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(BlockingIOError):
        if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return  # the supervisor was gone before that
    unfit = preload(sys.argv[2:])
    launcher = Launcher(control)
    processes.prctl(processes.PR_SET_PDEATHSIG, 0)  # from here on the line tells, and the workers are to be ended first
    try:
        launcher.say(unfit=unfit)
        launcher.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        launcher.end()
        sys.stderr.flush()
        if sys.exc_info()[0] is None:
            os._exit(0)  # the interpreter's own end, with torch in it, takes a second


if __name__ == "__main__":
    main()
