"""The published step caches of this version, each one composition of gate, predictor and guards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ..core.compat import native_cache, unwrap_module
from ..core.run import Run
from ..errors import IncompatibleError, InvalidOptionError, UnsupportedModelError
from .cache import BlockCache
from .gates import relative_l1
from .guards import Guards
from .predictors import reuse


@dataclass(frozen=True)
class FirstBlockCache:
    """Run the first block; if its residual hardly moved since the last computed step, reuse the rest.

    Reuse when mean|r_t - r_i| / mean|r_i| < threshold, with r the residual of the first block and i the last
    computed step; then y_t = b0(x_t) + (y_i - b0(x_i)). The decision is one for the whole batch.
    Source: First-Block Cache of ParaAttention, after TeaCache (arXiv 2411.19108).

    Attributes:
        threshold: relative change below which a step is reused; 0 turns the cache off (bit-equal). FLUX.1-dev
            is commonly run at 0.05 to 0.12 (published by ParaAttention).
        min_steps, last_steps, warmup_steps, max_consecutive: see `caching.guards.Guards`.
    """

    threshold: float = 0.08
    min_steps: int = 9
    last_steps: int = 1
    warmup_steps: int = 0
    max_consecutive: int | None = None

    name: ClassVar[str] = "cache.first_block"
    slot: ClassVar[Slot] = Slot.CALL
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __post_init__(self) -> None:
        number = isinstance(self.threshold, (int, float)) and not isinstance(self.threshold, bool)
        if not number or not 0 <= self.threshold < float("inf"):
            raise InvalidOptionError(f"threshold must be a number of at least 0, got {self.threshold!r}")
        self.guards()

    def guards(self) -> Guards:
        """The guards, validated."""
        return Guards(self.min_steps, self.last_steps, self.warmup_steps, self.max_consecutive)

    def check(self, target: Target) -> Verdict:
        """Needs a known stack of at least two blocks, and no other cache on the denoiser."""
        spec, pipe = target.spec, target.pipe
        if not spec.stack:
            return Verdict.no(f"{spec.family}: {spec.no_stack}", UnsupportedModelError)
        for component in spec.denoisers:
            module = getattr(pipe, component, None)
            if module is None:
                continue
            other = native_cache(module)
            if other is not None:
                return Verdict.refuse(
                    f"diffusers' own cache ({other}) is on {component}: call pipe.{component}.disable_cache() first",
                    IncompatibleError,
                )
            count = self._blocks(module, target)
            if count < 2:
                return Verdict.no(f"{component} has {count} block(s): nothing would be left to skip")
        if self.threshold == 0:
            return Verdict.yes("threshold 0: every step is computed")
        down = f"; runs of fewer than {self.min_steps} steps are computed in full" if self.min_steps else ""
        return Verdict.yes(f"one block of {count} decides about the rest{down}")

    @staticmethod
    def _blocks(module: Any, target: Target) -> int:
        return sum(len(getattr(unwrap_module(module), row.attribute, ())) for row in target.spec.stack)

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Share of the denoiser's parameters that a reused step does not touch (counted on the model)."""
        module = unwrap_module(getattr(target.pipe, target.spec.denoisers[0]))
        blocks = [block for row in target.spec.stack for block in getattr(module, row.attribute)]
        if self.threshold == 0:
            return {"blocks_skipped": f"0 of {len(blocks)}", "origin": "computed"}
        skipped = sum(p.numel() for block in blocks[1:] for p in block.parameters())
        total = sum(p.numel() for p in module.parameters())
        return {
            "blocks_skipped": f"{len(blocks) - 1} of {len(blocks)}",
            "parameters_skipped": round(skipped / total, 3),
            "origin": "computed",
        }

    def attach(self, target: Target, site: Site) -> Edit:
        """Hook the block stack of every denoiser."""
        caches: list[BlockCache] = []

        def undo() -> None:
            for cache in reversed(caches):
                cache.undo()

        try:
            for component, root in site.roots.items():
                module = unwrap_module(getattr(target.pipe, component))
                caches.append(
                    BlockCache(
                        self.name,
                        module,
                        root,
                        target.spec,
                        self.threshold,
                        self.guards(),
                        relative_l1,
                        reuse,
                    )
                )
        except BaseException:
            undo()
            raise

        def begin_run(run: Run) -> None:
            run.state[self.name] = {}

        def end_run(run: Run) -> None:
            for cache in caches:
                cache.end_run()

        def relink() -> None:
            for cache in caches:
                cache.relink()

        def stats(run: Run) -> dict[str, Any]:
            return {"hit_rate": round(run.hits / len(run.calls), 4) if run.calls else 0.0}

        return Edit(
            self.name,
            undo,
            begin_run=begin_run,
            end_run=end_run,
            relink=relink,
            bytes_held=lambda run: sum(cache.bytes_held() for cache in caches),
            stats=stats,
        )


METHODS: dict[str, type[FirstBlockCache]] = {"first_block": FirstBlockCache}
