"""quantize.py: statistics and quantiser against closed forms, float64 and a reference in python
integers; hooks, copies and the command line."""
import gc
import json
import math
import textwrap
import warnings

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import quantize
import runtime
import text
from model import LM
from runtime import BadInput

SHAPE = dict(vocab_size=257, block_size=16, embed_dim=16, depth=3, num_heads=2)


def tiny(seed=0, **more):
    torch.manual_seed(seed)
    net = LM(**{**SHAPE, **more})
    for p in net.blocks.parameters():
        # std .02 would leave the blocks nearly silent
        p.data.mul_(3)
    return net.eval()


def tokens(batch=4, seed=1):
    return torch.randint(257, (batch, 16), generator=torch.Generator().manual_seed(seed))


def quantiles(name, n=2 ** 20):
    """n equally likely values of a distribution of unit variance: a sample without sampling error."""
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return {"gaussian": torch.special.ndtri(u), "uniform": (2 * u - 1) * 3 ** 0.5,
            "laplace": -torch.sign(u - 0.5) * torch.log1p(-2 * (u - 0.5).abs()) / 2 ** 0.5}[name]


def direct(x):
    """(variance, excess kurtosis), two passes in float64."""
    d = x.double() - x.double().mean()
    return d.square().mean().item(), (d.pow(4).mean() / d.square().mean() ** 2 - 3).item()


def moments_of(parts, **more):
    moments = quantize.Moments(**more)
    for part in parts:
        moments.update(part)
    return moments


# -------------------------------------------------------------------------------------------------------
# statistics

@pytest.mark.parametrize("name, expected", [("gaussian", 0.0), ("laplace", 3.0), ("uniform", -1.2)])
def test_kurtosis_of_known_distributions(name, expected):
    """Closed forms to 1 %, and unchanged by an affine map, whose scale and offset it must not see."""
    x = quantiles(name)
    assert quantize.excess_kurtosis(x) == pytest.approx(expected, rel=0.01, abs=0.01)
    assert quantize.excess_kurtosis(5 - 3 * x) == pytest.approx(quantize.excess_kurtosis(x), abs=1e-9)


@pytest.mark.parametrize(
    "sizes", [[100_000], [1, 99_999], [50_000, 50_000], [7, 10_000, 3, 0, 89_990], [100] * 1000])
def test_streaming_equals_one_shot(sizes):
    """A skewed, heavy-tailed tensor, cut in any way: to 1e-10, as if it had come at once. Skewed, so
    that the third moment's term counts."""
    x = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    got, (variance, kurtosis) = moments_of(x.split(sizes)).summary(), direct(x)
    assert got["count"] == 100_000
    assert got["mean"] == pytest.approx(x.mean().item(), rel=1e-12)
    assert got["variance"] == pytest.approx(variance, rel=1e-10)
    assert got["excess_kurtosis"] == pytest.approx(kurtosis, rel=1e-10)
    assert got["max_abs"] == x.max().item()
    assert got["crest"] == pytest.approx((x.max() / x.square().mean().sqrt()).item(), rel=1e-12)


def test_batches_of_different_laws_are_pooled():
    """Means and variances that differ between batches: the merge's cross terms carry the result, and
    order does not matter."""
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, generator=g, dtype=torch.float64) * s + m
             for n, s, m in ((1000, 1, 0), (3000, 0.1, 5), (500, 10, -20))]
    expected = direct(torch.cat(parts))[1]
    for order in (parts, parts[::-1]):
        assert moments_of(order).excess_kurtosis == pytest.approx(expected, rel=1e-10)


def test_large_offset_is_stable():
    """Mean 1e6, deviation 1: sums of plain powers lose every digit of the fourth moment, which the test
    shows of itself; this keeps nine."""
    x = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e6
    expected = direct(x - 1e6)[1]
    m = [x.pow(k).mean().item() for k in range(5)]
    naive = (m[4] - 4 * m[1] * m[3] + 6 * m[1] ** 2 * m[2] - 3 * m[1] ** 4) / (m[2] - m[1] ** 2) ** 2 - 3
    assert abs(naive - expected) > 1
    assert moments_of(x.split(1234)).excess_kurtosis == pytest.approx(expected, abs=1e-8)


def test_the_undefined_is_nan_without_a_warning():
    """Equal values have no kurtosis, also .1, whose mean is not exact; nothing seen has no statistics
    at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (torch.full((1000, 7), 0.1), torch.zeros(5), torch.zeros(0), torch.ones(1)):
            assert math.isnan(quantize.excess_kurtosis(x))
        assert moments_of([torch.full((1000,), 0.1)]).summary()["variance"] == pytest.approx(
            0, abs=1e-30)
        empty = quantize.Moments(bits=(4,)).summary()
        assert empty["count"] == 0
        assert all(
            math.isnan(empty[key]) for key in ("mean", "variance", "excess_kurtosis", "max_abs", "crest")
        )


def test_half_precision_input_is_measured_in_float64():
    """The sum of a million bf16 squares would stop growing at 256 in bf16."""
    x = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert quantize.excess_kurtosis(x) == pytest.approx(direct(x)[1], rel=1e-10)
    noise = (x.double() - (x * 1.5).double()).square().sum()
    assert quantize.sqnr_db(x, x * 1.5) == pytest.approx(
        10 * math.log10(x.double().square().sum() / noise), rel=1e-10)


def test_kurtosis_bounds_the_crest():
    """kurtosis + 3 <= (max / sigma)^2 for mean 0, with equality for one spike among zeros: sigma^2 =
    s^2 / n, so the crest is sqrt(n)."""
    spike = torch.zeros(10_000)
    spike[0], spike[1] = 5, -5
    m = moments_of([spike]).summary()
    assert m["crest"] == pytest.approx(math.sqrt(5000)) and m["excess_kurtosis"] + 3 == pytest.approx(
        5000)
    x = moments_of([quantiles("laplace")]).summary()
    assert x["excess_kurtosis"] + 3 <= x["crest"] ** 2


def test_sqnr_by_hand():
    """|x|^2 = 25 and |error|^2 = .25 are 20 dB."""
    assert quantize.sqnr_db(torch.tensor([3.0, 4.0]), torch.tensor([3.5, 4.0])) == pytest.approx(20)
    assert quantize.sqnr_db(torch.ones(3), torch.ones(3)) == math.inf
    assert quantize.sqnr_db(torch.zeros(3), torch.ones(3)) == -math.inf


@pytest.mark.parametrize("name", ["uniform", "gaussian", "laplace"])
@pytest.mark.parametrize("bits", [8, 10, 12])
def test_sqnr_of_the_uniform_quantiser(name, bits):
    """4.77 + 20 log10(2^b - 1) - 20 log10(max / sigma), to 1 %, where steps are small beside the
    density's width. The symmetric grid has one step less."""
    x = quantiles(name)
    expected = (
        4.7712 + 20 * math.log10(2**bits - 1) - 20 * math.log10(x.abs().max() / x.square().mean().sqrt())
    )
    for symmetric in (True, False):
        assert quantize.sqnr_db(
            x, quantize.fake_quantize(x, bits, symmetric=symmetric)) == pytest.approx(expected, rel=0.01)


def test_streaming_sqnr_sums_powers_over_batches():
    """Each batch has its own scale; signal and noise power add up before the logarithm. A quiet batch
    then hardly counts, as it should."""
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, 32, generator=g) * s for s in (1, 10, 0.1)]
    for granularity in ("tensor", "token"):
        m = moments_of(batches, bits=(4, 8), granularity=granularity)
        for b in (4, 8):
            signal = sum(x.double().square().sum() for x in batches)
            noise = sum((x.double() - quantize.fake_quantize(x, b, granularity).double()).square().sum()
                        for x in batches)
            assert m.summary()["sqnr_db"][b] == pytest.approx(10 * math.log10(signal / noise), rel=1e-10)


def test_memory_does_not_grow_with_the_number_of_batches():
    """Numbers alive in tensors, counted by the garbage collector, after 2 batches and after 12."""
    def alive():
        gc.collect()
        return sum(o.numel() for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    net, x = tiny(), tokens()
    with quantize.watch(net, quantize.block_places(net), bits=(4, 8)) as stats, torch.no_grad():
        counts = []
        for batches in (2, 10):
            for _ in range(batches):
                net(x)
            counts.append(alive())
    assert counts[0] == counts[1]
    assert stats["block_output", 0].summary()["count"] == 12 * 4 * 16 * 16


# -------------------------------------------------------------------------------------------------------
# watch

def test_each_site_is_what_its_name_says():
    """The block's arithmetic written out: every site's variance and kurtosis, in every block, from
    tensors computed here. Two batches, pooled."""
    net = tiny(shortcut="residual")
    seen = {site: [[] for _ in net.blocks] for site in quantize.SITES}
    with quantize.watch(net, quantize.block_places(net)) as stats, torch.no_grad():
        for x in (tokens(4, 1), tokens(3, 2)):
            net(x)
    with torch.no_grad():
        for x in (tokens(4, 1), tokens(3, 2)):
            h = net.token_embed(x)
            for l, block in enumerate(net.blocks):
                z = block.norm1(h)
                context = []
                handle = block.attn.proj.register_forward_pre_hook(
                    lambda module, inputs: context.append(inputs[0]))
                attn = block.attn(z, net.rope(0, 16))
                handle.remove()
                assert torch.equal(attn, block.attn.proj(context[0]))
                u = block.norm2(h + attn)
                hidden = F.gelu(block.mlp.fc1(u))
                out = h + attn + block.mlp.fc2(hidden)
                for site, value in dict(block_input=h, attn_input=z, attn_context=context[0],
                                        attn_out=attn, mlp_input=u, mlp_hidden=hidden,
                                        mlp_out=block.mlp.fc2(hidden), block_output=out).items():
                    seen[site][l].append(value.flatten())
                h = out
    for site, layers in seen.items():
        for l, parts in enumerate(layers):
            variance, kurtosis = direct(torch.cat(parts))
            got = stats[site, l].summary()
            assert got["variance"] == pytest.approx(variance, rel=1e-5), (site, l)
            assert got["excess_kurtosis"] == pytest.approx(kurtosis, rel=1e-4, abs=1e-5), (site, l)


def test_hooks_go_at_the_end_and_after_an_exception():
    """No hook survives, also where the body raises; the statistics then stop."""
    net = tiny()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    places = {"hidden": ("blocks.1.mlp.fc2", "input"), "block": ("blocks.2", "output"),
              "logits": ("", "output")}
    with quantize.watch(net, places) as stats:
        assert hooks() == 3
        net(tokens())
    assert hooks() == 0
    net(tokens())
    assert {k: m.summary()["count"] for k, m in stats.items()} == dict(
        hidden=64 * 64, block=64 * 16, logits=64 * 257)
    with pytest.raises(RuntimeError, match="stop"):
        with quantize.watch(net):
            raise RuntimeError("stop")
    assert hooks() == 0
    with pytest.raises(AttributeError, match="nowhere"):
        with quantize.watch(net, {**places, "wrong": ("nowhere", "input")}):
            pass
    assert hooks() == 0


def test_watching_does_not_change_the_output():
    net = tiny()
    plain = net(tokens())
    with quantize.watch(net, bits=(4,)):
        assert torch.equal(net(tokens()), plain)


# -------------------------------------------------------------------------------------------------------
# the quantiser

def by_integers(row, bits, symmetric):
    """One scale's values in python floats and integers, which are IEEE doubles and exact."""
    if symmetric:
        levels, offset = 2 ** (bits - 1) - 1, 0.0
        scale, low = max(map(abs, row)) / levels, -levels
    else:
        levels, offset = 2 ** bits - 1, min(row)
        scale, low = (max(row) - min(row)) / levels, 0
    return [min(max(round((v - offset) / scale), low), levels) * scale + offset for v in row]


@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("symmetric", [True, False])
def test_against_python_integers(bits, symmetric):
    """Bit for bit in float64, per tensor and per row, with halves in the data (round to even) and a row
    of one outlier."""
    x = torch.randn(3, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(bits))
    x[0, 0] = torch.tensor(
        [2 ** (bits - 1) - 1, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0, 1], dtype=torch.float64)
    x[1, 1, 3] = 1000
    whole = quantize.fake_quantize(x, bits, "tensor", symmetric)
    assert whole.flatten().tolist() == by_integers(x.flatten().tolist(), bits, symmetric)
    for granularity in ("token", "channel"):
        rows = quantize.fake_quantize(x, bits, granularity, symmetric)
        assert rows.flatten(0, -2).tolist() == [
            by_integers(row, bits, symmetric) for row in x.flatten(0, -2).tolist()]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 12, 16])
def test_idempotent_bounded_and_on_the_grid(bits, granularity, symmetric):
    """Twice is once; no value moves by more than half a step; no more than 2^b - 1 (symmetric) or 2^b
    values remain; the extremes stay."""
    x = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)) + 0.3
    once = quantize.fake_quantize(x, bits, granularity, symmetric)
    twice = quantize.fake_quantize(once, bits, granularity, symmetric)
    q, scale, low = quantize.integers(x, bits, granularity, symmetric)
    assert torch.equal(quantize.integers(once, bits, granularity, symmetric)[0], q)
    assert torch.allclose(twice, once, rtol=1e-6, atol=1e-6)
    assert ((once - x).abs() <= scale * 0.5001 + 1e-6).all()
    assert len(q.unique()) <= 2 ** bits - symmetric
    assert torch.equal(q, q.round()) and q.abs().max() == (
        2 ** (bits - 1) - 1 if symmetric else 2**bits - 1)
    assert once.abs().max() == pytest.approx(x.abs().max().item(), rel=1e-6)
    if not symmetric:
        axis = {} if granularity == "tensor" else dict(dim=-1)
        for got, expected in zip(once.aminmax(**axis), x.aminmax(**axis)):
            assert torch.allclose(got, expected, rtol=1e-6, atol=0)


def test_zeros_constants_and_tiny_values():
    """A scale of 0 is never divided by: zeros stay zeros, an asymmetric constant is exact, an empty
    tensor passes."""
    for granularity in ("tensor", "token"):
        for symmetric in (True, False):
            x = torch.zeros(3, 5)
            x[2] = torch.tensor([0, 1, 2, 3, 4]) if granularity == "token" else 0
            y = quantize.fake_quantize(x, 8, granularity, symmetric)
            assert torch.equal(y[:2], x[:2]) and y.isfinite().all()
    assert torch.equal(
        quantize.fake_quantize(torch.full((4,), -3.7), 4, symmetric=False), torch.full((4,), -3.7))
    assert torch.equal(quantize.fake_quantize(torch.full((4,), -3.7), 4), torch.full((4,), -3.7))
    assert quantize.fake_quantize(torch.full((4,), 1e-42), 8).isfinite().all()
    assert quantize.fake_quantize(torch.zeros(0, 3), 8).shape == (0, 3)


def test_rows_do_not_see_each_other_per_token_and_do_per_tensor():
    """Scaling one token by 1000 leaves the others' result alone per token, and ruins it per tensor."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    loud = x.clone()
    loud[0] *= 1000
    assert torch.equal(
        quantize.fake_quantize(loud, 8, "token")[1:], quantize.fake_quantize(x, 8, "token")[1:])
    assert (quantize.sqnr_db(x[1:], quantize.fake_quantize(loud, 8)[1:]) < 5 < 35
            < quantize.sqnr_db(x[1:], quantize.fake_quantize(x, 8)[1:]))


def test_bf16_scales_are_float32():
    """The result is the float32 one, rounded once to bf16. A scale rounded to bf16 would be off by up
    to .4 %, half a step at code 127."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    y = quantize.fake_quantize(x, 8)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, quantize.fake_quantize(x.float(), 8).bfloat16())
    q, scale, _ = quantize.integers(x, 8)
    assert scale.dtype == torch.float32 and scale.item() == pytest.approx(
        x.float().abs().max().item() / 127, rel=1e-7)
    assert scale.item() != scale.bfloat16().float().item()       # or this test could not tell


@pytest.mark.parametrize("bits", [1, 17, 0, -8, 8.0, None])
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match="from 2 to 16"):
        quantize.fake_quantize(torch.ones(3), bits)


def test_unknown_granularity():
    with pytest.raises(ValueError, match="'row' is unknown"):
        quantize.fake_quantize(torch.ones(3), 8, "row")


# -------------------------------------------------------------------------------------------------------
# quantised models

class Own(nn.Module):
    """A user's net: Linears in odd places, one of them used twice, beside layers of other kinds."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(8, 8)
        self.features = nn.ModuleDict(
            {"a": nn.Sequential(nn.Conv1d(3, 8, 1), nn.Flatten(), nn.Linear(32, 8)),
             "b": nn.Sequential(shared, nn.ReLU(), shared)}
        )
        self.norm, self.classify = nn.BatchNorm1d(8), nn.Linear(8, 5, bias=False)

    def forward(self, x):
        return self.classify(self.norm(self.features["b"](self.features["a"](x))))


def test_any_net_can_be_watched_and_quantised():
    """By default every Linear, by its name: the inputs' statistics, and in the copy the rounding
    written out here."""
    torch.manual_seed(0)
    net, x = Own().eval(), torch.randn(16, 3, 4)
    with quantize.watch(net) as stats, torch.no_grad():
        net(x)
    hidden = net.features["a"](x)
    assert list(stats) == ["features.a.2", "features.b.0", "classify"]
    once = F.relu(net.features["b"][0](hidden))
    assert stats["features.b.0"].summary()["count"] == 2 * 16 * 8  # it is called twice
    assert stats["features.b.0"].excess_kurtosis == pytest.approx(
        direct(torch.cat([hidden, once]))[1], rel=1e-6)

    def linear(x, layer):
        weight = quantize.fake_quantize(layer.weight, 4, "channel")
        return F.linear(quantize.fake_quantize(x, 6, "token"), weight, layer.bias)
    a, b = net.features["a"], net.features["b"]
    expected = linear(F.relu(linear(linear(a[1](a[0](x)), a[2]), b[0])), b[2])
    expected = linear(net.norm(expected), net.classify)
    copy = quantize.quantized(net, 4, 6, "token", "channel")
    assert torch.equal(copy(x), expected) and not torch.equal(net(x), expected)
    assert copy.features["b"][0] is copy.features["b"][2]
    assert not any(isinstance(m, nn.Linear) for m in copy.modules())
    assert isinstance(quantize.quantized(net, skip=("classify",)).classify, nn.Linear)
    alone = quantize.quantized(net.classify)
    assert isinstance(alone, quantize.QuantLinear) and not isinstance(net.classify, quantize.QuantLinear)
    with pytest.raises(ValueError, match="MultiheadAttention calls no Linear"):
        quantize.quantized(nn.TransformerEncoderLayer(8, 2))


def test_the_example_of_the_docstring(capsys):
    example = textwrap.dedent(
        quantize.__doc__[quantize.__doc__.index("    with quantize.watch") :].split("\n\n")[0])
    assert example.count("\n") == 2
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
    exec(example, dict(quantize=quantize, net=net, x=torch.randn(64, 8)))
    kurtosis, sqnr = capsys.readouterr().out.splitlines()
    assert kurtosis.startswith("{'0': ") and "'2': " in kurtosis and 20 < float(sqnr) < 60


@pytest.mark.parametrize("act", ["tensor", "token"])
@pytest.mark.parametrize("weight", ["tensor", "channel"])
def test_fake_quantisation_is_integer_arithmetic(act, weight):
    """The product of the int64 codes, exact, times the two scales: what an int8 kernel computes."""
    torch.manual_seed(0)
    linear, x = nn.Linear(96, 40), torch.randn(5, 7, 96)
    fake = quantize.QuantLinear(linear, 8, 8, act, weight)(x)
    (a, scale_a, _), (w, scale_w, _) = (quantize.integers(x, 8, act),
                                        quantize.integers(linear.weight, 8, weight))
    assert a.abs().max() == w.abs().max() == 127
    real = (a.long() @ w.long().T) * (scale_a * scale_w.flatten()) + linear.bias
    assert (real - fake).abs().max() < 3e-6 * fake.abs().max()
    assert quantize.sqnr_db(linear(x), fake) < 45                # something was rounded


def test_every_linear_of_the_blocks_and_nothing_else():
    net = tiny()
    q = quantize.quantized(net)
    assert {name for name, m in q.named_modules() if isinstance(m, quantize.QuantLinear)} == {
        f"blocks.{l}.{path}" for l in range(3)
        for path in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert not any(isinstance(m, nn.Linear) for m in q.blocks.modules())
    assert q.head.weight is q.token_embed.weight and torch.equal(q.head.weight, net.head.weight)


def test_sixteen_bits_are_close_and_fewer_are_further():
    """Error of the logits beside the full net: about 6 dB per bit of the activations while the weights
    keep 16."""
    net, x = tiny(), tokens(16)
    with torch.no_grad():
        error = [
            quantize.sqnr_db(net(x), quantize.quantized(net, 16, bits)(x)) for bits in (4, 8, 12, 16)]
    assert error == sorted(error) and error[-1] > 70
    assert error[2] - error[1] == pytest.approx(24, abs=3)


def test_the_quantiser_is_the_only_difference(monkeypatch):
    """With rounding replaced by nothing the copy's logits are bitwise the original's; also where bits
    are None."""
    net, x = tiny(), tokens()
    with torch.no_grad():
        assert torch.equal(quantize.quantized(net, None, None, skip=(), embedding=True)(x), net(x))
        assert not torch.equal(quantize.quantized(net, None, 8)(x), net(x))
        assert not torch.equal(quantize.quantized(net, 8, None)(x), net(x))
        monkeypatch.setattr(quantize, "fake_quantize", lambda x, *rest: x)
        assert torch.equal(quantize.quantized(net, skip=(), embedding=True)(x), net(x))


def test_the_original_and_its_tied_head_are_left_alone():
    """head and embedding share a matrix: whichever is quantised in the copy, the other and the original
    keep theirs, and the tie holds."""
    net = tiny()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    rounded = quantize.fake_quantize(net.head.weight.detach(), 4)
    for head in (False, True):
        for embedding in (False, True):
            q = quantize.quantized(net, 4, 8, skip=() if head else ("head",), embedding=embedding)
            assert isinstance(q.head, quantize.QuantLinear) == head
            assert torch.equal(q.head.weight, rounded if head else net.head.weight)
            assert torch.equal(q.token_embed.weight, rounded if embedding else net.head.weight)
            q(tokens())
    assert net.head.weight is net.token_embed.weight and net.head.weight.requires_grad
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_scale_per_tensor_depends_on_the_batch_and_per_token_does_not():
    """What the docstring warns of: a text's logits beside other texts."""
    net = tiny()
    with torch.no_grad():
        for granularity, same in (("tensor", False), ("token", True)):
            q = quantize.quantized(net, 8, 4, granularity)
            assert torch.allclose(q(tokens())[:1], q(tokens()[:1]), atol=1e-4) == same


def test_loss_is_per_token_over_unequal_batches():
    """Against log-softmax in float64 over all tokens at once: a mean of batch means would weigh the
    short batch too much."""
    net, x = tiny(), tokens(7)
    got = quantize.loss_per_token(net, [(x[:5, :-1], x[:5, 1:]), (x[5:, :4], x[5:, 1:5])])
    with torch.no_grad():
        logp = [net(x[:5, :-1]).double().log_softmax(-1).gather(-1, x[:5, 1:, None]),
                net(x[5:, :4]).double().log_softmax(-1).gather(-1, x[5:, 1:5, None])]
    expected = -torch.cat([p.flatten() for p in logp]).mean().item()
    assert got == pytest.approx(expected, rel=1e-6)


# -------------------------------------------------------------------------------------------------------
# rounding with compensated errors

def correlated(samples, width, seed=0):
    """Inputs (samples, width) whose columns are mixtures of each other, on unequal scales."""
    g = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -1.5, width, dtype=torch.float64)
    return (torch.randn(samples, width, generator=g, dtype=torch.float64) * scales
            @ torch.randn(width, width, generator=g, dtype=torch.float64))


def decoded(q, scale, low):
    return q.double() * scale.double() + low.double()


def slow_gptq(W, H, scale, low, least, greatest, damping):
    """Before each column is rounded, all those free are solved for anew, from the original W, given all
    those fixed: least squares in H's norm."""
    n = len(H)
    H = H + damping * np.trace(H) / n * np.eye(n)
    q, fixed = np.zeros_like(W), np.zeros_like(W)
    for i in range(n):
        done, free = slice(0, i), slice(i, n)
        rest = W[:, free] - np.linalg.solve(H[free, free], H[free, done] @ (fixed - W)[:, done].T).T
        q[:, i:i + 1] = np.clip(np.rint((rest[:, :1] - low) / scale), least, greatest)
        fixed[:, i:i + 1] = q[:, i:i + 1] * scale + low
    return q


@pytest.mark.parametrize("granularity, symmetric",
                         [("tensor", True), ("channel", True), ("tensor", False), ("channel", False)])
def test_compensation_equals_solving_for_the_rest(granularity, symmetric):
    """The codes of a slow reference without any Cholesky factor, whichever block size; its grid is
    `integers`' own, fixed beforehand. W stays."""
    W, X = (torch.randn(7, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
            correlated(100, 24))
    before = W.clone()
    nearest, scale, low = quantize.integers(W, 4, granularity, symmetric)
    least, greatest = (-7, 7) if symmetric else (0, 15)
    for damping in (0.01, 0.3):
        expected = slow_gptq(
            W.numpy(), (2 * X.T @ X).numpy(), scale.numpy(), low.numpy(), least, greatest, damping)
        for block in (1, 5, 24, 128):
            q, *rest = quantize.gptq_integers(
                W, quantize.second_moments(X), 4, granularity, symmetric, damping, block)
            assert torch.equal(rest[0], scale) and torch.equal(rest[1], low)
            assert np.array_equal(q.numpy(), expected)
        assert not torch.equal(q, nearest)
    assert torch.equal(W, before)


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_compensation_brings_the_outputs_closer(granularity):
    """|X (W - W_hat)^T| at 4 bits well below that of rounding to nearest, though W_hat itself is
    further from W; more than 128 columns."""
    W, X = torch.randn(40, 200, generator=torch.Generator().manual_seed(1)), correlated(600, 200)
    near, far = (
        decoded(*f) - W.double()
        for f in (quantize.integers(W, 4, granularity),
                  quantize.gptq_integers(W, 2 * X.T @ X, 4, granularity))
    )
    assert (X @ far.T).norm() < 0.7 * (X @ near.T).norm() and far.norm() > near.norm()


@pytest.mark.parametrize("H", [torch.eye(150), torch.diag(torch.arange(150.0)), torch.zeros(150, 150)])
def test_without_correlations_it_is_rounding_to_nearest(H):
    """Bitwise, the float32 division of `integers` included; also where some inputs, or all, were 0."""
    for dtype in (torch.float32, torch.float64):
        W = torch.randn(30, 150, generator=torch.Generator().manual_seed(1), dtype=dtype)
        W[0, :7] = torch.arange(7.0) + 0.5
        for granularity, symmetric in (("tensor", True), ("channel", False)):
            got, expected = (quantize.gptq_integers(W, H, 4, granularity, symmetric),
                             quantize.integers(W, 4, granularity, symmetric))
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected))


@pytest.mark.parametrize("shortcut", ["residual", "skipless"])
def test_each_linear_sees_the_inputs_of_the_rounded_ones_before_it(shortcut):
    """Every Linear's codes are reached from the inputs that the finished, rounded copy hands it, and
    not from those of the full net."""
    net, x = tiny(shortcut=shortcut), tokens(12)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    codes = quantize.gptq(net, [x[:8], x[8:, :9]], 4, embedding=True)  # unequal windows
    rounded, full = (quantize.quantized(net, 4, None, embedding=True, codes=codes),
                     quantize.quantized(net, None, None))
    assert (
        list(codes)
        == [name for name, m in rounded.blocks.named_modules(prefix="blocks")
            if isinstance(m, quantize.QuantLinear)]
        and len(codes) == 12
    )

    def inputs(net, name):
        seen = []
        with (
            torch.no_grad(),
            net.get_submodule(name).register_forward_pre_hook(
                lambda module, args: seen.append(args[0].flatten(0, 1).double())),
        ):
            net(x[:8]), net(x[8:, :9])
        return torch.cat(seen)
    same = []
    for name, (q, scale, low) in codes.items():
        weight, X, X_full = (net.get_submodule(name).weight.detach(), inputs(rounded, name),
                             inputs(full, name))
        assert torch.equal(q, quantize.gptq_integers(weight, 2 * X.T @ X, 4)[0])
        assert torch.equal(rounded.get_submodule(name).weight, q * scale)
        same.append(torch.equal(q, quantize.gptq_integers(weight, 2 * X_full.T @ X_full, 4)[0]))
    assert sum(same) < 6
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_activations_that_are_not_finite_cannot_calibrate():
    with pytest.raises(ValueError, match="not finite"):
        quantize.gptq_integers(torch.ones(2, 2), torch.tensor([[1, math.nan], [math.nan, 1]]), 4)


# -------------------------------------------------------------------------------------------------------
# command line

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(
        "".join(f"The number {i} has the square {i * i}, and the cube {i**3}.\n" for i in range(2000)),
        encoding="utf-8")
    return path


def checkpoint(folder, corpus, net, ema=None, **more):
    """A run's checkpoint as train_lm.py writes it, as far as it is read here; `more` replaces flags."""
    folder.mkdir()
    args = dict(kind="lm", model=SHAPE, tokenizer="bytes",
                tokenizer_digest=text.load_tokenizer("bytes").digest, data=str(corpus), opt="soap",
                init="default", seed=0)
    runtime.save_checkpoint(folder / "ckpt.pt", dict(
        model=net.state_dict(), ema=ema and ema.state_dict(), optimizer={}, step=7, best=1.0,
        rng=torch.get_rng_state(), args={**args, **more}))
    return str(folder / "ckpt.pt")


FAST = ("--eval-tokens", "512", "--batch-size", "8", "--device", "cpu")


def test_command_line_of_two_checkpoints(tmp_path, corpus, capsys):
    """Both side by side in both tables, a file and a folder. The losses are those of the same windows,
    and the JSON holds each layer and site."""
    nets = [tiny(0), tiny(1, shortcut="skipless", temperature_beta=1.1)]
    shape = dict(SHAPE, shortcut="skipless", temperature_beta=1.1)
    paths = [checkpoint(tmp_path / "a", corpus, nets[0]),
             str(tmp_path / "b")]
    checkpoint(tmp_path / "b", corpus, nets[1], ema=nets[1], model=shape)
    quantize.main(["--ckpt", *paths, "--bits", "12", "8", "--act-granularity", "token", *FAST])
    out, report = capsys.readouterr().out, (tmp_path / "a" / "quantize.md").read_text(encoding="utf-8")
    assert report in out and "act granularity token" in out and "weight rounding nearest" in out
    for name in ("quantize.md", "quantize.json", "quantize.png"):
        assert name in out and (tmp_path / "a" / name).stat().st_size > 0
    lines = [
        line.split(" | ")[:2] for line in report.splitlines() if line.startswith(("| float32", "| W8"))]
    assert lines == [[f"| {p}", n] for p in ("float32", "W8A12", "W8A8") for n in ("a", "b (ema)")]
    results = json.loads((tmp_path / "a" / "quantize.json").read_text(encoding="utf-8"))
    windows = lambda: text.eval_batches(text.load_text(str(corpus), "bytes").val, 16, 8, limit=32)
    for net, record in zip(nets, results["checkpoints"]):
        full, _, eight = record["rows"]
        assert full["loss"] == pytest.approx(quantize.loss_per_token(net, windows()), rel=1e-6)
        q = quantize.quantized(net, 8, 8, "token")
        assert eight["loss"] == pytest.approx(quantize.loss_per_token(q, windows()), rel=1e-6)
        assert eight["delta"] == pytest.approx(eight["loss"] - full["loss"], abs=1e-12)
        assert eight["perplexity"] == pytest.approx(math.exp(eight["loss"]))
        assert set(record["stats"]) == set(quantize.SITES)
        assert all(len(layers) == 3 for layers in record["stats"].values())
        kurtosis = [layer["excess_kurtosis"] for layer in record["stats"]["block_output"]]
        assert (record["layer"] == 2 and record["kurtosis"] == kurtosis[1]
                and record["kurtosis_max"] == max(kurtosis))
        sqnr = [
            layer["sqnr_db"]["8"] for site in quantize.LINEAR_INPUTS for layer in record["stats"][site]]
        assert record["sqnr8_min"] == min(sqnr) and record["sqnr8_mean"] == pytest.approx(sum(sqnr) / 12)
    assert results["args"]["act_granularity"] == "token"


def test_command_line_with_gptq(tmp_path, corpus, capsys):
    """--weight-rounding gptq: the losses of `quantized` with the codes of windows of the training
    text."""
    net = tiny()
    path = checkpoint(tmp_path / "a", corpus, net)
    quantize.main(
        ["--ckpt", path, "--bits", "16", "8", "--weight-rounding", "gptq", "--weight-bits", "3",
         "--calibration-tokens", "600", "--weight-granularity", "channel", "--asymmetric", "--embedding",
         "--head", *FAST]
    )
    report = (tmp_path / "a" / "quantize.md").read_text(encoding="utf-8")
    assert "weight rounding gptq, calibration tokens 600" in report and "| W3A8 gptq |" in report
    rows = json.loads((tmp_path / "a" / "quantize.json").read_text(encoding="utf-8"))["checkpoints"][0][
        "rows"]
    data = text.load_text(str(corpus), "bytes")
    # 608 tokens, rounded up
    windows = [x for x, _ in text.eval_batches(data.train, 16, 8, limit=38)]
    codes = quantize.gptq(net, windows, 3, "channel", symmetric=False, embedding=True)
    nets = [net] + [
        quantize.quantized(net, 3, bits, "tensor", "channel", False, (), True, codes) for bits in (16, 8)
    ]
    for row, net in zip(rows, nets, strict=True):
        loss = quantize.loss_per_token(net, text.eval_batches(data.val, 16, 8, limit=32))
        assert row["loss"] == pytest.approx(loss, rel=1e-6)


def test_averaged_or_raw_weights(tmp_path, corpus):
    """By default the average where there is one."""
    raw, ema = tiny(0), tiny(1)
    path = checkpoint(tmp_path / "a", corpus, raw, ema)
    for flag, expected, name in ((False, ema, "ema"), (True, raw, "raw")):
        net, saved = quantize.load_lm(path, flag)
        assert (saved["weights"] == name and torch.equal(net(tokens()), expected(tokens()))
                and not net.training)
    assert quantize.load_lm(checkpoint(tmp_path / "b", corpus, raw))[1]["weights"] == "raw"


def test_wrong_input_in_one_sentence(tmp_path, corpus, capsys):
    """What is wrong and what to do, and nothing is written. A wrong last run is said before one is
    measured."""
    good = checkpoint(tmp_path / "good", corpus, tiny())
    (tmp_path / "broken.pt").write_bytes(b"no checkpoint")
    vit = checkpoint(tmp_path / "vit", corpus, tiny(), kind="vit")
    other = checkpoint(tmp_path / "other", corpus, tiny(), model=dict(SHAPE, depth=2))
    strange = checkpoint(tmp_path / "strange", corpus, tiny(), model=dict(SHAPE, colour="blue"))
    digest = checkpoint(tmp_path / "digest", corpus, tiny(), tokenizer_digest="0")
    burst = tiny()
    burst.blocks[1].mlp.fc1.weight.data[0, 0] = math.nan
    burst = checkpoint(tmp_path / "burst", corpus, burst)
    for flags, message in [((tmp_path / "none.pt",), "none.pt is no checkpoint"),
                           ((tmp_path,), "is no checkpoint"),
                           ((tmp_path / "broken.pt",), "is not a whole checkpoint"),
                           ((good, vit), "holds no language model"), ((other,), "does not fit model.LM"),
                           ((strange,), "does not fit model.LM"), ((digest,), "another vocabulary"),
                           ((good, "--data", tmp_path / "nowhere"), "--data"),
                           ((burst, "--weight-rounding", "gptq"), "activations are not finite")]:
        with pytest.raises(BadInput) as error:
            quantize.main(["--ckpt", *map(str, flags), *FAST])
        assert message in str(error.value) and "\n" not in str(error.value) and ": " in str(error.value)
    for flags in (("--bits", "1"), ("--bits", "17"), ("--weight-bits", "8.5"),
                  ("--act-granularity", "channel"), ("--batch-size", "0")):
        with pytest.raises(SystemExit) as stop:
            quantize.main(["--ckpt", good, *flags])
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.rglob("quantize.*"))
