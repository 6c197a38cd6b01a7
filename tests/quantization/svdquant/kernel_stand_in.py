"""nunchaku's two kernels in PyTorch, as their callers see them: they read the packed tensors and write into the
buffers they are given. What glue code gets wrong (an order, a shape, a missing correction), they show."""

from __future__ import annotations

import torch

from diffaccel.quantization.svdquant import packing as p
from diffaccel.quantization.svdquant.formats import GROUP, code_values, quantize_activation


class StandIn:
    """Quantized activations are not packed here: they wait in this object between the two calls."""

    def quantize_w4a4_act_fuse_lora(self, x, codes, scales, lora_down, lora_act, smooth, fuse_glu, fp4):
        rows, columns = x.shape
        assert columns % 128 == 0 and codes.shape[0] % 256 == 0 and rows <= codes.shape[0]
        assert codes.shape[1] == columns // 2 and not fuse_glu and x.is_contiguous()
        assert scales.shape == (columns // (16 if fp4 else 64), codes.shape[0])
        kept = quantize_activation(x.float() / p.unpack_vector(smooth).float(), "nvfp4" if fp4 else "int4")
        self.kept = torch.zeros(codes.shape[0], columns)
        self.kept[:rows] = kept
        lora_act.zero_()
        lora_act[:rows] = x.float() @ p.unpack_down(lora_down).float().T

    def gemm_w4a4(
        self, act, wgt, out, qout, ascales, wscales, oscales, poolout, lora_act_in, lora_up, lora_down, lora_act_out,
        norm_q, norm_k, rotary_emb, bias, smooth_factor, out_vk, out_linearattn, act_unsigned, lora_scales, fuse_silu,
        fp4, alpha, wcscales, out_q, out_k, out_v, attn_tokens,
    ):  # fmt: skip
        precision = "nvfp4" if fp4 else "int4"
        values = code_values(p.unpack_codes(wgt), precision)
        scales = (p.unpack_micro_scales if fp4 else p.unpack_scales)(wscales).float()
        weight = values.view(len(values), -1, GROUP[precision]) * scales[..., None]
        weight = weight.flatten(1) * alpha
        if wcscales is not None:
            weight = weight * p.unpack_vector(wcscales).float()[:, None]
        assert not act_unsigned and len(lora_scales) * 16 == lora_up.shape[1] and set(lora_scales) == {1.0}
        result = self.kept @ weight.T + lora_act_in @ p.unpack_up(lora_up).float().T + p.unpack_vector(bias).float()
        out.copy_(result)
