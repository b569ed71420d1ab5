"""What launchers say, to whoever is there."""

import os
import subprocess
import sys

CODE = "from megatron_ft.launch.console import say, show; say('one'); show('two'); say('three'); print('went on')"


def test_a_terminal_that_has_gone_away_ends_nothing():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=write, text=True)
    os.close(write)
    assert done.stdout == "went on\n"


def test_what_is_said_has_a_name_and_what_is_shown_has_none():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stderr == "megatron_ft: one\ntwo\nmegatron_ft: three\n"
