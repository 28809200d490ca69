"""Speed of a training step beside the peers, in one run: interleaved repetitions, medians, ratios.

    python bench.py step                     tokens/s of a language model's training step, beside nanoGPT's architecture at the same sizes
    python bench.py tokenize                 MB/s of `prepare` on one core, beside tiktoken alone
"""
import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import optim
import runtime
from model import LM


class GPT(nn.Module):
    """nanoGPT's architecture, written from its description: learned positions, LayerNorm eps 1e-5, one fused q k v, SDPA, exact GELU, tied head, no dropout.

    bias: nanoGPT trains without (bias=False) by default, GPT-2 has them."""

    class Block(nn.Module):
        def __init__(self, dim, heads, bias):
            super().__init__()
            self.heads = heads
            self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=bias), nn.LayerNorm(dim, bias=bias)
            self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)
            self.c_fc, self.mlp_proj = nn.Linear(dim, 4 * dim, bias=bias), nn.Linear(4 * dim, dim, bias=bias)

        def forward(self, x):
            B, N, D = x.shape
            q, k, v = (t.view(B, N, self.heads, D // self.heads).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(D, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).reshape(B, N, D))
            return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))

    def __init__(self, vocab_size, block_size, embed_dim, depth, num_heads, bias=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, embed_dim), nn.Embedding(block_size, embed_dim)
        self.h = nn.Sequential(*[self.Block(embed_dim, num_heads, bias) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(embed_dim, bias=bias)
        self.lm_head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        return self.lm_head(self.ln_f(self.h(self.wte(tokens) + self.wpe.weight[:tokens.shape[1]])))
