"""What is shown of the tracebacks that programs print; `test_relay` has those of Ctrl-C."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.ground import contract
from poprun.job.output.tracebacks import TracebackFilter

HEADER = "Traceback (most recent call last):\n"
OWN = '  File "/home/me/train.py", line 7, in step\n    loss(model(x)).backward()\n         ^^^^^^^^\n'
TORCH = '  File "/v/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in call\n    return call()\n'
POPDIST = f'  File "{contract.__file__}", line 9, in wait\n    raise error\n'
PYTHON = '  File "/usr/lib/python3.11/contextlib.py", line 144, in __exit__\n    next(self.gen)\n'
MINE = '  File "/v/lib/python3.11/site-packages/mine/train.py", line 4, in main\n    step()\n'
COMMAND = '  File "/v/bin/mine-train", line 8, in <module>\n    sys.exit(main())\n'
CALLED = "  … 1 call of torch\n"
ERROR = "ValueError: instance 3 has no batch 17\n"
WHOLE = HEADER + OWN + TORCH + POPDIST + TORCH + ERROR
FOLDED = HEADER + OWN + "  … 3 calls of torch and popdist\n" + ERROR
LINK = "\nDuring handling of the above exception, another exception occurred:\n\n"


def show(*writes: tuple[int, str], shows_all: bool = False) -> str:
    """What poprun shows of what instances write, one after the other."""
    tracebacks = TracebackFilter(shows_all=shows_all)
    shown = [tracebacks.feed(index, text.encode(), leaves_out_interrupts=False) for index, text in writes]
    return b"".join([*shown, *(tracebacks.finish(index) for index, _ in writes)]).decode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (WHOLE, FOLDED),
        ("step 1\n" + WHOLE + "step 2\n", "step 1\n" + FOLDED + "step 2\n"),
        ("".join(f"[rank3]: {line}" for line in WHOLE.splitlines(keepends=True)), FOLDED),
        (HEADER + OWN + PYTHON + OWN + ERROR, HEADER + OWN + "  … 1 call of Python\n" + OWN + ERROR),
        (HEADER + TORCH + POPDIST + ERROR, HEADER + TORCH + "  … 1 call of popdist\n" + ERROR),
        (HEADER + PYTHON + MINE + TORCH + ERROR, HEADER + "  … 1 call of Python\n" + MINE + CALLED + ERROR),
        (HEADER + COMMAND + MINE + TORCH + ERROR, HEADER + COMMAND + MINE + CALLED + ERROR),
        (WHOLE + LINK + WHOLE, FOLDED + LINK.strip() + "\n" + FOLDED),
        (HEADER + "no traceback\n", HEADER + "no traceback\n"),
        (HEADER + OWN, HEADER + OWN),
        (ERROR + OWN, ERROR + OWN),
    ],
)
def test_calls_of_libraries_become_a_line(text: str, shown: str) -> None:
    """The user's own calls stay whole, and so do those of an installed program that has no others."""
    assert show((0, text)) == shown
    assert show((0, text), shows_all=True) == text


def test_equal_tracebacks_are_shown_once() -> None:
    """With the instance that printed the traceback first, whatever the numbers in the message are."""
    other = ERROR.replace("3", "4")
    repeated = f"same traceback as instance 2: {other}"

    assert show((2, WHOLE), (0, WHOLE.replace(ERROR, other))) == FOLDED + repeated
    assert show((2, WHOLE + LINK + HEADER + OWN + ERROR), (0, WHOLE.replace(ERROR, other) + LINK + WHOLE)) == (
        FOLDED + LINK.strip() + "\n" + HEADER + OWN + ERROR + repeated + f"same traceback as instance 2: {ERROR}"
    )
    assert show((2, WHOLE), (2, WHOLE)) == FOLDED * 2
    assert show((2, WHOLE), (0, WHOLE.replace("step", "other"))) == FOLDED + FOLDED.replace("step", "other")


def test_a_long_message_is_whole_once() -> None:
    """Another message, be it in a number alone, is shown whole again."""
    long = ERROR.replace("no batch", "no batch of samples" * 9)
    repeated = f"same traceback as instance 2: {long[:100]}…\n"

    assert show((2, WHOLE.replace(ERROR, long)), (0, WHOLE.replace(ERROR, long))).endswith(f"\n{long}{repeated}")
    assert show((2, WHOLE.replace(ERROR, long)), (0, WHOLE.replace(ERROR, long.replace("17", "4")))).endswith(
        long.replace("17", "4")
    )


def test_the_lines_of_a_message_of_popdist_are_shown_once() -> None:
    """Where they end what an instance prints, or a link follows; never a line that it prints after them."""
    raised, advice = "popdist.errors.BatchError: write\n", "\n    write this\n\nand that\n"
    whole, folded = WHOLE.replace(ERROR, raised), FOLDED.replace(ERROR, raised)
    first, again = folded + advice[1:], f"same traceback as instance 2: {raised}"

    assert show((2, whole + advice), (0, whole + advice)) == first + again
    assert show((2, whole + advice), (0, whole + advice + "saved\n")) == first + again + advice[1:] + "saved\n"
    assert show((2, whole + advice), (0, whole + "    write this\n" + whole)) == (
        first + again + "    write this\n" + again
    )
    assert show((2, whole + advice), (0, whole + advice + LINK + WHOLE)) == first + again + FOLDED
    assert show((2, WHOLE + "saved\n"), (0, WHOLE + "saved\n")).count("saved") == 2


@given(st.lists(st.sampled_from([HEADER, OWN, TORCH, ERROR, "step 1\n", LINK]), max_size=20), st.data())
def test_no_line_of_the_user_is_lost(parts: list[str], data: st.DataObject) -> None:
    """However the tracebacks are torn, his calls, his exceptions and what he prints are shown in their order."""
    shown = show(*((0, part) for part in parts))
    kept = [line for line in "".join(parts).splitlines() if line.strip() and "site-packages" not in line]

    assert [line for line in shown.splitlines() if "…" not in line and "call()" not in line and line.strip()] == [
        line for line in kept if "call()" not in line
    ] or "site-packages" in shown
    lines = "".join(parts).splitlines(keepends=True)
    cut = data.draw(st.integers(0, len(lines)))
    assert show((0, "".join(lines[:cut])), (0, "".join(lines[cut:]))) == shown
