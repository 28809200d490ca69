"""What needs CUDA, and is skipped without: flash attention, torch.compile, bf16, the optimizers, a
checkpoint that changes devices. `python -m tools.bench gpu` runs these first."""
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import optim
import runtime
from model import LM, ViT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
NANO = dict(img_size=28, patch_size=7, in_chans=1, num_classes=10, embed_dim=64, depth=2, num_heads=2)
OFTEN = dict(precondition_frequency=2)
OPTIONS = {"adamw": {}, "soap": OFTEN, "kl-shampoo": OFTEN, "muon": {}}


def batch(n=16, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 28, 28, generator=generator)
    return x.to(device), torch.randint(10, (n,), generator=generator).to(device)


def vit(shortcut="residual", device="cuda"):
    torch.manual_seed(0)
    return ViT(**NANO, shortcut=shortcut).to(device)


def train(model, optimizer, steps, device, dtype=torch.float32):
    """The losses of some steps on one batch."""
    x, y = batch(device=device)
    losses = []
    for _ in range(steps):
        with runtime.autocast(torch.device(device), dtype):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("kind", ["vit", "lm"])
def test_attention_takes_the_flash_path(kind):
    if kind == "vit":
        model, x = vit(), batch()[0]
    else:
        model = LM(vocab_size=64, block_size=32, embed_dim=64, depth=2, num_heads=2).cuda()
        x = torch.randint(64, (4, 32), device="cuda")
    # raises where the inputs do not suit it
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cuda", torch.bfloat16):
        model(x).float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("shortcut", ["residual", "skipless"])
def test_compiled_equals_eager(shortcut):
    eager, compiled = vit(shortcut), vit(shortcut)
    x, y = batch()
    F.cross_entropy(eager(x), y).backward()
    F.cross_entropy(torch.compile(compiled)(x), y).backward()
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters()):
        assert relative(b.grad, a.grad) < 1e-3, name


def test_bf16_step_learns_like_fp32():
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = vit()
        optimizer = optim.build_optimizer(model, "adamw", 3e-3, 0.05)
        losses[dtype] = train(model, optimizer, 20, "cuda", dtype)
        assert all(p.dtype == torch.float32 for p in model.parameters())            # weights stay
    full, half = losses[torch.float32], losses[torch.bfloat16]
    assert full[-1] < full[0] / 2
    assert half[-1] == pytest.approx(full[-1], abs=0.1 * full[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_optimizer_equals_the_cpu(name):
    """The same gradients on both. Eigenvectors differ in sign by library, what they do must not."""
    torch.manual_seed(0)
    cpu = ViT(**NANO)
    start, gpu = copy.deepcopy(cpu), copy.deepcopy(cpu).cuda()
    models = cpu, gpu
    optimizers = [optim.build_optimizer(m, name, 1e-2, 0.01, **OPTIONS[name]) for m in models]
    for _ in range(5):
        for p, q in zip(cpu.parameters(), gpu.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    tolerance = 3e-2 if name == "muon" else 1e-2            # Muon works in bf16
    for (key, p), q, p0 in zip(cpu.named_parameters(), gpu.parameters(), start.parameters()):
        assert relative(q.detach().cpu() - p0, p.detach() - p0) < tolerance, key


def one_of_two(rank, name, device, folder):
    """Two ranks on one device, so gloo; rank 0 writes the checkpoint."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    model = vit(device=device)
    optimizer = optim.build_optimizer(model, name, 1e-3, 0.01, shard=True, **OPTIONS[name])
    train(model, optimizer, 5, device)
    checkpoint = dict(model=model.state_dict(), optimizer=optimizer.state_dict())       # collective
    if rank == 0:
        torch.save(checkpoint, f"{folder}/ckpt.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("name, source, target", [
    ("soap", "cuda", "cpu"), ("kl-shampoo", "cpu", "cuda")])
def test_a_checkpoint_of_two_ranks_changes_devices(name, source, target, tmp_path):
    torch.multiprocessing.spawn(one_of_two, (name, source, tmp_path), nprocs=2)
    losses = []
    for device in (source, target):
        saved = torch.load(tmp_path / "ckpt.pt", map_location="cpu", weights_only=True)
        model = vit(device=device)
        model.load_state_dict(saved["model"])
        optimizer = optim.build_optimizer(model, name, 1e-3, 0.01, **OPTIONS[name])
        optimizer.load_state_dict(saved["optimizer"])
        losses.append(train(model, optimizer, 4, device))
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
