"""runtime.py: schedules, seeds, checkpoints, log, devices and messages, each against a value computed by hand or an event made to happen."""
import copy
import importlib
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import runtime
from runtime import BadInput

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("train_*.py"))
WORLD = runtime.World(0, 1, torch.device("cpu"), "test")


# ---------------------------------------------------------------------------------------------------------------------
# processes, for this file and those of the train scripts

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def run_script(*flags, script="train_vit.py", env=None, nproc=1, timeout=120):
    """A train script as a person runs it, from the repository root; with nproc > 1 under torchrun. Returns exit code, stdout and stderr."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={nproc}", "--master-port", free_port()] if nproc > 1 else []
    return subprocess.run([sys.executable, *torchrun, script, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})


def _server():
    """Processes forked from one that has already imported torch and the scripts: a start costs .1 s instead of 5."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*SCRIPTS, "matplotlib.pyplot"])
    return context


SERVER = _server()


def _enter(function, arguments, output, env):
    os.environ.update(env)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    function(*arguments)


def launch(function, *arguments, output, env=None):
    """Start function(*arguments) in a process of its own, whose stdout and stderr are appended to the file `output`."""
    process = SERVER.Process(target=_enter, args=(function, arguments, str(output), env or {}))
    process.start()
    return process


def launch_ranks(n, function, *arguments, folder, timeout=90):
    """function(*arguments) in n processes with torchrun's variables. Like torchrun, it ends all when one fails.

    Returns ([exit code of each], [output of each]); the exit code of a process ended from here is negative.
    """
    env = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    outputs = [Path(folder) / f"output-{env['MASTER_PORT']}-{rank}.txt" for rank in range(n)]
    processes = [launch(function, *arguments, output=outputs[rank], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(n)]
    end, grace = time.monotonic() + timeout, 10.0               # what the others get to fail by themselves after the first
    while any(p.is_alive() for p in processes) and time.monotonic() < end:
        if any(p.exitcode for p in processes):
            end = min(end, time.monotonic() + grace)
        time.sleep(0.02)
    for p in processes:
        if p.is_alive():
            p.kill()
        p.join()
    return [p.exitcode for p in processes], [o.read_text() if o.exists() else "" for o in outputs]


# ---------------------------------------------------------------------------------------------------------------------
# schedule

def test_warm_up_is_linear_and_its_first_step_learns():
    """Step s of a warm-up of 4 to a peak of 8 has lr 2 (s + 1): 2, 4, 6, 8. A first step of lr 0 would be a step thrown away."""
    assert [runtime.lr_at(s, 10, 4, 8.0) for s in range(4)] == [2.0, 4.0, 6.0, 8.0]


def test_cosine_against_values_from_paper_and_pencil():
    """Ten steps, two of them warm-up, peak 4: after it (1 + cos(pi k / 8)) * 2 for k = 0..7; 2 + sqrt(2) at k = 2, exactly half at k = 4."""
    got = [runtime.lr_at(s, 10, 2, 4.0) for s in range(2, 10)]
    assert got[0] == 4.0
    assert got[2] == pytest.approx(2 + math.sqrt(2), rel=1e-12)
    assert got[4] == pytest.approx(2.0, rel=1e-12)
    assert got[6] == pytest.approx(2 - math.sqrt(2), rel=1e-12)
    assert all(a > b for a, b in zip(got, got[1:]))
    assert 0 < got[7] < 0.2                                      # the last step still learns a little; lr 0 would waste it


@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_no_warm_up_and_nothing_but_warm_up(total):
    """Both ends work: without warm-up the first step has the peak, with warm-up = total the last one has it."""
    assert runtime.lr_at(0, total, 0, 3.0) == 3.0
    ramp = [runtime.lr_at(s, total, total, 3.0) for s in range(total)]
    assert ramp[0] == pytest.approx(3.0 / total) and ramp[-1] == pytest.approx(3.0)


def test_floor_is_approached_and_never_crossed():
    """With a floor the cosine runs between peak and floor: halfway it is their mean, at and beyond the end it is the floor."""
    values = [runtime.lr_at(s, 20, 0, 1.0, floor=0.2) for s in range(25)]
    assert values[10] == pytest.approx(0.6)
    assert min(values) >= 0.2 and values[20:] == pytest.approx([0.2] * 5)


# ---------------------------------------------------------------------------------------------------------------------
# checkpoint

def _save_for_ever(path, started):
    """Saves version after version; each is a file of 1 MB in which every number is the version."""
    version = 0
    while True:
        version += 1
        runtime.save_checkpoint(path, dict(model=dict(w=torch.full((250_000,), float(version))), ema=None, optimizer={}, step=version, best=0.0, rng=torch.get_rng_state(), args={}))
        started.set()


def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL 20 times in the middle of writing: the file loads, holds one version throughout, never goes back, and no orphans pile up.

    A writer that saved in place, or that renamed before the data was on disk, would leave a torn file here.
    """
    path, rng, torn, version = tmp_path / "ckpt.pt", random.Random(0), 0, 0
    for _ in range(20):
        started = SERVER.Event()
        writer = launch(_save_for_ever, path, started, output=tmp_path / "output.txt")
        assert started.wait(30), (tmp_path / "output.txt").read_text()
        time.sleep(rng.uniform(0, 0.03))
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        saved = runtime.load_checkpoint(path)
        assert (saved["model"]["w"] == saved["step"]).all() and len(saved["model"]["w"]) == 250_000
        torn += (tmp_path / "ckpt.pt.tmp").exists()
        assert {p.name for p in tmp_path.iterdir()} <= {"ckpt.pt", "ckpt.pt.tmp", "output.txt"}
        version = saved["step"]
    assert version >= 1
    assert torn >= 1, "no kill fell into a save, so this test has shown nothing"
    runtime.save_checkpoint(path, saved)                         # what a killed save left is overwritten, then gone
    assert not (tmp_path / "ckpt.pt.tmp").exists()


def _whole():
    return dict(model=dict(w=torch.arange(4000.0)), ema=None, optimizer=dict(state={}), step=3, best=0.0, rng=torch.get_rng_state(), args=dict(lr=0.1))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damaged_checkpoint_is_answered_with_its_name(tmp_path):
    """Cut short anywhere, overwritten with noise, text, another pickle or nothing: always the sentence that names the file, never a traceback."""
    good = tmp_path / "good.pt"
    runtime.save_checkpoint(good, _whole())
    whole = good.read_bytes()
    rng = random.Random(1)
    ends = [0, 1, 2, 4, 10, 100, 1000, len(whole) // 2, len(whole) - 1] + [rng.randrange(len(whole)) for _ in range(20)]
    damaged = {f"cut at {n}": whole[:n] for n in ends}
    damaged |= {f"noise {i}": rng.randbytes(rng.randrange(1, 300)) for i in range(60)}
    damaged |= {"text": b"hello\n", "html": b"<html><body>404</body></html>", "json": b'{"model": 1}', "zeros": bytes(len(whole)),
                "pickle": b"\x80\x04K\x01.", "pickle 2": b"\x80\x02K\x01.", "list": b"]q\x00.", "name": b"cos\nsystem\n.",
                "zip": b"PK\x03\x04" + rng.randbytes(200)}
    path = tmp_path / "ckpt.pt"
    for what, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(BadInput) as caught:
            runtime.load_checkpoint(path)
            pytest.fail(f"{what}: was loaded")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value), what
    path.unlink()
    path.mkdir()
    with pytest.raises(BadInput, match="ckpt.pt"):
        runtime.load_checkpoint(path)


@pytest.mark.parametrize("other", [dict(model={}), [1, 2], torch.zeros(3), 7, {"state_dict": {}}])
def test_checkpoint_of_another_program_is_refused_by_name(tmp_path, other):
    """A file that torch can read and that is no checkpoint of ours must not end in a KeyError three calls later."""
    path = tmp_path / "foreign.pt"
    torch.save(other, path)
    with pytest.raises(BadInput, match="foreign.pt"):
        runtime.load_checkpoint(path)


def test_checkpoint_comes_back_as_it_was(tmp_path):
    """Tensors keep dtype and bits, python scalars keep their type."""
    saved = dict(_whole(), ema=None, best=1 / 3, rng=torch.get_rng_state(), half=torch.tensor([1 / 3], dtype=torch.bfloat16))
    runtime.save_checkpoint(tmp_path / "c.pt", saved)
    back = runtime.load_checkpoint(tmp_path / "c.pt")
    assert back.keys() == saved.keys() and back["best"] == 1 / 3 and back["ema"] is None and back["step"] == 3
    assert back["half"].dtype == torch.bfloat16 and torch.equal(back["half"], saved["half"]) and torch.equal(back["rng"], saved["rng"])


def test_check_resume_names_the_flag_and_both_values():
    """Refused: what defines the run, with both values. Noted: what may change. Silent: what never matters, and what is equal."""
    saved = dict(img_size=28, lr=0.1, out="a", seed=0)
    with pytest.raises(BadInput) as caught:
        runtime.check_resume("out/ckpt.pt", saved, dict(saved, img_size=32), fixed=("img_size", "seed"), free=("out",))
    sentence = str(caught.value)
    assert "out/ckpt.pt" in sentence and "--img-size 28" in sentence and "--img-size 32" in sentence and "--fresh" in sentence
    notes = runtime.check_resume("c", saved, dict(saved, lr=0.2, out="b"), fixed=("img_size", "seed"), free=("out",))
    assert notes == ["--lr was 0.1 and is 0.2"]
    assert runtime.check_resume("c", saved, copy.deepcopy(saved), fixed=("img_size",), free=()) == []


# ---------------------------------------------------------------------------------------------------------------------
# log

def test_log_drops_lines_past_the_resumed_step_and_a_torn_last_line(tmp_path):
    """The steps after the checkpoint run again, so their old lines go; half a line, left by a kill, goes too; the kept ones stay to the byte."""
    kept = "".join(json.dumps({"step": s, "loss": 1 / (s + 3)}) + "\n" for s in (1, 2, 2, 3))
    (tmp_path / "log.jsonl").write_text(kept + json.dumps({"step": 4, "loss": 0.5}) + "\n" + '{"step": 5, "lo')
    log = runtime.Log(tmp_path, WORLD, step=3)
    assert (tmp_path / "log.jsonl").read_text() == kept
    log.line("human", step=4, loss=0.25)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 2, 3, 4] and rows[-1]["loss"] == 0.25
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl"]


@pytest.mark.parametrize("junk", ["5", "null", '"step"', "[1]", "{}", '{"step": null}', '{"step": "x"}', "", "not json"])
def test_log_drops_a_line_that_has_no_step(tmp_path, junk):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n' + junk + "\n")
    runtime.Log(tmp_path, WORLD, step=3)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


def test_log_drops_a_line_that_is_no_text(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\x00\n')
    runtime.Log(tmp_path, WORLD, step=3)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


def test_a_lone_rank_variable_is_not_torchrun(monkeypatch):
    """Some schedulers set RANK for programs of their own."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert runtime.start("cpu").size == 1


def test_log_starts_empty_on_a_new_run_and_only_rank_0_writes(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    runtime.Log(tmp_path, runtime.World(1, 2, torch.device("cpu"), ""), step=0).line("human", step=2, loss=1.0)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'
    runtime.Log(tmp_path, WORLD, step=0)
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_log_line_is_json_even_when_a_value_is_not_finite(tmp_path):
    """NaN and Infinity are no JSON: a strict reader would choke on the whole file."""
    runtime.Log(tmp_path, WORLD).line("human", step=1, loss=float("nan"), val_loss=float("inf"), lr=0.1)
    row = json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the log"))
    assert row == {"step": 1, "loss": None, "val_loss": None, "lr": 0.1}


# ---------------------------------------------------------------------------------------------------------------------
# the check for non-finite numbers

def _window(losses, norms):
    return [(10 + i, 0.001 * (i + 1), torch.tensor(a), torch.tensor(b)) for i, (a, b) in enumerate(zip(losses, norms))]


def test_check_finite_returns_the_mean_loss_and_the_last_norm():
    mean, norm = runtime.check_finite(_window([1.0, 2.0, 6.0], [4.0, 5.0, 7.0]), WORLD)
    assert mean == 3.0 and norm == 7.0


@pytest.mark.parametrize("losses, norms", [([1.0, math.nan, math.nan], [1.0, 2.0, math.nan]), ([1.0, math.inf, 1.0], [1.0, 2.0, 3.0]),
                                           ([1.0, -math.inf, 1.0], [1.0, 2.0, 3.0]), ([1.0, 2.0, 3.0], [1.0, math.inf, math.nan])])
def test_check_finite_names_the_first_bad_step(losses, norms):
    """Of a window of steps 10, 11, 12 the one at fault is 11; its lr and gradient norm are in the sentence."""
    with pytest.raises(BadInput) as caught:
        runtime.check_finite(_window(losses, norms), WORLD)
    sentence = str(caught.value)
    assert "step 11" in sentence and "lr 0.002" in sentence and f"gradient norm {norms[1]}" in sentence and "step 10" not in sentence and "step 12" not in sentence


def _one_rank_is_ill():
    world = runtime.start("cpu", 1)
    loss = math.nan if world.rank == 1 else 1.0
    runtime.run(lambda: runtime.check_finite(_window([1.0, loss], [1.0, 1.0]), world))


def test_one_ill_rank_stops_all_with_one_message(tmp_path):
    """NaN on rank 1 only: both ranks leave with code 2 and neither waits for the other."""
    codes, outputs = launch_ranks(2, _one_rank_is_ill, folder=tmp_path, timeout=60)
    assert codes == [2, 2], outputs
    assert "error: the loss is not finite at step 11" in outputs[0]


def _bad_input_on(rank):
    def main():
        world = runtime.start("cpu", 1)
        if world.rank == rank:
            raise BadInput("photo.jpg cannot be read")
        runtime.all_sum([1.0], world)
    runtime.run(main)


def test_fault_that_only_rank_1_meets_is_said(tmp_path):
    """A damaged image lies in one rank's share of the data: that rank must speak, or the run ends without a word."""
    codes, outputs = launch_ranks(2, _bad_input_on, 1, folder=tmp_path, timeout=60)
    assert codes[1] == 2
    assert "error: photo.jpg cannot be read" in outputs[1]


# ---------------------------------------------------------------------------------------------------------------------
# seeds, sums, numbers

def test_mix_seed_is_distinct_over_a_grid_and_stable():
    """seed + rank + step collides between runs; a hash over the same grid of 20,000 does not, and torch accepts every value."""
    seeds = {runtime.mix_seed(seed, kind, step, rank, micro)
             for seed in range(5) for kind in ("noise", "mask") for step in range(250) for rank in range(4) for micro in range(2)}
    assert len(seeds) == 5 * 2 * 250 * 4 * 2
    assert all(0 <= s < 2 ** 63 for s in seeds)
    assert runtime.mix_seed(1, 23) != runtime.mix_seed(12, 3)
    child = subprocess.run([sys.executable, "-c", "import runtime; print(runtime.mix_seed(3, 'noise', 7))"], cwd=ROOT, capture_output=True, text=True,
                           env={**os.environ, "PYTHONHASHSEED": "99"}, check=True)
    assert int(child.stdout) == runtime.mix_seed(3, "noise", 7)  # python's own hash() changes from process to process


@pytest.mark.parametrize("kind, bounds, text, words", [
    (int, dict(low=1), "0", "at least 1"), (int, dict(low=0), "-1", "at least 0"), (int, {}, "x", "invalid int value: 'x'"), (int, {}, "1.5", "invalid int value"),
    (float, dict(above=0), "0", "above 0"), (float, dict(low=0, high=1), "1.5", "at most 1"), (float, {}, "nan", "finite"), (float, dict(low=0), "nan", "at least 0"),
    (float, {}, "inf", "finite"), (float, {}, "abc", "invalid float value: 'abc'"), (int, dict(high=9), "9" * 400, "at most 9")])
def test_number_says_what_is_wrong(capsys, kind, bounds, text, words):
    """One sentence on stderr that names the flag and the bound, exit code 2."""
    parser = runtime.Parser()
    parser.add_argument("--speed", type=runtime.number(kind, **bounds))
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--speed", text])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert error.startswith("error: argument --speed") and words in error


def test_number_accepts_its_bounds():
    parse = runtime.number(float, low=0, high=1)
    assert [parse("0"), parse("1"), parse("1e-3")] == [0.0, 1.0, 0.001]
    assert runtime.number(int, low=1)("12") == 12


# ---------------------------------------------------------------------------------------------------------------------
# device, folder

def test_dtype_on_a_cpu_is_float32_unless_asked():
    """No bf16 on a CPU by itself, and no question to CUDA that raises where there is none."""
    cpu = torch.device("cpu")
    assert runtime.pick_dtype("auto", cpu)[0] == torch.float32
    assert runtime.pick_dtype("bfloat16", cpu)[0] == torch.bfloat16
    with runtime.autocast(cpu, torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with runtime.autocast(cpu, torch.float32):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("device, words", [("cuda", "--device cuda"), ("cuda:1", "--device cuda:1"), ("mps", "--device mps"), ("gpu", "--device gpu")])
def test_absent_device_is_refused_by_name(monkeypatch, device, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BadInput, match=words):
        runtime.start(device)
    assert runtime.start("auto").device.type == "cpu"


def test_more_processes_than_gpus_is_refused_with_the_number(monkeypatch):
    """LOCAL_RANK 3 on a machine with 2 GPUs: a sentence, not "invalid device ordinal"."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(BadInput, match="nproc_per_node=2"):
        runtime.start("cuda")


@pytest.mark.parametrize("place", ["file/out", "file", "file/deep/er/out"])
def test_unwritable_out_is_refused_by_name(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match="--out .*" + place):
        runtime.make_out(tmp_path / place, dict(a=1), WORLD)
    assert (tmp_path / "file").read_text() == "in the way"


# ---------------------------------------------------------------------------------------------------------------------
# imports and --help

def test_importing_does_nothing_else(tmp_path):
    """Every top-level module, imported with the network cut and in an empty folder: no output, file, thread setting, seed, group or CUDA context."""
    names = sorted(p.stem for p in ROOT.glob("*.py"))
    script = f"""
import os, random, signal, socket, sys, threading
import numpy, torch, torchvision.ops      # what these set is not ours
def refuse(*a, **k): raise AssertionError("network")
socket.socket.connect = socket.create_connection = refuse
def state():
    return dict(cwd=os.getcwd(), env=dict(os.environ), argv=list(sys.argv), files=os.listdir(), torch_rng=torch.get_rng_state().tolist(), rng=random.getstate(),
                numpy_rng=numpy.random.get_state()[1].tolist(), threads=torch.get_num_threads(), dtype=torch.get_default_dtype(),
                matmul=torch.get_float32_matmul_precision(), tf32=torch.backends.cuda.matmul.allow_tf32, cudnn=torch.backends.cudnn.benchmark,
                grad=torch.is_grad_enabled(), deterministic=torch.are_deterministic_algorithms_enabled(), group=torch.distributed.is_initialized(),
                cuda=torch.cuda.is_initialized(), live=threading.active_count(), signal=signal.getsignal(signal.SIGTERM))
before = state()
sys.argv = before["argv"] = ["x", "--no-such-flag"]
for name in {names}:
    __import__(name)
    after = state()
    for key in before:
        assert before[key] == after[key], f"importing {{name}} changes {{key}}"
"""
    ran = subprocess.run([sys.executable, "-B", "-c", script], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "" and ran.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_data_no_network_no_gpu(tmp_path):
    """The scripts alone, copied without data/, with CUDA hidden and no way out: --help answers and writes nothing."""
    for source in ROOT.glob("*.py"):
        shutil.copy(source, tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    code = f"""
import runpy, socket, sys
def refuse(*a, **k): raise AssertionError("network")
socket.socket.connect = socket.create_connection = refuse
for name in {SCRIPTS}:
    sys.argv = [name + ".py", "--help"]
    try:
        runpy.run_path(name + ".py", run_name="__main__")
    except SystemExit as stop:
        assert stop.code == 0, name
"""
    ran = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=120)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    assert ran.stdout.count("--skipless") >= len(SCRIPTS)
    assert all(importlib.import_module(name).__doc__.splitlines()[0] in ran.stdout for name in SCRIPTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


DATA = {"train_lm": "sotu"}                                      # digits8x8 for all others
MARKS = {"train_vit": ("img_size", "28", "224"), "train_lm": ("embed_dim", "128", "768"), "train_dino": ("size", "nano", "small"), "train_mae": ("decoder_dim", "64", "512"), "train_sit": ("size", "nano", "XL")}


@pytest.mark.parametrize("preset", ["laptop", "paper"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_shows_the_defaults_that_hold(monkeypatch, capsys, name, preset):
    """Every "(default: x)" of --help is the value that a run without that flag gets, for each preset; every flag has a help text; and where the default is
    None, which stands for what other flags say, the text tells what."""
    script = importlib.import_module(name)
    monkeypatch.setenv("COLUMNS", "1000")                        # no line is broken within a help text
    with pytest.raises(SystemExit) as stop:
        script.get_args(["--preset", preset, "--help"])
    assert stop.value.code == 0
    shown, said = {}, {}
    for entry in re.split(r"\n  (?=--)", capsys.readouterr().out)[1:]:
        found = re.match(r"--([\w-]+).*?\s{2,}(\S.*?)( \(default: (.*)\))?\n", entry + "\n", re.DOTALL)
        assert found, f"no help: {entry}"
        if found[3]:
            key = found[1].replace("-", "_")
            shown[key], said[key] = found[4], found[2]
    args = vars(script.get_args(["--preset", preset, "--data", DATA.get(name, "digits8x8")]))
    assert set(shown) <= set(args)
    told = {**{k: args[k] for k in shown}, "preset": "laptop", **{k: v for k, v in script.PRESETS[preset].items() if k in ("data", "tokenizer")}}
    for key in told:
        if shown[key] == "None" and "None" in said[key]:
            told[key] = None
    assert shown == {k: str(v) for k, v in told.items()}
    key, *values = MARKS[name]
    assert shown[key] == dict(zip(("laptop", "paper"), values))[preset]
