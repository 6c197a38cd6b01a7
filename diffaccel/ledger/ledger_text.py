"""A ledger as a page of text."""

from __future__ import annotations

from collections.abc import Sequence

from .book import Ledger
from .comparison import LLM_FLOPS, Step, llm_seconds
from .hardware import Hardware
from .memory import CONTEXT_GIB, need
from .timing import Seconds


def page(
    ledger: Ledger, machine: Hardware | None, free_gib: float | None = None, strips_bytes: int | None = None
) -> str:
    """All about one generation; `strips_bytes`: the peak of decoding in exact strips, where there are any."""
    lines = [*_head(ledger), "", *_forward(ledger, machine), "", *_stages(ledger)]
    lines += ["", *_memory(ledger, machine, free_gib, strips_bytes)]
    if machine is not None:
        lines += ["", *_seconds(machine, ledger.seconds)]
    lines += ["", *_llm(ledger, machine)]
    lines += [f"not certain: {remark}" for remark in ledger.uncertain]
    return "\n".join(lines)


def _head(ledger: Ledger) -> list[str]:
    asked = ledger.request
    size = f"{asked.width}x{asked.height}" + (f"x{asked.frames}" if asked.frames else "")
    forwards = "1 forward" if asked.branches == 1 else f"{asked.branches} forwards"
    text = "+".join(map(str, asked.text_tokens))
    return [f"{ledger.model}  {size}, {asked.steps} steps, {forwards} a step, {text} text tokens ({ledger.origin})"]


def _forward(ledger: Ledger, machine: Hardware | None) -> list[str]:
    one, tokens = ledger.flops.forward, ledger.tokens
    image = f" ({ledger.image_tokens} of the image)" if tokens != ledger.image_tokens else ""
    ridge = machine.ridge if machine else None
    limit = ""
    if machine is not None and ridge is not None:
        bound = "arithmetic" if ledger.intensity > ridge else "memory bandwidth"
        limit = f"; the ridge of {machine.name} is {ridge:.0f}: limited by {bound}"
    return [
        f"tokens     {tokens}{image}",
        f"forward    {flops(one.total)}: {flops(one.linear)} linear, {flops(one.attention)} attention, "
        f"{flops(one.conv)} convolution",
        f"attention  {ledger.attention_share:.1%} of a forward",
        f"per token  {billions(ledger.per_token['image'])} parameters for an image token, "
        f"{billions(ledger.per_token['text'])} for a text token, of {billions(ledger.params['transformer'])}",
        f"intensity  {ledger.intensity:.0f} FLOP per byte of weights{limit}",
    ]


def _stages(ledger: Ledger) -> list[str]:
    book, seconds = ledger.flops, ledger.seconds
    rows = [("encode", book.encode), ("denoise", book.denoise), ("decode", book.decode or 0), ("total", book.total)]
    lines = [f"{'stage':10} {'FLOPs':>10} {'part':>7}" + (f" {'seconds':>10}" if seconds else "")]
    for name, count in rows:
        took = f" {short(getattr(seconds, name)):>10}" if seconds else ""
        lines.append(f"{name:10} {flops(count):>10} {count / book.total:7.1%}{took}")
    return lines


def _memory(ledger: Ledger, machine: Hardware | None, free_gib: float | None, strips_bytes: int | None) -> list[str]:
    wanted = need(ledger)
    parts = ", ".join(f"{name} {size:.2f}" for name, size in ledger.weights_gib.items())
    lines = [
        f"weights    {wanted.weights:.1f} GiB in bf16: {parts}",
        f"working    {(ledger.activation_bytes or 0) / 2**30:.2f} GiB in a forward, "
        f"{(ledger.vae_peak_bytes or 0) / 2**31:.2f} GiB decoding in bf16 ({(ledger.vae_peak_bytes or 0) / 2**30:.2f} "
        "in fp32)",
    ]
    if strips_bytes is not None:
        lines.append(
            f"strips     {strips_bytes / 2**31:.2f} GiB decoding in bf16 in exact strips (vae_tiling='exact')"
        )
    memory = free_gib if free_gib is not None else machine.memory_gib if machine else None
    where = "" if machine is None else f" {'that are free' if free_gib is not None else ''} on {machine.name}"
    for label, size in (("resident", wanted.resident), ("by stage", wanted.by_stage)):
        line = f"{label:10} {size:.1f} GiB with {CONTEXT_GIB} of context"
        if memory is not None:
            short = size - memory
            verdict = f"fits in {memory:g}" if short <= 0 else f"does not fit in {memory:g} ({short:.1f} GiB short)"
            line += f": {verdict}{where.replace('  ', ' ')}"
        lines.append(line)
    return lines


def _seconds(machine: Hardware, seconds: Seconds | None) -> list[str]:
    if seconds is None:
        wayout = "--probe measures this one in 5 s" if machine.kind == "cpu" else "--hardware names one that is"
        return [f"no seconds: the peak of {machine.name} is not in the table ({wayout})"]
    lines = [
        f"seconds    {short(seconds.total)} on {machine.name}, {seconds.execution}; 80 % within {short(seconds.low)} "
        f"to {short(seconds.high)}",
        f"rate       {seconds.mfu:.2f} of {machine.bf16_tflops:g} TFLOP/s in bf16 ({seconds.basis})",
    ]
    if machine.usd_per_hour is not None:
        price = machine.usd_per_hour
        cost = seconds.total * price / 3600
        lines.append(f"dollars    {cost:.2g} at {price:g} an hour (a rough rent; --prices sets your own)")
    return lines


def _llm(ledger: Ledger, machine: Hardware | None) -> list[str]:
    ratio = ledger.flops.total / LLM_FLOPS
    line = f"an LLM of 7B that writes 1000 tokens computes 14 T: this is {short(ratio)} times as much"
    theirs = llm_seconds(machine) if machine else None
    if theirs is not None and ledger.seconds is not None:
        line += f", in {short(ledger.seconds.total / theirs)} times its {theirs:.2f} s"
    return [line]


def sweep_table(steps: Sequence[Step]) -> str:
    """One line per point."""
    timed = steps[0].ledger.seconds is not None
    head = f"{'at':>12} {'tokens':>8} {'attention':>10} {'forward':>10} {'denoise':>10}"
    lines = ["", head + (f" {'seconds':>9}" if timed else "")]
    for step in steps:
        book = step.ledger
        took = f" {short(book.seconds.total):>9}" if book.seconds is not None else ""
        lines.append(
            f"{step.label:>12} {book.tokens:8} {book.attention_share:10.1%} {flops(book.flops.forward.total):>10} "
            f"{flops(book.flops.denoise):>10}{took}"
        )
    return "\n".join(lines)


def amplifier_table(rows: Sequence[tuple[str, float]]) -> str:
    """What doubling multiplies the denoiser's FLOPs by."""
    return "\ntwice as much of   multiplies the denoiser's FLOPs by\n" + "\n".join(
        f"{label:20} {factor:5.2f}" for label, factor in rows
    )


def flops(count: float) -> str:
    """4.86 T, 2.08 P."""
    return f"{count / 1e15:.2f} P" if count >= 1e15 else f"{count / 1e12:.2f} T"


def short(number: float) -> str:
    """Three figures, and no exponent: 0.0305, 6.22, 4790."""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def billions(count: float) -> str:
    """6.46 B."""
    return f"{count / 1e9:.2f} B"
