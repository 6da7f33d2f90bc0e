"""Compile the simulated accelerator once for each of its sources and each torch."""

import fcntl
import hashlib
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import torch

_SOURCES: Final = Path(__file__).parent
_CACHE: Final = _SOURCES / ".build"
_FLAGS: Final = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror")


def library() -> Path:
    """Return the compiled accelerator; compile the sources if nobody has done so."""
    _CACHE.mkdir(exist_ok=True)
    made = _CACHE / f"{_digest()}.so"
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(made)
    return made


def _digest() -> str:
    digest = hashlib.blake2b(f"{torch.__version__} {torch.__file__} {_FLAGS}".encode(), digest_size=10)
    for path in sorted(path for path in _SOURCES.iterdir() if path.suffix in {".cpp", ".h"}):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _compile(made: Path) -> None:
    """Compile the sources as one, as most of the time goes into torch's headers."""
    headers = Path(torch.__file__).parent / "include"
    includes = [f"-I{headers}", f"-I{headers / 'torch/csrc/api/include'}"]
    torch_libraries = [f"-L{headers.parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    source = "".join(f'#include "{path}"\n' for path in sorted(_SOURCES.glob("*.cpp")))
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        library = Path(folder, "simulated.so")
        command = ["g++", *_FLAGS, *includes, "-shared", "-x", "c++", "-", *torch_libraries, "-o", str(library)]
        subprocess.run(command, input=source, text=True, check=True)
        library.replace(made)
