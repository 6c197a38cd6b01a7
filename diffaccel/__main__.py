"""`python -m diffaccel` is the same as the `diffaccel` command."""

import sys

from diffaccel.cli import main

if __name__ == "__main__":
    sys.exit(main())
