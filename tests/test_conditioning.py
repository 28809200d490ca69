"""evals/conditioning.py: numbers by hand, the propositions of paper 1, the report."""
import json
import math

import pytest
import torch

from evals import conditioning
from init import init_skipless_vit
from model import Attention, ViT
from runtime import BadInput


def test_condition_number_by_hand():
    assert conditioning.condition_number(torch.tensor([8.0, 4.0, 2.0]).diag()).item() == pytest.approx(4)
    assert conditioning.condition_number(torch.zeros(3, 3) + 1) >= 1e15


def test_jacobians_against_finite_differences_and_the_kronecker_formula():
    torch.manual_seed(0)
    attn = Attention(6, 1).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    K, B = conditioning.attention_jacobians(attn, x)
    h, numeric = 1e-6, torch.empty(24, 24, dtype=torch.float64)
    for j in range(24):
        e = torch.zeros(24, dtype=torch.float64)
        e[j] = h
        e = e.view(4, 6)
        numeric[:, j] = (attn((x + e)[None]) - attn((x - e)[None])).detach().flatten() / (2 * h)
    torch.testing.assert_close(K, numeric, rtol=0, atol=1e-7)
    # y_ia = sum_jb A_ij x_jb (W^V W^O)_ba, so B_(ia)(jb) = A_ij (W^V W^O)_ba
    VO = attn.qkv.weight[12:].T @ attn.proj.weight.T
    kronecker = torch.kron(attn.matrix(x[None])[0, 0], VO.T.contiguous())
    torch.testing.assert_close(B, kronecker, rtol=0, atol=1e-10)


def test_measure_shows_the_papers_propositions():
    """Diffuse rows: A uniform, kappa explodes. Dominant rows, orthogonal V O: kappa(K) near kappa(B)."""
    tables = {}
    for name, parts in (("default", ()), ("both", ("qk", "vo"))):
        torch.manual_seed(0)
        net = ViT(3, 1, 3, 0, 32, 2, 1, shortcut="skipless")
        if parts:
            init_skipless_vit(net, 1.0, 2.0, 3.0, parts=parts)
        x = torch.randn(1, 10, 32, dtype=torch.float64)
        tables[name] = conditioning.measure_blocks(net.double(), x)
    default, both = tables["default"][0], tables["both"][0]
    assert default["range"] < 0.2 and default["gap"] < 0
    assert default["diagonal"] == pytest.approx(0.1, abs=0.01)
    assert both["gap"] > 3 and both["diagonal"] > 0.95
    assert both["cond_VO"] < 1.001 < default["cond_VO"]
    assert both["kappa_K"] < 1e-4 * default["kappa_K"]
    assert both["kappa_B"] < both["kappa_K"] < 30 * both["kappa_B"]
    assert default["kappa_K_plus_I"] < 1.5                          # what a residual connection does
    assert tables["default"][1]["cosine"] > 0.99 > 0.3 > tables["both"][1]["cosine"]


def test_the_effective_rank_is_a_number_of_directions():
    """Tokens of r orthogonal directions, of equal length, have rank r: exp of the entropy in nats."""
    torch.manual_seed(0)
    net = ViT(2, 1, 3, 0, 8, 1, 1).double()
    for weight in (net.blocks[0].attn.proj.weight, net.blocks[0].mlp.fc2.weight):
        weight.data.zero_()                                         # the block is the identity
    x = torch.eye(8, dtype=torch.float64)[[0, 1, 2, 0, 1, 2]][None]
    assert conditioning.measure_blocks(net, x)[0]["rank"] == pytest.approx(3)


def test_report(tmp_path, capsys):
    """A table per initialisation, init.json with the flags and medians, and a picture."""
    flags = ["--dim", "32", "--heads", "1", "--grid", "2", "--depth", "2", "--seeds", "3"]
    conditioning.main([*flags, "--out", str(tmp_path / "new")])
    found = json.loads((tmp_path / "new/init.json").read_text(encoding="utf-8"))
    assert list(found["rows"]) == list(conditioning.VARIANTS) and found["args"]["seeds"] == 3
    assert [len(rows) for rows in found["rows"].values()] == [2] * 6
    assert all(math.isfinite(v) for rows in found["rows"].values() for row in rows for v in row.values())
    assert (tmp_path / "new/init.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert all(f"\n{name}" in printed for name in conditioning.VARIANTS) and "cancel_mean" in printed
    singles = []
    for seed in range(3):
        torch.manual_seed(seed)
        net = ViT(2, 1, 3, 0, 32, 2, 1, shortcut="skipless").double()
        x = torch.randn(2, 5, 32, dtype=torch.float64)
        singles.append(conditioning.measure_blocks(net, x)[1]["gap"])
    assert found["rows"]["default"][1]["gap"] == sorted(singles)[1]


@pytest.mark.parametrize("flags, words", [
    (["--heads", "3"], ["--dim 64", "--heads 3"]), (["--out", "{file}/x"], ["--out"])])
def test_wrong_input(tmp_path, flags, words):
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        conditioning.main([flag.format(file=file) for flag in flags])
    assert all(word in str(caught.value) for word in words)
