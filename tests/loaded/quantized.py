"""Rows of docs/loading.md: weights in high precision, and weights that others quantized."""

from __future__ import annotations

from tests import tiny
from tests.loaded.row import Row

ROWS = (Row("`from_pretrained`", lambda: tiny.build("flux"), slow=False),)
