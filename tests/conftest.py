"""Settings for all tests: nothing is ever downloaded, and libraries keep their hints to themselves."""

import os

# One thread: sums split over threads are not bit-equal from run to run, and many tests compare bits; on tiny models
# it is faster, too. Before any test imports torch.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # before any test imports huggingface_hub
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tests start subprocesses
