"""This machine's GPUs: found by nvidia-smi, and assigned to pods by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence

LIST_SECONDS = 30.0  # nvidia-smi needs some seconds if no process uses the driver
GPU_LINE = re.compile(r"GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
MIG_LINE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


def devices(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them: indices, or UUIDs of MIG devices.

    Empty without a working nvidia-smi. CUDA_VISIBLE_DEVICES of this process limits them.
    """
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LIST_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if allowed is None else [name.strip() for name in allowed.split(",") if name.strip()]
    return [name for name, names in _listed(done.stdout) if wanted is None or _any_of(wanted, names)]


def _listed(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each device of `nvidia-smi -L`, with all of its names. A GPU that is split into MIG devices is left out."""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if mig := MIG_LINE.match(line):
            yield mig[1], (mig[1],)
        elif (gpu := GPU_LINE.match(line)) and not MIG_LINE.match(following):
            yield gpu[1], (gpu[1], gpu[2])


def _any_of(wanted: Sequence[str], names: Sequence[str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES contains a device: by its index, or by the beginning of its UUID."""
    return any(name == w or (not w.isdecimal() and name.startswith(w)) for w in wanted for name in names)


class Gpus:
    """Assigns this machine's GPUs to pods. If it doesn't have any, GPUs are simulated and pods don't see a device.

    :param devices: names for CUDA_VISIBLE_DEVICES, in the order of nvidia-smi.
    """

    def __init__(self, devices: Sequence[str] = ()) -> None:
        self.offer(devices)

    def offer(self, devices: Sequence[str]) -> None:
        """Assign these devices from now on."""
        self._holders: dict[str, set[str]] = {device: set() for device in devices}

    def take(self, uid: str, count: int) -> dict[str, str]:
        """The variables of a pod that requests `count` GPUs: its own GPUs, then those with the fewest pods.

        CUDA counts GPUs by speed, nvidia-smi by bus, unless CUDA_DEVICE_ORDER says otherwise.
        """
        best = sorted(self._holders.items(), key=lambda held: (uid not in held[1], len(held[1])))[:count]
        for _, holders in best:
            holders.add(uid)
        taken = {device for device, _ in best}
        visible = ",".join(device for device in self._holders if device in taken)
        return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def free(self, uid: str) -> None:
        """Release the GPUs of a pod."""
        for holders in self._holders.values():
            holders.discard(uid)
