"""Messages of the library: plain lines by default, and a script can send them elsewhere."""

import io
import logging
import sys

from megatron_ft.utils import log
from megatron_ft.utils.console import say


def test_a_message_is_a_line_and_warnings_are_on_standard_error(capsys):
    messages = logging.getLogger("megatron_ft.run.session")
    messages.info("step 3 is saved, 100% of it")
    messages.warning("history not written")
    messages.debug("nothing to show")
    assert capsys.readouterr() == (
        "megatron_ft: step 3 is saved, 100% of it\n",
        "megatron_ft: history not written\n",
    )


def test_messages_of_an_agent_are_on_standard_error_with_control_characters_shown(capsys):
    say("host 1 (\x1b[2J) is lost")
    assert capsys.readouterr() == ("", "megatron_ft: host 1 (\\x1b[2J) is lost\n")


def test_a_stream_that_is_closed_ends_nothing(capsys, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    logging.getLogger("megatron_ft").info("nobody reads this")
    monkeypatch.undo()
    logging.getLogger("megatron_ft").info("this is read")
    assert capsys.readouterr() == ("megatron_ft: this is read\n", "")


def test_handlers_that_a_script_has_given_are_kept(capsys, monkeypatch):
    heard: list[str] = []

    class Mine(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger("megatron_ft"), "handlers", [Mine()])
    log.set_up()
    logging.getLogger("megatron_ft.data.prefetch").warning("the dataset failed")
    assert heard == ["the dataset failed"]
    assert capsys.readouterr() == ("", "")
