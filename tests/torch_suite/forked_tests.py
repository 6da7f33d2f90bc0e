"""torch's own tests of process groups, each in ranks that are forked from a process that has imported all of them.

They are those of `torch.testing._internal.distributed.distributed_test` in the installed torch, as torch runs them
for gloo. What a test does only for gloo it does for the backend under test, too: the module is imported as gloo's,
and then told the other name.
"""

import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final, Literal

MODULE: Final = "torch.testing._internal.distributed.distributed_test"
_ERROR: Final = 10
"""Exit code of a rank whose test raised; others stand in torch's ``TEST_SKIPS``."""

Result = Literal["passed", "skipped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a test.

    Attributes:
        name: The test.
        result: How it ended.
        detail: Of a failed one, what the ranks raised or how they ended; of a skipped one, why.
        seconds: How long it took.
    """

    name: str
    result: Result
    detail: str
    seconds: float


class LikeGloo(str):
    """The name of a backend, which is equal to gloo's, too."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str, num_ranks: int) -> Any:
    """Import the tests for this backend and number of ranks, once in a process; their class."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", INIT_METHOD="file://")
    module: Any = importlib.import_module(MODULE)
    module.BACKEND = LikeGloo(backend)

    class TestBackend(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc] # torch's names
        """What torch's files for each way to start processes define."""

    return TestBackend


def names(cls: type) -> list[str]:
    """The tests, in the order of their names."""
    return sorted(name for name in dir(cls) if name.startswith("test_"))


def run(cls: Any, name: str, num_ranks: int, limit_seconds: float) -> Outcome:
    """Run one test in ``num_ranks`` forked ranks; they are killed if it takes longer than ``limit_seconds``."""
    begin = time.monotonic()
    if getattr(getattr(cls, name), "__unittest_skip__", False):
        why = getattr(cls, name).__unittest_skip_why__
        return Outcome(name=name, result="skipped", detail=why, seconds=0.0)
    with tempfile.TemporaryDirectory(prefix="popdist-torch-") as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            (Path(folder) / part).mkdir()
        pipes = [Pipe() for _ in range(num_ranks)]
        children = [_fork(cls, name, rank, Path(folder), theirs) for rank, (_, theirs) in enumerate(pipes)]
        for _, theirs in pipes:
            theirs.close()
        codes = _wait(children, begin + limit_seconds)
        told = [_received(ours) for ours, _ in pipes]
    return _judged(name, codes, told, time.monotonic() - begin)


def _fork(cls: Any, name: str, rank: int, folder: Path, pipe: Connection) -> int:
    child = os.fork()
    if child:
        return child
    code = _ERROR
    try:
        os.setpgid(0, 0)
        out = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["TEMP_DIR"] = str(folder)
        tests: Any = sys.modules[MODULE]
        tests.INIT_METHOD = os.environ["INIT_METHOD"] = f"file://{folder}/init_dir/shared_init_file"
        cls._run(rank, name, str(folder / "store"), pipe)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else _ERROR
    except BaseException:  # noqa: BLE001 - whatever it is, it is the test's failure
        pipe.send(traceback.format_exc())
    finally:
        os._exit(code)


def _wait(children: Sequence[int], deadline: float) -> list[int | None]:
    """The exit codes; None of those that had to be killed."""
    codes: dict[int, int | None] = {}
    while len(codes) < len(children) and time.monotonic() < deadline:
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and whatever a test has left behind
        if child not in codes:
            os.waitpid(child, 0)
            codes[child] = None
    return [codes[child] for child in children]


def _received(pipe: Connection) -> str:
    try:
        return str(pipe.recv()) if pipe.poll() else ""
    except EOFError:
        return ""
    finally:
        pipe.close()


def _judged(name: str, codes: Sequence[int | None], told: Sequence[str], seconds: float) -> Outcome:
    skips: Any = sys.modules["torch.testing._internal.common_distributed"].TEST_SKIPS
    reasons = {skip.exit_code: skip.message for skip in skips.values()}
    result: Result = "failed"
    detail = "\n".join(
        f"rank {rank}: {'killed: it took too long' if code is None else f'exit code {code}'}\n{text}"
        for rank, (code, text) in enumerate(zip(codes, told, strict=True))
    )
    if len(set(codes)) == 1 and codes[0] == 0:
        result, detail = "passed", ""
    elif len(set(codes)) == 1 and codes[0] in reasons:
        result, detail = "skipped", reasons[codes[0]]
    return Outcome(name=name, result=result, detail=detail, seconds=seconds)
