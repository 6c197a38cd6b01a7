"""alpha / r of each layer: from the file's own alphas, or from the adapter's config in its header, by peft's rules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidOptionError, UnsupportedModelError

# Entries of peft's config that change what the matrices mean, beyond alphas and ranks.
VARIANTS = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config", "use_bdlora",
    "use_qalora", "velora_config",
)  # fmt: skip
STARTS = ("corda", "lora_ga", "olora", "pissa", "mica", "loftq")  # initializations that change the weights themselves


@dataclass(frozen=True)
class Scales:
    """Where the scales of one component come from.

    Attributes:
        config: peft's config of the adapter (lora_alpha, alpha_pattern, use_rslora, r, ...); may be empty.
        alphas: path of a layer -> alpha, of the file; these come first.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def of(self, path: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rsLoRA; 1 where nothing is said. A rank of 0 (a bias alone) counts
        as the config's."""
        rank = rank or int(self._patterned("rank_pattern", path, self.config.get("r", 1)))
        if path in self.alphas:
            return self.alphas[path] / rank
        alpha = self._patterned("alpha_pattern", path, self.config.get("lora_alpha", self.config.get("alpha")))
        if alpha is None:
            return 1.0
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _patterned(self, name: str, path: str, otherwise: Any) -> Any:
        """peft's rule: the first entry whose regular expression matches the path, or the end of it after a dot."""
        for key, value in (self.config.get(name) or {}).items():
            if re.match(rf"(.*\.)?({key})$", path):
                return value
        return otherwise


def scales(component: str, metadata: Mapping[str, Any] | None, alphas: Mapping[str, float]) -> Scales:
    """The scales of one component, as the file calls it.

    Args:
        metadata: `lora_adapter_metadata` of the header: "component.entry" -> value.
        alphas: path in the component -> alpha.

    Raises:
        UnsupportedModelError: the config asks for a kind of adapter that is none of ours.
        InvalidOptionError: a pattern is no regular expression.
    """
    start = f"{component}."
    config = {key.removeprefix(start): value for key, value in (metadata or {}).items() if key.startswith(start)}
    for name in VARIANTS:
        if config.get(name):
            raise UnsupportedModelError(f"the LoRA's metadata say {name}={config[name]!r}, which only peft can apply")
    for key in (*(config.get("alpha_pattern") or {}), *(config.get("rank_pattern") or {})):
        try:
            re.compile(key)
        except re.error as error:
            raise InvalidOptionError(f"the LoRA's metadata have a pattern {key!r} that is none ({error})") from error
    begun = str(config.get("init_lora_weights", "")).lower()
    if begun.startswith(STARTS):
        raise UnsupportedModelError(
            f"the LoRA's metadata say init_lora_weights={begun!r}: its matrices belong to other base weights. Convert "
            "it to a plain LoRA with peft (path_initial_model_for_weight_conversion) first"
        )
    return Scales(config, alphas)
