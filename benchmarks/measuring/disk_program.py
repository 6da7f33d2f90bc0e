"""Measures how fast the disk of a folder is without the kernel's cache.

    python benchmarks/measuring/disk_program.py /data

It says when it is ready, and then for each line that it reads the bytes that are read in a second, and those that
are written, by as many threads as are fastest. `trainings` starts it.
"""

import json
import mmap
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

MIB = 1024**2
PIECE_BYTES, BUFFER_BYTES, FILE_BYTES = 8 * MIB, 64 * MIB, 512 * MIB
THREADS = (1, 2, 3)


class Disk:
    """A file that is read and written without the kernel's cache."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(self._file, 0, FILE_BYTES)
        self._buffers = [mmap.mmap(-1, BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in THREADS]
        for buffer in self._buffers:
            buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer.write(bytes(BUFFER_BYTES))
        self._moved(1, writes=True)  # what was never written is not read from the disk

    def speed(self, *, writes: bool) -> float:
        """Bytes in a second, with the number of threads that is fastest."""
        return max(FILE_BYTES / self._moved(num, writes=writes) for num in THREADS)

    def _moved(self, num_threads: int, *, writes: bool) -> float:
        """Seconds in which so many threads write the whole file, or read it."""

        def move(first: int) -> None:
            for start in range(first * PIECE_BYTES, FILE_BYTES, num_threads * PIECE_BYTES):
                piece = memoryview(self._buffers[first])[start % BUFFER_BYTES :][:PIECE_BYTES]
                moved = (os.pwritev if writes else os.preadv)(self._file, [piece], start)
                if moved != PIECE_BYTES:
                    raise SystemExit(f"{moved} of {PIECE_BYTES} bytes were moved")

        with ThreadPoolExecutor(num_threads) as threads:
            begin = time.perf_counter()
            list(threads.map(move, range(num_threads)))
            return time.perf_counter() - begin


def main() -> None:
    """Measure on order."""
    with tempfile.NamedTemporaryFile(dir=sys.argv[1]) as file:
        disk = Disk(file.name)
        print(json.dumps("ready"), flush=True)
        for _ in sys.stdin:
            print(json.dumps([disk.speed(writes=False), disk.speed(writes=True)]), flush=True)


if __name__ == "__main__":
    main()
