"""What diffusers' converters made of the names of a file: which of its tensors arrived, and where rows went.

A converter is a function from one dict of tensors to another that renames, splits along rows and scales by alphas.
Fed with marked tensors instead (and alphas that scale by 1), it tells where each of them goes, for every family alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from .pairs import Tensor

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]  # a file's tensors -> diffusers' names
DORA = ".dora_scale"
ALPHA = ".alpha"
_DOWN = (".lora_down.weight", ".lora_A.weight", ".lora_A.default.weight", ".lora.down.weight", "_lora.down.weight")
_RANKED = (".lokr_w2_b", ".lokr_w1_b")  # [r, ...]: what LoKr's converter divides an alpha by
_UP = (".lora_up.weight", ".lora_B.weight", ".lora_B.default.weight", ".lora.up.weight", "_lora.up.weight")


def take_doras(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Take kohya's `dora_scale` [out, 1, ...] out of a file: {key of the up matrix: [out]}, and what is refused."""
    found: dict[str, Tensor] = {}
    problems = []
    for key in [key for key in state if key.endswith(DORA)]:
        value, path = state.pop(key), key.removesuffix(DORA)
        up = next((path + end for end in _UP if path + end in state), None)
        if up is None:
            problems.append(f"{key}: the matrices of this DoRA are missing")
        elif value.numel() != len(state[up]) or value.shape[0] != value.numel():
            problems.append(f"{key}: shape {tuple(value.shape)}, not one value per output of its layer")
        else:
            found[up] = value.flatten()
    return found, problems


def magnitudes(state: Mapping[str, Tensor], doras: Mapping[str, Tensor], convert: Convert) -> dict[str, Tensor]:
    """{converted key of an up matrix: its rows' magnitudes [out]}: the rows that a converter splits or swaps."""

    def marked(key: str, tensor: Tensor) -> Tensor:
        if key not in doras:
            return torch.full_like(tensor, float("nan"), dtype=torch.float32)
        column = doras[key].float().view(-1, *(1,) * (tensor.ndim - 1))
        return column.expand(tensor.shape).contiguous()

    rows = {key: tensor.flatten(1)[:, 0] for key, tensor in _probe(state, convert, marked).items() if tensor.ndim > 1}
    return {key: row for key, row in rows.items() if len(row) and bool(torch.isfinite(row).all())}


def dropped(state: Mapping[str, Tensor], converted: Mapping[str, Tensor], convert: Convert) -> list[str]:
    """The keys of a file that hold something and did not arrive."""
    arrived = {tensor.data_ptr() for tensor in converted.values()}
    unseen = [key for key, tensor in _weights(state) if tensor.data_ptr() not in arrived and bool(tensor.any())]
    if not unseen:
        return []
    number = {key: float(index) for index, (key, _) in enumerate(_weights(state), 1)}

    def marked(key: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, number[key], dtype=torch.float32)

    seen = torch.zeros(len(number) + 1, dtype=torch.bool)
    for tensor in _probe(state, convert, marked).values():
        marks = tensor.flatten().long()
        seen |= torch.bincount(marks[(marks > 0) & (marks <= len(number))], minlength=len(seen)) > 0
    return [key for key in unseen if not seen[int(number[key])]]


def _weights(state: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    return ((key, tensor) for key, tensor in state.items() if not key.endswith(ALPHA))


def _probe(
    state: Mapping[str, Tensor], convert: Convert, marked: Callable[[str, Tensor], Tensor]
) -> Mapping[str, Tensor]:
    probe = {}
    for key, tensor in state.items():
        if key.endswith(ALPHA):
            path = key.removesuffix(ALPHA)
            down = next((state[path + end] for end in (*_DOWN, *_RANKED) if path + end in state), None)
            probe[key] = tensor if down is None else torch.tensor(float(len(down)))
        else:
            probe[key] = marked(key, tensor)
    return convert(probe)
