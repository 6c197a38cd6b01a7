"""Rows of docs/loading.md: pipelines with a device map."""

from __future__ import annotations

import tempfile
from typing import Any

from tests import tiny
from tests.loaded.row import Row


def mapped() -> Any:
    """`device_map="cpu"`: the pipeline says where its components were loaded, and nothing moves."""
    pipe = tiny.build("flux")
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        return type(pipe).from_pretrained(folder, device_map="cpu")


ROWS = (Row('`device_map="cpu"`', mapped),)
