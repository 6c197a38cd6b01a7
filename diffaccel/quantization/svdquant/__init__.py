"""SVDQuant (4-bit weights and activations with a low-rank branch): mathematics, quantizing, files, execution.

`math.py` and `formats.py` are pure functions; `ptq.py` quantizes a pipeline into a file; `checkpoint.py` is our file,
`nunchaku*.py` and `packing.py` the layouts of others; `linear.py` is the layer, and `config.py` what puts it on.
"""

from .config import SvdQuant

__all__ = ["SvdQuant"]
