"""evals/quantization_theory.py: each formula against its closed form or its own measurement."""
import math

import pytest
import torch
import torch.nn.functional as F

from evals import quantization_theory as theory
from quantize import fake_quantize, sqnr_db


def test_activations():
    """ReLU in closed form: m1 = 1/sqrt(2 pi), E r^2 = 1/2, E r^3 = 2/sqrt(2 pi), E r^4 = 3/2.

    GELU: the paper's.
    Linear: 0; x^2: chi-squared, 12."""
    m = 1 / math.sqrt(2 * math.pi)
    relu = (1.5 - 4 * m * 2 * m + 6 * m ** 2 / 2 - 3 * m ** 4) / (0.5 - m ** 2) ** 2 - 3
    assert relu == pytest.approx(2.4076, abs=1e-4)
    for f, expected, error in ((F.relu, relu, 1e-9), (F.gelu, 3.0847, 1e-4), (torch.square, 12, 1e-6),
                               (lambda z: z, 0, 1e-9)):
        assert theory.activation_kurtosis(f) == pytest.approx(expected, abs=error)


def test_mixing_and_residuals():
    """Measured against formula within the sampling error. The width contracts dense mixing, and only
    that."""
    dims = [16, 64, 256]
    rows = [theory.mixing_kurtosis(d, 2 ** 20) for d in dims]
    for d, (measured, formula, error) in zip(dims, rows):
        # E sum a^4 = 3 / (d + 2) of a uniform direction
        assert formula == pytest.approx(9 / (d + 2), rel=0.15)
        assert abs(measured - formula) < 4 * error
    assert theory.power_law_exponent(dims, [r[0] for r in rows]) == pytest.approx(-1, abs=0.15)
    assert theory.residual_kurtosis(3, 1, 3, 1) == 1.5
    assert theory.residual_kurtosis(40000, 10, 0, 0.1) > 39000
    for var_f in (0.01, 1):
        measured, formula = theory.measured_residual_kurtosis(var_f, 2 ** 20)
        assert measured == pytest.approx(formula, abs=0.1)


def test_softmax():
    """Smooth rows: the log-normal's 5.90 whatever the width. One-hot rows: d - 5 + 1 / (d - 1),
    Bernoulli's."""
    log_normal = math.e + 2 * math.exp(0.75) + 3 * math.exp(0.5) - 6
    assert theory.softmax_kurtosis(4096, 0.5) == pytest.approx(log_normal, rel=0.02)
    dims = [64, 256, 1024]
    smooth = [theory.softmax_kurtosis(d, 0.5) for d in dims]
    assert theory.power_law_exponent(dims, smooth) == pytest.approx(0, abs=0.1)
    for d in dims:
        assert theory.softmax_kurtosis(d, 1e6) == pytest.approx(d * d / (d - 1) - 6, rel=0.01)


def test_one_step():
    """Sign step: eta sqrt(d). Spectral step: at most 2 eta + eta^2, flat in d. No step, no distance."""
    dims = [16, 32, 64, 128]
    sign, spectral = zip(*(theory.drift_of_one_step(d) for d in dims))
    assert theory.power_law_exponent(dims, sign) == pytest.approx(0.5, abs=0.1)
    assert theory.power_law_exponent(dims, spectral) == pytest.approx(0, abs=0.02)
    assert max(spectral) <= 2e-4 + 1e-8 + 1e-12
    assert max(theory.drift_of_one_step(32, eta=0.0)) < 1e-13


@pytest.mark.parametrize("bits", [8, 10, 12])
def test_sqnr_of_a_uniform_density(bits):
    """Its error is uniform within a step, and its crest is sqrt(3): 20 log10(2^b - 1), to 1 %."""
    x = torch.linspace(-1, 1, 2 ** 18, dtype=torch.float64)
    expected = 20 * math.log10(2 ** bits - 1)
    assert theory.uniform_sqnr(bits, math.sqrt(3)) == pytest.approx(expected)
    for symmetric in (True, False):
        assert sqnr_db(x, fake_quantize(x, bits, symmetric=symmetric)) == pytest.approx(
            expected, rel=0.01)
    assert theory.gaussian_sqnr(bits)[0] == pytest.approx(theory.gaussian_sqnr(bits)[1], rel=0.01)


def test_the_report_has_a_table_for_each_formula(monkeypatch, capsys):
    """Every function is called by it; the costly ones are replaced."""
    for name, value in dict(mixing_kurtosis=(0.5, 0.5, 0.1), measured_residual_kurtosis=(1.0, 1.0),
                            softmax_kurtosis=5.9, drift_of_one_step=(1e-4, 1e-4)).items():
        monkeypatch.setattr(theory, name, lambda *args, value=value: value)
    theory.main([])
    out = capsys.readouterr().out
    assert (out.count("## ") == 6 and "| GELU | 3.0847 | 3.0847 |" in out
            and "| ReLU | 2.4076 | 2.4076 |" in out)
    assert out.count("theory") == 5
