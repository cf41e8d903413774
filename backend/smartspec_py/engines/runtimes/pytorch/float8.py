"""8-bit weights on a GPU: float8 with one scale per row of a matrix, products with tensor cores.

Activations are rounded too, with one scale per token, so a token's result depends on this token
only. The numbers are multiplied without their scales, because cuBLAS does that faster: on an H200,
PyTorch's product with scales by row was slower than bfloat16. Embeddings and the output layer keep
their type.
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
    one: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight, scales = rounded(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.t().contiguous())
        self.register_buffer("one", torch.ones((), device=weight.device))
        self.rounded, self.scaled = rounded, scaled  # `compiled` joins the operators of each
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out]."""
        given, scales = self.rounded(tokens.flatten(0, -2))
        product = torch._scaled_mm(
            given,
            self.weight.t(),
            scale_a=self.one,
            scale_b=self.one,
            out_dtype=torch.bfloat16,
        )
        out = self.scaled(product, scales, self.scales, self.bias, tokens.dtype)
        return out.view(*tokens.shape[:-1], self.out_features)


def scaled(
    product: torch.Tensor,
    of_tokens: torch.Tensor,
    of_weights: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product [n, out] with its scales [n, 1] and [1, out], and the bias."""
    out = product.float() * of_tokens * of_weights
    return out.to(dtype) if bias is None else out.to(dtype) + bias


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
