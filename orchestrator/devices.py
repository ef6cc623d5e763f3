"""Which devices a run may use, and the leases that keep two runs off one device.

Devices are named by UUID throughout: an index means something else in every process that hides some of them. Nothing
here imports torch or touches CUDA.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import OrchestratorError
from orchestrator.manifest import short
from orchestrator.wording import count

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,mig.mode.current,name", "--format=csv,noheader")
CONTROL = Path("/dev/nvidiactl")
UUID = re.compile(r"(?:GPU|MIG)-[A-Za-z0-9/-]+")
LANES = 4
"""Workers on a CPU where the caller names no number."""
PER_DEVICE, ON_DEVICES, OF_CORES = 12, 16, 0.75
"""Workers on GPUs: at most so many each and in all, and for each core so many: the supervisor and the driver need some
too."""


@dataclass(frozen=True)
class Device:
    index: int
    uuid: str
    name: str
    sliced: bool = False
    """Whether MIG is on: then CUDA has only slices to offer, which have UUIDs of their own."""


@dataclass(frozen=True)
class Lanes:
    """``devices[i]`` is the device of lane ``i``; ``kind`` names the hardware in the duration history."""

    devices: list[str]
    kind: str
    sentence: str


def cpu_count() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def query() -> list[Device]:
    """The GPUs of this host. No driver and no nvidia-smi means none; a driver that does not answer is an error."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        if CONTROL.exists():
            raise OrchestratorError(
                "O401", "there is a GPU driver, but no nvidia-smi to list the devices",
                "name them by UUID in CUDA_VISIBLE_DEVICES, or set ATTNMATRIX_DEVICE=cpu",
            ) from None  # fmt: skip
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OrchestratorError("O401", f"nvidia-smi: {error}", "set ATTNMATRIX_DEVICE=cpu to run without") from None
    if done.returncode:
        if not CONTROL.exists() and "o devices were found" in done.stdout + done.stderr:
            return []
        text = (done.stderr or done.stdout).strip().splitlines()
        raise OrchestratorError(
            "O401", f"nvidia-smi failed with {done.returncode}: {text[0] if text else 'no message'}",
            "set ATTNMATRIX_DEVICE=cpu to run without",
        )  # fmt: skip
    return [parse_device(line) for line in done.stdout.splitlines() if line.strip()]


def parse_device(line: str) -> Device:
    fields = [field.strip() for field in line.split(",", 3)]
    if len(fields) != 4 or not fields[0].isdigit() or not UUID.fullmatch(fields[1]):
        raise OrchestratorError("O406", f"nvidia-smi printed {short(line)}, which names no device")
    return Device(int(fields[0]), fields[1], fields[3], fields[2] == "Enabled")


def narrow(devices: Sequence[Device], wish: str, source: str) -> list[Device]:
    """The devices that a comma-separated list of indices and UUIDs (or their beginnings) names, in its order."""
    out: list[Device] = []
    for word in words_of(wish):
        if word.isdigit():
            found = [device for device in devices if device.index == int(word)]
        else:
            found = [device for device in devices if device.uuid.startswith(word)]
        if len(found) != 1:
            there = ", ".join(f"{device.index} ({device.uuid})" for device in devices) or "none"
            why = "names several devices" if found else "does not exist here"
            raise OrchestratorError("O402", f"{source}: device {short(word)} {why}", f"devices: {there}")
        if found[0] not in out:
            out.append(found[0])
    return out


def words_of(wish: str) -> list[str]:
    """What a list of devices names; -1 ends it, as in CUDA."""
    words = [word for word in (word.strip() for word in wish.split(",")) if word]
    return words[: words.index("-1")] if "-1" in words else words


def slices(words: Sequence[str]) -> list[Device]:
    """MIG slices as devices; nvidia-smi lists them in no form that a program should read."""
    if wrong := [word for word in words if not (word.startswith("MIG-") and UUID.fullmatch(word))]:
        raise OrchestratorError(
            "O407", f"CUDA_VISIBLE_DEVICES names MIG slices, and {short(wrong[0])} beside them",
            "name either slices or whole devices: times of the two are not comparable",
        )  # fmt: skip
    return [Device(number, word, "MIG slice") for number, word in enumerate(dict.fromkeys(words))]


def check_order(devices: Sequence[Device], words: Sequence[str], env: Mapping[str, str]) -> None:
    """Refuse an index that means one device to CUDA and another to nvidia-smi: CUDA counts the fastest first unless it
    is told to count as they are plugged in. Among devices of one model both count alike."""
    mixed = len({device.name for device in devices}) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if mixed and (index := next((word for word in words if word.isdigit()), None)):
        there = ", ".join(f"{device.uuid} ({device.name})" for device in devices)
        raise OrchestratorError(
            "O407", f"CUDA_VISIBLE_DEVICES: {index} may be one device for CUDA and another for nvidia-smi",
            f"name devices by UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID; devices: {there}",
        )  # fmt: skip


def allowed(env: Mapping[str, str]) -> list[Device]:
    """Devices inside what the caller allows: CUDA_VISIBLE_DEVICES first, then ATTNMATRIX_DEVICES within it."""
    wanted = env.get("ATTNMATRIX_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise OrchestratorError("O402", f"ATTNMATRIX_DEVICE is {short(wanted)}", "it takes cpu or cuda")
    if wanted == "cpu" or env.get("ATTNMATRIX_DEVICES") == "cpu":
        return []
    visible = env.get("CUDA_VISIBLE_DEVICES")
    words = words_of(visible or "")
    if visible is not None and not words:
        devices = []
    elif any(word.startswith("MIG-") for word in words):
        devices = slices(words)
    else:
        devices = query()
        if visible is not None:
            check_order(devices, words, env)
            devices = narrow(devices, visible, "CUDA_VISIBLE_DEVICES")
    if env.get("ATTNMATRIX_DEVICES"):
        devices = narrow(devices, env["ATTNMATRIX_DEVICES"], "ATTNMATRIX_DEVICES")
    if split := next((device for device in devices if device.sliced), None):
        raise OrchestratorError(
            "O407", f"device {split.index} ({split.uuid}) is split by MIG, so that no worker can have all of it",
            "name its slices (`nvidia-smi -L`) or other devices in CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    if not devices and wanted == "cuda":
        raise OrchestratorError("O405", "ATTNMATRIX_DEVICE=cuda, and no GPU may be used here")
    return devices


def lease_folder(env: Mapping[str, str]) -> Path:
    """Shared by all users of the host."""
    folder = Path(env.get("ATTNMATRIX_LEASES") or Path(tempfile.gettempdir()) / "attnmatrix-leases")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            raise OrchestratorError("O404", f"{folder} is a link")
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o1777)
    except OSError as error:
        raise OrchestratorError("O404", f"cannot use {folder}: {error.strerror}") from None
    return folder


def lease(
    stack: ExitStack, devices: Sequence[Device], number: int, wait: float, env: Mapping[str, str]
) -> list[Device]:
    """Lock up to ``number`` free devices; wait while there is none. A lease ends with its process."""
    from filelock import FileLock, Timeout  # not needed to plan, to merge or to report

    folder = lease_folder(env)
    until = time.monotonic() + wait
    told = False
    held = f"all {len(devices)} devices are leased" if len(devices) > 1 else "the one device is leased"
    while True:
        mine: list[Device] = []
        for device in devices:
            lock = FileLock(folder / f"{device.uuid.replace('/', '_')}.lock", mode=0o666)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            except OSError as error:
                raise OrchestratorError(
                    "O404", f"cannot lock {lock.lock_file}: {error.strerror}",
                    "set ATTNMATRIX_LEASES to a folder that all users of this host may write",
                ) from None  # fmt: skip
            stack.callback(lock.release)
            mine.append(device)
            if len(mine) == number:
                break
        if mine:
            return mine
        if time.monotonic() > until:
            raise OrchestratorError("O403", f"{held} by other runs", "wait for them, or longer with --wait S")
        if not told:
            print(f"{held} by other runs; waiting up to {wait:g} s", flush=True)
            told = True
        time.sleep(0.5)


@contextmanager
def choose_lanes(
    workers: int | None, per_device: int | None = None, wait: float = 0.0, env: Mapping[str, str] = os.environ
) -> Generator[Lanes]:
    """Lanes for a run: several per leased device, or CPU lanes where there is no GPU to use."""
    devices = allowed(env)
    with ExitStack() as stack:
        mine = lease(stack, devices, needed(devices, workers), wait, env) if devices else []
        yield lanes_on(mine, len(devices) - len(mine), workers, per_device, env)


def foresee_lanes(workers: int | None, per_device: int | None = None, env: Mapping[str, str] = os.environ) -> Lanes:
    """What ``choose_lanes`` would give if no other run held a device; leases nothing."""
    devices = allowed(env)
    mine = devices[: needed(devices, workers)]
    return lanes_on(mine, len(devices) - len(mine), workers, per_device, env)


def needed(devices: Sequence[Device], workers: int | None) -> int:
    """How many of the devices to use: no more than there are workers."""
    return min(workers or len(devices), len(devices))


def lanes_on(
    mine: Sequence[Device], taken: int, workers: int | None, per_device: int | None, env: Mapping[str, str]
) -> Lanes:
    """Lanes on these devices, while so many more are left alone; on the CPU if there are none."""
    cores = cpu_count()
    if not mine:
        number = workers or min(LANES, cores)
        asked = "cpu" in (env.get("ATTNMATRIX_DEVICE"), env.get("ATTNMATRIX_DEVICES"))
        if asked:
            head = f"Running on the CPU as asked: {count(number, 'worker')}"
        else:
            head = f"No GPU here: {count(number, 'worker')} {'runs' if number == 1 else 'run'} them on the CPU"
        sentence = f"{head} ({count(cores, 'core')}), one thread each."
        return Lanes(["cpu"] * number, "cpu", sentence)
    each = per_device or max(1, min(PER_DEVICE, ON_DEVICES // len(mine), int(cores * OF_CORES) // len(mine)))
    number = workers or each * len(mine)
    lanes = [mine[lane % len(mine)].uuid for lane in range(number)]
    names = sorted({device.name for device in mine})
    sentence = f"{count(number, 'worker')} on {count(len(mine), 'GPU')} ({', '.join(names)})"
    sentence += f"; {taken} more in use elsewhere or not needed." if taken else "."
    return Lanes(lanes, names[0], sentence)
