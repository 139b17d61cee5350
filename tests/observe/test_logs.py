"""Logs: one JSON object a line, whatever is logged."""

from __future__ import annotations

import io
import json
import logging

from headrace.observe.logs import Forward, logger


def test_a_line_is_one_json_object() -> None:
    out = io.StringIO()
    log = logger(out)
    log.info("request", request_id="r-1", status=200, text="two\nlines", odd=object())
    log.debug("hidden")
    (line,) = out.getvalue().splitlines()
    event = json.loads(line)
    assert event["event"] == "request"
    assert event["level"] == "info"
    assert event["request_id"] == "r-1"
    assert event["timestamp"].endswith("Z")


def test_exceptions_and_foreign_records_stay_on_one_line() -> None:
    out = io.StringIO()
    foreign = logging.getLogger("tests.foreign")
    foreign.propagate = False
    foreign.addHandler(Forward(logger(out)))
    try:
        raise ValueError("boom")
    except ValueError:
        foreign.exception("it %s", "failed")
    (line,) = out.getvalue().splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["logger"]) == ("it failed", "error", "tests.foreign")
    assert "ValueError: boom" in event["exception"]
