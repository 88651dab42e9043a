"""A small predictor that learns the next step's hidden state from the present one; it shows how every stored tensor is used."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingest.prefeature.collate import RecordBatch
from ingest.prefeature.kvmath import (
    ContextKv,
    apply_camera,
    apply_rotary,
    camera_matrices,
    encode_kv,
    join_heads,
    layer_norm,
    per_token,
    rms_norm,
    split_heads,
)
from ingest.prefeature.sizes import Sizes


class _Block(nn.Module):
    """One attention block over text, context and current tokens, in both branches, modulated per frame."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.sizes = sizes
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.q_norm = nn.Parameter(torch.ones(sizes.head_dim))
        self.k_norm = nn.Parameter(torch.ones(sizes.head_dim))
        self.rope_out, self.prope_out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(approximate="tanh"), nn.Linear(2 * hidden, hidden))

    def forward(
        self, x: Tensor, condition: Tensor, batch: RecordBatch, text: tuple[Tensor, Tensor], context: ContextKv | None, mask: Tensor
    ) -> Tensor:
        """``x`` float32 ``[B, S, C]``, ``condition`` ``[B, n, C]``, ``mask`` bool ``[B, 1, 1, keys]``."""
        tokens = x.shape[1]
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            per_token(part, tokens) for part in self.modulation(functional.silu(condition)).chunk(6, dim=-1)
        )
        q, k, v = (split_heads(part, self.sizes.heads) for part in self.qkv(layer_norm(x) * (1 + scale1) + shift1).chunk(3, dim=-1))
        q, k = rms_norm(q, self.q_norm), rms_norm(k, self.k_norm)
        viewmats, intrinsics = batch.viewmats.to(x.dtype), batch.intrinsics.to(x.dtype)
        project, _ = camera_matrices(viewmats, intrinsics)
        frames = viewmats.shape[1]
        # each record has its own rotary window start, so rows are rotated one by one
        starts: list[int] = batch.rope_start.tolist()
        rope_q = torch.cat([apply_rotary(q[row : row + 1], self.sizes, start, frames) for row, start in enumerate(starts)])
        own = [
            encode_kv(k[row : row + 1], v[row : row + 1], viewmats[row : row + 1], intrinsics[row : row + 1], self.sizes, start)
            for row, start in enumerate(starts)
        ]

        def attend(query: Tensor, key: str, value: str) -> Tensor:
            keys, values = [text[0]], [text[1]]
            if context is not None:
                keys.append(getattr(context, key))
                values.append(getattr(context, value))
            keys.append(torch.cat([getattr(kv, key) for kv in own]))
            values.append(torch.cat([getattr(kv, value) for kv in own]))
            joined = torch.cat([part.to(x.dtype) for part in keys], dim=2), torch.cat([part.to(x.dtype) for part in values], dim=2)
            return functional.scaled_dot_product_attention(query, *joined, attn_mask=mask)

        rope = self.rope_out(join_heads(attend(rope_q, "k_rope", "v")))
        prope_q = apply_camera(q, project.transpose(-1, -2))
        prope = self.prope_out(join_heads(apply_camera(attend(prope_q, "k_prope", "v_prope"), project)))
        x = x + gate1 * (rope + prope)
        return x + gate2 * self.mlp(layer_norm(x) * (1 + scale2) + shift2)


class SmallPredictor(nn.Module):
    """Predicts ``final_hidden`` of a target step from the source step, as a residual that starts near zero.

    Args:
        sizes: of the dataset.
        with_context: use context K/V and the previous chunk's hidden state (the ``predictor`` and ``rollout`` views).
    """

    def __init__(self, sizes: Sizes, *, with_context: bool = True) -> None:
        super().__init__()
        self.sizes = sizes
        self.with_context = with_context
        self.patch = nn.Linear(sizes.input_channels, sizes.hidden)
        self.previous = nn.Linear(sizes.hidden, sizes.hidden)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in sizes.blocks)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, batch: RecordBatch, pair: tuple[int, int], context: dict[int, ContextKv]) -> Tensor:
        """Predicted hidden state of ``pair[1]``, float32 ``[B, S, C]``."""
        source, target = pair
        hidden = batch.final_hidden[source].float()
        x = hidden + self.patch(batch.input65(target).float().permute(0, 2, 3, 4, 1).flatten(1, 3))
        if self.with_context and batch.previous_hidden:
            earlier = batch.previous_hidden.get(target, next(iter(batch.previous_hidden.values())))
            x = x + self.previous(earlier.float())
        condition = batch.frame_condition[target].float()
        rows, tokens = len(batch), x.shape[1]
        masks = [batch.text_mask] + ([batch.context_mask] if self.with_context and context else [])
        own = torch.ones(rows, tokens, dtype=torch.bool, device=x.device)
        mask = torch.cat([*masks, own], dim=1)[:, None, None]
        for block, number in zip(self.blocks, self.sizes.blocks, strict=True):
            text = batch.text_k[number], batch.text_v[number]
            x = block(x, condition, batch, text, context.get(number) if self.with_context else None, mask)
        return hidden + self.out(x)


def record_loss(predicted: Tensor, batch: RecordBatch, target: int) -> Tensor:
    """Mean squared error over the records that are not padding, scaled by the target's mean square; 0 when all are padding."""
    wanted = batch.final_hidden[target].float()
    error = (predicted - wanted).square().mean(dim=(1, 2)) / wanted.square().mean(dim=(1, 2)).clamp_min(1e-6)
    weight = (~batch.is_pad).to(error.dtype)
    return (error * weight).sum() / weight.sum().clamp_min(1.0)
