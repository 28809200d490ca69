"""How well conditioned initialisations of a ViT without residuals are, block by block (paper 1).

    python -m evals.conditioning --seeds 3        tables, results/init.json, results/init.png; 3 minutes

Six of them: the usual one, parts of paper 1's, all of it, and the constants that --init auto chooses.
Columns, one line per block:

    diagonal     mean A_ii of the attention matrix; 1/n where attention is uniform
    range        of a row of logits, max - min: Delta of proposition 1
    gap          self-logit - largest other of a row: gamma of proposition 1
    cond(A)      condition number of A, median over images and heads
    cond(VO)     of the full product W^V W^O
    kappa(K)     of the Jacobian K of the attention sub-block; kappa(B): of its part with A held fixed
    kappa(K+I)   with a shortcut around it
    cosine       mean cosine between different tokens of an image, after the block
    eff. rank    exp of the entropy of the tokens' normalised singular values, after the block
"""
import json
import math
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from init import choose_constants, init_skipless_vit, token_cosine
from model import ViT
from probe import effective_rank
from runtime import BadInput, Parser, number, pyplot, run_script, write_text

# name -> the parts of `init_skipless_vit`; auto has constants of its own
VARIANTS = {
    "default": (), "VO only": ("vo",), "QK only": ("qk",), "both": ("qk", "vo"),
    "both + MLP": ("qk", "vo", "mlp"), "auto": ("qk", "vo", "mlp"),
}


def condition_number(matrix):
    """sigma_max / sigma_min of (..., n, m) in float64, which resolves no more than 1/eps = 4.5e15."""
    s = torch.linalg.svdvals(matrix.double())
    return s[..., 0] / torch.maximum(s[..., -1], s[..., 0] * torch.finfo(torch.float64).eps)


def attention_jacobians(attn, x):
    """(K, B), each (n d, n d), of the attention sub-block at its normalised input x (n, d), by autograd.

    K = d SA(x) / d x, softmax included. B is the derivative with A held fixed: the Kronecker term
    (W^V W^O)^T (x) A of paper 1's K = (X W^V W^O (x) I)^T A' + (W^V W^O)^T (x) A, summed over heads.
    Proposition 2: with both initialisations kappa(K) ~ kappa(B).
    """
    A = attn.matrix(x[None]).detach()

    def attend(z):
        return attn(z[None])[0]

    def attend_with_fixed_weights(z):
        _, _, v = attn.heads(z[None])
        return attn.merge_heads(A @ v)[0]

    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):     # the only one that jacrev can batch
        jacobians = [torch.func.jacrev(f)(x) for f in (attend, attend_with_fixed_weights)]
    return [J.reshape(x.numel(), x.numel()) for J in jacobians]


@torch.no_grad()
def measure_blocks(model, x):
    """One dict per block of a ViT in float64, for tokens x (B, n, d) that enter its first block.

    The keys are the columns that the top of this file explains; the Jacobians are the first image's."""
    rows = []
    for block in model.blocks:
        attn, z = block.attn, block.norm1(x)
        q, k, _ = attn.heads(z)
        logits = q @ k.mT * attn.scale
        A, own = logits.softmax(-1), logits.diagonal(dim1=-2, dim2=-1)
        others = logits.masked_fill(torch.eye(x.shape[1], dtype=torch.bool), -math.inf).amax(-1)
        w_v = attn.qkv.weight.chunk(3)[2]
        K, B = attention_jacobians(attn, z[0])
        x = block(x)
        rank = torch.tensor([effective_rank(tokens) for tokens in x], dtype=torch.float64).exp()
        row = dict(
            diagonal=A.diagonal(dim1=-2, dim2=-1).mean(),
            range=(logits.amax(-1) - logits.amin(-1)).mean(),
            gap=(own - others).mean(),
            cond_A=condition_number(A).median(),
            cond_VO=condition_number(w_v.T @ attn.proj.weight.T),
            kappa_K=condition_number(K),
            kappa_B=condition_number(B),
            kappa_K_plus_I=condition_number(K + torch.eye(len(K)).to(K)),
            cosine=token_cosine(x),
            rank=rank.mean())
        rows.append({key: float(value) for key, value in row.items()})
    return rows


def measure_variant(args, parts, constants):
    """As `measure_blocks`, each number the median over args.seeds draws of weights and tokens."""
    runs, tokens = [], 1 + args.grid ** 2
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = ViT(img_size=args.grid, patch_size=1, num_classes=0, embed_dim=args.dim,
                    depth=args.depth, num_heads=args.heads, shortcut="skipless")
        if parts:
            init_skipless_vit(model, **constants, parts=parts)
        x = torch.randn(2, tokens, args.dim, dtype=torch.float64)
        runs.append(measure_blocks(model.double(), x))
    return [{key: sorted(run[l][key] for run in runs)[args.seeds // 2] for key in runs[0][l]}
            for l in range(args.depth)]


def print_variant(name, rows):
    """The table of one initialisation."""
    print(f"\n{name}")
    print("block  diagonal  range    gap   cond(A)  cond(VO)  kappa(K)  kappa(B)  kappa(K+I)  "
          "cosine  eff. rank")
    for l, r in enumerate(rows, 1):
        print(f"{l:5d}  {r['diagonal']:8.3f} {r['range']:6.2f} {r['gap']:6.2f}  {r['cond_A']:8.1e}  "
              f"{r['cond_VO']:8.1e}  {r['kappa_K']:8.1e}  {r['kappa_B']:8.1e}  "
              f"{r['kappa_K_plus_I']:10.1e}  {r['cosine']:6.3f}  {r['rank']:9.1f}")


def draw_variants(results, path, title):
    """Four panels over depth: attention diagonal, kappa(K), token cosine, effective rank."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), constrained_layout=True)
    labels = dict(diagonal="mean attention diagonal", kappa_K=r"$\kappa(K)$ of the attention sub-block",
                  cosine="mean token cosine", rank="effective rank of the tokens")
    for axis, (key, label) in zip(axes, labels.items()):
        for name, rows in results.items():
            width = 5 if name == "default" else 1.5             # VO only lies on it
            axis.plot(range(1, len(rows) + 1), [r[key] for r in rows], "o-", ms=3, label=name, lw=width)
        axis.set(xlabel="block", title=label, yscale="log" if key == "kappa_K" else "linear")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def get_args(argv=None):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--dim", type=number(int, low=2), default=64, help="width; a Jacobian is (tokens x width)^2")
    add("--heads", type=number(int, low=1), default=2, help="attention heads")
    add("--grid", type=number(int, low=2), default=4, help="side of the patch grid: grid^2 + 1 tokens")
    add("--depth", type=number(int, low=1), default=12, help="blocks")
    add("--alpha", type=number(float, low=0), default=1.8, help="random part of W_Q W_K^T")
    add("--beta", type=number(float, low=0), default=1.0, help="identity part of W_Q W_K^T")
    add("--c", type=number(float, above=0), default=3.0, help="W_V W_O is c^2 x an orthogonal matrix")
    add("--seeds", type=number(int, low=1), default=1, help="draws; the tables show the median")
    add("--out", default="results", help="folder for init.png and init.json")
    args = parser.parse_args(argv)
    if args.dim % args.heads:
        raise BadInput(f"--dim {args.dim} is not divisible by --heads {args.heads}: change one of them")
    return args


def main(argv=None):
    args = get_args(argv)
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {args.out} cannot be written ({error.strerror}): use another") from error
    title = (f"{args.dim} channels, {args.heads} heads, {args.grid ** 2 + 1} tokens, no residuals; "
             f"alpha {args.alpha:g}, beta {args.beta:g}, c {args.c:g}; Gaussian tokens, "
             f"median of {args.seeds}")
    print(title)
    results = {}
    for name, parts in VARIANTS.items():
        heading, constants = name, dict(alpha=args.alpha, beta=args.beta, c=args.c)
        if name == "auto":
            try:
                constants = choose_constants(args.dim, args.heads, 1 + args.grid ** 2, args.depth)
            except ValueError as error:
                print(f"\nauto: {error}")
                continue
            heading += f" ({', '.join(f'{key} {value:.3g}' for key, value in constants.items())})"
        results[name] = measure_variant(args, parts, constants)
        print_variant(heading, results[name])
    flags = {key: value for key, value in vars(args).items() if key != "out"}
    write_text(folder / "init.json", json.dumps(dict(args=flags, rows=results), indent=1) + "\n")
    draw_variants(results, folder / "init.png", title)
    print(f"\n{folder / 'init.png'} and {folder / 'init.json'} written")


if __name__ == "__main__":
    run_script(main)
