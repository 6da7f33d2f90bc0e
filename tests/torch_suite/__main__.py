"""Run torch's own tests of process groups on the backend ``popdist``.

    python -m tests.torch_suite --world-size 2 3 4

Prints each test that does not end as `tests.torch_suite.expectations` says, and how many passed, failed and were
skipped; the exit code is 1 if there was one of the first kind. ``--backend gloo`` runs the same over gloo.
"""

import argparse
import gc
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.torch_suite import expectations, forked_tests

PRELOADED = (
    "torch.testing._internal.common_distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "popdist.exchange.process_group.torch_process_group",
)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", default="popdist", help="the backend under test (popdist)")
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks (2 3 4)")
    parser.add_argument("--each-change", action="store_true", help="only the tests that run on each change")
    parser.add_argument("--only", nargs="+", help="these tests")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a test (120)")
    parser.add_argument("--json", type=Path, help="a folder for the outcomes, a file for each number of ranks")
    return parser.parse_args(arguments)


def run_all(options: argparse.Namespace, num_ranks: int) -> int:
    """Run the tests at one number of ranks; how many ended otherwise than expected."""
    cls = forked_tests.load(options.backend, num_ranks)
    every = forked_tests.names(cls)
    chosen = options.only or (expectations.EACH_CHANGE if options.each_change else every)
    if unknown := sorted({*chosen, *expectations.EACH_CHANGE, *expectations.FAILING} - {*every}):
        print(f"this torch has no tests {', '.join(unknown)}")  # noqa: T201 - the command's output
        return len(unknown)
    outcomes: list[forked_tests.Outcome] = []
    num_problems = 0
    for name in chosen:
        outcome = forked_tests.run(cls, name, num_ranks, options.limit)
        outcomes.append(outcome)
        if problem := expectations.problem(options.backend, outcome):
            num_problems += 1
            print(f"{num_ranks} ranks, {name}: {problem}\n{outcome.detail}", flush=True)  # noqa: T201 - as above
    counts = Counter(outcome.result for outcome in outcomes)
    print(  # noqa: T201 - as above
        f"{options.backend}, {num_ranks} ranks: {counts['passed']} passed, {counts['skipped']} skipped, "
        f"{counts['failed']} failed in {sum(outcome.seconds for outcome in outcomes):.0f} s; "
        f"{num_problems} not as expected",
        flush=True,
    )
    if options.json:
        text = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
        (options.json / f"{options.backend}-{num_ranks}.json").write_text(text, encoding="utf-8")
    return num_problems


def main() -> None:
    """Fork a process for each number of ranks, which the tests read when they are imported."""
    options = parsed(sys.argv[1:])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a rank would write to every page that it shares with us
    codes = []
    for num_ranks in options.world_size:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = min(run_all(options, num_ranks), 1)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
