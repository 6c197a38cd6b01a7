"""FP8 and INT8 on a GPU, alone, compiled and under a cache. Not run on a GPU by us."""

from __future__ import annotations

from measure import arguments, compare

FP8 = {"quantization": "fp8"}
INT8 = {"quantization": "int8"}
SETTINGS = {
    "fp8 dynamic row": FP8 | {"quantization_scheme": "dynamic"},
    "fp8 dynamic tensor": FP8 | {"quantization_scheme": "dynamic", "quantization_granularity": "tensor"},
    "fp8 weight_only": FP8 | {"quantization_scheme": "weight_only"},
    "fp8 dynamic torchao": FP8 | {"quantization_backend": "torchao"},
    "fp8 dynamic and compile": FP8 | {"compile": True},
    "fp8 dynamic, compile and first_block": FP8 | {"compile": True, "cache": "first_block", "cache_threshold": 0.1},
    "fp8 dynamic, text encoders too": FP8 | {"quantization_text_encoders": True},
    "int8 dynamic (compiled by the plan)": INT8,
    "int8 dynamic, eager": INT8 | {"compile": False},
    "int8 weight_only": INT8 | {"quantization_scheme": "weight_only"},
    "compile": {"compile": True},
}

if __name__ == "__main__":
    compare(arguments(__doc__), SETTINGS)
