"""Logs: one line an event, for people or as JSON.

Rules: facts go into `extra={"facts": {...}}`, never into the text; no prompt text, key material or token ids, ever
(ids of namespaces and sessions appear shortened). Loggers are `logging.getLogger(__name__)` below `prefixcache`.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message and the facts."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "facts", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class HumanFormatter(logging.Formatter):
    """`12:34:56 info message  name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with a traceback where there is one."""
        moment = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        facts = "".join(f"  {name}={value}" for name, value in getattr(record, "facts", {}).items())
        text = f"{moment} {record.levelname.lower():7} {record.getMessage()}{facts}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def setup(form: str, level: str, stream: TextIO | None = None) -> None:
    """Send everything below `prefixcache` to `stream` (standard error); replaces an earlier set-up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    logger = logging.getLogger("prefixcache")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
