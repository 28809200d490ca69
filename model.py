"""One transformer block, three kinds of shortcut.

    x = a * x + attn(norm1(x))          residual: a = 1
    x = a * x + mlp(norm2(x))           skipless: a = 0, the addition is not computed at all
                                        decayed:  a falls from 1 to alpha_min over the 2L sub-layers

ViT (supervised), LM (decoder), MAE (masked autoencoder), SiT and UViT (flow matching) are built of it.
Names follow timm, so a residual ViT loads into timm's and back. Shapes: B images or texts, N tokens, D channels, H heads, d = D / H.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.ops import stochastic_depth

from init import init_lm, init_vit

SIZES = {                                                        # parameters at 224 px, patch 16, 1000 classes
    "nano": dict(embed_dim=96, depth=12, num_heads=3),           # 1.5 M
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),          # 5.7 M
    "small": dict(embed_dim=384, depth=12, num_heads=6),         # 22 M
    "base": dict(embed_dim=768, depth=12, num_heads=12),         # 87 M
    "large": dict(embed_dim=1024, depth=24, num_heads=16),       # 304 M
}


class Attention(nn.Module):
    """Multi-head self-attention, softmax(temperature * q k^T / sqrt(d)) v, through SDPA so that FlashAttention is used where torch has it.

    temperature: tau_l of paper 2, beta ** -l at layer l; 1 is the usual attention. causal: token i sees tokens 0..i only.
    """

    def __init__(self, dim, num_heads, bias=True, temperature=1.0, causal=False, qkv_bias=None):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"embed_dim {dim} is not divisible by num_heads {num_heads}: change one of them")
        self.num_heads, self.head_dim, self.causal = num_heads, dim // num_heads, causal
        self.scale = temperature * self.head_dim ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias if qkv_bias is None else qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def heads(self, x, rope=None):
        """x (B, N, D) -> q, k, v, each (B, H, N, d). Rows of qkv.weight: all of q, then k, then v; within each, head by head.

        rope: the (cos, sin) of `rope_table` for these tokens, or None for no rotation."""
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return (q, k, v) if rope is None else (rotate(q, *rope), rotate(k, *rope), v)

    def forward(self, x, rope=None, cache=None):
        """cache: a dict that keeps k and v of the tokens before x, for generation; it is extended in place."""
        q, k, v = self.heads(x, rope)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], dim=2), torch.cat([cache["v"], v], dim=2)
            cache.update(k=k, v=v)
        new, all_ = q.shape[2], k.shape[2]
        # is_causal aligns the corner at the top left, so where tokens came before, the mask is written out; a single new token sees everything
        mask = torch.ones(new, all_, dtype=torch.bool, device=x.device).tril(all_ - new) if self.causal and 1 < new < all_ else None
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and new == all_, scale=self.scale)
        return self.proj(x.transpose(1, 2).flatten(2))

    def matrix(self, x, rope=None):
        """The attention matrix A (B, H, N, N) itself, which SDPA never forms: for measurements only."""
        q, k, _ = self.heads(x, rope)
        logits = q @ k.mT * self.scale
        if self.causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
        return logits.softmax(-1)


def rope_table(length, head_dim, base=10000.0):
    """(cos, sin), each (length, d), of the angles position * base ** (-2 i / d), i = 0 .. d/2 - 1, written twice: for the two halves of a head."""
    angle = torch.arange(length, dtype=torch.float64)[:, None] * base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """Rotary position embedding (Su et al. 2021) in LLaMA's layout: dimensions i and i + d/2 of x (B, H, N, d) turn by the token's angle i.

    A product q k^T of two rotated tokens depends on their distance only."""
    one, two = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-two, one], dim=-1) * sin).to(x.dtype)


class MLP(nn.Module):
    """fc2(gelu(fc1(x)) - shift), hidden width mlp_ratio * dim. gelu: "none" is the exact (erf) one, "tanh" its approximation.

    shift: a constant off the activation, for nets without biases (a bias of fc2 could do the same); 0 is the usual MLP.
    """

    def __init__(self, dim, hidden, bias=True, shift=0.0, gelu="none"):
        super().__init__()
        if hidden < 1:
            raise ValueError(f"an MLP of width {dim} has no hidden unit at this mlp_ratio: raise it")
        self.shift, self.gelu = shift, gelu
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x):
        x = F.gelu(self.fc1(x), approximate=self.gelu)
        return self.fc2(x - self.shift if self.shift else x)


SCHEDULES = ("linear", "per-layer", "cosine")


def shortcut_weights(shortcut, depth, alpha_min=1.0, schedule="linear", decay_on="both"):
    """The weight a of the shortcut in each of the 2 * depth sub-layers (attention, MLP, attention, ...).

    decayed (paper 3), from 1 at the first attention to alpha_min at the last MLP, t = linspace(0, 1, 2 depth):
        linear      a = 1 - t (1 - alpha_min), as in the paper's code
        cosine      a = alpha_min + (1 - alpha_min) (1 + cos(pi t)) / 2
        per-layer   the paper's formula, read with a block as its layer: a_l = 1 - (1 - alpha_min) l / depth for l = 1 .. depth on the
                    attention's shortcut and 1 on the MLP's, so that the block is a_l x + f_l(x)
    decay_on: "both" kinds of sub-layers, only "attn" or only "mlp"; the others keep 1. Raises ValueError for what has no effect or is unknown.
    """
    if shortcut not in ("residual", "skipless", "decayed"):
        raise ValueError(f"shortcut {shortcut!r} is unknown: use residual, skipless or decayed")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown: use {', '.join(SCHEDULES)}")
    if decay_on not in ("both", "attn", "mlp"):
        raise ValueError(f"decay_on {decay_on!r} is unknown: use both, attn or mlp")
    if not 0 <= alpha_min <= 1:
        raise ValueError(f"alpha_min {alpha_min} must lie between 0 and 1")
    if shortcut != "decayed":
        if alpha_min != 1:
            raise ValueError(f"alpha_min {alpha_min} has no effect on a {shortcut} shortcut: use shortcut decayed")
        return [{"residual": 1.0, "skipless": 0.0}[shortcut]] * (2 * depth)
    if schedule == "per-layer":
        if decay_on != "both":
            raise ValueError(f"the per-layer schedule weighs the block as a whole, so decay_on {decay_on!r} has no meaning: use both")
        return [a for l in range(1, depth + 1) for a in (1 - (1 - alpha_min) * l / depth, 1.0)]
    fall = [i / (2 * depth - 1) for i in range(2 * depth)]
    if schedule == "cosine":
        fall = [(1 - math.cos(math.pi * t)) / 2 for t in fall]
    kept = {"both": (0, 1), "attn": (0,), "mlp": (1,)}[decay_on]
    return [1 - t * (1 - alpha_min) if i % 2 in kept else 1.0 for i, t in enumerate(fall)]


def alpha_min_for(alpha_eff, depth, schedule="linear", decay_on="both"):
    """The alpha_min whose alpha_eff = product of all shortcut weights, the share of x_0 in the last block's output, is the one wanted.

    Paper 3 finds the useful range to be [1e-3, 1e-2) at every depth, so a deeper net takes a larger alpha_min. Raises ValueError where
    no alpha_min gives it."""
    def product(alpha_min):
        return math.prod(shortcut_weights("decayed", depth, alpha_min, schedule, decay_on))
    if not product(0.0) <= alpha_eff <= 1:
        raise ValueError(f"alpha_eff {alpha_eff} is out of reach: it must lie between {product(0.0):g} and 1")
    low, high = 0.0, 1.0
    for _ in range(60):                                          # the product grows with alpha_min, so halve the interval down to rounding
        middle = (low + high) / 2
        low, high = (middle, high) if product(middle) < alpha_eff else (low, middle)
    return high


def check_drop_path(rate, alphas):
    """Raises ValueError for a rate outside [0, 1), or where a branch that may be dropped is the whole signal."""
    if not 0 <= rate < 1:
        raise ValueError(f"drop path {rate} must be at least 0 and below 1")
    if rate and 0 in alphas:
        raise ValueError("drop path needs a shortcut: without one a dropped branch wipes the whole sample out; set drop path to 0")


class Block(nn.Module):
    """Pre-norm transformer block. alphas = (a of the attention, a of the MLP); see the top of this file.

    gain: a factor on both branches, for paper 3's ablation: gain * f(x). learn_alphas: the two a are parameters that start at `alphas`.
    drop_path is refused where a = 0: dropping a branch that is the whole signal wipes the sample out.
    """

    def __init__(self, dim, num_heads, mlp_ratio=4.0, alphas=(1.0, 1.0), temperature=1.0, drop_path=0.0, norm=nn.LayerNorm, eps=1e-6, bias=True,
                 causal=False, shift=0.0, gain=1.0, learn_alphas=False, qkv_bias=None, gelu="none"):
        super().__init__()
        check_drop_path(drop_path, alphas)
        self.drop_path, self.gain = drop_path, gain
        self.alphas = nn.ParameterList(nn.Parameter(torch.tensor(float(a))) for a in alphas) if learn_alphas else alphas
        self.norm1 = norm(dim, eps=eps)
        self.attn = Attention(dim, num_heads, bias, temperature, causal, qkv_bias)
        self.norm2 = norm(dim, eps=eps)
        self.mlp = MLP(dim, int(dim * mlp_ratio), bias, shift, gelu)

    def join(self, alpha, x, branch):
        """alpha * x + gain * branch, without computing what does not matter."""
        fixed = isinstance(alpha, (int, float))
        if self.gain != 1:
            branch = self.gain * branch
        if fixed and alpha == 0:
            return branch
        if self.drop_path:
            branch = stochastic_depth(branch, self.drop_path, "row", self.training)
        return x + branch if fixed and alpha == 1 else alpha * x + branch

    def forward(self, x, rope=None, cache=None):
        x = self.join(self.alphas[0], x, self.attn(self.norm1(x), rope, cache))
        return self.join(self.alphas[1], x, self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Image (B, C, Y, X) -> patch tokens (B, N, D), row by row."""

    def __init__(self, patch_size, in_chans, dim):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).mT


def check_patches(height, width, patch_size):
    """The patch grid (rows, columns) of an image. Raises ValueError where the patches do not tile it."""
    if height % patch_size or width % patch_size:
        raise ValueError(f"image size {height} x {width} is not divisible by patch size {patch_size}: choose a multiple of the patch size")
    return height // patch_size, width // patch_size


def resize_pos_embed(pos_embed, old, new, prefix=1):
    """Position embedding (1, prefix + rows*columns, D) of grid `old` -> grid `new`, bicubic, class token untouched."""
    if old == new:
        return pos_embed
    tokens, grid = pos_embed[:, :prefix], pos_embed[:, prefix:]
    grid = grid.unflatten(1, old).permute(0, 3, 1, 2)
    grid = F.interpolate(grid.float(), size=new, mode="bicubic", antialias=True, align_corners=False).to(pos_embed.dtype)
    return torch.cat([tokens, grid.flatten(2).mT], dim=1)


class ViT(nn.Module):
    """Vision transformer: learned position embedding, class token, LayerNorm eps 1e-6, qkv bias, exact GELU.

    pool: "token" (class token after the final norm) or "mean" (mean of the patch tokens, then `fc_norm`; timm calls it "avg").
    num_classes = 0 makes the head the identity. Images of another size are allowed: the position embedding is interpolated.
    Raises ValueError for an image size that the patches do not tile, and for drop path without shortcut.
    """
    prefix_tokens = 1                                            # tokens before the patches: the class token

    def __init__(self, img_size=224, patch_size=16, in_chans=3, num_classes=1000, embed_dim=768, depth=12, num_heads=12, mlp_ratio=4.0,
                 shortcut="residual", alpha_min=1.0, temperature_beta=1.0, drop_path=0.0, pool="token"):
        super().__init__()
        pool = "mean" if pool == "avg" else pool
        if pool not in ("token", "mean"):
            raise ValueError(f"pool {pool!r} is unknown: use token or mean")
        self.grid, self.pool, self.shortcut = check_patches(img_size, img_size, patch_size), pool, shortcut
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid[0] * self.grid[1], embed_dim))
        alphas = shortcut_weights(shortcut, depth, alpha_min)
        check_drop_path(drop_path, alphas)
        self.blocks = nn.Sequential(*[
            Block(embed_dim, num_heads, mlp_ratio, alphas=(alphas[2 * l], alphas[2 * l + 1]), temperature=temperature_beta ** -l,
                  drop_path=drop_path * l / max(1, depth - 1)) for l in range(depth)])        # stochastic depth grows linearly
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6) if pool == "token" else nn.Identity()
        self.fc_norm = nn.LayerNorm(embed_dim, eps=1e-6) if pool == "mean" else nn.Identity()
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        init_vit(self)

    def embed(self, x):
        """Images (B, C, Y, X) -> tokens (B, 1 + N, D), class token first."""
        grid = check_patches(*x.shape[-2:], self.patch_embed.patch_size)
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        return x + resize_pos_embed(self.pos_embed, self.grid, grid)

    def layers(self, x):
        """Yields the tokens (B, 1 + N, D) of images after the embedding and after each block, the final norm left out: what `probe.py` looks at."""
        x = self.embed(x)
        yield x
        for block in self.blocks:
            x = block(x)
            yield x

    def forward_features(self, x):
        """Images -> tokens (B, 1 + N, D) after the last block and the final norm."""
        return self.norm(self.blocks(self.embed(x)))

    def forward(self, x):
        """Images (B, C, Y, X) -> logits (B, num_classes)."""
        x = self.forward_features(x)
        x = x[:, 0] if self.pool == "token" else x[:, 1:].mean(1)
        return self.head(self.fc_norm(x))


class LM(nn.Module):
    """LLaMA-style decoder: RMSNorm, rotary positions, no biases, tied embeddings, causal SDPA, two-matrix exact-GELU MLP (paper 2).

    temperature_beta: attention scale tau_l / sqrt(d) with tau_l = beta ** -l, l from 0. attention_scale: "head" divides by sqrt(head_dim), as
    usual; "model" by sqrt(embed_dim), as paper 2's formula reads when its d is the width. shift: see MLP.
    The defaults have 194.48 M parameters, the paper's size. Raises ValueError for sizes that do not fit.
    """

    def __init__(self, vocab_size=32000, block_size=512, embed_dim=768, depth=24, num_heads=12, mlp_ratio=4.0, shortcut="residual",
                 temperature_beta=1.0, alpha_min=1.0, attention_scale="head", shift=0.0):
        super().__init__()
        if attention_scale not in ("head", "model"):
            raise ValueError(f"attention_scale {attention_scale!r} is unknown: use head or model")
        if embed_dim % num_heads == 0 and embed_dim // num_heads % 2:
            raise ValueError(f"heads of {embed_dim // num_heads} dimensions cannot be rotated in pairs: choose num_heads so that embed_dim / num_heads is even")
        self.vocab_size, self.block_size, self.shortcut = vocab_size, block_size, shortcut
        self.token_embed = nn.Embedding(vocab_size, embed_dim)
        alphas = shortcut_weights(shortcut, depth, alpha_min)
        scale = 1.0 if attention_scale == "head" else num_heads ** -0.5
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, alphas=(alphas[2 * l], alphas[2 * l + 1]), temperature=scale * temperature_beta ** -l,
                  norm=nn.RMSNorm, bias=False, causal=True, shift=shift) for l in range(depth))
        self.norm = nn.RMSNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.head.weight = self.token_embed.weight
        for name, table in zip(("cos", "sin"), rope_table(block_size, embed_dim // num_heads)):
            self.register_buffer(name, table, persistent=False)
        init_lm(self)

    def rope(self, start, stop):
        """(cos, sin) for the positions start .. stop - 1. Raises ValueError past the end of the context."""
        if stop > self.block_size:
            raise ValueError(f"{stop} tokens do not fit the context of {self.block_size}: pass fewer, or build the model with a larger block_size")
        return self.cos[start:stop], self.sin[start:stop]

    def forward(self, tokens, cache=None):
        """Tokens (B, N) -> logits (B, N, V) for the token that follows each.

        cache: a list of one dict per block, empty at first; then only the new tokens are passed, and those before them come out of it."""
        past = cache[0]["k"].shape[2] if cache and cache[0] else 0
        rope = self.rope(past, past + tokens.shape[1])
        x = self.token_embed(tokens)
        for l, block in enumerate(self.blocks):
            x = block(x, rope, None if cache is None else cache[l])
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens, count, temperature=1.0, top_k=None, generator=None):
        """Tokens (B, N) -> (B, N + count), drawn from softmax(logits / temperature) of the top_k likeliest; temperature 0 takes the likeliest.

        Keys and values are cached while the text fits the context; past it, each token sees the last block_size tokens."""
        cache = [{} for _ in self.blocks]
        new = tokens
        for _ in range(count):
            if tokens.shape[1] > self.block_size:                # positions shift with the window, so cached keys are of no more use
                cache, new = None, tokens[:, -self.block_size:]
            logits = self(new, cache)[:, -1].float()
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                if top_k and top_k < logits.shape[-1]:
                    logits[logits < logits.topk(top_k).values[:, -1:]] = -math.inf
                new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens
