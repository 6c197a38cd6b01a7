"""The `diffaccel` command: one file per verb, loaded only when that verb is called.

A verb's file has `add_arguments(parser)` and `run(args) -> int`. Its result goes to stdout, with --json as
exactly one document; progress and complaints go to stderr.
Exit codes: 0 done, 1 failed or refused, 2 bad arguments, 4 worse than what was asked for, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import DiffaccelError, nearest

VERBS: dict[str, str] = {
    "bench": "measure plans in turn on one pipeline: speed, fidelity, steps, memory; a report; a regression check",
    "demo": "generate pictures with and without acceleration and compare speed and fidelity",
    "doctor": "say what is wrong with this machine, a pipeline, or a lever on it",
    "export": "write a plan as a command or script for SGLang, vLLM-Omni, xDiT or diffusers",
    "ledger": "say what a generation costs: FLOPs, memory, seconds, dollars",
    "plan": "show what a preset would switch on for a pipeline, and why",
    "presets": "list the presets, or print one",
    "quantize": "turn a pipeline's denoisers into a 4-bit checkpoint (SVDQuant)",
    "scout": "show what many seeds become after a few steps, and finish the chosen ones",
    "sweep": "one parameter from careful to bold: a curve of speed and fidelity, beside simply fewer steps",
    "tune": "search the steps that are worth computing, for one pipeline, and write presets",
}
_LATER = ("comfyui",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (sys.argv unless given) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(words).parse_args(words)
        code: int = args.run(args)
        sys.stdout.flush()  # here, where a reader that went away can be told from a failure
        return code
    except BrokenPipeError:  # `diffaccel presets auto | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more is to be written at exit
        return 1
    except (DiffaccelError, OSError) as refusal:  # OSError: weights missing, --out not writable
        print(f"diffaccel: {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("diffaccel: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # argparse: 0 after --help, 2 after bad arguments
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """A parser that knows every verb by name, but has loaded only the one in `words`."""
    parser = argparse.ArgumentParser(
        prog="diffaccel", description="Accelerators for diffusers pipelines.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"diffaccel {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        parser.error(_unknown(verb))
    for name, summary in VERBS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == verb:
            module = importlib.import_module(f".{name}", __name__)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def _unknown(verb: str) -> str:
    if verb in _LATER:
        return f"{verb!r} is not in this version; verbs are {', '.join(VERBS)}"
    return f"unknown verb {verb!r}: {nearest(verb, VERBS)}"


# What libraries say while they are imported, of optional packages and of each other; nothing a user could act upon.
IMPORT_NOISE = re.compile(
    r"requires torchvision|Unable to import `torchao`|Failed to load .*\.so|register_constant\(\)|cpp extensions"
)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return IMPORT_NOISE.search(record.getMessage()) is None


def hush_libraries() -> None:
    """Keep bars, and notes about optional packages (torchvision, parts of torchao), off the screen; warnings stay."""
    for name in ("torchao", "torch.utils._pytree"):  # both speak while diffusers is imported
        logging.getLogger(name).addFilter(_is_no_noise)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    for library in (diffusers_logging, transformers_logging):
        library.get_logger()  # makes the handler, which sees what all loggers of the library say
        for handler in logging.getLogger(library.__name__.partition(".")[0]).handlers:
            handler.addFilter(_is_no_noise)
