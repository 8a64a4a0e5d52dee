"""One line an event on standard error, as text or as JSON. The daemon's, never the library's.

Called once by each process of the daemon at its start. Modules log through
`logging.getLogger(__name__)`; a save's lines begin with its save_id. It writes no files.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone


def configure_logging(log_format: str, process: str) -> None:
    """Send the writer's log to standard error. process: "supervisor" or "server"."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter(process))
    else:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {process}[%(process)d] %(message)s")
        )
    for name in ("shardwright_writer", "__main__"):  # a module run with -m has the second name
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname,
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
