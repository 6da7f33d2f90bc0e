"""What is shown of a program's standard error; the files of `stderr` are what real programs wrote."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.observe.account.last_words import MAX_EXCERPT_LINES, LastWords, last_words

RECORDED = Path(__file__).parent / "stderr"

TRACEBACK = "Traceback (most recent call last):"
CALL = '  File "/home/me/train.py", line 3, in <module>'


def words(*lines: str) -> LastWords:
    """The last words of a program that wrote ``lines``."""
    return last_words(lines)


def recorded(name: str) -> list[str]:
    """The excerpt of what a real program wrote."""
    return list(last_words((RECORDED / f"{name}.txt").read_text(encoding="utf-8").splitlines()).lines)


def test_the_last_traceback_is_shown() -> None:
    """What a library printed around it is not."""
    said = words(TRACEBACK, CALL, "KeyError: 1", "noise", TRACEBACK, CALL, "ValueError: x")

    lines = (TRACEBACK, CALL, "ValueError: x")
    assert said == LastWords(summary="ValueError: x", place="/home/me/train.py:3", lines=lines)


def test_a_call_may_be_marked_with_a_line_of_blanks() -> None:
    """Python does that when the code of a call spans lines."""
    assert words(TRACEBACK, CALL, "    def impl(", "    ", "ValueError: x").lines == (
        TRACEBACK,
        CALL,
        "    def impl(",
        "ValueError: x",
    )


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    """Of the steps of a progress bar only the last one; nothing of a program that said nothing."""
    assert words() == LastWords()
    assert words("one", "", "two").lines == ("one", "two")
    assert words("loading", " 98%|████▉| 49/50", "100%|█████| 50/50").lines == ("loading", "100%|█████| 50/50")


def test_a_traceback_that_the_program_survived_is_none() -> None:
    """It went on and printed much."""
    said = words(TRACEBACK, CALL, "OSError: retrying", *(f"step {n} of {'x' * n}" for n in range(50)), "no data")

    assert said.summary == "no data"
    assert TRACEBACK not in said.lines


@pytest.mark.parametrize(
    "noise",
    [
        "[rank0]:[W1121 06:40:02.364000000 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() ...",
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: 2 leaked",
        "terminate called after throwing an instance of 'c10::Error'",
        "frame #0: c10::Error::Error() + 0x57 (0x7f in /x/libc10.so)",
        "E1121 06:40:06.925000 22083 torch/distributed/elastic/multiprocessing/api.py:1002] failed",
        "[box:00017] [ 3] /lib/libc.so.6(+0x29d90)",
        "/home/me/train.py:9: DeprecationWarning: old",
    ],
)
def test_what_the_shutdown_prints_does_not_hide_the_cause(noise: str) -> None:
    """Warnings and stack frames of C++ come after the exception, and are no part of its message."""
    said = words(TRACEBACK, CALL, "ValueError: two", "lines", *[noise] * 60)

    assert said.summary == "ValueError: two"
    assert said.lines == (TRACEBACK, CALL, "ValueError: two", "lines")


def test_an_abort_is_its_message_without_the_stack() -> None:
    """A C++ exception that nobody caught."""
    abort = "terminate called after throwing an instance of 'std::bad_alloc'"
    said = words("step 1", abort, "  what():  std::bad_alloc", "frame #0: f() + 0x57 (0x7f in /x/libc10.so)")

    assert said == LastWords(summary="what():  std::bad_alloc", lines=(abort, "  what():  std::bad_alloc"))


def test_a_long_traceback_keeps_the_users_calls() -> None:
    """And the very last call, where the exception was raised."""
    library = '  File "/usr/lib/python3.11/site-packages/torch/nn.py", line 1, in _call_impl'
    deep = [line for _ in range(30) for line in (library, "    return forward_call()")]
    said = words(
        TRACEBACK, CALL, "    train()", *deep, CALL.replace("3", "9"), "    x.view(3)", *deep, "ValueError: x"
    )

    assert said.lines == (
        TRACEBACK,
        "  … 31 more calls",
        CALL.replace("3", "9"),
        "    x.view(3)",
        "  … 29 more calls",
        library,
        "    return forward_call()",
        "ValueError: x",
    )


def test_colours_and_long_lines_are_cut() -> None:
    """Nothing of a terminal's codes is left, and of a line that is too long its two ends."""
    said = words(f"\x1b[31m{TRACEBACK}\x1b[0m", CALL, f"\x1b[1;31mValueError\x1b[0m: {'x' * 5000} end\x07")

    assert said.lines[0] == TRACEBACK
    assert said.summary.startswith("ValueError: xxx")
    assert said.summary.endswith("xxx end")
    assert len(said.summary) == 200


def test_a_long_message_is_cut() -> None:
    """Its first lines tell what it is about."""
    assert words(TRACEBACK, CALL, "ValueError: 0", *map(str, range(1, 9))).lines[2:] == (
        "ValueError: 0",
        "1",
        "2",
        "… 6 more lines",
    )


def test_the_exception_of_a_data_loaders_worker() -> None:
    """The worker's own traceback, and who brought it."""
    assert recorded("data_loader") == [
        "ValueError: Caught ValueError in DataLoader worker process 1.",
        TRACEBACK,
        "  … 3 more calls",
        '  File "/home/me/loader.py", line 7, in __getitem__',
        '    raise ValueError(f"sample {i} is broken")',
        "ValueError: sample 3 is broken",
    ]


def test_the_exception_of_a_spawned_process() -> None:
    """What torch.multiprocessing.spawn brings."""
    assert recorded("spawn")[::6] == [
        "-- Process 0 terminated with the following error:",
        "ZeroDivisionError: integer division or modulo by zero",
    ]
    assert '  File "/home/me/spawn.py", line 2, in f' in recorded("spawn")


def test_the_exception_of_a_loaders_spawned_worker() -> None:
    """Why it ended, whole, and not the errors of torch in the main process, which say that it ended."""
    said = recorded("spawned_worker")[-2:]

    assert said[0].startswith("popdist.errors.BackendError: init() in process ")
    assert said[1].startswith(
        "A process that is spawned, such as a worker of a DataLoader, runs the main file again"
    )
    assert said[1].endswith('and call that below `if __name__ == "__main__":`')
    assert " … " not in "".join(said)


def test_a_killed_worker_is_named_by_torchs_error() -> None:
    """It wrote nothing, so there is nothing else to show."""
    said = words(TRACEBACK, CALL, "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly")

    assert said.summary == "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly"


def test_torchruns_report_does_not_hide_the_programs() -> None:
    """The rank that torchrun names as the root cause is shown, not the one that lost it, nor torchrun's own."""
    assert recorded("torchrun") == [
        TRACEBACK,
        '  File "/home/me/worker.py", line 7, in <module>',
        '    train(int(os.environ["RANK"]))',
        '  File "/home/me/worker.py", line 5, in train',
        '    raise ValueError("bad batch")',
        "ValueError: bad batch",
    ]


def test_torchruns_report_is_shown_when_there_is_nothing_else() -> None:
    """A worker that a signal ended has no traceback: who it was, and how it ended."""
    lines = (RECORDED / "torchrun.txt").read_text(encoding="utf-8").splitlines()
    said = last_words([line for line in lines if not line.startswith("[rank")])

    assert said.lines[-3:] == (
        "  host      : localhost",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : 1 (pid: 22147)",
    )


def test_an_exception_that_led_to_another_is_one_line() -> None:
    """A thread's own is another matter, and does not hide the program's."""
    assert recorded("thread_and_chain") == [
        "KeyError: 'lr' (File \"/home/me/thread.py\", line 6, in main)",
        "During handling of the above exception, another exception occurred:",
        TRACEBACK,
        "  … 1 more call",
        '  File "/home/me/thread.py", line 8, in main',
        '    raise RuntimeError("no learning rate\\nset one\\n\\nplease")',
        "RuntimeError: no learning rate",
        "set one",
        "please",
    ]


def test_the_cause_in_a_process_pool_is_named() -> None:
    """The place in the function that the pool ran."""
    assert recorded("process_pool")[0] == (
        'ZeroDivisionError: integer division or modulo by zero (File "/home/me/pool.py", line 2, in f)'
    )


def test_a_cause_inside_a_library_has_no_place() -> None:
    """Where in the library it was raised tells the user nothing."""
    library = '  File "/usr/lib/python3.11/site-packages/torch/signal.py", line 7, in handler'
    sentence = "The above exception was the direct cause of the following exception:"
    said = words(
        TRACEBACK, library, "RuntimeError: killed", "", sentence, "", TRACEBACK, CALL, "RuntimeError: exited"
    )

    assert said.lines == ("RuntimeError: killed", sentence, TRACEBACK, CALL, "RuntimeError: exited")


def test_a_long_message_leaves_no_heading_without_calls() -> None:
    """As torch's stages of a pipeline raise, whose message has the arguments."""
    sentence = "The above exception was the direct cause of the following exception:"
    torchs = (
        CALL,
        "    loss()",
        '  File "/usr/lib/python3.11/site-packages/torch/stage.py", line 9, in forward',
        "    step(",
    )
    stage = ("RuntimeError:", "    [Stage 1] failed to run forward:", "    args: (1,)", "    kwargs: {}")
    said = words(TRACEBACK, CALL, "ValueError: bad", "", sentence, "", TRACEBACK, *torchs, *stage)

    assert said.lines[:2] == (f"ValueError: bad ({CALL.strip()})", sentence)
    assert TRACEBACK not in said.lines
    assert said.lines[-4:] == stage
    assert said.summary == "RuntimeError: [Stage 1] failed to run forward:"


def test_a_group_of_exceptions_is_read() -> None:
    """Its place is known, and what the exceptions in it say, also after another traceback."""
    lines = (RECORDED / "exception_group.txt").read_text(encoding="utf-8").splitlines()

    for said in (words(*lines), words(TRACEBACK, CALL, "ValueError: first", "", *lines)):
        assert (said.summary, said.place) == (
            "ExceptionGroup: both failed (3 sub-exceptions)",
            "/home/me/group.py:9",
        )
        assert said.lines[-4:] == (
            "ExceptionGroup: both failed (3 sub-exceptions)",
            "  ValueError: 1",
            "  KeyError: 'two'",
            "… 2 more lines",
        )


def test_of_a_drawn_traceback_the_last_lines_are_shown() -> None:
    """Of rich's box: with the last exception, also after another traceback."""
    lines = (RECORDED / "rich.txt").read_text(encoding="utf-8").splitlines()
    before = words(TRACEBACK, CALL, "ValueError: first", "", *lines).lines

    for excerpt in (recorded("rich"), before):
        assert len(excerpt) == MAX_EXCERPT_LINES
        assert any("return 1 / rate" in line for line in excerpt)
        assert any("ZeroDivisionError: division by zero" in line for line in excerpt)


def test_an_exception_that_python_ignored_is_not_the_cause() -> None:
    """It comes last, from an object's end."""
    assert recorded("ignored_in_del")[-1] == "ValueError: real"


def test_the_interpreters_report_of_a_crash() -> None:
    """With the stack of the thread that crashed, the innermost call last as in a traceback."""
    assert recorded("segfault")[1] == '  File "<string>", line 1 in <module>'
    assert recorded("segfault")[-1] == "Fatal Python error: Segmentation fault"


def test_an_error_of_syntax_has_no_traceback() -> None:
    """It is found all the same, with the mark below the code."""
    lines = (CALL.rpartition(",")[0], "    def f(:", "          ^", "SyntaxError: invalid syntax")

    assert words("starting", *lines).lines == lines


LINES = st.sampled_from(
    [line for file in sorted(RECORDED.iterdir()) for line in file.read_text(encoding="utf-8").splitlines()]
)


@given(st.lists(LINES | st.text(max_size=300), max_size=60))
def test_any_text_has_an_excerpt(tail: list[str]) -> None:
    """Whatever the order of whatever lines: few short lines, and none of them holds a control code."""
    said = last_words(tail)

    assert len(said.lines) <= MAX_EXCERPT_LINES
    assert all(len(line) <= 200 for line in (*said.lines, said.summary))
    assert not {chr(code) for code in range(32)} & set("".join((*said.lines, said.summary)))


def test_the_message_of_popdist_is_never_cut() -> None:
    """It says what to do, however long it is; the calls above it give way."""
    rows = [f"  instance {index}: all_reduce of {index} elements" for index in range(7)]
    first = "popdist.errors.CollectiveError: " + "collective mismatch, " * 20 + "end"
    calls = [f'  File "/home/me/train.py", line {number}, in step' for number in range(9)]
    said = last_words(["Traceback (most recent call last):", *calls, first, *rows])

    assert said.lines[-8:] == (first, *rows)
    assert said.summary == first
