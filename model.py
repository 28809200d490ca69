"""One transformer block for all, and its interface `alphas`: the weights of its two shortcuts.

    x = a * x + attn(norm1(x))          residual: a = 1
    x = a * x + mlp(norm2(x))           skipless: a = 0, the addition is not computed at all
                                        decayed:  a falls from 1 to alpha_min over the 2L sub-layers

Names follow timm, so a residual ViT loads into timm's and back.
Shapes: B images or texts, N tokens, D channels, H heads, d = D / H.
"""
import itertools
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.ops import stochastic_depth

from init import bisect, init_lm, init_mae, init_sit, init_uvit, init_vit

SIZES = {                                                       # parameters at 224 px, patch 16
    "nano": dict(embed_dim=96, depth=12, num_heads=3),          # 1.5 M
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),         # 5.7 M
    "small": dict(embed_dim=384, depth=12, num_heads=6),        # 22 M
    "base": dict(embed_dim=768, depth=12, num_heads=12),        # 87 M
    "large": dict(embed_dim=1024, depth=24, num_heads=16),      # 304 M
}

activation = F.gelu     # of every MLP but SiT's (tanh-GELU); --init auto reads it off the net


# -------------------------------------------------------------------------------------------------------
# shortcuts

# (depth, alpha_min) -> alphas: for each block a pair of weights, the attention's and the MLP's. A weight
# is a, for a x + f(x), or (a, g), for a x + g f(x). A number is fixed, an nn.Parameter is learned;
# make a new one for every weight, since [pair] * depth would share it.
SHORTCUTS = {
    "residual": lambda depth, alpha_min: [(1.0, 1.0)] * depth,
    "skipless": lambda depth, alpha_min: [(0.0, 0.0)] * depth,
    "decayed": lambda depth, alpha_min: pair_up(linear_decay(2 * depth, alpha_min)),
}


def linear_decay(sublayers, alpha_min):
    """Weights that fall evenly from 1 to alpha_min (paper 3's code)."""
    return [1 - i / (sublayers - 1) * (1 - alpha_min) for i in range(sublayers)]


def pair_up(weights):
    """A flat list, attention, MLP, attention, ... -> a list of pairs, one per block."""
    return list(zip(weights[::2], weights[1::2]))


def shortcut_weights(shortcut, depth, alpha_min=1.0):
    """The alphas of a kind in SHORTCUTS. Raises ValueError for an unknown kind or alpha_min.

    A net takes any list as its `alphas`. Decay of the attention's shortcuts alone:
        [(a, 1.0) for a, _ in shortcut_weights("decayed", depth, alpha_min)]"""
    if shortcut not in SHORTCUTS:
        raise ValueError(f"shortcut {shortcut!r} is unknown: use {', '.join(SHORTCUTS)}")
    if not 0 <= alpha_min <= 1:
        raise ValueError(f"alpha_min {alpha_min} must lie between 0 and 1")
    return SHORTCUTS[shortcut](depth, alpha_min)


def learnable(alphas):
    """Pairs of numbers -> pairs of parameters that start there."""
    return [tuple(nn.Parameter(torch.tensor(float(a))) for a in pair) for pair in alphas]


def split_weight(weight):
    """A weight, a or (a, g) -> (a, g)."""
    return weight if isinstance(weight, (tuple, list)) else (weight, 1.0)


def hold_weights(weights):
    """A tuple of weights; a ParameterList where some are learned, so that the block's state has them."""
    return nn.ParameterList(weights) if any(map(torch.is_tensor, weights)) else weights


def is_fixed_at(weight, value):
    """Is the weight fixed at this value? A parameter that only stands there now is not."""
    return not torch.is_tensor(weight) and weight == value


def effective_alpha(alphas):
    """The product of all shortcut weights: the factor with which the embedding reaches the last block."""
    weights = [split_weight(weight)[0] for pair in alphas for weight in pair]
    return float(math.prod(a.item() if torch.is_tensor(a) else a for a in weights))


def alpha_min_for(alpha_eff, depth):
    """The alpha_min for which the decayed weights of `depth` blocks have the product alpha_eff.

    Paper 3 finds [1e-3, 1e-2) useful at every depth, so a deeper net takes a larger alpha_min."""
    def enough(alpha_min):
        return math.prod(linear_decay(2 * depth, alpha_min)) >= alpha_eff
    return bisect(enough, 0.0, 1.0, steps=60)


def alphas_or_default(alphas, shortcut, depth, alpha_min):
    """A net's alphas: those passed, or its shortcut's. Raises ValueError where they do not fit depth."""
    alphas = shortcut_weights(shortcut, depth, alpha_min) if alphas is None else alphas
    if len(alphas) != depth:
        raise ValueError(f"alphas has {len(alphas)} pairs for {depth} blocks: pass one pair per block")
    return alphas


# -------------------------------------------------------------------------------------------------------
# the block

class Attention(nn.Module):
    """softmax(temperature q k^T / sqrt(d)) v, by SDPA: it is FlashAttention where torch has that.

    temperature: tau_l of paper 2, beta ** -l at layer l. causal: token i sees tokens 0 .. i only."""

    def __init__(self, dim, num_heads, bias=True, qkv_bias=None, temperature=1.0, causal=False):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"embed_dim {dim} is not divisible by num_heads {num_heads}: change one")
        self.num_heads, self.head_dim, self.causal = num_heads, dim // num_heads, causal
        self.scale = temperature * self.head_dim ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias if qkv_bias is None else qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def heads(self, x, rope=None):
        """x (B, N, D) -> q, k, v, each (B, H, N, d). rope: (cos, sin) of these tokens, or None.

        The rows of qkv.weight are all of q, then k, then v; within each, head by head."""
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return (q, k, v) if rope is None else (apply_rope(q, *rope), apply_rope(k, *rope), v)

    def merge_heads(self, x):
        """Heads (B, H, N, d), side by side, through the output projection -> (B, N, D)."""
        return self.proj(x.transpose(1, 2).flatten(2))

    def forward(self, x, rope=None):
        q, k, v = self.heads(x, rope)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.merge_heads(mixed)

    def matrix(self, x, rope=None):
        """The attention matrix A (B, H, N, N), which SDPA never forms: for measurements."""
        q, k, _ = self.heads(x, rope)
        logits = q @ k.mT * self.scale
        if self.causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
        return logits.softmax(-1)


def rope_table(length, head_dim, base=10000.0):
    """(cos, sin), each (length, d), of the angles position * base ** (-2 i / d), i = 0 .. d/2 - 1.

    A row holds them twice, for the two halves of a head."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def apply_rope(x, cos, sin):
    """Rotary positions (Su et al. 2021) as in LLaMA: x (B, H, N, d), cos and sin of `rope_table`.

    Dimensions i and i + d/2 turn by angle i, so that q k^T of two tokens depends on their distance."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class MLP(nn.Module):
    """fc2(act(fc1(x)) - shift). shift: a constant, for nets without biases; 0 is the usual MLP."""

    def __init__(self, dim, hidden, bias=True, shift=0.0, act=activation):
        super().__init__()
        self.shift, self.act = shift, act
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x):
        x = self.act(self.fc1(x))
        return self.fc2(x - self.shift if self.shift else x)


class Block(nn.Module):
    """Pre-norm transformer block. alphas: the weights of its two shortcuts, see SHORTCUTS.

    drop_path: the share of training samples that lose a branch. It needs shortcuts."""

    def __init__(self, dim, num_heads, mlp_ratio=4.0, alphas=(1.0, 1.0), temperature=1.0, drop_path=0.0,
                 norm=nn.LayerNorm, eps=1e-6, bias=True, qkv_bias=None, causal=False, shift=0.0,
                 act=activation):
        super().__init__()
        a, g = zip(*[split_weight(weight) for weight in alphas])
        self.alphas, self.gains = hold_weights(a), hold_weights(g)
        self.drop_path = drop_path
        self.norm1 = norm(dim, eps=eps)
        self.attn = Attention(dim, num_heads, bias, qkv_bias, temperature, causal)
        self.norm2 = norm(dim, eps=eps)
        self.mlp = MLP(dim, int(dim * mlp_ratio), bias, shift, act)

    def forward(self, x, rope=None):
        x = self.join(0, x, self.attn(self.norm1(x), rope))
        return self.join(1, x, self.mlp(self.norm2(x)))

    def join(self, i, x, branch):
        """a x + g branch with the weights of sub-layer i, without computing what changes nothing."""
        a, g = self.alphas[i], self.gains[i]
        if not is_fixed_at(g, 1):
            branch = g * branch
        if is_fixed_at(a, 0):
            return branch
        if self.drop_path:
            branch = stochastic_depth(branch, self.drop_path, "row", self.training)
        return x + branch if is_fixed_at(a, 1) else a * x + branch


# -------------------------------------------------------------------------------------------------------
# vision transformer (paper 1)

class PatchEmbed(nn.Module):
    """Image (B, C, Y, X) -> patch tokens (B, N, D), row by row."""

    def __init__(self, patch_size, in_chans, dim):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).mT


def patch_grid(height, width, patch_size):
    """The patches of an image, (rows, columns). Raises ValueError where they do not tile it."""
    if height % patch_size or width % patch_size:
        raise ValueError(f"image size {height} x {width} is not divisible by patch size {patch_size}: "
                         f"choose a multiple of the patch size")
    return height // patch_size, width // patch_size


def resize_pos_embed(pos_embed, old, new, prefix=1):
    """Positions (1, prefix + rows * columns, D) from grid `old` to `new`, bicubic; prefix untouched."""
    if old == new:
        return pos_embed
    tokens, grid = pos_embed[:, :prefix], pos_embed[:, prefix:]
    grid = grid.unflatten(1, old).permute(0, 3, 1, 2).float()
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([tokens, grid.to(pos_embed.dtype).flatten(2).mT], dim=1)


class Encoder(nn.Module):
    """What ViT and MAE share: tokens (B, 1 + N, D), class token first, pass through the blocks."""
    prefix_tokens = 1

    @property
    def alpha_eff(self):
        """The product of the shortcut weights, a float."""
        return effective_alpha(block.alphas for block in self.blocks)

    def layers(self, *inputs):
        """Yields the tokens after the embedding and after each block, not normalised."""
        x = self.embed(*inputs)
        yield x
        for block in self.blocks:
            x = block(x)
            yield x

    def forward_features(self, x):
        """Images (B, C, Y, X) -> tokens after the last block and the final norm."""
        return self.norm(self.blocks(self.embed(x)))


class ViT(Encoder):
    """Vision transformer: learned positions, class token, LayerNorm eps 1e-6, qkv bias, exact GELU.

    pool: "token" (the class token after the final norm) or "mean" (of the patch tokens, then `fc_norm`).
    num_classes 0 makes the head the identity. drop_path: of the last block, growing linearly from 0.
    Positions are interpolated for images of another size.
    Raises ValueError for sizes that do not fit, and for drop path without shortcuts."""

    def __init__(self, img_size=224, patch_size=16, in_chans=3, num_classes=1000, embed_dim=768,
                 depth=12, num_heads=12, mlp_ratio=4.0, shortcut="residual", alpha_min=1.0,
                 temperature_beta=1.0, drop_path=0.0, pool="token", alphas=None):
        super().__init__()
        alphas = alphas_or_default(alphas, shortcut, depth, alpha_min)
        if drop_path and effective_alpha(alphas) == 0:
            raise ValueError("drop path needs a shortcut: without one a dropped branch wipes the sample "
                             "out; set drop path to 0")
        self.grid, self.pool = patch_grid(img_size, img_size, patch_size), pool
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + math.prod(self.grid), embed_dim))
        self.blocks = nn.Sequential(*[
            Block(embed_dim, num_heads, mlp_ratio, pair, temperature=temperature_beta ** -l,
                  drop_path=drop_path * l / max(1, depth - 1)) for l, pair in enumerate(alphas)])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6) if pool == "token" else nn.Identity()
        self.fc_norm = nn.LayerNorm(embed_dim, eps=1e-6) if pool == "mean" else nn.Identity()
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        init_vit(self)

    def embed(self, x):
        grid = patch_grid(*x.shape[-2:], self.patch_embed.patch_size)
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        return x + resize_pos_embed(self.pos_embed, self.grid, grid)

    def forward(self, x):
        """Images (B, C, Y, X) -> logits (B, num_classes)."""
        x = self.forward_features(x)
        x = x[:, 0] if self.pool == "token" else x[:, 1:].mean(1)
        return self.head(self.fc_norm(x))


class DINOHead(nn.Module):
    """DINO's projection head (Caron et al. 2021): features (B, D) -> logits (B, K).

    Three linear layers with GELU between, L2 normalisation, and a linear layer whose rows have norm g.
    norm_last_layer holds every g at 1, so that logits are cosines; else g is learned from 1."""

    def __init__(self, in_dim, out_dim=65536, hidden_dim=2048, bottleneck_dim=256, norm_last_layer=True):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, hidden_dim), nn.GELU(),
            nn.Linear(hidden_dim, bottleneck_dim))
        last = nn.Linear(bottleneck_dim, out_dim, bias=False)
        self.last_layer = nn.utils.parametrizations.weight_norm(last)
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        g = self.last_layer.parametrizations.weight.original0
        nn.init.ones_(g)
        g.requires_grad_(not norm_last_layer)

    def forward(self, x):
        x = F.normalize(self.mlp(x).float(), dim=-1)            # float32: a squared half overflows
        return self.last_layer(x)


class DINO(nn.Module):
    """Student or teacher of self-distillation: a ViT without classes and its head.

    head: keyword arguments of `DINOHead`; the others are `ViT`'s.
    center (1, K): the running mean of the teacher's logits; the student's stays 0."""

    def __init__(self, head=None, **backbone):
        super().__init__()
        self.backbone = ViT(num_classes=0, **backbone)
        self.head = DINOHead(self.backbone.pos_embed.shape[2], **(head or {}))
        self.register_buffer("center", torch.zeros(1, self.head.last_layer.out_features))

    def forward(self, crops):
        """Crops, a list of V image batches (B, C, S_v, S_v) -> (logits (V, B, K), features (V, B, D)).

        Neighbours of equal size go through the backbone together, and all through the head together."""
        groups = itertools.groupby(crops, key=lambda crop: crop.shape[-2:])
        features = torch.cat([self.backbone(torch.cat(list(group))) for _, group in groups])
        views = len(crops), -1
        return self.head(features).unflatten(0, views), features.unflatten(0, views)


def patch_tokens(net, x, layers, feature="token", norm=True):
    """Images (B, C, Y, X) -> a list of (B, N, D), the patch tokens at each of `layers`, prefix left out.

    Layer l is after block l, layer 0 the embedding; no block runs after the last that is needed.
    feature "token": the tokens, through the final LayerNorm where the net has one and `norm` is true.
    "query", "key", "value": what the attention of block l computes from its input, heads side by side.
    Raises ValueError for a layer that is not there, or an unknown feature."""
    kinds = ("query", "key", "value")
    if feature not in ("token", *kinds):
        raise ValueError(f"feature {feature!r} is unknown: use token, {', '.join(kinds)}")
    depth, first = len(net.blocks), 0 if feature == "token" else 1
    if not layers or min(layers) < first or max(layers) > depth:
        raise ValueError(f"layers {' '.join(map(str, layers))} are not all within {first} .. {depth}, "
                         f"the {feature} layers of this net")
    final = getattr(net, "norm", None)
    final = final if norm and isinstance(final, nn.LayerNorm) else nn.Identity()
    found = {}
    for l, tokens in enumerate(net.layers(x)):
        if feature == "token" and l in layers:
            found[l] = final(tokens)
        elif feature != "token" and l + 1 in layers:            # what leaves block l enters block l + 1
            block = net.blocks[l]
            found[l + 1] = block.attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)[kinds.index(feature)]
        if len(found) == len(set(layers)):
            break
    return [found[l][:, net.prefix_tokens:] for l in layers]


# -------------------------------------------------------------------------------------------------------
# language model (paper 2)

class LM(nn.Module):
    """LLaMA-style decoder: RMSNorm, rotary positions, no biases, tied embeddings, exact GELU.

    temperature_beta: attention is scaled by tau_l / sqrt(d), tau_l = beta ** -l, l from 0.
    attention_scale "model": by tau_l / sqrt(D), as paper 2's formula reads if its d is the width.
    shift: see `MLP`. The defaults have 194.48 M parameters, the paper's size.
    Raises ValueError for sizes that do not fit."""

    def __init__(self, vocab_size=32000, block_size=512, embed_dim=768, depth=24, num_heads=12,
                 mlp_ratio=4.0, shortcut="residual", temperature_beta=1.0, alpha_min=1.0,
                 attention_scale="head", shift=0.0, alphas=None):
        super().__init__()
        head_dim = embed_dim // num_heads
        if embed_dim % num_heads == 0 and head_dim % 2:
            raise ValueError(f"heads of {head_dim} dimensions cannot be rotated in pairs: "
                             f"choose num_heads so that embed_dim / num_heads is even")
        alphas = alphas_or_default(alphas, shortcut, depth, alpha_min)
        scale = {"head": 1.0, "model": num_heads ** -0.5}[attention_scale]
        self.vocab_size, self.block_size = vocab_size, block_size
        self.token_embed = nn.Embedding(vocab_size, embed_dim)
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, pair, scale * temperature_beta ** -l, norm=nn.RMSNorm,
                  bias=False, causal=True, shift=shift) for l, pair in enumerate(alphas))
        self.norm = nn.RMSNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.head.weight = self.token_embed.weight
        for name, table in zip(("cos", "sin"), rope_table(block_size, head_dim)):
            self.register_buffer(name, table, persistent=False)
        init_lm(self)

    def rope(self, start, stop):
        """(cos, sin) of positions start .. stop - 1. Raises ValueError past the end of the context."""
        if stop > self.block_size:
            raise ValueError(f"{stop} tokens do not fit the context of {self.block_size}: "
                             f"pass fewer, or build the model with a larger block_size")
        return self.cos[start:stop], self.sin[start:stop]

    def layers(self, tokens):
        """Yields the states (B, N, D) after the embedding and after each block, not normalised."""
        rope = self.rope(0, tokens.shape[1])
        x = self.token_embed(tokens)
        yield x
        for block in self.blocks:
            x = block(x, rope)
            yield x

    def forward(self, tokens):
        """Tokens (B, N) -> logits (B, N, V) for the token that follows each."""
        for x in self.layers(tokens):
            pass
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens, count, temperature=1.0, top_k=None, generator=None):
        """Tokens (B, N) -> (B, N + count), from softmax(logits / temperature) of the top_k likeliest.

        temperature 0 takes the likeliest. Past the context, each token sees the block_size before it."""
        cache, new = [None] * len(self.blocks), tokens
        for _ in range(count):
            if tokens.shape[1] <= self.block_size:
                logits = self.forward_cached(new, cache)[:, -1].float()
            else:                             # positions shift with the window, so cached keys are void
                logits = self(tokens[:, -self.block_size:])[:, -1].float()
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                if top_k and top_k < self.vocab_size:
                    logits[logits < logits.topk(top_k).values[:, -1:]] = -math.inf
                new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens

    def forward_cached(self, tokens, cache):
        """`forward` for a text (B, N), and after it for one token (B, 1) at a time.

        cache: a list with the (keys, values) of each block, None at first. It is extended in place."""
        past = cache[0][0].shape[2] if cache[0] else 0
        rope = self.rope(past, past + tokens.shape[1])
        x = self.token_embed(tokens)
        for l, block in enumerate(self.blocks):
            q, k, v = block.attn.heads(block.norm1(x), rope)
            if past:
                k, v = torch.cat([cache[l][0], k], dim=2), torch.cat([cache[l][1], v], dim=2)
            cache[l] = k, v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not past, scale=block.attn.scale)
            x = block.join(0, x, block.attn.merge_heads(mixed))
            x = block.join(1, x, block.mlp(block.norm2(x)))
        return self.head(self.norm(x))


# -------------------------------------------------------------------------------------------------------
# masked autoencoder (paper 3)

def sincos_pos_embed(dim, rows, cols):
    """Fixed 2-D positions (rows * cols, D): the column, then the row, in half of the channels each.

    Either half is [sin(p w_i), cos(p w_i)], w_i = 10000 ** (-i / (D / 4)), i = 0 .. D/4 - 1 (as in MAE).
    Raises ValueError where D is no multiple of 4."""
    if dim % 4:
        raise ValueError(f"2-D sin-cos positions need a width that 4 divides, not {dim}: change it")
    omega = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    angles = [p.flatten()[:, None] * omega for p in (col, row)]
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1).float()


def patchify(x, patch_size):
    """Images (B, C, Y, X) -> patches (B, N, p * p * C), row by row; channels last, as in MAE."""
    B, C, Y, X = x.shape
    p = patch_size
    return x.reshape(B, C, Y // p, p, X // p, p).permute(0, 2, 4, 3, 5, 1).reshape(B, -1, p * p * C)


def unpatchify(patches, patch_size, rows, cols):
    """The inverse of `patchify`: (B, rows * cols, p * p * C) -> (B, C, rows * p, cols * p)."""
    p = patch_size
    x = patches.unflatten(2, (p, p, -1)).unflatten(1, (rows, cols))     # (B, rows, cols, p, p, C)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def random_masking(noise, mask_ratio):
    """noise (B, N), uniform -> (kept (B, n) patch indices, mask (B, N): 1 if removed, restore (B, N)).

    The n = int(N (1 - mask_ratio)) smallest of each row are kept. `restore` undoes the shuffle:
    cat([kept tokens, others]).gather(1, restore) is in image order.
    Raises ValueError where nothing is kept or nothing removed."""
    N = noise.shape[1]
    n = int(N * (1 - mask_ratio))
    if not 0 < n < N:
        raise ValueError(f"mask ratio {mask_ratio} keeps {n} of {N} patches: some must be kept and some "
                         f"removed, so change it or the patch size")
    shuffle = noise.argsort(dim=1)
    restore = shuffle.argsort(dim=1)
    return shuffle[:, :n], (restore >= n).to(noise.dtype), restore


def unshuffle(tokens, mask_token, restore):
    """Kept tokens (B, n, D), filled up with the mask token (1, 1, D) -> (B, N, D) in image order."""
    filler = mask_token.expand(len(tokens), restore.shape[1] - tokens.shape[1], -1)
    index = restore[:, :, None].expand(-1, -1, tokens.shape[2])
    return torch.cat([tokens, filler], dim=1).gather(1, index)


class LongSkip(nn.Module):
    """Encoder tokens into a decoder block (paper 3): x + fc2(silu(fc1([skip, x])))."""

    def __init__(self, encoder_dim, decoder_dim):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder_dim))
        self.fc1 = nn.Linear(encoder_dim + decoder_dim, decoder_dim)
        self.fc2 = nn.Linear(decoder_dim, decoder_dim)

    def forward(self, x, skip, restore):
        """x (B, 1 + N, decoder_dim), skip (B, 1 + n, encoder_dim), class tokens first -> like x."""
        skip = torch.cat([skip[:, :1], unshuffle(skip[:, 1:], self.mask_token, restore)], dim=1)
        return x + self.fc2(F.silu(self.fc1(torch.cat([skip, x], dim=2))))


class MAE(Encoder):
    """Masked autoencoder (He et al. 2022) whose encoder's shortcuts decay (paper 3), not its decoder's.

    long_skips: every second encoder block feeds one decoder block, the last first (`LongSkip`). The
    decoder then starts from its own class token and positions, and sees the image through the skips.
    zero_init: see `init.init_mae`. norm_pix_loss: the targets are normalised patch by patch.
    encoder_norm: a final LayerNorm; None: only without long skips, as in the published nets.
    The original is MAE(alpha_min=1, long_skips=False, zero_init=False).
    Raises ValueError for sizes that do not fit."""

    def __init__(self, img_size=224, patch_size=16, in_chans=3, embed_dim=768, depth=12, num_heads=12,
                 decoder_dim=512, decoder_depth=8, decoder_heads=16, alpha_min=1.0, long_skips=True,
                 zero_init=True, mlp_ratio=4.0, shortcut="decayed", encoder_norm=None,
                 norm_pix_loss=True, alphas=None):
        super().__init__()
        if long_skips and (depth % 2 or decoder_depth < depth // 2):
            raise ValueError(f"long skips pair every second of {depth} encoder blocks with one of "
                             f"{decoder_depth} decoder blocks: make depth even, decoder_depth half")
        alphas = alphas_or_default(alphas, shortcut, depth, alpha_min)
        encoder_norm = not long_skips if encoder_norm is None else encoder_norm
        self.patch_size, self.norm_pix_loss = patch_size, norm_pix_loss
        self.grid = patch_grid(img_size, img_size, patch_size)

        def positions(dim):                                     # zeros for the class token
            return F.pad(sincos_pos_embed(dim, *self.grid), (0, 0, 1, 0))[None]

        # encoder
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.register_buffer("pos_embed", positions(embed_dim))
        self.blocks = nn.Sequential(*[Block(embed_dim, num_heads, mlp_ratio, pair) for pair in alphas])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6) if encoder_norm else nn.Identity()
        # decoder
        self.register_buffer("decoder_pos_embed", positions(decoder_dim))
        skips = depth // 2 if long_skips else 0
        self.skips = nn.ModuleList(LongSkip(embed_dim, decoder_dim) for _ in range(skips))
        self.decoder_embed = nn.Linear(decoder_dim if long_skips else embed_dim, decoder_dim)
        token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.register_parameter("decoder_cls_token" if long_skips else "mask_token", token)
        self.decoder_blocks = nn.ModuleList(
            Block(decoder_dim, decoder_heads, mlp_ratio) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, patch_size ** 2 * in_chans)
        init_mae(self, zero_init)

    def embed(self, x, kept=None):
        """Images -> tokens (B, 1 + N, D); with kept (B, n), a tensor of patch indices, only those."""
        pos = resize_pos_embed(self.pos_embed, self.grid, patch_grid(*x.shape[-2:], self.patch_size))
        x = self.patch_embed(x) + pos[:, 1:]
        if kept is not None:
            x = x.gather(1, kept[:, :, None].expand(-1, -1, x.shape[2]))
        return torch.cat([(self.cls_token + pos[:, :1]).expand(len(x), -1, -1), x], dim=1)

    def decode(self, states, restore, grid):
        """Kept tokens after the embedding and each block, a list -> predicted patches (B, N, p * p * C).

        restore (B, N): see `random_masking`. grid: (rows, columns) of the image's patches."""
        pos = resize_pos_embed(self.decoder_pos_embed, self.grid, grid)
        last = self.norm(states[-1])
        if self.skips:                                          # equal for all images
            x = torch.cat([self.decoder_cls_token[0], pos[0, 1:]])
            x = self.decoder_embed(x).expand(len(restore), -1, -1)
        else:
            x = self.decoder_embed(last)
            x = torch.cat([x[:, :1], unshuffle(x[:, 1:], self.mask_token, restore)], dim=1) + pos
        sources = [last, *states[-3::-2]]                       # after the last block, the last but two
        for i, block in enumerate(self.decoder_blocks):
            if i < len(self.skips):
                x = self.skips[i](x, sources[i], restore)
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]

    def patch_statistics(self, target):
        """(mean, std), each (B, N, 1), of patches (B, N, p * p * C); (0, 1) without norm_pix_loss."""
        if not self.norm_pix_loss:
            return torch.zeros_like(target[..., :1]), torch.ones_like(target[..., :1])
        return target.mean(-1, keepdim=True), (target.var(-1, keepdim=True) + 1e-6).sqrt()

    def forward(self, x, mask_ratio=0.75, noise=None):
        """Images (B, C, Y, X) -> (loss, prediction (B, N, p * p * C), mask (B, N): 1 where removed).

        loss: mean squared error of the pixels in removed patches. noise (B, N), uniform, decides which
        they are (`random_masking`); None draws it."""
        grid = patch_grid(*x.shape[-2:], self.patch_size)
        if noise is None:
            noise = torch.rand(len(x), math.prod(grid), device=x.device)
        kept, mask, restore = random_masking(noise, mask_ratio)
        prediction = self.decode(list(self.layers(x, kept)), restore, grid)
        target = patchify(x, self.patch_size)
        mean, std = self.patch_statistics(target)
        # float32: half precision overflows late in long runs
        error = (prediction.float() - (target - mean) / std).square().mean(-1)
        return (error * mask).sum() / mask.sum(), prediction, mask

    @torch.no_grad()
    def reconstruct(self, x, mask_ratio=0.75, noise=None):
        """Images -> (masked, reconstruction), each (B, C, Y, X): removed patches are 0, or as predicted.

        The net does not predict a patch's mean and std, so a prediction takes the true ones."""
        _, prediction, mask = self(x, mask_ratio, noise)
        target, mask = patchify(x, self.patch_size), mask[:, :, None]
        mean, std = self.patch_statistics(target)
        grid = patch_grid(*x.shape[-2:], self.patch_size)
        fillers = torch.zeros_like(target), prediction.float() * std + mean
        return [unpatchify(target * (1 - mask) + f * mask, self.patch_size, *grid) for f in fillers]


# -------------------------------------------------------------------------------------------------------
# flow matching (paper 3)

SIT_SIZES = {                                                   # parameters at 4 x 32 x 32, patch 2
    "nano": dict(embed_dim=128, depth=8, num_heads=4),          # 2.6 M
    "S": dict(embed_dim=384, depth=12, num_heads=6),            # 33 M
    "B": dict(embed_dim=768, depth=12, num_heads=12),           # 130 M
    "L": dict(embed_dim=1024, depth=24, num_heads=16),          # 458 M
    "XL": dict(embed_dim=1152, depth=28, num_heads=16),         # 675 M
}
UVIT_SIZES = {
    "nano": dict(embed_dim=128, depth=8, num_heads=4),          # 2.1 M
    "S": dict(embed_dim=512, depth=12, num_heads=8),            # 45 M
    "M": dict(embed_dim=768, depth=16, num_heads=12),           # 131 M
    "L": dict(embed_dim=1024, depth=20, num_heads=16),          # 287 M
    "H": dict(embed_dim=1152, depth=28, num_heads=16),          # 501 M
}
PATHS = ("linear", "gvp")


def path_coefficients(path, t):
    """(alpha, sigma, alpha', sigma') at times t, a tensor. Raises ValueError for an unknown path.

        x_t = alpha(t) x_1 + sigma(t) x_0       x_1 data, x_0 noise N(0, I), t from 0 (noise) to 1 (data)
        v_t = alpha'(t) x_1 + sigma'(t) x_0     the velocity, what the net predicts

        linear   alpha = t               sigma = 1 - t
        gvp      alpha = sin(pi t / 2)   sigma = cos(pi t / 2)     alpha^2 + sigma^2 = 1
    """
    if path == "linear":
        return t, 1 - t, torch.ones_like(t), -torch.ones_like(t)
    if path == "gvp":
        angle, rate = t * (math.pi / 2), math.pi / 2
        return angle.sin(), angle.cos(), rate * angle.cos(), -rate * angle.sin()
    raise ValueError(f"path {path!r} is unknown: use {' or '.join(PATHS)}")


def guided(velocity, null_label, scale):
    """Classifier-free guidance, v(null) + scale (v(y) - v(null)), in one pass of twice the batch.

    velocity: a function (x (B, ...), t (B,), y (B,)) -> (B, ...), as is the result."""
    if scale == 1:
        return velocity

    def guided_velocity(x, t, y):
        labels = torch.cat([y, torch.full_like(y, null_label)])
        conditional, unconditional = velocity(torch.cat([x, x]), torch.cat([t, t]), labels).chunk(2)
        return unconditional + scale * (conditional - unconditional)
    return guided_velocity


def timestep_features(t, dim):
    """t (B,) -> float32 (B, 2n): cos(t w_i), then sin(t w_i), w_i = 10000 ** (-i / n), i < n."""
    index = torch.arange(dim // 2, device=t.device, dtype=torch.float32)
    angle = t.float()[:, None] * torch.exp(-math.log(10000.0) / (dim // 2) * index)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def modulate(x, shift, scale):
    """x (B, N, D) scaled and shifted per sample; shift, scale (B, D), and 0 changes nothing."""
    return x * (1 + scale[:, None]) + shift[:, None]


class FlowNet(nn.Module):
    """SiT or UViT: (x_t (B, C, Y, X), t (B,) in [0, 1], y (B,) int64) -> velocity (B, C, Y, X).

    y = num_classes is the null label, which guidance needs. drop (B,) bool gives it to those samples;
    the train loop draws it, with probability `label_dropout`: nothing is random in here."""

    def __init__(self, input_size, patch_size, in_chans, num_classes, embed_dim, label_dropout):
        super().__init__()
        self.input_size, self.patch_size = input_size, patch_size
        self.num_classes, self.label_dropout = num_classes, label_dropout
        self.grid = patch_grid(input_size, input_size, patch_size)
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)

    alpha_eff = Encoder.alpha_eff

    def embed_patches(self, x):
        if x.shape[-1] != self.input_size or x.shape[-2] != self.input_size:
            raise ValueError(f"the model was built for {self.input_size} x {self.input_size} inputs, "
                             f"not {x.shape[-2]} x {x.shape[-1]}: build it with that input_size")
        return self.patch_embed(x)

    def embed_labels(self, y, drop):
        return self.label_embed(y if drop is None else torch.where(drop, self.num_classes, y))

    def through_blocks(self, x, *condition):
        """Yields x and the tokens after each block. A long skip takes in those of the mirrored block."""
        yield x
        saved = []
        for l, block in enumerate(self.blocks):
            x = block(x, *condition, skip=saved.pop() if block.skip is not None else None)
            if l < len(self.blocks) // 2:
                saved.append(x)
            yield x


class SiTBlock(Block):
    """DiT's adaLN-Zero block with weighted shortcuts: x <- a x + gate * f(norm(x), scaled and shifted).

    gate, scale and shift are linear in the condition c (B, D) and 0 at first, which leaves the shortcut.
    skip: before the block, x <- x + Linear(tokens of the mirrored block)."""

    def __init__(self, dim, num_heads, mlp_ratio, alphas, skip):
        super().__init__(dim, num_heads, mlp_ratio, alphas, act=partial(F.gelu, approximate="tanh"),
                         norm=partial(nn.LayerNorm, elementwise_affine=False))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.skip = nn.Linear(dim, dim) if skip else None

    def forward(self, x, c, skip=None):
        if self.skip is not None:
            x = x + self.skip(skip)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = self.join(0, x, gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1)))
        return self.join(1, x, gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2)))


class SiT(FlowNet):
    """Scalable interpolant transformer (Ma et al. 2024): DiT's blocks, velocity prediction, t unscaled.

    Paper 3 adds decayed shortcuts, and long_skips from the first half of the blocks to the second.
    Raises ValueError for sizes that do not fit, and where a shortcut weight is 0."""
    prefix_tokens = 0                                           # every token is a patch

    def __init__(self, input_size=32, patch_size=2, in_chans=4, num_classes=1000, embed_dim=1152,
                 depth=28, num_heads=16, alpha_min=1.0, long_skips=False, label_dropout=0.1,
                 mlp_ratio=4.0, shortcut="decayed", alphas=None):
        super().__init__(input_size, patch_size, in_chans, num_classes, embed_dim, label_dropout)
        if long_skips and depth % 2:
            raise ValueError(f"long skips pair two halves, and depth {depth} is odd: make it even")
        alphas = alphas_or_default(alphas, shortcut, depth, alpha_min)
        if effective_alpha(alphas) == 0:
            raise ValueError("SiT's gates start at zero, so with a shortcut of weight 0 nothing passes "
                             "and nothing is learned: use shortcut decayed, alpha_min above 0")
        pos = sincos_pos_embed(embed_dim, *self.grid)[None]
        self.register_buffer("pos_embed", pos, persistent=False)
        self.time_embed = nn.Sequential(
            nn.Linear(256, embed_dim), nn.SiLU(), nn.Linear(embed_dim, embed_dim))
        self.label_embed = nn.Embedding(num_classes + 1, embed_dim)
        self.blocks = nn.ModuleList(
            SiTBlock(embed_dim, num_heads, mlp_ratio, pair, long_skips and l >= depth // 2)
            for l, pair in enumerate(alphas))
        self.norm = nn.LayerNorm(embed_dim, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(embed_dim, 2 * embed_dim))
        self.head = nn.Linear(embed_dim, patch_size ** 2 * in_chans)
        init_sit(self)

    def condition(self, t, y, drop=None):
        """(B, D): the sum of the time's and the label's embedding."""
        time = timestep_features(t, 256).to(self.head.weight.dtype)
        return self.time_embed(time) + self.embed_labels(y, drop)

    def layers(self, x, t, y):
        """Yields the tokens (B, N, D) after the embedding and after each block, not normalised."""
        return self.through_blocks(self.embed_patches(x) + self.pos_embed, self.condition(t, y))

    def forward(self, x, t, y, drop=None):
        c = self.condition(t, y, drop)
        for x in self.through_blocks(self.embed_patches(x) + self.pos_embed, c):
            pass
        x = self.head(modulate(self.norm(x), *self.modulation(c).chunk(2, dim=1)))
        return unpatchify(x, self.patch_size, *self.grid)


class UViTBlock(Block):
    """A plain block; skip: before it, x <- Linear([x, tokens of the mirrored block])."""

    def __init__(self, dim, num_heads, mlp_ratio, alphas, qkv_bias, skip):
        super().__init__(dim, num_heads, mlp_ratio, alphas, eps=1e-5, qkv_bias=qkv_bias)
        self.skip = nn.Linear(2 * dim, dim) if skip else None

    def forward(self, x, skip=None):
        return super().forward(x if self.skip is None else self.skip(torch.cat([x, skip], dim=2)))


class UViT(FlowNet):
    """U-ViT (Bao et al. 2023): label and time (1000 t) are tokens, positions are learned.

    depth/2 in-blocks, one in the middle, depth/2 out-blocks that take in the mirrored ones' tokens
    (long_skips); a last 3 x 3 convolution smooths the seams. Shortcuts decay over all depth + 1 blocks.
    zero_init: see `init.init_uvit`; U-ViT itself has none, and a small alpha_min needs it.
    Raises ValueError for sizes that do not fit, and for zero_init where a shortcut weight is 0."""
    prefix_tokens = 2                                           # label, time

    def __init__(self, input_size=32, patch_size=2, in_chans=4, num_classes=1000, embed_dim=512,
                 depth=12, num_heads=8, alpha_min=1.0, long_skips=True, zero_init=True,
                 label_dropout=0.1, mlp_ratio=4.0, qkv_bias=False, shortcut="decayed", alphas=None):
        super().__init__(input_size, patch_size, in_chans, num_classes, embed_dim, label_dropout)
        if depth % 2:
            raise ValueError(f"U-ViT has depth/2 blocks on either side of one, and {depth} is odd: "
                             f"make it even")
        alphas = alphas_or_default(alphas, shortcut, depth + 1, alpha_min)
        if zero_init and effective_alpha(alphas) == 0:
            raise ValueError("with zero_init and a shortcut of weight 0 nothing passes and nothing is "
                             "learned: leave zero_init out, or use alpha_min above 0")
        tokens = self.prefix_tokens + math.prod(self.grid)
        self.label_embed = nn.Embedding(num_classes + 1, embed_dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, embed_dim))
        self.blocks = nn.ModuleList(
            UViTBlock(embed_dim, num_heads, mlp_ratio, pair, qkv_bias, long_skips and l > depth // 2)
            for l, pair in enumerate(alphas))
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, patch_size ** 2 * in_chans)
        self.smooth = nn.Conv2d(in_chans, in_chans, 3, padding=1)
        init_uvit(self, zero_init)

    def layers(self, x, t, y, drop=None):
        """Yields the tokens (B, 2 + N, D) after the embedding and after each block, not normalised."""
        time = timestep_features(1000 * t, self.pos_embed.shape[2]).to(x.dtype)
        tokens = [self.embed_labels(y, drop)[:, None], time[:, None], self.embed_patches(x)]
        return self.through_blocks(torch.cat(tokens, dim=1) + self.pos_embed)

    def forward(self, x, t, y, drop=None):
        for x in self.layers(x, t, y, drop):
            pass
        x = self.head(self.norm(x))[:, self.prefix_tokens:]
        return self.smooth(unpatchify(x, self.patch_size, *self.grid))
