"""8-bit weights on a GPU: float8 with one scale per row of a matrix, products with tensor cores.

Activations are rounded too, with one scale per token, so a token's result depends on this token
only. Embeddings and the output layer keep their type.
"""

from __future__ import annotations

import torch

TYPE = torch.float8_e4m3fn
MOST = torch.finfo(TYPE).max
LEAST = 1e-9
"""The largest number of a row counts as at least this, so that a row of zeros has a scale."""

OUTPUT_LAYERS = ("lm_head", "embed_out")

DIVISOR = 16
"""cuBLAS multiplies matrices in float8 whose sides are multiples of this."""


class Float8Linear(torch.nn.Module):
    """A linear layer whose weights are float8. weight: [out, in]. scales: [1, out], float32."""

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight, scales = rounded(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.t().contiguous())
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out]."""
        given, scales = rounded(tokens.flatten(0, -2))
        out = torch._scaled_mm(
            given,
            self.weight.t(),
            scale_a=scales,
            scale_b=self.scales,
            out_dtype=torch.bfloat16,
        )
        out = out.to(tokens.dtype) if self.bias is None else out + self.bias
        return out.view(*tokens.shape[:-1], self.out_features)


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, m] in float8, and their scales [n, 1], float32."""
    whole = rows.float()
    scales = whole.abs().amax(-1, keepdim=True).clamp(min=LEAST) / MOST
    return (whole / scales).to(TYPE), scales


def use_float8(model: torch.nn.Module) -> None:
    """Round the weights of a model's linear layers, but for its output layer."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if not isinstance(layer, torch.nn.Linear) or name in OUTPUT_LAYERS:
                continue
            if not layer.in_features % DIVISOR and not layer.out_features % DIVISOR:
                setattr(module, name, Float8Linear(layer))


def has_float8(device: torch.device) -> bool:
    """Whether a device multiplies float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
