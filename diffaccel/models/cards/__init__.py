"""One card per family: what diffaccel knows about it, as plain data."""
