"""Loggers of `opslot`; below WARNING, only rank 0 logs."""

from __future__ import annotations

import logging
import os


def _is_logged(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or os.environ.get("RANK", "0") == "0"


def get_logger(name: str) -> logging.Logger:
    """Logger `name` (usually `__name__`) whose messages below WARNING are dropped on ranks other than 0."""
    logger = logging.getLogger(name)
    logger.addFilter(_is_logged)
    return logger
