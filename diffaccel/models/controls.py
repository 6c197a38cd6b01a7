"""What pipelines add to a prompt, by diffusers' names: control networks, adapters, arguments that carry conditions.

Plain data. A condition stays as it is over a run, unless its window ends or the user exchanges it; what a control
network makes of it does not, since that depends on the latents and the time as well.
"""

from __future__ import annotations

from collections.abc import Mapping

# A component whose name contains this runs before the denoiser in each step, and its output is added between blocks.
NETWORK = "controlnet"

# A component of this name and class runs once, before the loop; its output is added between blocks in each step.
ADAPTER = "adapter"
ADAPTERS = ("T2IAdapter", "MultiAdapter")

# Denoisers with blocks of their own that carry a control, whose output is added between the others.
CONTROL_BLOCKS = {"WanVACETransformer3DModel": "vace_blocks"}

# Arguments of a control network that say what the picture is to follow, and how strongly.
NETWORK_CONDITIONS = (
    "controlnet_cond",
    "conditioning_scale",
    "controlnet_mode",
    "control_type",
    "control_type_idx",
    "control_context",
    "controls_latents",
    "condition_mask",
    "guess_mode",
)

# Arguments of a denoiser (or keys of its dicts of further arguments) that do so: reference pictures (IP-Adapter,
# image to video), VACE, and whether a call fills a store of keys and values or reads it (which another call's answer
# cannot stand for).
CONDITIONS = (
    "control_hidden_states",
    "control_hidden_states_scale",
    "encoder_hidden_states_image",
    "image_embeds",
    "ip_adapter_image_embeds",
    "ip_adapter_masks",
    "ip_hidden_states",
    "kv_cache_mode",
)
NESTED = ("joint_attention_kwargs", "cross_attention_kwargs", "attention_kwargs", "added_cond_kwargs")

# Arguments with the output of an adapter, which is the same in each step; a pipeline may copy it for each.
ONCE = ("down_intrablock_additional_residuals",)


def networks(components: Mapping[str, object]) -> list[str]:
    """The names of the control networks of a pipeline."""
    return [name for name, part in components.items() if NETWORK in name and part is not None]


def acts_between_blocks(components: Mapping[str, object]) -> str | None:
    """What of a pipeline adds its output between the denoiser's blocks in every call, or None."""
    found = networks(components)
    if found:
        return found[0]
    if type(components.get(ADAPTER)).__name__ in ADAPTERS:
        return ADAPTER
    inside = (CONTROL_BLOCKS.get(type(part).__name__) for part in components.values())
    return next((blocks for blocks in inside if blocks is not None), None)
