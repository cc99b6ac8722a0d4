"""Both log forms."""

import io
import json
import logging

import pytest

from prefixcache.server import logs


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_json_lines_carry_the_facts(stream: io.StringIO) -> None:
    logs.setup("json", "info", stream)
    logger = logging.getLogger("prefixcache.test")
    logger.info("it %s", "happened", extra={"facts": {"pid": 7, "error": OSError("full")}})
    logger.debug("not shown")
    line = json.loads(stream.getvalue())
    assert (line["message"], line["level"], line["logger"]) == ("it happened", "info", "prefixcache.test")
    assert (line["pid"], line["error"]) == (7, "full")


def test_human_lines_and_tracebacks(stream: io.StringIO) -> None:
    logs.setup("human", "debug", stream)
    try:
        raise KeyError("inner")
    except KeyError as error:
        logging.getLogger("prefixcache.test").error("failed", extra={"facts": {"a": 1}}, exc_info=error)
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("error   failed  a=1")
    assert rest[-1] == "KeyError: 'inner'"


def test_setting_up_again_replaces(stream: io.StringIO) -> None:
    logs.setup("human", "info", io.StringIO())
    logs.setup("human", "warning", stream)
    logging.getLogger("prefixcache").info("no")
    logging.getLogger("prefixcache").warning("yes")
    assert len(stream.getvalue().splitlines()) == 1
