"""One transformer block, three kinds of shortcut.

    x = a * x + attn(norm1(x))          residual: a = 1
    x = a * x + mlp(norm2(x))           skipless: a = 0, the addition is not computed at all
                                        decayed:  a falls from 1 to alpha_min over the 2L sub-layers

ViT (supervised), DINO (self-distilled), LM (decoder), MAE (masked autoencoder), SiT and UViT (flow matching) are built of it.
Names follow timm, so a residual ViT loads into timm's and back. Shapes: B images or texts, N tokens, D channels, H heads, d = D / H.
"""
import itertools
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.ops import stochastic_depth

from init import init_lm, init_mae, init_sit, init_uvit, init_vit

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


def encoder_weights(shortcut, depth, alpha_min, schedule, decay_on, scaling, learn_alphas):
    """(`shortcut_weights`, gain of the branches) of an encoder, scaling included. Raises ValueError for what does not go together.

    scaling: "both" is x <- sqrt(.5) (x + f(x)), "branch" is x + sqrt(.5) f(x) (ablations of paper 3); "none" is a x + f(x)."""
    if scaling not in ("none", "both", "branch"):
        raise ValueError(f"scaling {scaling!r} is unknown: use none, both or branch")
    alphas = shortcut_weights(shortcut, depth, alpha_min, schedule, decay_on)
    if scaling != "none" and set(alphas) != {1.0}:
        raise ValueError(f"scaling {scaling!r} is an ablation of the plain shortcut: use shortcut residual, or alpha_min 1")
    if learn_alphas and (shortcut == "skipless" or scaling != "none"):
        raise ValueError("only the weights of a shortcut that is there, and not scaled, can be learned: leave learn_alphas out")
    return [math.sqrt(.5)] * len(alphas) if scaling == "both" else alphas, 1.0 if scaling == "none" else math.sqrt(.5)


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
    shortcut, alpha_min, schedule, decay_on, scaling, learn_alphas: as in `MAE`, so that every encoder of its can be carried on.
    Raises ValueError for an image size that the patches do not tile, and for drop path without shortcut.
    """
    prefix_tokens = 1                                            # tokens before the patches: the class token

    def __init__(self, img_size=224, patch_size=16, in_chans=3, num_classes=1000, embed_dim=768, depth=12, num_heads=12, mlp_ratio=4.0,
                 shortcut="residual", alpha_min=1.0, temperature_beta=1.0, drop_path=0.0, pool="token", schedule="linear", decay_on="both",
                 scaling="none", learn_alphas=False):
        super().__init__()
        pool = "mean" if pool == "avg" else pool
        if pool not in ("token", "mean"):
            raise ValueError(f"pool {pool!r} is unknown: use token or mean")
        self.grid, self.pool, self.shortcut = check_patches(img_size, img_size, patch_size), pool, shortcut
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid[0] * self.grid[1], embed_dim))
        alphas, gain = encoder_weights(shortcut, depth, alpha_min, schedule, decay_on, scaling, learn_alphas)
        check_drop_path(drop_path, alphas)
        self.blocks = nn.Sequential(*[
            Block(embed_dim, num_heads, mlp_ratio, alphas=(alphas[2 * l], alphas[2 * l + 1]), temperature=temperature_beta ** -l,
                  drop_path=drop_path * l / max(1, depth - 1), gain=gain, learn_alphas=learn_alphas) for l in range(depth)])  # stochastic depth grows linearly
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


# ---------------------------------------------------------------------------------------------------------------------
# self-distillation and dense features (paper 1)

class DINOHead(nn.Module):
    """DINO's projection head (Caron et al. 2021): features (B, D) -> logits (B, K).

    Linear, GELU, Linear, GELU, Linear to `bottleneck_dim`, L2 normalisation, then a linear layer without bias whose rows have norm g ("weight norm").
    norm_last_layer holds every g at 1, so logits are cosines; else g is learned from 1.
    """

    def __init__(self, in_dim, out_dim=65536, hidden_dim=2048, bottleneck_dim=256, norm_last_layer=True):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, bottleneck_dim))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(bottleneck_dim, out_dim, bias=False))
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        g = self.last_layer.parametrizations.weight.original0
        nn.init.ones_(g)
        g.requires_grad_(not norm_last_layer)

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x).float(), dim=-1))       # float32: a squared half overflows


class DINO(nn.Module):
    """Student or teacher of self-distillation: a ViT without classes, its head, and `center` (1, K), the running mean of the teacher's logits.

    head: keyword arguments of `DINOHead`; the others are those of `ViT`. The centre is the teacher's; the student's stays 0.
    """

    def __init__(self, head=None, **backbone):
        super().__init__()
        self.backbone = ViT(num_classes=0, **backbone)
        self.head = DINOHead(self.backbone.pos_embed.shape[2], **(head or {}))
        self.register_buffer("center", torch.zeros(1, self.head.last_layer.out_features))

    def forward(self, crops):
        """Crops, a list of V image batches (B, C, S_v, S_v) -> (logits (V, B, K), features (V, B, D) after the final norm).

        Neighbours of equal size go through the backbone together, and all through the head together.
        """
        groups = [torch.cat(list(group)) for _, group in itertools.groupby(crops, key=lambda crop: crop.shape[-2:])]
        features = torch.cat([self.backbone(group) for group in groups])
        return self.head(features).unflatten(0, (len(crops), -1)), features.unflatten(0, (len(crops), -1))


def patch_tokens(net, x, layers, feature="token", norm=True):
    """Images (B, C, Y, X) -> a list of (B, N, D), the patch tokens at each of `layers` (1 .. depth: after that block; 0: the embedding), prefix left out.

    feature "token": the tokens themselves, through the final LayerNorm where the net has one and norm is true, as DINO takes its intermediate layers.
    "query", "key", "value": what the attention of block l computes from its input, heads side by side.
    Only the blocks that are needed run. Raises ValueError for a layer that is not there, or an unknown feature.
    """
    kinds = ("query", "key", "value")
    if feature not in ("token", *kinds):
        raise ValueError(f"feature {feature!r} is unknown: use token, {', '.join(kinds)}")
    depth, first = len(net.blocks), 0 if feature == "token" else 1
    if not layers or min(layers) < first or max(layers) > depth:
        raise ValueError(f"layers {' '.join(map(str, layers))} are not all within {first} .. {depth}, the {feature} layers of this net")
    final = getattr(net, "norm", None)
    final = final if norm and isinstance(final, nn.LayerNorm) else nn.Identity()
    found = {}
    for l, tokens in enumerate(net.layers(x)):
        if feature == "token" and l in layers:
            found[l] = final(tokens)
        elif feature != "token" and l + 1 in layers:             # the tokens after block l are the input of block l + 1
            block = net.blocks[l]
            found[l + 1] = block.attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)[kinds.index(feature)]
        if len(found) == len(set(layers)):
            break
    return [found[l][:, net.prefix_tokens:] for l in layers]


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


# ---------------------------------------------------------------------------------------------------------------------
# generative representation learning (paper 3)

def sincos_pos_embed(dim, rows, cols):
    """Fixed 2-D position embedding (rows * cols, D): the first half of the channels encodes the column, the second the row (MAE's order).

    Each half is [sin(p w_i), cos(p w_i)], w_i = 10000 ** (-i / (D / 4)), i = 0 .. D/4 - 1. Raises ValueError where D is no multiple of 4."""
    if dim % 4:
        raise ValueError(f"a 2-D sin-cos position embedding needs a width that 4 divides, not {dim}: change it")
    omega = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    angles = [p.flatten()[:, None] * omega for p in (col, row)]
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1).float()


def patchify(x, patch_size):
    """Images (B, C, Y, X) -> patches (B, N, p * p * C), row by row, channels last within a patch (MAE's pixel order)."""
    B, C, Y, X = x.shape
    p = patch_size
    return x.reshape(B, C, Y // p, p, X // p, p).permute(0, 2, 4, 3, 5, 1).reshape(B, -1, p * p * C)


def unpatchify(patches, patch_size, rows, cols):
    """The inverse of `patchify`: (B, rows * cols, p * p * C) -> (B, C, rows * p, cols * p)."""
    p = patch_size
    x = patches.unflatten(2, (p, p, -1)).unflatten(1, (rows, cols))                  # (B, rows, cols, p, p, C)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def random_masking(noise, mask_ratio):
    """noise (B, N), uniform -> (kept (B, n) patch indices, mask (B, N): 1 where removed, restore (B, N)), n = int(N (1 - mask_ratio)).

    The n smallest of each row are kept. `restore` undoes the shuffle: cat([kept tokens, others]).gather(1, restore) is in image order.
    Raises ValueError where nothing is kept or nothing removed."""
    N = noise.shape[1]
    n = int(N * (1 - mask_ratio))
    if not 0 < n < N:
        raise ValueError(f"mask ratio {mask_ratio} keeps {n} of {N} patches: some must be kept and some removed, so change it or the patch size")
    shuffle = noise.argsort(dim=1)
    restore = shuffle.argsort(dim=1)
    return shuffle[:, :n], (restore >= n).to(noise.dtype), restore


def unshuffle(tokens, mask_token, restore):
    """Kept tokens (B, n, D), filled up with the mask token (1, 1, D) and brought into image order: (B, N, D)."""
    filler = mask_token.expand(len(tokens), restore.shape[1] - tokens.shape[1], -1)
    return torch.cat([tokens, filler], dim=1).gather(1, restore[:, :, None].expand(-1, -1, tokens.shape[2]))


class LongSkip(nn.Module):
    """Encoder tokens into a decoder block (paper 3): unshuffled with a mask token of their own, concatenated, x + fc2(silu(fc1([skip, x]))), fc2 of zeros."""

    def __init__(self, encoder_dim, decoder_dim):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder_dim))
        self.fc1 = nn.Linear(encoder_dim + decoder_dim, decoder_dim)
        self.fc2 = nn.Linear(decoder_dim, decoder_dim)

    def forward(self, x, skip, restore):
        """x (B, 1 + N, decoder_dim), skip (B, 1 + n, encoder_dim), class tokens first -> (B, 1 + N, decoder_dim)."""
        skip = torch.cat([skip[:, :1], unshuffle(skip[:, 1:], self.mask_token, restore)], dim=1)
        return x + self.fc2(F.silu(self.fc1(torch.cat([skip, x], dim=2))))


class MAE(nn.Module):
    """Masked autoencoder (He et al. 2022) whose encoder's shortcuts decay (paper 3): x <- a x + f(x), a falling to alpha_min over 2 * depth sub-layers.

    long_skips: every second encoder block feeds one decoder block, the last first (`LongSkip`); the decoder then starts from its own class token
    and positions, and all that it knows of the image comes through the skips. Without them: the usual decoder of embedded latents and mask tokens.
    zero_init: the last weight of every branch, skip and of the pixel head starts at zero, so at step 0 a block is its shortcut alone.
    encoder_norm: final LayerNorm of the encoder; None means only without long skips, as in the published nets.
    shortcut, schedule, decay_on: see `shortcut_weights`; scaling: see `encoder_weights`; learn_alphas makes the weights parameters that start there.
    A skipless encoder's branches never start at zero; give it an init with `init.init_skipless_vit`. Decoder blocks are residual.
    MAE(alpha_min=1, long_skips=False, zero_init=False) is the original. norm_pix_loss: targets are normalised per patch.
    Raises ValueError for sizes that do not fit.
    """
    prefix_tokens = 1

    def __init__(self, img_size=224, patch_size=16, in_chans=3, embed_dim=768, depth=12, num_heads=12, decoder_dim=512, decoder_depth=8, decoder_heads=16,
                 alpha_min=1.0, long_skips=True, zero_init=True, mlp_ratio=4.0, shortcut="decayed", schedule="linear", decay_on="both", learn_alphas=False,
                 scaling="none", encoder_norm=None, norm_pix_loss=True):
        super().__init__()
        if long_skips and (depth % 2 or decoder_depth < depth // 2):
            raise ValueError(f"long skips pair every second of {depth} encoder blocks with one of {decoder_depth} decoder blocks: "
                             f"make depth even and decoder_depth at least half of it, or leave the skips out")
        alphas, gain = encoder_weights(shortcut, depth, alpha_min, schedule, decay_on, scaling, learn_alphas)
        if decoder_dim % decoder_heads:
            raise ValueError(f"decoder_dim {decoder_dim} is not divisible by decoder_heads {decoder_heads}: change one of them")
        if decoder_dim % 4:
            raise ValueError(f"decoder_dim {decoder_dim} is not divisible by 4, which its sin-cos positions need: change it")
        self.grid, self.patch_size, self.shortcut, self.norm_pix_loss = check_patches(img_size, img_size, patch_size), patch_size, shortcut, norm_pix_loss
        # encoder
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.register_buffer("pos_embed", F.pad(sincos_pos_embed(embed_dim, *self.grid), (0, 0, 1, 0))[None])         # zeros for the class token
        self.blocks = nn.Sequential(*[Block(embed_dim, num_heads, mlp_ratio, alphas=tuple(alphas[2 * l:2 * l + 2]), gain=gain, learn_alphas=learn_alphas)
                                      for l in range(depth)])
        keep_norm = encoder_norm if encoder_norm is not None else not long_skips
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6) if keep_norm else nn.Identity()
        # decoder
        self.register_buffer("decoder_pos_embed", F.pad(sincos_pos_embed(decoder_dim, *self.grid), (0, 0, 1, 0))[None])
        self.skips = nn.ModuleList(LongSkip(embed_dim, decoder_dim) for _ in range(depth // 2 if long_skips else 0))
        self.decoder_embed = nn.Linear(decoder_dim if long_skips else embed_dim, decoder_dim)
        if long_skips:
            self.decoder_cls_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        else:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.decoder_blocks = nn.ModuleList(Block(decoder_dim, decoder_heads, mlp_ratio) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, patch_size ** 2 * in_chans)
        init_mae(self, zero_init)

    @property
    def alpha_eff(self):
        """Product of the encoder's shortcut weights: the share of the embedding that reaches the last block unchanged (0 without shortcuts)."""
        return math.prod(float(getattr(a, "data", a)) for block in self.blocks for a in block.alphas)

    def embed(self, x, kept=None):
        """Images (B, C, Y, X) -> tokens (B, 1 + N, D), class token first; with kept (B, n) only those patches."""
        grid = check_patches(*x.shape[-2:], self.patch_size)
        pos = resize_pos_embed(self.pos_embed, self.grid, grid)
        x = self.patch_embed(x) + pos[:, 1:]
        if kept is not None:
            x = x.gather(1, kept[:, :, None].expand(-1, -1, x.shape[2]))
        return torch.cat([(self.cls_token + pos[:, :1]).expand(len(x), -1, -1), x], dim=1)

    def layers(self, x, kept=None):
        """Yields the tokens (B, 1 + N, D) of images after the embedding and after each block, the final norm left out; all patches unless `kept` (B, n)."""
        x = self.embed(x, kept)
        yield x
        for block in self.blocks:
            x = block(x)
            yield x

    def forward_features(self, x):
        """Images -> tokens (B, 1 + N, D) of the whole image after the last block and the final norm, where there is one."""
        return self.norm(self.blocks(self.embed(x)))

    def decode(self, states, restore, grid):
        """Encoder tokens of the kept patches after the embedding and each block (a list), restore (B, N) and the image's grid of patches
        (rows, columns) -> predicted patches (B, N, p * p * C)."""
        pos = resize_pos_embed(self.decoder_pos_embed, self.grid, grid)
        last = self.norm(states[-1])
        if self.skips:
            x = torch.cat([self.decoder_cls_token[0], pos[0, 1:]])                    # the same for all images, so without a batch
            x = self.decoder_embed(x).expand(len(restore), -1, -1)
        else:
            x = self.decoder_embed(last)
            x = torch.cat([x[:, :1], unshuffle(x[:, 1:], self.mask_token, restore)], dim=1) + pos
        sources = [last, *states[-3::-2]]                        # after the last block, the last but two, ...: one per skip, then none
        for i, block in enumerate(self.decoder_blocks):
            if i < len(self.skips):
                x = self.skips[i](x, sources[i], restore)
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]

    def patch_statistics(self, target):
        """(mean, std) of each target patch (B, N, p * p * C), each (B, N, 1): unbiased variance, eps 1e-6; (0, 1) without norm_pix_loss."""
        if not self.norm_pix_loss:
            return torch.zeros_like(target[..., :1]), torch.ones_like(target[..., :1])
        return target.mean(-1, keepdim=True), (target.var(-1, keepdim=True) + 1e-6).sqrt()

    def forward(self, x, mask_ratio=0.75, noise=None):
        """Images (B, C, Y, X) -> (loss, prediction (B, N, p * p * C), mask (B, N), 1 where a patch was removed).

        loss: squared error of the (normalised) pixels, mean over the pixels of the removed patches only. noise (B, N) uniform decides which
        are removed (`random_masking`); None draws it. Raises ValueError for a mask ratio that keeps or removes nothing."""
        grid = check_patches(*x.shape[-2:], self.patch_size)
        if noise is None:
            noise = torch.rand(len(x), math.prod(grid), device=x.device)
        kept, mask, restore = random_masking(noise, mask_ratio)
        prediction = self.decode(list(self.layers(x, kept)), restore, grid)
        target = patchify(x, self.patch_size)
        mean, std = self.patch_statistics(target)
        error = (prediction.float() - (target - mean) / std).square().mean(-1)       # float32: half precision overflows late in long runs
        return (error * mask).sum() / mask.sum(), prediction, mask

    @torch.no_grad()
    def reconstruct(self, x, mask_ratio=0.75, noise=None):
        """Images -> (masked, reconstruction), each (B, C, Y, X): the removed patches grey (0), or as predicted, brought back to pixels
        with the true mean and std of each patch, which the net does not predict; kept patches as they are."""
        _, prediction, mask = self(x, mask_ratio, noise)
        target, mask = patchify(x, self.patch_size), mask[:, :, None]
        mean, std = self.patch_statistics(target)
        grid = check_patches(*x.shape[-2:], self.patch_size)
        return [unpatchify(target * (1 - mask) + fill * mask, self.patch_size, *grid) for fill in (torch.zeros_like(target), prediction.float() * std + mean)]


SIT_SIZES = {                                                    # parameters with latents 4 x 32 x 32, patch 2, 1000 classes
    "nano": dict(embed_dim=128, depth=8, num_heads=4),           # 2.6 M
    "S": dict(embed_dim=384, depth=12, num_heads=6),             # 33 M
    "B": dict(embed_dim=768, depth=12, num_heads=12),            # 130 M
    "L": dict(embed_dim=1024, depth=24, num_heads=16),           # 458 M
    "XL": dict(embed_dim=1152, depth=28, num_heads=16),          # 675 M
}
UVIT_SIZES = {
    "nano": dict(embed_dim=128, depth=8, num_heads=4),           # 2.1 M
    "S": dict(embed_dim=512, depth=12, num_heads=8),             # 45 M
    "M": dict(embed_dim=768, depth=16, num_heads=12),            # 131 M
    "L": dict(embed_dim=1024, depth=20, num_heads=16),           # 287 M
    "H": dict(embed_dim=1152, depth=28, num_heads=16),           # 501 M
}


def timestep_features(t, dim):
    """t (B,) -> (B, dim): cos(t w_i), sin(t w_i), w_i = 10000 ** (-i / (dim / 2)), i = 0 .. dim/2 - 1, in float32 whatever the model's type."""
    omega = torch.exp(-math.log(10000.0) / (dim // 2) * torch.arange(dim // 2, device=t.device, dtype=torch.float32))
    angle = t.float()[:, None] * omega
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def modulate(x, shift, scale):
    """x (B, N, D) scaled and shifted per sample; shift, scale (B, D), and 0 changes nothing."""
    return x * (1 + scale[:, None]) + shift[:, None]


class SiTBlock(Block):
    """DiT's adaLN-Zero block with a weight on its shortcut: x <- a x + gate(c) * f(norm(x) modulated by c), f attention, then MLP.

    gate, shift and scale are a linear function of the condition c (B, D) that starts at zero, so at step 0 a block is its shortcut alone.
    skip: a Linear through which the mirrored encoder block's tokens are added to x before the block.
    """

    def __init__(self, dim, num_heads, mlp_ratio, alphas, skip=False):
        super().__init__(dim, num_heads, mlp_ratio, alphas, norm=partial(nn.LayerNorm, elementwise_affine=False), gelu="tanh")
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.skip = nn.Linear(dim, dim) if skip else None

    def forward(self, x, c, skip=None):
        if self.skip is not None:
            x = x + self.skip(skip)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = self.join(self.alphas[0], x, gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1)))
        return self.join(self.alphas[1], x, gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2)))


class FlowNet(nn.Module):
    """What SiT and UViT share: (x_t (B, C, Y, X), t (B,) in [0, 1], y (B,) int64) -> velocity (B, C, Y, X).

    y = num_classes is the null class, "no label", that guidance needs; drop (B,) bool makes the labels of those samples null. Which to drop the train
    loop decides, with probability `label_dropout`: nothing is random in here.
    """

    @property
    def alpha_eff(self):
        """Product of all shortcut weights: the share of the embedding that reaches the last block unchanged."""
        return math.prod(a for block in self.blocks for a in block.alphas)

    def labels(self, y, drop):
        return y if drop is None else torch.where(drop, self.num_classes, y)

    def check_size(self, x):
        if x.shape[-2:] != (self.input_size, self.input_size):
            raise ValueError(f"the model was built for {self.input_size} x {self.input_size} inputs, not {x.shape[-2]} x {x.shape[-1]}: build it with that input_size")


class SiT(FlowNet):
    """Scalable interpolant transformer (Ma et al. 2024): DiT's blocks, velocity prediction; decayed shortcuts and long skips as in paper 3.

    The shortcuts fall from 1 to alpha_min through the last block (see `shortcut_weights`); the first half of the blocks is the encoder, the second the decoder.
    long_skips: decoder block i adds Linear(tokens after the mirrored encoder block), last in first out, to x before the block.
    learn_sigma: the head has twice the channels and the second half is dropped, as in the released nets. t is embedded unscaled.
    Raises ValueError for sizes that do not fit, and where a shortcut weight is 0: gates that start at zero would leave no signal to learn from.
    """
    prefix_tokens = 0                                            # every token is a patch

    def __init__(self, input_size=32, patch_size=2, in_chans=4, num_classes=1000, embed_dim=1152, depth=28, num_heads=16, alpha_min=1.0, long_skips=False,
                 label_dropout=0.1, mlp_ratio=4.0, learn_sigma=False, shortcut="decayed", schedule="linear", decay_on="both"):
        super().__init__()
        if long_skips and depth % 2:
            raise ValueError(f"long skips pair the first half of the blocks with the second, and depth {depth} has no half: make it even")
        alphas = shortcut_weights(shortcut, depth, alpha_min, schedule, decay_on)
        if 0 in alphas:
            raise ValueError("SiT's gates start at zero, so with a shortcut of weight 0 nothing passes and nothing is learned: use shortcut decayed, alpha_min above 0")
        self.input_size, self.patch_size, self.num_classes, self.label_dropout = input_size, patch_size, num_classes, label_dropout
        self.grid, self.shortcut, self.learn_sigma = check_patches(input_size, input_size, patch_size), shortcut, learn_sigma
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.register_buffer("pos_embed", sincos_pos_embed(embed_dim, *self.grid)[None], persistent=False)
        self.time_embed = nn.Sequential(nn.Linear(256, embed_dim), nn.SiLU(), nn.Linear(embed_dim, embed_dim))
        self.label_embed = nn.Embedding(num_classes + 1, embed_dim)
        self.blocks = nn.ModuleList(SiTBlock(embed_dim, num_heads, mlp_ratio, tuple(alphas[2 * l:2 * l + 2]), skip=long_skips and l >= depth // 2)
                                    for l in range(depth))
        self.norm = nn.LayerNorm(embed_dim, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(embed_dim, 2 * embed_dim))
        self.head = nn.Linear(embed_dim, patch_size ** 2 * in_chans * (1 + learn_sigma))
        init_sit(self)

    def condition(self, t, y, drop=None):
        """(B, D): the sum of the time's and the label's embedding."""
        return self.time_embed(timestep_features(t, 256).to(self.head.weight.dtype)) + self.label_embed(self.labels(y, drop))

    def run(self, x, c):
        """Yields the tokens (B, N, D) after the embedding and after each block."""
        self.check_size(x)
        x = self.patch_embed(x) + self.pos_embed
        yield x
        skips = []
        for l, block in enumerate(self.blocks):
            x = block(x, c, skips.pop() if block.skip is not None else None)
            if l < len(self.blocks) // 2:
                skips.append(x)
            yield x

    def layers(self, x, t, y):
        """Yields the tokens (B, N, D) after the embedding and after each block, the final norm left out: what `probe.py` looks at."""
        return self.run(x, self.condition(t, y))

    def forward(self, x, t, y, drop=None):
        c = self.condition(t, y, drop)
        for x in self.run(x, c):
            pass
        x = self.head(modulate(self.norm(x), *self.modulation(c).chunk(2, dim=1)))
        x = unpatchify(x, self.patch_size, *self.grid)
        return x.chunk(2, dim=1)[0] if self.learn_sigma else x


class UViTBlock(Block):
    """A plain block; skip: before it, x <- Linear([x, tokens of the mirrored block])."""

    def __init__(self, dim, num_heads, mlp_ratio, alphas, qkv_bias, skip=False):
        super().__init__(dim, num_heads, mlp_ratio, alphas, eps=1e-5, qkv_bias=qkv_bias)
        self.skip = nn.Linear(2 * dim, dim) if skip else None

    def forward(self, x, skip=None):
        return super().forward(x if self.skip is None else self.skip(torch.cat([x, skip], dim=2)))


class UViT(FlowNet):
    """U-ViT (Bao et al. 2023): time and label are tokens before the patches, positions are learned, depth/2 in-blocks, one in the middle and depth/2 out-blocks,
    each of which takes the mirrored in-block's tokens in by concatenation (without long_skips: none does); a final 3 x 3 convolution smooths the patches' seams.

    The shortcuts fall from 1 to alpha_min up to the last out-block, over 2 (depth + 1) sub-layers (paper 3). zero_init: attn.proj and mlp.fc2 start at zero, which
    U-ViT itself does not do and a small alpha_min needs. The published net sees a time that counts 1 to 1000, so t is multiplied by 1000 before its sinusoids.
    Raises ValueError for sizes that do not fit, and for zero_init where a shortcut weight is 0.
    """
    prefix_tokens = 2                                            # label, time

    def __init__(self, input_size=32, patch_size=2, in_chans=4, num_classes=1000, embed_dim=512, depth=12, num_heads=8, alpha_min=1.0, long_skips=True,
                 zero_init=True, label_dropout=0.1, mlp_ratio=4.0, qkv_bias=False, shortcut="decayed", schedule="linear", decay_on="both"):
        super().__init__()
        if depth % 2:
            raise ValueError(f"U-ViT has depth/2 blocks on either side of the middle one, and depth {depth} has no half: make it even")
        if embed_dim % 2:
            raise ValueError(f"the time's sinusoids come in pairs, so embed_dim {embed_dim} must be even")
        alphas = shortcut_weights(shortcut, depth + 1, alpha_min, schedule, decay_on)
        if zero_init and 0 in alphas:
            raise ValueError("with zero_init and a shortcut of weight 0 nothing passes and nothing is learned: leave zero_init out, or use alpha_min above 0")
        self.input_size, self.patch_size, self.num_classes, self.label_dropout = input_size, patch_size, num_classes, label_dropout
        self.grid, self.shortcut = check_patches(input_size, input_size, patch_size), shortcut
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.label_embed = nn.Embedding(num_classes + 1, embed_dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.prefix_tokens + self.grid[0] * self.grid[1], embed_dim))
        self.blocks = nn.ModuleList(UViTBlock(embed_dim, num_heads, mlp_ratio, tuple(alphas[2 * l:2 * l + 2]), qkv_bias, skip=long_skips and l > depth // 2)
                                    for l in range(depth + 1))
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, patch_size ** 2 * in_chans)
        self.smooth = nn.Conv2d(in_chans, in_chans, 3, padding=1)
        init_uvit(self, zero_init)

    def layers(self, x, t, y, drop=None):
        """Yields the tokens (B, 2 + N, D) after the embedding and after each block, the final norm left out."""
        self.check_size(x)
        time = timestep_features(1000 * t, self.pos_embed.shape[2]).to(x.dtype)
        x = torch.cat([self.label_embed(self.labels(y, drop))[:, None], time[:, None], self.patch_embed(x)], dim=1) + self.pos_embed
        yield x
        skips = []
        for l, block in enumerate(self.blocks):
            x = block(x, skips.pop() if block.skip is not None else None)
            if l < len(self.blocks) // 2:
                skips.append(x)
            yield x

    def forward(self, x, t, y, drop=None):
        for x in self.layers(x, t, y, drop):
            pass
        x = self.head(self.norm(x))[:, self.prefix_tokens:]
        return self.smooth(unpatchify(x, self.patch_size, *self.grid))
