"""A short EAGLE-3 head to compare with: no cache, no batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from eagle_checkpoints import EPS, HEAD_DIM, HEADS, KEY_HEADS, OF_TARGET, THETA


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return states / (states.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(heads: torch.Tensor) -> torch.Tensor:
    """[heads, N, D], turned by the position."""
    half = HEAD_DIM // 2
    angles = torch.arange(heads.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
    left, right = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Reference:
    """The head without a cache: every draft reads the whole sequence again."""

    def __init__(self, tensors: dict[str, torch.Tensor], layer: str, *flags: str) -> None:
        self.w = {name.removeprefix(f"{layer}."): one for name, one in tensors.items()}
        self.flags = flags

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if "norm_before_fc" in self.flags:
            states = rms(states, self.w["input_norm.weight"])
        if "fc_norm" in self.flags:
            parts = states.split(OF_TARGET, -1)
            normed = [rms(one, self.w[f"fc_norm.{i}.weight"]) for i, one in enumerate(parts)]
            states = torch.cat(normed, -1)
        return states @ self.w["fc.weight"].T

    def run(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [N], states [N, H] before each -> logits [DRAFTED] and state after the last."""
        w = self.w
        hidden = rms(states, w["hidden_norm.weight"])
        embedded = rms(w["embed_tokens.weight"][tokens], w["input_layernorm.weight"])
        both = torch.cat([embedded, hidden], -1)
        q, k, v = (
            (both @ w[f"self_attn.{n}_proj.weight"].T)
            .view(len(tokens), -1, HEAD_DIM)
            .transpose(0, 1)
            for n in "qkv"
        )
        k, v = (one.repeat_interleave(HEADS // KEY_HEADS, 0) for one in (k, v))
        scores = rotated(q) @ rotated(k).transpose(1, 2) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = mixed @ w["self_attn.o_proj.weight"].T
        x = x + (hidden if "norm_before_residual" in self.flags else states)
        y = rms(x, w["post_attention_layernorm.weight"])
        y = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = (x + y @ w["mlp.down_proj.weight"].T)[-1]
        out = rms(x, w["norm.weight"])
        return w["lm_head.weight"] @ out, out if "norm_output" in self.flags else x

    def chain(self, tokens: list[int], states: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """Logits before each draft and after the last one. tokens: those that have a state."""
        tokens, fused, found = list(tokens), self.fuse(states), []
        for draft in (*drafts, -1):
            logits, state = self.run(tokens, fused)
            found.append(logits)
            tokens.append(draft)
            fused = torch.cat([fused, state[None]])
        return torch.stack(found)
