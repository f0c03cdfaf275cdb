"""A small byte-level GPT in plain PyTorch: the model that the demo trains and the benchmarks time.

Shapes in names: b sequences, t positions, h heads, w width (d = w / h), v vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Size of a model.

    Attributes:
        vocab: number of tokens; 256 is one per byte.
        block: longest sequence, in tokens.
        layers: transformer blocks.
        heads: attention heads of a block; divides `width`.
        width: features of a token.
        tied: let the output head share the token embedding's weight.
    """

    vocab: int = 256
    block: int = 128
    layers: int = 6
    heads: int = 4
    width: int = 256
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")


DEMO = GPTConfig()
"""About 5 M parameters: trains on a laptop's processor in minutes."""

LINK = GPTConfig(block=256, layers=8, heads=8, width=512)
"""About 25.5 M parameters: 0.8 s of gradient traffic a step on a link of 1 Gbit/s."""


class Attention(nn.Module):
    """Causal self-attention, all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_btw.shape
        split = self.qkv(x_btw).view(batch, length, 3, self.heads, width // self.heads)
        q_bhtd, k_bhtd, v_bhtd = split.permute(2, 0, 3, 1, 4).unbind(0)
        y_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
        return self.out(y_bhtd.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        x_btw = x_btw + self.attention(self.attention_norm(x_btw))
        return x_btw + self.mlp(self.mlp_norm(x_btw))


class GPT(nn.Module):
    """Decoder-only transformer: tokens in, logits of the next token out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_initialise)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        """
        Args:
            tokens_bt: int64, at most `block` positions.

        Returns:
            logits_btv, of the token that follows each position.
        """
        positions_t = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        x_btw = self.tokens(tokens_bt) + self.positions(positions_t)
        return self.head(self.norm(self.blocks(x_btw)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def parameter_count(module: nn.Module) -> int:
    """Number of trained scalars; a shared weight counts once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def example() -> tuple[GPT, torch.Tensor]:
    """The demo's model and a batch for it: `fxpasses dump bench.gpt:example`."""
    return GPT(DEMO), torch.zeros(4, DEMO.block, dtype=torch.long)


def small_example() -> tuple[GPT, torch.Tensor]:
    """The same model with fewer and smaller layers."""
    config = GPTConfig(layers=1, width=32, block=16)
    return GPT(config), torch.zeros(2, config.block, dtype=torch.long)
