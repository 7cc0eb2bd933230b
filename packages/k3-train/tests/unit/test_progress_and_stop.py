"""What a person sees, and how a run is asked to stop."""

import dataclasses
import io
import os
import re
import signal

import pytest
from rich.console import Console

from k3_train.loop.log import LogRow
from k3_train.loop.progress import LiveReporter, PlainReporter, describe, make_reporter
from k3_train.loop.stop import StopRequest

ROW = LogRow(
    step=3,
    tokens=300,
    loss=2.5,
    lr=0.01,
    tokens_per_s=1234.0,
    grad_norm=0.5,
    max_over_mean_load=1.25,
    dead_experts=2,
    mtp_loss=0.0,
    values={"mfu": 0.314},
)
FIGURES = ("loss 2.5", "lr 1.00e-02", "tok/s 1,234", "MFU 31.4%", "max/mean 1.25", "dead 2")


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with make_reporter(10, stream) as reporter:
        assert isinstance(reporter, PlainReporter)
        reporter.row(ROW, 12.0)
    line = stream.getvalue()
    assert line.startswith("step 3/10")
    assert line.count("\n") == 1
    assert all(figure in line for figure in (*FIGURES, "eta 12s"))


def test_without_a_known_peak_there_is_no_mfu():
    assert "MFU" not in describe(dataclasses.replace(ROW, values={}))
    assert "skipped 3" in describe(dataclasses.replace(ROW, values={"skipped_steps": 3}))


def test_a_terminal_gets_a_panel_with_the_same_figures():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=160)
    with LiveReporter(10, console) as reporter:
        reporter.row(ROW, 3700.0)
        reporter.note("saved [here]")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "eta 1:01:40" in shown
    assert "3/10" in shown
    assert "saved [here]" in shown
    assert all(figure in shown for figure in FIGURES)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.name == ""
        os.kill(os.getpid(), number)
        assert stop.name == number.name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_ends_at_once():
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
