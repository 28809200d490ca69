"""Weights that stay orthogonal while they train (ours): after every update each block matrix is put back
on the manifold that it started on.

    W = g X,  X with orthonormal rows or columns, whichever are fewer: the Stiefel manifold, scaled by g

Papers 1 and 2 make matrices orthogonal at the start and hope that the optimizer keeps them near. Here

    start         g = the mean singular value of W,  W <- g polar(W)                exact, by an SVD
    after a step  X = W / g,  twice  X <- 1.5 X - .5 X X^T X,  W <- g X             Newton-Schulz

A singular value 1 + e becomes 1 - 1.5 e^2 in one iteration, so two are enough for the steps of training.
Values above sqrt(3) would diverge: where X X^T is far from I, X is scaled down first (`retract`).

Weight decay pulls on g alone, which is restored: it has no effect on these matrices.

Prior art: manifold Muon, steepest descent under the spectral norm on the Stiefel manifold (J. Bernstein,
Modular Manifolds and the Modula docs, 2025; J. Su, kexue.fm 11221, 2025; F. L. Cesista, 2025); nGPT
(weights on spheres); orthogonal RNNs; geotorch.
"""
import torch
from torch import Tensor

KINDS = {"off": (), "vo-mlp": ("v", "o", "u", "d"), "all": ("q", "k", "v", "o", "u", "d")}


def polar_factor(w: Tensor) -> Tensor:
    """U V^T of w (..., m, n) = U S V^T: the nearest matrix with orthonormal rows or columns."""
    u, _, vh = torch.linalg.svd(w.double(), full_matrices=False)
    return (u @ vh).to(w)


def retract(x: Tensor, steps: int = 2) -> Tensor:
    """x (B, m, n), nearly orthonormal -> its polar factor, but for an error that squares in each step.

    All steps are done on the Gram matrix of the short side: P_i = 1.5 I - .5 G_i, G_(i+1) = P_i G_i P_i,
    and x is multiplied once by the product of the P_i. Before, x is divided by
    sqrt(max(1, (1 + |G - I|_F) / 2)), so that no singular value leaves the basin of sqrt(3); the
    divisor is 1 where |G - I|_F < 1. Flops: 4 r^2 c + 6 (steps - 1) r^3, r short, c long."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    identity = torch.eye(y.shape[-2], dtype=y.dtype, device=y.device)
    gram = y @ y.mT
    excess = torch.linalg.matrix_norm(gram - identity)[..., None, None]
    gram = gram / (scale := ((1 + excess) / 2).clamp(min=1))
    product = 1.5 * identity - 0.5 * gram
    for _ in range(steps - 1):
        last = 1.5 * identity - 0.5 * gram
        gram = last @ gram @ last
        product = (1.5 * identity - 0.5 * gram) @ product
    y = product @ y * scale.rsqrt()
    return y.mT if tall else y


def constrain(blocks, args):
    """The constraint that --orthogonal and orthogonal_gain ask for, or None."""
    if args.orthogonal == "off":
        return None
    return Orthogonal(blocks, args.orthogonal, args.orthogonal_gain)


class Orthogonal:
    """The constraint on the matrices of some blocks. Making it puts them on the manifold.

    blocks: modules with attn.qkv, attn.proj, mlp.fc1 and mlp.fc2; q, k and v are taken apart.
    which: a key of KINDS. gain: "kept", g stays what it was at the start; "following", g is the mean
    singular value after each update, so that a matrix may grow or shrink as a whole."""

    @torch.no_grad()
    def __init__(self, blocks, which: str = "all", gain: str = "kept"):
        self.gain, self.places = gain, []                   # (parameter, its rows) of each matrix
        for block in blocks:
            qkv, width = block.attn.qkv.weight, block.attn.proj.weight.shape[0]
            rows = {name: (qkv, slice(i * width, (i + 1) * width)) for i, name in enumerate("qkv")}
            rows |= {name: (layer.weight, slice(None)) for name, layer in
                     (("o", block.attn.proj), ("u", block.mlp.fc1), ("d", block.mlp.fc2))}
            self.places += [rows[name] for name in KINDS[which]]
        values = [torch.linalg.svdvals(p[rows].double()) for p, rows in self.places]
        self.gains = torch.stack([s.mean() for s in values])
        for (p, rows), g in zip(self.places, self.gains):
            p[rows] = g * polar_factor(p[rows])

    @torch.no_grad()
    def restore(self, params) -> None:
        """Put the matrices of these parameters, which have just been updated, back on the manifold."""
        params, stacks = set(params), {}
        for i, (p, rows) in enumerate(self.places):
            if p in params:
                stacks.setdefault((p[rows].shape, p.device), []).append(i)
        for indices in stacks.values():
            w = torch.stack([self.places[i][0][self.places[i][1]].float() for i in indices])
            g = self.gains[indices].to(w)[:, None, None]
            if self.gain == "following":                    # W = g X: the norm is g sqrt(rank)
                g = torch.linalg.matrix_norm(w)[:, None, None] / min(w.shape[1:]) ** 0.5
            x = retract(w / g)
            if self.gain == "following":
                g = (x * w).sum((1, 2), keepdim=True) / min(w.shape[1:])
            for i, made in zip(indices, g * x):
                p, rows = self.places[i]
                p[rows] = made
