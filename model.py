"""One transformer block, three kinds of shortcut.

    x = a * x + attn(norm1(x))          residual: a = 1
    x = a * x + mlp(norm2(x))           skipless: a = 0, the addition is not computed at all
                                        decayed:  a falls from 1 to alpha_min over the 2L sub-layers

Names follow timm, so a residual ViT loads into timm's and back. Shapes: B images, N tokens, D channels, H heads, d = D / H.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.ops import stochastic_depth

from init import init_vit

SIZES = {                                                        # parameters at 224 px, patch 16, 1000 classes
    "nano": dict(embed_dim=96, depth=12, num_heads=3),           # 1.5 M
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),          # 5.7 M
    "small": dict(embed_dim=384, depth=12, num_heads=6),         # 22 M
    "base": dict(embed_dim=768, depth=12, num_heads=12),         # 87 M
    "large": dict(embed_dim=1024, depth=24, num_heads=16),       # 304 M
}


class Attention(nn.Module):
    """Multi-head self-attention, softmax(temperature * q k^T / sqrt(d)) v, through SDPA so that FlashAttention is used where torch has it.

    temperature: tau_l of paper 2, beta ** -l at layer l; 1 is the usual attention.
    """

    def __init__(self, dim, num_heads, bias=True, temperature=1.0):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"embed_dim {dim} is not divisible by num_heads {num_heads}: change one of them")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = temperature * self.head_dim ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def heads(self, x):
        """x (B, N, D) -> q, k, v, each (B, H, N, d). Rows of qkv.weight: all of q, then k, then v; within each, head by head."""
        B, N, _ = x.shape
        return self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x):
        q, k, v = self.heads(x)
        x = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj(x.transpose(1, 2).flatten(2))

    def matrix(self, x):
        """The attention matrix A (B, H, N, N) itself, which SDPA never forms: for measurements only."""
        q, k, _ = self.heads(x)
        return (q @ k.mT * self.scale).softmax(-1)


class MLP(nn.Module):
    """fc2(gelu(fc1(x))), exact (erf) GELU, hidden width mlp_ratio * dim."""

    def __init__(self, dim, hidden, bias=True):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


def shortcut_weights(shortcut, depth, alpha_min=1.0):
    """The weight a of the shortcut in each of the 2 * depth sub-layers (attention, MLP, attention, ...).

    decayed: a = 1 - linspace(0, 1, 2 depth) (1 - alpha_min), as in paper 3's code: exactly 1 at the first attention, alpha_min at the last MLP.
    """
    if shortcut not in ("residual", "skipless", "decayed"):
        raise ValueError(f"shortcut {shortcut!r} is unknown: use residual, skipless or decayed")
    if not 0 <= alpha_min <= 1:
        raise ValueError(f"alpha_min {alpha_min} must lie between 0 and 1")
    if shortcut != "decayed" and alpha_min != 1:
        raise ValueError(f"alpha_min {alpha_min} has no effect on a {shortcut} shortcut: use shortcut decayed")
    if shortcut == "decayed":
        return [1 - i / (2 * depth - 1) * (1 - alpha_min) for i in range(2 * depth)]
    return [{"residual": 1.0, "skipless": 0.0}[shortcut]] * (2 * depth)


def check_drop_path(rate, alphas):
    """Raises ValueError for a rate outside [0, 1), or where a branch that may be dropped is the whole signal."""
    if not 0 <= rate < 1:
        raise ValueError(f"drop path {rate} must be at least 0 and below 1")
    if rate and 0 in alphas:
        raise ValueError("drop path needs a shortcut: without one a dropped branch wipes the whole sample out; set drop path to 0")


class Block(nn.Module):
    """Pre-norm transformer block. alphas = (a of the attention, a of the MLP); see the top of this file.

    drop_path is refused where a = 0: dropping a branch that is the whole signal wipes the sample out.
    """

    def __init__(self, dim, num_heads, mlp_ratio=4.0, alphas=(1.0, 1.0), temperature=1.0, drop_path=0.0, norm=nn.LayerNorm, eps=1e-6, bias=True):
        super().__init__()
        check_drop_path(drop_path, alphas)
        self.alphas, self.drop_path = alphas, drop_path
        self.norm1 = norm(dim, eps=eps)
        self.attn = Attention(dim, num_heads, bias, temperature)
        self.norm2 = norm(dim, eps=eps)
        self.mlp = MLP(dim, int(dim * mlp_ratio), bias)

    def join(self, alpha, x, branch):
        """alpha * x + branch, without computing what does not matter."""
        if alpha == 0:
            return branch
        if self.drop_path:
            branch = stochastic_depth(branch, self.drop_path, "row", self.training)
        return x + branch if alpha == 1 else alpha * x + branch

    def forward(self, x):
        x = self.join(self.alphas[0], x, self.attn(self.norm1(x)))
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

    def forward_features(self, x):
        """Images -> tokens (B, 1 + N, D) after the last block and the final norm."""
        return self.norm(self.blocks(self.embed(x)))

    def forward(self, x):
        """Images (B, C, Y, X) -> logits (B, num_classes)."""
        x = self.forward_features(x)
        x = x[:, 0] if self.pool == "token" else x[:, 1:].mean(1)
        return self.head(self.fc_norm(x))
