"""Measurement of the GPUs of poprun's own host: load and memory, printed by the maker's tool every 5 seconds."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from poprun.launch.process.process_tree import ProcessKey, key_of, send
from poprun.launch.process.spawn import ProcessStart, start_process
from poprun.makers.maker import MAKERS
from poprun.observe.account.curves import JobCurves
from poprun.observe.account.job_identity import JobIdentity
from poprun.plan.plan import LaunchPlan

_MIB: Final = 2**20
_PERCENT: Final = 100.0
_READ_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The load and the used memory of one GPU at one moment."""

    names: tuple[str, str]  # the GPU's number and uuid
    busy_share: float | None  # share of the time, 0 to 1; None if the driver does not report the share
    memory_bytes: float | None

    @classmethod
    def read(cls, line: str) -> Self | None:
        """Return the measurement in ``line`` of the tool (number, uuid, percent, MiB); None if malformed."""
        try:
            index, uuid, *cells = map(str.strip, line.split(","))
            busy, memory = (float(cell) if cell.isdecimal() else None for cell in cells)
        except ValueError:
            return None
        return cls(
            names=(index, uuid),
            busy_share=None if busy is None else busy / _PERCENT,
            memory_bytes=None if memory is None else memory * _MIB,
        )


def watch_gpus(
    plan: LaunchPlan, identity: JobIdentity, environ: Mapping[str, str], curves: JobCurves
) -> "GpuWatch | None":
    """Start to measure the job's GPUs on poprun's host, and return the watch; None without GPU or tool."""
    network, devices = identity.network, {}
    for index in range(plan.num_instances):
        route = identity.route(plan, index)
        if network is None or (route is not None and route.address == network.control_host):
            devices[index] = tuple(plan.instance(index, identity.devices_of(plan, index)).devices)
    words = MAKERS[plan.maker].watch
    return GpuWatch(words, devices, environ, curves) if words and any(devices.values()) else None


class GpuWatch:
    """A running tool of the GPUs' maker that prints the GPUs' load, which poprun adds to the instances' curves."""

    def __init__(
        self,
        words: Sequence[str],
        devices: Mapping[int, Sequence[str]],
        environ: Mapping[str, str],
        curves: JobCurves,
    ) -> None:
        self._devices = devices
        self._curves = curves
        self._begun_line = b""
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        null = os.open(os.devnull, os.O_RDWR)
        self._process: ProcessKey | None = None
        with suppress(OSError):  # a host without the program has no such curves
            start = ProcessStart(words, os.sep, environ, (null, writer, null), signal.SIGTERM)
            self._process = key_of(start_process(start))
        os.close(null)
        os.close(writer)

    def close(self) -> None:
        """End the tool that measures the GPUs; poprun reaps it like every other child process."""
        os.close(self._reader)
        if self._process is not None:
            send([self._process], signal.SIGTERM)

    def update(self, now_seconds: float) -> None:
        """Read what the tool has printed since the last call, and add the measurements to the curves."""
        try:
            data = os.read(self._reader, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._begun_line = (self._begun_line + data).split(b"\n")
        for reading in filter(None, (GpuReading.read(line.decode(errors="replace")) for line in lines)):
            for instance, name in self._holders(reading):
                self._curves.add_gpu(instance, name, reading.busy_share, reading.memory_bytes, now_seconds)

    def _holders(self, reading: GpuReading) -> Iterator[tuple[int, str]]:
        """Yield each instance that uses the measured GPU, and the name of the instance's curves for this GPU."""
        index, uuid = reading.names
        for instance, devices in self._devices.items():
            if any(it == index or (it.startswith("GPU-") and uuid.startswith(it)) for it in devices):
                yield instance, f"gpu_{index}" if len(devices) > 1 else "gpu"
