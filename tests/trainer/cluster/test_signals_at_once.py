"""Two signals at once reach a main thread that waits, whichever thread the kernel chooses."""

import select
import signal
import subprocess
import sys
from pathlib import Path

from trainer.cluster import signals
from trainer.cluster.signals import on_interrupt

ROUNDS = 20
SECONDS = 120
# The other threads are awake, as those of a supervisor may be, and could receive a signal.
WAITING = """
import os, queue, select, threading
from trainer.cluster.signals import on_interrupt

def turn():
    while True:
        select.select([reader], [], [], 0.001)

interrupts, (reader, _) = queue.SimpleQueue(), os.pipe()
for _ in range(6):
    threading.Thread(target=turn, daemon=True).start()
with on_interrupt(lambda: interrupts.put(None)):
    while True:
        print("ready", flush=True)
        interrupts.get()
        interrupts.get()
"""


def test_both_of_two_signals_are_noticed():
    with subprocess.Popen(
        [sys.executable, "-c", WAITING],
        cwd=Path(signals.__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for _ in range(ROUNDS):
                assert select.select([process.stdout], [], [], SECONDS)[0], "nothing was noticed"
                assert process.stdout.readline() == "ready\n"
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGTERM)
        finally:
            process.kill()


def test_the_handlers_before_it_come_back():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGURG)
    before = [signal.getsignal(number) for number in numbers]
    with on_interrupt(list):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
