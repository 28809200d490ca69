"""Weights kept orthogonal while they train: the retraction, the constraint under every optimizer, resume."""
import copy

import pytest
import torch
import torch.nn.functional as F

import init
import optim
import train_lm
from model import LM
from orthogonal import KINDS, Orthogonal, polar_factor, retract


def small_lm(seed=0):
    torch.manual_seed(seed)
    net = LM(64, 16, 32, 2, 2, shortcut="skipless")
    init.init_residual_free_lm(net, 3.0, joint_heads=True)
    return net


def train(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, 64, (4, 16), generator=generator)
        F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(32, 32), (8, 40), (40, 8)])
@pytest.mark.parametrize("size", [0.02, 0.1])
def test_the_retraction_is_the_polar_factor(shape, size):
    """Two steps leave an error of the fourth order: against an SVD in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
    x = polar_factor(x) + size * torch.randn(x.shape, dtype=torch.float64, generator=generator) / 32 ** 0.5
    values = torch.linalg.svdvals(retract(x))
    assert (values - 1).abs().max() < 30 * size ** 4 + 1e-12
    cosine = (retract(x) * polar_factor(x)).sum((1, 2)) / min(shape)
    assert (cosine - 1).abs().max() < 30 * size ** 4 + 1e-12


@pytest.mark.parametrize("scale", [0.3, 3.0, 100.0])
def test_far_from_the_manifold_it_comes_back(scale):
    """A plain iteration diverges where a singular value exceeds sqrt(3)."""
    x = scale * torch.randn(2, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = polar_factor(x)
    for _ in range(40):
        x = retract(x)
    assert torch.allclose(x, target, atol=1e-6)


@pytest.mark.parametrize("gain", ["kept", "following"])
@pytest.mark.parametrize("name, lr", [("adamw", 1e-2), ("soap", 1e-2), ("kl-shampoo", 1e-2), ("muon", 3e-2)])
def test_all_singular_values_stay_equal(name, lr, gain):
    """Square, tall, wide, and q, k and v within one tensor; a kept gain stays what it was."""
    net = small_lm()
    constraint = Orthogonal(net.blocks, "all", gain)
    optimizer = optim.build_optimizer(net, name, lr, 0.01, constraint=constraint)
    train(net, optimizer, 100)
    assert len(constraint.places) == 12
    for (p, rows), g in zip(constraint.places, constraint.gains):
        values = torch.linalg.svdvals(p.detach()[rows].double())
        wanted = g if gain == "kept" else values.mean()
        assert (values / wanted - 1).abs().max() < 1e-3


def test_without_it_they_do_not():
    net = small_lm()
    train(net, optim.build_optimizer(net, "soap", 1e-2, 0.01), 100)
    values = torch.linalg.svdvals(net.blocks[0].mlp.fc1.weight.detach())
    assert values.max() / values.min() > 1.05


def test_the_start_is_the_nearest_point_and_others_stay():
    net = small_lm()
    before = copy.deepcopy(net.state_dict())
    Orthogonal(net.blocks, "vo-mlp")
    for key, value in net.state_dict().items():             # all were orthogonal at the start, q and k too
        assert torch.allclose(value, before[key], atol=1e-5), key
    torch.nn.init.normal_(net.blocks[0].mlp.fc1.weight)
    mean = torch.linalg.svdvals(net.blocks[0].mlp.fc1.weight.detach()).mean()
    q = net.blocks[0].attn.qkv.weight[:64].detach().clone().normal_()
    net.blocks[0].attn.qkv.weight.data[:64] = q
    Orthogonal(net.blocks, "vo-mlp")
    assert torch.allclose(torch.linalg.svdvals(net.blocks[0].mlp.fc1.weight.detach()), mean, rtol=1e-4)
    assert torch.equal(net.blocks[0].attn.qkv.weight.detach()[:64], q) and "q" not in KINDS["vo-mlp"]


@pytest.mark.parametrize("name", ["adamw", "soap"])
def test_a_loaded_state_goes_on_bitwise(name):
    whole, optimizer = small_lm(), None
    optimizer = optim.build_optimizer(whole, name, 1e-2, 0.01, constraint=Orthogonal(whole.blocks))
    train(whole, optimizer, 6)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, 6, first=6)
    other = small_lm(seed=1)
    again = optim.build_optimizer(other, name, 1e-2, 0.01, constraint=Orthogonal(other.blocks))
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(other, again, 6, first=6)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), other.state_dict().values()))


def test_the_flag_reaches_the_weights(tmp_path):
    flags = ["--embed-dim", "32", "--depth", "2", "--steps", "8", "--warmup", "0", "--block-size", "16",
             "--threads", "1", "--out", str(tmp_path), "--skipless", "--opt", "soap", "--orthogonal", "all",
             "--set", "num_heads=2", "eval_tokens=512", "sample_tokens=0", "joint_heads=true"]
    train_lm.main(flags)
    weights = torch.load(tmp_path / "ckpt.pt", weights_only=True)["model"]
    for key in ("attn.proj", "mlp.fc1", "mlp.fc2"):
        values = torch.linalg.svdvals(weights[f"blocks.0.{key}.weight"])
        assert values.max() / values.min() < 1.001
