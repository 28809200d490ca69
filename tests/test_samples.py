"""flow.py against what is known in closed form: Gaussian targets, derivatives by autograd, distances of Gaussians, files read back."""
import math

import numpy as np
import pytest
import torch
from PIL import Image

import flow

PATHS = list(flow.PATHS)


def gaussian_velocity(path, mean, cov):
    """The exact velocity towards N(mean, cov) from N(0, I): x_t and v_t are jointly Gaussian, so E[v | x] is a linear regression. No net, no learning."""
    def velocity(x, t, y=None):
        alpha, sigma, d_alpha, d_sigma = flow.coefficients(path, t[0].double())
        eye = torch.eye(len(mean), dtype=x.dtype)
        total = alpha ** 2 * cov + sigma ** 2 * eye
        gain = (alpha * d_alpha * cov + sigma * d_sigma * eye) @ torch.linalg.inv(total)
        return d_alpha * mean + (x - alpha * mean) @ gain.T
    return velocity


def target():
    basis = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    return torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), basis @ torch.diag(torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)) @ basis.T


def noise(n, seed=1):
    return torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------------
# paths and loss

@pytest.mark.parametrize("path", PATHS)
def test_a_path_goes_from_noise_to_data_and_its_velocity_is_its_derivative(path):
    t = torch.linspace(0, 1, 11, dtype=torch.float64, requires_grad=True)
    data, start = noise(11, 2), noise(11, 3)
    x, v = flow.interpolate(path, t, data, start)
    for d in range(3):
        slope, = torch.autograd.grad(x[:, d].sum(), t, retain_graph=True)
        torch.testing.assert_close(v[:, d], slope)
    torch.testing.assert_close(x[0], start[0])
    torch.testing.assert_close(x[-1], data[-1])


def test_paths_by_hand():
    t = torch.tensor([0.25], dtype=torch.float64)
    assert [c.item() for c in flow.coefficients("linear", t)] == [0.25, 0.75, 1.0, -1.0]
    c, s = math.cos(math.pi / 8), math.sin(math.pi / 8)
    assert [c.item() for c in flow.coefficients("gvp", t)] == pytest.approx([s, c, math.pi / 2 * c, -math.pi / 2 * s])
    with pytest.raises(ValueError, match="linear or gvp"):
        flow.coefficients("vp", t)


def test_loss_is_the_mean_square_in_float32():
    v, u = torch.zeros(2, 3, 4, 4, dtype=torch.float16), torch.zeros(2, 3, 4, 4, dtype=torch.float16)
    v[1] = 300                                                   # the square does not fit half precision
    loss = flow.velocity_loss(v, u)
    assert loss.dtype == torch.float32 and loss.tolist() == [0.0, 90000.0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("t", [0.0, 0.3, 0.9])
def test_score_is_that_of_the_marginal(path, t):
    """The marginal of a Gaussian target is N(alpha m, alpha^2 S + sigma^2 I), whose score is known."""
    mean, cov = target()
    alpha, sigma, _, _ = flow.coefficients(path, torch.tensor(t, dtype=torch.float64))
    x = noise(7)
    truth = -(x - alpha * mean) @ torch.linalg.inv(alpha ** 2 * cov + sigma ** 2 * torch.eye(3, dtype=torch.float64))
    found = flow.score(path, t, x, gaussian_velocity(path, mean, cov)(x, torch.full((7,), t, dtype=torch.float64)))
    torch.testing.assert_close(found, truth)


# ---------------------------------------------------------------------------------------------------------------------
# samplers

def ode_map(mean, cov, x):
    """Where the exact flow takes noise x: the path's marginals share their eigenvectors and each axis is stretched, so it is m + S^(1/2) x."""
    values, vectors = torch.linalg.eigh(cov)
    return mean + x @ (vectors * values.sqrt() @ vectors.T)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sampler, order", [("euler", 1), ("heun", 2)])
def test_ode_samplers_converge_with_their_order(path, sampler, order):
    """The end point is known exactly for every start; halving the step divides the error by 2 for Euler and by 4 for Heun."""
    mean, cov = target()
    x, errors = noise(50), []
    for steps in (40, 80, 160):
        end = flow.integrate(gaussian_velocity(path, mean, cov), x, None, sampler, steps, path)
        errors.append((end - ode_map(mean, cov, x)).norm().item())
    rates = [math.log2(a / b) for a, b in zip(errors, errors[1:])]
    assert rates == pytest.approx([order, order], abs=0.15), errors


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sampler, steps", [("euler", 100), ("heun", 25), ("sde", 150)])
def test_samples_of_a_known_target_have_its_moments(path, sampler, steps):
    """8,000 samples of the exact velocity: mean and covariance of N(m, S), within five standard errors and the step's own error."""
    mean, cov = target()
    generator = torch.Generator().manual_seed(5)
    draw = lambda: torch.randn(8000, 3, dtype=torch.float64, generator=generator)
    found_mean, found_cov = flow.moments(flow.integrate(gaussian_velocity(path, mean, cov), draw(), None, sampler, steps, path, draw))
    torch.testing.assert_close(found_mean, mean, atol=5 * math.sqrt(2 / 8000) + 0.01, rtol=0)
    torch.testing.assert_close(found_cov, cov, atol=5 * 2 * math.sqrt(2 / 8000) + 0.04, rtol=0)


def test_sde_draws_noise_in_all_steps_but_the_last():
    drawn = []
    flow.integrate(lambda x, t, y: -x, noise(2), None, "sde", 10, draw=lambda: drawn.append(1) or torch.zeros(2, 3, dtype=torch.float64))
    assert len(drawn) == 9


@pytest.mark.parametrize("sampler, evaluations", [("euler", 6), ("heun", 12), ("sde", 6)])
def test_samplers_end_at_one_and_cost_what_they_say(sampler, evaluations):
    times = []
    flow.integrate(lambda x, t, y: (times.append(t[0].item()), torch.zeros_like(x))[1], noise(2), None, sampler, 6, draw=lambda: noise(2))
    assert len(times) == evaluations and times[0] == 0 and times == sorted(times)
    assert times[-1] == pytest.approx({"euler": 5 / 6, "heun": 1.0, "sde": 0.96}[sampler])


def test_refusals():
    for options, match in (({"sampler": "dopri5"}, "euler, heun, sde"), ({"sampler": "sde", "steps": 1}, "at least 2")):
        with pytest.raises(ValueError, match=match):
            flow.integrate(lambda x, t, y: x, noise(2), None, **options)


# ---------------------------------------------------------------------------------------------------------------------
# guidance

def test_guidance_extrapolates_from_no_label_to_the_label_on_all_channels():
    batches = []

    def model(x, t, y):
        batches.append(len(x))
        return x * t[:, None] + y[:, None].double()
    x, t, y = noise(4), torch.linspace(0, 1, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    v = flow.guided(model, 9, 3.0)(x, t, y)
    torch.testing.assert_close(v, x * t[:, None] + (9 + 3 * (y[:, None] - 9)).double())
    assert batches == [8]
    torch.testing.assert_close(flow.guided(model, 9, 0.0)(x, t, y), model(x, t, torch.full_like(y, 9)))


def test_guidance_of_scale_one_is_the_model_itself():
    """No second half, so equal to the bit and as cheap."""
    def model(x, t, y):
        return x
    assert flow.guided(model, 9, 1.0) is model and flow.guided(model, 9, 1) is model


# ---------------------------------------------------------------------------------------------------------------------
# seeded groups

def matmul_velocity(batches=None):
    """A small net whose products round differently in batches of different sizes."""
    weight = torch.randn(48, 48, generator=torch.Generator().manual_seed(3)) / 7

    def velocity(x, t, y):
        if batches is not None:
            batches.append(len(x))
        return ((x.flatten(1) + y[:, None]) @ weight).view_as(x) * t[:, None, None, None] - x
    return velocity


def samples(count, sampler="heun", world=1, seed=0, counts=(1, 1, 1)):
    """All samples, by index, as `world` processes would draw them one after the other."""
    found = {}
    for rank in range(world):
        for first, x, y in flow.sample_groups(matmul_velocity(), (3, 4, 4), count, counts, sampler, 5, seed=seed, rank=rank, world=world):
            found.update({first + i: (x[i], y[i].item()) for i in range(len(x)) if first + i < count})
    return [found[i] for i in range(count)]


@pytest.mark.parametrize("sampler", flow.SAMPLERS)
@pytest.mark.parametrize("count, world", [(7, 1), (100, 2), (100, 3), (33, 4)])
def test_a_sample_is_the_same_to_the_bit_on_any_split(sampler, count, world):
    """However many are asked for and however many processes share them."""
    whole = samples(100, sampler)
    for (x, label), (x_whole, label_whole) in zip(samples(count, sampler, world), whole):
        assert torch.equal(x, x_whole) and label == label_whole


def test_every_rank_takes_as_many_turns():
    turns = [sum(1 for _ in flow.sample_groups(matmul_velocity(), (3, 4, 4), 70, [1], steps=1, rank=r, world=2)) for r in (0, 1)]
    assert turns == [2, 2]


def test_batches_always_have_the_same_size():
    batches = []
    for _ in flow.sample_groups(matmul_velocity(batches), (3, 4, 4), 40, [1], steps=2):
        pass
    assert batches == [flow.GROUP] * 4


def test_seeds_and_samples_differ():
    a, b = samples(40), samples(40, seed=1)
    assert all(not torch.equal(x, y) for (x, _), (y, _) in zip(a, b))
    assert len({x.sum().item() for x, _ in a}) == 40


def test_labels_have_the_shares_of_the_classes():
    assert flow.label_sequence([5, 5, 5], 7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    counts = [700, 200, 100, 0]
    labels = flow.label_sequence(counts, 1000)
    for n in (10, 100, 1000):                                    # at every length, to within one image
        given = np.bincount(labels[:n], minlength=4)
        assert np.abs(given - np.array(counts) / 1000 * n).max() < 1
    assert flow.label_sequence(counts, 50).tolist() == labels[:50].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Frechet distance

def test_frechet_distance_of_one_dimension():
    """(m1 - m2)^2 + (s1 - s2)^2."""
    one, two = torch.tensor([1.0]), torch.tensor([3.0])
    assert flow.frechet_distance(one, torch.tensor([[4.0]]), two, torch.tensor([[0.25]])) == pytest.approx(4 + 1.5 ** 2, rel=1e-12)


def test_frechet_distance_of_diagonal_covariances():
    a, b = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    zero = torch.zeros(6)
    assert flow.frechet_distance(zero, a.diag(), zero, b.diag()) == pytest.approx((a.sqrt() - b.sqrt()).square().sum().item(), rel=1e-10)


def test_frechet_distance_by_newtons_root():
    """The root of the product of two full covariances by the Denman-Beavers iteration: nothing in common with eigenvalues."""
    x, y = (torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) @ torch.rand(5, 5, dtype=torch.float64) for s in (0, 1))
    (m1, c1), (m2, c2) = flow.moments(x), flow.moments(y)
    np.testing.assert_allclose(c1, np.cov(x.numpy().T), rtol=1e-12)
    root, inverse = c1 @ c2, torch.eye(5, dtype=torch.float64)
    for _ in range(60):
        root, inverse = (root + torch.linalg.inv(inverse)) / 2, (inverse + torch.linalg.inv(root)) / 2
    truth = (m1 - m2).square().sum() + (c1 + c2 - 2 * root).trace()
    assert flow.frechet_distance(m1, c1, m2, c2) == pytest.approx(truth.item(), rel=1e-8)
    assert flow.frechet_distance(m2, c2, m1, c1) == pytest.approx(truth.item(), rel=1e-8)


def test_frechet_distance_of_few_samples_is_real_and_zero_to_itself():
    """Fewer samples than dimensions: singular covariances."""
    m, c = flow.moments(torch.randn(6, 20, generator=torch.Generator().manual_seed(0)))
    assert flow.frechet_distance(m, c, m, c) == pytest.approx(0, abs=1e-6)
    assert flow.frechet_distance(m, c, m + 1, c) == pytest.approx(20, abs=1e-5)


def test_features_of_a_tensor_and_of_a_dataset_are_those_of_each_image():
    """Batches and their rest change nothing, and the steps come before the net."""
    images = torch.randint(0, 256, (7, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    steps = [lambda x: x.float() / 2]
    for pixels in (images, [(x, 0) for x in images]):
        found = flow.features(lambda x: x.flatten(1).square(), steps, pixels, batch=3)
        assert torch.equal(found, (images.float() / 2).flatten(1).square())


# ---------------------------------------------------------------------------------------------------------------------
# files

def test_pixels():
    assert flow.to_uint8(torch.tensor([-9.0, -1.0, 0.0, 1 / 255, 1.0, 9.0])).tolist() == [0, 0, 128, 128, 255, 255]
    whole = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(flow.to_uint8(whole / 127.5 - 1), whole)


def test_npz_is_what_adm_reads(tmp_path):
    images = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8)
    flow.write_npz(tmp_path / "s.npz", images)
    with np.load(tmp_path / "s.npz") as z:
        assert z.files == ["arr_0"] and z["arr_0"].dtype == np.uint8 and z["arr_0"].shape == (5, 4, 6, 3)
        assert z["arr_0"][2, 1, 5, 0] == images[2, 0, 1, 5]
    flow.write_npz(tmp_path / "grey.npz", images[:, :1])
    with np.load(tmp_path / "grey.npz") as z:
        assert z["arr_0"].shape == (5, 4, 6, 3) and (z["arr_0"] == z["arr_0"][..., :1]).all()
    assert {p.name for p in tmp_path.iterdir()} == {"s.npz", "grey.npz"}


def test_grid_shows_every_image_row_by_row(tmp_path):
    images = torch.zeros(5, 3, 32, 32, dtype=torch.uint8) + (40 * torch.arange(1, 6)).view(5, 1, 1, 1).to(torch.uint8)
    flow.write_grid(tmp_path / "g.png", images, columns=3)
    with Image.open(tmp_path / "g.png") as picture:
        pixels = np.asarray(picture)
    assert pixels.shape == (2 + 2 * 66, 2 + 3 * 66, 3)           # 32 pixels doubled to 64, gaps of 2
    assert [pixels[30 + 66 * (i // 3), 30 + 66 * (i % 3), 0] for i in range(6)] == [40, 80, 120, 160, 200, 255]
    assert (pixels[:2] == 255).all() and (pixels[66:68] == 255).all()
