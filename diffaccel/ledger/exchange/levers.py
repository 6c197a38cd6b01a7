"""What each plan item does to the open book. One pure function per kind of item, found by the item's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..book import GIB, Ledger
from ..hardware import Hardware
from ..timing import predict
from .account import LAYERS, STAGES, Account, forward_times, link_gb_s
from .caches import CACHES
from .formulas import attention_8bit, kept_pairs, quantized_gib, quantized_linear
from .outcome import Outcome, number, unknown_effect

FP8_UNITS = (8, 9)  # compute capability from which on products of 8-bit floating point are
INT4_UNITS = ((7, 5), (9, 0))  # from, up to: Hopper and later have none
IN_RATES = "the fitted rates are of such kernels: no further gain is counted"


@dataclass(frozen=True)
class Item:
    """What an exchange knows of a plan item: its name, its parameters, and what it was found to need."""

    name: str
    params: Mapping[str, object] = field(default_factory=dict)
    predicted: Mapping[str, object] = field(default_factory=dict)
    fidelity: str = ""


@dataclass(frozen=True)
class Place:
    """Where the book is: of which generation, on which machine, and what else is on."""

    ledger: Ledger
    machine: Hardware | None
    names: frozenset[str] = frozenset()


Rule = Callable[[Account, Item, Place], Outcome]


def ratio(machine: Hardware | None, peak: str) -> float | None:
    """Peak of that name over the bf16 peak; None where either is not known."""
    top = None if machine is None else getattr(machine, peak)
    return None if machine is None or top is None or not machine.bf16_tflops else float(top) / machine.bf16_tflops


# ---- execution ------------------------------------------------------------------------------------------------------


def compiled(account: Account, item: Item, at: Place) -> Outcome:
    """The fitted rates of compiled and eager runs on this machine."""
    if at.machine is None or at.machine.bf16_tflops is None or at.ledger.seconds is None:
        return unknown_effect(account, "no rate of compiled runs is known for this machine")
    eager, fast = (predict(at.ledger, at.machine, execution) for execution in ("eager", "compiled"))
    if eager is None or fast is None or at.ledger.seconds.execution != "eager":
        return unknown_effect(account, "the rate is that of compiled runs already")
    part = eager.mfu / fast.mfu
    how = f"{eager.mfu:.2f} to {fast.mfu:.2f} of the peak ({fast.basis})"
    return Outcome(forward_times(account, part, part, part), how)


def plain_attention(account: Account, item: Item, at: Place) -> Outcome:
    """Kernels that the published times were run with."""
    return unknown_effect(account, IN_RATES)


def eight_bit_attention(account: Account, item: Item, at: Place) -> Outcome:
    """Scores with 8-bit integers; products with the values in FP8 where the GPU has it."""
    int8 = ratio(at.machine, "int8_tops")
    scores, values = (number(item.predicted.get(key)) or 8 for key in ("score_bits", "value_bits"))
    if int8 is None or at.machine is None or scores > 8:
        return unknown_effect(account, "no 8-bit units are used, or none are known for this machine")
    units = values <= 8 and (at.machine.capability or (0, 0)) >= FP8_UNITS
    fp8 = ratio(at.machine, "fp8_tflops") if units else None
    part = attention_8bit(int8, fp8)
    how = f"attention {1 / part:.2f}x, {account.attention / account.compute:.0%} of a forward"
    return Outcome(forward_times(account, attention=part), how)


def sparse_attention(account: Account, item: Item, at: Place) -> Outcome:
    """Pairs that are left out take no time (Amdahl with this model's and shape's share of attention)."""
    density = number(item.params.get("density"))
    if density is None:
        return unknown_effect(account, "the method chooses the density by content: give attention_density=")
    dense = number(item.params.get("dense_steps")) or 0.0
    kept = kept_pairs(density, dense if dense <= 1 else min(1.0, dense / account.steps))
    share = account.attention / account.compute
    how = f"{kept:.0%} of the pairs kept, attention {share:.0%} of a forward; at a dense kernel's rate"
    return Outcome(forward_times(account, attention=kept), how)


# ---- weights --------------------------------------------------------------------------------------------------------


def quantized(account: Account, item: Item, at: Place) -> Outcome:
    """Fewer bytes; products in few bits where the machine has units for them."""
    kind = item.name.partition(".")[2]
    bits, rank = (4.25, 0.02) if kind == "svdquant" else (8.02, 0.0)
    book = at.ledger
    one = quantized_gib(book.params["transformer"], book.per_token["condition"], bits, rank)
    count = sum(name.startswith("transformer") for name in account.weights_gib)
    told = number(item.predicted.get("denoiser_gib"))
    weights = {
        name: min(size, (one if told is None else told / count) if name.startswith("transformer") else size)
        for name, size in account.weights_gib.items()
    }
    encoders = number(item.predicted.get("encoders_gib"))
    if encoders is not None:
        weights["text_encoders"] = min(encoders, weights.get("text_encoders", encoders))
    shrunk = sum(weights.values()) / sum(account.weights_gib.values())
    transfer = account.transfer * weights["transformer"] / account.weights_gib["transformer"]
    account = replace(account, weights_gib=weights, moved=account.moved * shrunk, transfer=transfer)
    peak = _peak_of(kind, item, at.machine)
    if peak is None:
        return Outcome(account, "fewer bytes; products stay in 16 bits")
    if kind == "int8" and "compile" not in at.names:
        return Outcome(account, "fewer bytes; run eagerly, quantizing costs what products in 8 bits save")
    part = min(1.0, quantized_linear(peak))
    how = f"linear layers {1 / part:.2f}x, {account.linear / account.compute:.0%} of a forward"
    return Outcome(forward_times(account, linear=part), how)


def _peak_of(kind: str, item: Item, machine: Hardware | None) -> float | None:
    """Peak of the products over that of bf16; None where they stay in 16 bits."""
    capability = (machine.capability if machine is not None else None) or (0, 0)
    if item.predicted.get("product_bits") == 16:
        return None
    if kind == "svdquant":
        if item.params.get("precision", "int4") == "nvfp4":
            return ratio(machine, "fp4_tflops")
        int8 = ratio(machine, "int8_tops")
        return 2 * int8 if int8 is not None and INT4_UNITS[0] <= capability < INT4_UNITS[1] else None
    if item.params.get("scheme", "dynamic") != "dynamic" or machine is None or machine.kind != "cuda":
        return None
    if kind == "fp8":
        return ratio(machine, "fp8_tflops") if capability >= FP8_UNITS else None
    return ratio(machine, "int8_tops") if capability >= (8, 0) else None


# ---- places ---------------------------------------------------------------------------------------------------------


def stage_offload(account: Account, item: Item, at: Place) -> Outcome:
    """Every component comes in once a generation."""
    gb_s = link_gb_s(at.machine)
    bytes_in = sum(account.weights_gib.values()) * GIB
    if gb_s is None:
        return unknown_effect(replace(account, place=STAGES), "the link to the host is not known")
    moved = bytes_in / (gb_s * 1e9) if account.unit == "s" else 0.0
    how = f"{bytes_in / GIB:.1f} GiB come in once, at {gb_s:g} GB/s"
    return Outcome(replace(account, place=STAGES, moved=moved), how)


def layerwise_offload(account: Account, item: Item, at: Place) -> Outcome:
    """Blocks come in at every forward while others compute."""
    gb_s = link_gb_s(at.machine)
    moved, live = number(item.predicted.get("moved_bytes_per_pass")), number(item.predicted.get("resident_bytes"))
    weights = account.weights_gib["transformer"]
    was = at.ledger.weights_bytes["transformer"] / GIB
    shrunk = weights / was  # what the lever found is of the weights as they are
    bytes_in = weights * GIB if moved is None else moved * shrunk
    here = weights * 0.1 if live is None else live * shrunk / GIB
    account = replace(account, place=LAYERS, live_gib=here)
    if gb_s is None or account.unit != "s":
        return unknown_effect(account, "the link to the host is not known")
    transfer = bytes_in / (gb_s * 1e9)
    hidden = "hidden behind" if transfer <= account.compute else "longer than"
    how = f"{bytes_in / GIB:.1f} GiB a forward in {transfer:.2g} s, {hidden} {account.compute:.2g} s of compute"
    return Outcome(replace(account, transfer=transfer), how)


def tiled_decoding(account: Account, item: Item, at: Place) -> Outcome:
    """A lower peak; what neighbours' lines cost is not counted."""
    peak, plain = number(item.predicted.get("peak_mib")), number(item.predicted.get("plain_peak_mib"))
    part = 0.5 if peak is None or not plain else peak / plain
    how = f"decoding peaks at {part:.0%} of a whole one; the lines that strips share are not timed"
    return Outcome(replace(account, decoding_gib=account.decoding_gib * part), how)


# ---- calls ----------------------------------------------------------------------------------------------------------


def guidance_reuse(account: Account, item: Item, at: Place) -> Outcome:
    """The second branch runs in part of the steps."""
    skipped = number(item.predicted.get("unconditional_skipped"))
    if account.branches < 2:
        return unknown_effect(account, "there is one branch")
    if skipped is None:
        interval = number(item.params.get("interval"))
        if interval is None:
            return unknown_effect(account, "how many steps run the second branch is not known beforehand")
        skipped = 1 - 1 / interval
    how = f"the second branch runs in {1 - skipped:.0%} of the steps"
    return Outcome(replace(account, branches=account.branches - skipped), how)


def step_cache(account: Account, item: Item, at: Place) -> Outcome:
    """Fewer steps are computed."""
    count = CACHES.get(item.name.partition(".")[2])
    least = number(item.params.get("min_steps", 9)) or 0
    if account.steps < least:
        return unknown_effect(account, f"stands down below {least:g} steps")
    found = None if count is None else count(account, item.params, item.predicted)
    if found is None:
        return unknown_effect(account, "how many steps it reuses is not known beforehand: measure() says it")
    computed, reused, how = found
    return Outcome(replace(account, computed=computed, reused=reused), how)


def solver(account: Account, item: Item, at: Place) -> Outcome:
    """Another way to take the same steps."""
    return unknown_effect(account, "its steps cost what others cost: the gain is in taking fewer (--steps)")


def nothing(account: Account, item: Item, at: Place) -> Outcome:
    """No change of cost that is known."""
    return unknown_effect(account, "its effect on time is not in the book")


RULES: dict[str, Rule] = {
    "attention": plain_attention,
    "attention.sage": eight_bit_attention,
    **{f"attention.{name}": sparse_attention for name in ("radial", "sparse_auto", "sta", "svg", "svg2", "topk")},
    "attention.custom": nothing,
    "cache": step_cache,
    "compile": compiled,
    "guidance": guidance_reuse,
    "offload.layerwise": layerwise_offload,
    "offload.stage": stage_offload,
    "quantization": quantized,
    "solver": solver,
    "vae.tiling": tiled_decoding,
}
ITEMS = (  # that `Ledger.apply` knows by name alone
    *(name for name in RULES if "." in name),
    *(f"cache.{name}" for name in CACHES),
    *("compile", "guidance.reuse", "quantization.fp8", "quantization.int8", "quantization.svdquant"),
)


def rule_of(name: str) -> Rule:
    """The rule of an item: its own, else that of its place."""
    return RULES.get(name) or RULES.get(name.partition(".")[0]) or nothing
