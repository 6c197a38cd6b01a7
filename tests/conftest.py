"""Settings for all tests: nothing is ever downloaded, and libraries keep their hints to themselves."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before any test imports huggingface_hub
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tests start subprocesses
