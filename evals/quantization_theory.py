"""Paper 2's formulas on kurtosis, quantisation and orthogonality, each beside its measurement.

    python -m evals.quantization_theory        about 10 seconds on one core; needs no checkpoint
"""
import math
import statistics

import numpy as np
import torch
import torch.nn.functional as F

import runtime
from quantize import Moments, excess_kurtosis, fake_quantize, markdown_table, sqnr_db


def power_law_exponent(xs, ys):
    """Slope of the least-squares line through (log x, log y)."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def activation_kurtosis(f, limit=12.0, nodes=200):
    """Excess kurtosis of f(z), z standard normal, by Gauss-Legendre quadrature on each side of 0.

    Two sides, since ReLU has a kink at 0."""
    t, w = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(nodes))
    z = torch.cat([t - 1, t + 1]) * limit / 2
    p = torch.cat([w, w]) * limit / 2 * torch.exp(-z ** 2 / 2) / math.sqrt(2 * math.pi)
    d = f(z) - (p * f(z)).sum()
    return float((p * d ** 4).sum() / (p * d ** 2).sum() ** 2 - 3)


def laplace(*shape, generator):
    """Independent Laplace variables of unit variance: excess kurtosis 3."""
    a, b = (torch.empty(shape).exponential_(generator=generator) for _ in range(2))
    return (a - b) / math.sqrt(2)


def mixing_kurtosis(d, samples=2 ** 22, seed=0):
    """Excess kurtosis of y = sum_i a_i x_i, |a| = 1, x_i d independent Laplace variables of kurtosis 3.

    Returns (measured, formula, standard error). The formula is 3 sum_i a_i^4, about 9 / d for random a.
    Up to 256 directions a share each draw of x."""
    g, k = torch.Generator().manual_seed(seed), min(d, 256)
    a = F.normalize(torch.randn(d, k, generator=g), dim=0)
    parts = [excess_kurtosis(laplace(samples // (16 * k), d, generator=g) @ a) for _ in range(16)]
    formula = 3 * float(a.double().pow(4).sum(0).mean())
    return statistics.fmean(parts), formula, statistics.stdev(parts) / 4


def residual_kurtosis(gamma_x, var_x, gamma_f, var_f):
    """Excess kurtosis of x + f, independent: (gamma_x s_x^4 + gamma_f s_f^4) / (s_x^2 + s_f^2)^2.

    Fourth cumulants add. The width does not occur, so nothing shrinks with it."""
    return (gamma_x * var_x ** 2 + gamma_f * var_f ** 2) / (var_x + var_f) ** 2


def measured_residual_kurtosis(var_f, samples=2 ** 22, seed=0):
    """(measured, formula) of x + f, x Laplace of variance 1 and f Gaussian of variance var_f."""
    g = torch.Generator().manual_seed(seed)
    x = laplace(samples, generator=g)
    return (excess_kurtosis(x + var_f ** 0.5 * torch.randn(samples, generator=g)),
            residual_kurtosis(3, 1, 0, var_f))


def softmax_kurtosis(d, std, entries=2 ** 20, seed=0):
    """Excess kurtosis of the entries of softmax rows over d positions; logits are normal of this std s.

    Smooth rows tend to a log-normal law: e^(4 s^2) + 2 e^(3 s^2) + 3 e^(2 s^2) - 6, 5.90 at s = .5,
    whatever d. One-hot rows (large s) hold a share p = 1 / d of ones: 1 / (p (1 - p)) - 6, about d."""
    g = torch.Generator().manual_seed(seed)
    logits = std * torch.randn(max(1, entries // d), d, generator=g, dtype=torch.float64)
    return excess_kurtosis(logits.softmax(-1))


def drift_of_one_step(d, eta=1e-4, seed=0):
    """|W W^T - I|_2 after one step of size eta from an orthogonal W (d, d), for a Gaussian gradient G.

    Returns (sign step, spectral step). Sign: W - eta sign(G), whose |sign(G)|_2 is about 2 sqrt(d).
    Spectral: W - eta U V^T with G = U S V^T, of norm 1."""
    g = torch.Generator().manual_seed(seed)
    W, G = (torch.randn(d, d, generator=g, dtype=torch.float64) for _ in range(2))
    W, (U, _, Vh) = torch.linalg.qr(W)[0], torch.linalg.svd(G)
    eye = torch.eye(d, dtype=torch.float64)
    moved = W - eta * G.sign(), W - eta * U @ Vh
    return tuple(float(torch.linalg.matrix_norm(V @ V.T - eye, 2)) for V in moved)


def uniform_sqnr(bits, crest):
    """SQNR in dB of an error uniform within a step: 10 log10(3) + 20 log10((2^b - 1) / crest)."""
    return 10 * math.log10(3) + 20 * math.log10((2 ** bits - 1) / crest)


def gaussian_sqnr(bits, samples=2 ** 20, seed=0):
    """(measured, formula) of Gaussian values, in dB."""
    x, moments = torch.randn(samples, generator=torch.Generator().manual_seed(seed)), Moments()
    moments.update(x)
    return sqnr_db(x, fake_quantize(x, bits)), uniform_sqnr(bits, moments.summary()["crest"])


def print_table(title, columns, points, rows, digits=2):
    """A table with a line per point. Returns its columns of numbers."""
    lines = [[point, *(f"{value:.{digits}f}" for value in row)] for point, row in zip(points, rows)]
    print(f"## {title}\n\n{markdown_table(columns, lines)}")
    return list(zip(*rows))


def main(argv=None):
    runtime.Parser(description=__doc__).parse_args(argv)
    rows = [(activation_kurtosis(F.gelu), 3.0847), (activation_kurtosis(F.relu), 2.4076)]
    print_table("An activation of a Gaussian", ["", "measured", "paper"], ["GELU", "ReLU"], rows, 4)

    dims = [16, 64, 256, 1024, 4096]
    columns, rows = ["d", "measured", "formula", "standard error"], [mixing_kurtosis(d) for d in dims]
    title = "Dense mixing of d Laplace inputs contracts kurtosis by sum a^4"
    measured, *_ = print_table(title, columns, dims, rows, 4)
    print(f"slope over d = 16 .. 256: {power_law_exponent(dims[:3], measured[:3]):.2f} (theory -1)\n")

    variances = [0.01, 0.1, 1]
    rows = [measured_residual_kurtosis(v) for v in variances]
    title = "A residual sum x + f does not: x Laplace (3), f Gaussian (0)"
    print_table(title, ["var f / var x", "measured", "formula"], variances, rows, 3)

    rows = [(softmax_kurtosis(d, .5), softmax_kurtosis(d, 1000)) for d in dims]
    columns = ["d", "smooth: logits of std .5", "saturated: std 1000"]
    smooth, hot = [power_law_exponent(dims, v) for v in print_table("Softmax rows", columns, dims, rows)]
    print(f"slopes over d: {smooth:.2f} (theory 0) and {hot:.2f} (theory 1)\n")

    widths, eta = [16, 32, 64, 128, 256, 512], 1e-4
    rows = [[distance / eta for distance in drift_of_one_step(d, eta)] for d in widths]
    title = f"|W W^T - I|_2 / eta after one step of size eta = {eta} from an orthogonal W"
    found = print_table(title, ["d", "sign step", "spectral step"], widths, rows)
    sign, spectral = [power_law_exponent(widths, v) for v in found]
    print(f"slopes over d: {sign:.2f} (theory 1/2) and {spectral:.2f} (theory 0)\n")

    bits = [4, 6, 8, 12]
    title = "SQNR of a million Gaussian values on one symmetric grid, dB"
    print_table(title, ["bits", "measured", "formula"], bits, [gaussian_sqnr(b) for b in bits])


if __name__ == "__main__":
    runtime.run_script(main)
