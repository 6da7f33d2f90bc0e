"""Check in at most eight minutes on one GPU what this project promises.

The parts run in their order, each with a bound of its own, and a line is printed as each part ends. The folder of
--out gets gpu.json with the newest outcome of each part, gpu.log with what the parts printed, and gpu.md, the page
of the documentation with the table of these outcomes.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from gpu_check.jobs import DEVICE, ROOT
from gpu_check.outcomes import Found, Outcome, Verdict, found_in, judged, merged
from gpu_check.part import FINDINGS
from gpu_check.parts import DEVICES, PARTS, Part, planned, seconds_left, skip_reason
from gpu_check.rendering import as_json, as_markdown, line, outcomes_in
from gpu_check.runner import run
from measuring.documents import put

PAGE = ROOT / "docs" / "gpu.md"


def main() -> int:
    """Run the parts; return 0 if none of them failed."""
    options = _options()
    signal.signal(signal.SIGTERM, _interrupted)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "gpu.json"
    old = outcomes_in(kept.read_text(encoding="utf-8")) if kept.exists() else ()
    card, software = _machine(options.device)
    print(f"{card}, {software}; outcomes go to {options.out}", flush=True)
    parts, begin = planned(options.device, options.parts, options.patience), time.monotonic()
    ends: list[Outcome] = []
    for position, part in enumerate(parts):
        seconds = seconds_left(parts, position, time.monotonic() - begin)
        verdict, found, taken = _run(part, options, seconds)
        ends.append(
            Outcome(
                number=part.number,
                name=part.name,
                device=options.device,
                card=card,
                software=software,
                seen_on=datetime.now(UTC).strftime("%Y-%m-%d"),
                verdict=verdict,
                seconds=taken,
                found=found,
            )
        )
        print(line(ends[-1]), flush=True)
        _write(options.out, merged(old, ends), options.document)
    return int(any(it.verdict not in {Verdict.HOLDS, Verdict.SKIPPED} for it in ends))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="the type of the device (cuda)")
    parser.add_argument(
        "--parts", type=_numbers, default=(), metavar="2,3,8", help="only the parts with these numbers"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu-check", metavar="DIR", help="(build/gpu-check)"
    )
    parser.add_argument(
        "--patience", type=float, metavar="N", help="multiply the time of each part (1; 5 without a GPU)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--device-module", default="", metavar="MODULE", help="what programs import to have the device"
    )
    parser.add_argument("--document", action="store_true", help=f"renew the table in docs/{PAGE.name}, too")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    known = {str(part.number): part.number for part in PARTS}
    if unknown := [it for it in text.split(",") if it not in known]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no part: name some of 1 to {len(PARTS)}, such as 2,3,8"
        )
    return tuple(known[it] for it in text.split(","))


def _interrupted(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _run(part: Part, options: argparse.Namespace, seconds: float) -> tuple[Verdict, Found, float]:
    """Run one part in its own process; return its verdict, its findings and its seconds."""
    if reason := skip_reason(part, options.device):
        return Verdict.SKIPPED, Found(skipped=(reason,)), 0.0
    log = options.out / "gpu.log"
    with log.open("a", encoding="utf-8") as output:
        output.write(f"\n== part {part.number}, {part.name}, on {options.device} ==\n")
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        words = [sys.executable, "-m", "gpu_check.part", str(part.number), "--device", options.device]
        words += ["--folder", str(folder), "--seconds", f"{seconds:.0f}", *(["--quick"] if options.quick else [])]
        end = run(words, seconds, _environment(options), log)
        table = {}
        with suppress(FileNotFoundError):
            table = json.loads((folder / FINDINGS).read_text(encoding="utf-8"))
        return *judged(found_in(table), end), end.seconds
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(options: argparse.Namespace) -> dict[str, str]:
    variables = {DEVICE: options.device, "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **variables, "GPU_CHECK_DEVICE_MODULE": options.device_module}


def _machine(device: str) -> tuple[str, str]:
    """Return what the device is called, and the versions of torch and of the driver."""
    software = f"torch {metadata.version('torch')}"
    if device != "cuda":
        return f"{'a simulated accelerator on ' * (device == 'simulated')}{platform.machine()} CPU", software
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"a GPU that nvidia-smi does not name ({error})", software
    name, _, driver = said.partition("\n")[0].partition(",")
    return name.strip(), f"{software}, driver {driver.strip()}"


def _write(out: Path, outcomes: tuple[Outcome, ...], renews_page: bool) -> None:  # noqa: FBT001 - an option
    (out / "gpu.json").write_text(as_json(outcomes), encoding="utf-8")
    shutil.copy(PAGE, out / PAGE.name)
    for page in (out / PAGE.name, *([PAGE] if renews_page else [])):
        put(page, "outcomes", as_markdown(outcomes))


if __name__ == "__main__":
    sys.exit(main())
