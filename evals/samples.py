"""Flow matching: paths from noise to data, the velocity loss, samplers, guidance, and the Frechet distance.

    x_t = alpha(t) x_1 + sigma(t) x_0        x_1 data, x_0 noise N(0, I), t from 0 (noise) to 1 (data)
    v_t = alpha'(t) x_1 + sigma'(t) x_0      what the net learns to say from (x_t, t)

    linear   alpha = t                sigma = 1 - t
    gvp      alpha = sin(pi t / 2)    sigma = cos(pi t / 2)        generalised variance-preserving: alpha^2 + sigma^2 = 1

Conventions are SiT's (Ma et al. 2024). A velocity is a function (x (B, ...), t (B,), y (B,) labels) -> (B, ...).
"""
import math
import os

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

from runtime import mix_seed

PATHS = ("linear", "gvp")
SAMPLERS = ("euler", "heun", "sde")
GROUP = 32                                                       # samples that are always computed together: see `sample_groups`
LAST_STEP = 0.04                                                 # the SDE's last step, without noise


# ---------------------------------------------------------------------------------------------------------------------
# paths and loss

def coefficients(path, t):
    """(alpha, sigma, alpha', sigma') at times t, a tensor of any shape. Raises ValueError for an unknown path."""
    if path == "linear":
        return t, 1 - t, torch.ones_like(t), -torch.ones_like(t)
    if path == "gvp":
        angle, rate = t * (math.pi / 2), math.pi / 2
        return angle.sin(), angle.cos(), rate * angle.cos(), -rate * angle.sin()
    raise ValueError(f"path {path!r} is unknown: use {' or '.join(PATHS)}")


def interpolate(path, t, data, noise):
    """t (B,), data and noise (B, ...) -> (x_t, velocity target), each (B, ...)."""
    alpha, sigma, d_alpha, d_sigma = (c.view(-1, *[1] * (data.ndim - 1)) for c in coefficients(path, t))
    return alpha * data + sigma * noise, d_alpha * data + d_sigma * noise


def velocity_loss(velocity, target):
    """Squared error, mean over all but the batch: (B,). In float32, since half precision overflows late in long runs."""
    return (velocity.float() - target.float()).square().flatten(1).mean(1)


def score(path, t, x, velocity):
    """grad log p_t(x) from the velocity: s = (r v - x) / (sigma^2 - r sigma' sigma), r = alpha / alpha'; t a float below 1.

    From v = alpha' E[x_1 | x] + sigma' E[x_0 | x], x = alpha E[x_1 | x] + sigma E[x_0 | x] and s = -E[x_0 | x] / sigma."""
    alpha, sigma, d_alpha, d_sigma = coefficients(path, torch.tensor(float(t), dtype=torch.float64))
    ratio = alpha / d_alpha
    return (ratio.item() * velocity - x) / (sigma * sigma - ratio * d_sigma * sigma).item()


# ---------------------------------------------------------------------------------------------------------------------
# samplers: x (B, ...) noise at t = 0 -> data at t = 1

def guided(model, null, scale):
    """Classifier-free guidance as a velocity: v(null) + scale (v(y) - v(null)), on all channels, in one pass of twice the batch.

    null: the label that means none. scale 1 is the model itself, without the second half of the work."""
    if scale == 1:
        return model

    def velocity(x, t, y):
        both = model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([y, torch.full_like(y, null)]))
        conditional, unconditional = both.chunk(2)
        return unconditional + scale * (conditional - unconditional)
    return velocity


def integrate(velocity, x, y, sampler="euler", steps=50, path="linear", draw=None):
    """x (B, ...), noise -> samples. steps: updates; each costs one evaluation of the velocity, with heun two.

    euler, heun   the ODE dx = v dt, on an even grid
    sde           Euler-Maruyama on dx = (v + w s) dt + sqrt(2 w) dW with the score s and w = sigma(t), which has the same marginals; from t = 0 to
                  1 - LAST_STEP, then one step of that length along the drift without noise ("Mean"), since s has no limit at t = 1
    draw: a function () -> noise like x, for the SDE. Raises ValueError for an unknown sampler, and for an SDE of one step."""
    def v(x, t):
        return velocity(x, torch.full((len(x),), t, device=x.device, dtype=x.dtype), y)

    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r} is unknown: use {', '.join(SAMPLERS)}")
    if sampler == "sde":
        if steps < 2:
            raise ValueError(f"the SDE sampler needs at least 2 steps, not {steps}: the last one is without noise")
        dt = (1 - LAST_STEP) / (steps - 1)
        for i in range(steps):
            t = i * dt
            w = coefficients(path, torch.tensor(t, dtype=torch.float64))[1].item()
            slope = v(x, t)
            drift = slope + w * score(path, t, x, slope)
            x = x + drift * LAST_STEP if i == steps - 1 else x + drift * dt + math.sqrt(2 * w * dt) * draw()
        return x
    dt = 1 / steps
    for i in range(steps):
        slope = v(x, i * dt)
        if sampler == "heun":
            slope = (slope + v(x + slope * dt, (i + 1) * dt)) / 2
        x = x + slope * dt
    return x


def label_sequence(counts, n):
    """The labels of samples 0 .. n - 1, int64 (n,), in the shares of `counts` (images per class): each goes to the class that is furthest behind its share.

    Equal counts give 0, 1, .., C - 1, 0, 1, ...; a longer sequence begins like a shorter one."""
    share = np.asarray(counts, dtype=np.float64) / sum(counts)
    labels, given = np.empty(n, dtype=np.int64), np.zeros(len(share))
    for i in range(n):
        labels[i] = np.argmax((share * (i + 1) - given).round(9))                     # rounded: ties go to the first class
        given[labels[i]] += 1
    return torch.from_numpy(labels)


def sample_groups(velocity, shape, count, class_counts, sampler="euler", steps=50, path="linear", seed=0, device="cpu", rank=0, world=1):
    """Yields (first index, samples (GROUP, *shape), labels (GROUP,)) of this rank's groups; ranks take turns, and each yields as often as the others.

    Sample i is a function of (seed, i) and the velocity: its noise comes from a generator of its own, its label is that of `label_sequence`. Matrix products
    may round differently in batches of another size, so the samples of a group (i // GROUP) are always computed together and in this order, whatever `count`
    and `world`; those past `count` are for the caller to drop."""
    groups = math.ceil(count / GROUP)
    labels = label_sequence(class_counts, math.ceil(groups / world) * world * GROUP).to(device)
    for turn in range(math.ceil(groups / world)):
        first = (turn * world + rank) * GROUP
        generators = [torch.Generator().manual_seed(mix_seed(seed, "sample", i)) for i in range(first, first + GROUP)]

        def draw():
            return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)

        y = labels[first:first + GROUP]
        yield first, integrate(velocity, draw(), y, sampler, steps, path, draw), y


# ---------------------------------------------------------------------------------------------------------------------
# what to do with samples: uint8 images (N, C, Y, X)

def to_uint8(x):
    """Images in [-1, 1] -> uint8 0..255, clipped and rounded."""
    return ((x.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


@torch.no_grad()
def features(net, steps, pixels, batch=100):
    """uint8 images (N, C, Y, X), or a dataset of them -> the net's output (N, D). steps: transforms from an image to the net's input."""
    transform = v2.Compose(steps)
    return torch.cat([net(torch.stack([transform(pixels[j] if torch.is_tensor(pixels) else pixels[j][0]) for j in range(i, min(i + batch, len(pixels)))]))
                      for i in range(0, len(pixels), batch)])


class Pixels(Dataset):
    """uint8 images (N, 3, Y, X) as torch-fidelity reads them."""
    def __init__(self, images):
        self.images = images.expand(-1, 3, -1, -1)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


def moments(features):
    """(N, D) -> mean (D,) and unbiased covariance (D, D), float64."""
    features = features.double()
    return features.mean(0), torch.cov(features.T).reshape(features.shape[1], -1)


def frechet_distance(mu1, cov1, mu2, cov2):
    """|mu1 - mu2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), float64: the squared 2-Wasserstein distance of two Gaussians.

    The trace of the root is the sum of the roots of the eigenvalues of C1^(1/2) C2 C1^(1/2), which is symmetric; so nothing turns complex where the
    covariances are singular (fewer samples than dimensions)."""
    mu1, cov1, mu2, cov2 = (a.double() for a in (mu1, cov1, mu2, cov2))
    values, vectors = torch.linalg.eigh(cov1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov2 @ root).clamp(min=0).sqrt().sum()
    return ((mu1 - mu2).square().sum() + cov1.trace() + cov2.trace() - 2 * cross).item()


def write_npz(path, images):
    """uint8 (N, C, Y, X) -> the file that ADM's evaluation suite and its kin read: `arr_0`, uint8 (N, Y, X, 3). Grey images get three equal channels.

    Written beside and moved into place, so that a kill leaves no half of it."""
    images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as f:
        np.savez(f, arr_0=images.permute(0, 2, 3, 1).contiguous().numpy())
    os.replace(temporary, path)


def write_grid(path, images, columns=None, smallest=64):
    """uint8 (N, C, Y, X) -> one PNG, row by row, white between; small images are enlarged by a whole factor to at least `smallest` pixels."""
    images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    n, _, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(n))
    factor, gap = math.ceil(smallest / height), 2
    images = images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    height, width = height * factor + gap, width * factor + gap
    sheet = torch.full((3, math.ceil(n / columns) * height + gap, columns * width + gap), 255, dtype=torch.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * height + gap, i % columns * width + gap
        sheet[:, top:top + height - gap, left:left + width - gap] = image
    temporary = f"{path}.tmp"
    Image.fromarray(sheet.permute(1, 2, 0).numpy()).save(temporary, format="PNG")
    os.replace(temporary, path)
