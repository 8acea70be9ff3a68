"""The comparison with peers: its arithmetic, its turns, and that PyTorch's side trains the same net."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.peers import rates, whole
from benchmarks.peers.rates import Stamp
from benchmarks.peers.turns import Job, Side
from hvd_cifar.models import build

CHECKOUT = Path(__file__).resolve().parent.parent.parent
PEERS = Path(os.environ.get("HVD_CIFAR_PEERS", "~/.cache/hvd_cifar/peers")).expanduser()


def test_a_rate_runs_from_the_first_stamp_to_the_last() -> None:
    stamps = [Stamp(100.0, 30), Stamp(101.0, 40), Stamp(104.0, 50)]
    assert rates.rate(stamps, 256) == 20 * 256 / 4.0


@pytest.mark.parametrize("stamps", [[], [Stamp(1.0, 10)], [Stamp(1.0, 10), Stamp(2.0, 10)]])
def test_no_rate_without_steps_between_stamps(stamps: list[Stamp]) -> None:
    with pytest.raises(ValueError, match="two stamps"):
        rates.rate(stamps, 256)


def test_a_machine_that_slows_down_leaves_paired_ratios_alone() -> None:
    base = [1000.0, 800.0, 500.0, 250.0, 900.0]
    faster = [1.5 * rate for rate in base]
    assert rates.spread(rates.paired(faster, base)) == (1.5, 1.5, 1.5, 5)
    assert rates.spread(faster) == (750.0, 1200.0, 1350.0, 5)
    last = rates.table({"other": base, "ours": faster}, "other").splitlines()[-1]
    assert last == "| ours | 1,200 (750 to 1,350) | 1.500 (1.500 to 1.500) | 5 |"


def test_of_two_repeats_both_are_shown() -> None:
    assert rates.spread([3.0, 1.0]) == (1.0, 2.0, 3.0, 2)


STEPPER = """
import pathlib, subprocess, sys, time
path = pathlib.Path(sys.argv[1])
if len(sys.argv) > 2:  # a launcher and its rank
    sys.exit(subprocess.call([sys.executable, "-c", sys.argv[2], sys.argv[1]]))
step = 0
while True:
    time.sleep(0.01)
    step += 1
    with path.open("a") as file:
        file.write('{"event": "train", "step": %d}\\n' % step)
"""


def test_a_paused_job_does_no_step_and_goes_on_where_it_was(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    side = Side("stepper", [[sys.executable, "-c", STEPPER, str(metrics), STEPPER]], [metrics], 10)
    with Job(side, tmp_path, tmp_path) as job:
        assert job.take_turn(0.1).rate > 0
        job.pause()
        before = metrics.read_text()
        time.sleep(0.1)
        assert metrics.read_text() == before
        job.wake()
        (stamps,) = job.run_for(0.1, 3)
        assert stamps[0].step > before.count("\n")
    after = metrics.read_text()
    time.sleep(0.1)
    assert metrics.read_text() == after


def test_a_side_that_ends_is_told_of_with_its_output(tmp_path: Path) -> None:
    side = Side("broken", [[sys.executable, "-c", "print('no such thing')"]], [tmp_path / "metrics.jsonl"], 10)
    with Job(side, tmp_path, tmp_path) as job, pytest.raises(SystemExit, match=r"broken ended(.|\n)*no such thing"):
        job.take_turn(20.0)


COUNTER = (
    "import pathlib, sys, time\nfor i in range(6): time.sleep(0.05); pathlib.Path(sys.argv[1]).open('a').write('x')"
)


def test_whole_runs_take_turns_to_their_ends(tmp_path: Path) -> None:
    sides = {}
    for name in ("one", "other"):
        sides[name] = Side(name, [[sys.executable, "-c", COUNTER, str(tmp_path / name)]], [], 1)
    spent = whole.in_turns(sides, tmp_path, 0.1, random.Random(0))
    assert set(spent) == set(sides) and min(spent.values()) > 0
    assert all((tmp_path / name).read_text() == "xxxxxx" for name in sides)


def test_a_whole_run_that_fails_is_told_of_with_its_output(tmp_path: Path) -> None:
    broken = Side("broken", [[sys.executable, "-c", "raise SystemExit('no such thing')"]], [], 1)
    with pytest.raises(SystemExit, match=r"broken failed(.|\n)*no such thing"):
        whole.in_turns({"broken": broken}, tmp_path, 20.0, random.Random(0))


MEASURER = """
import pathlib, random, sys
from benchmarks.peers import turns, whole
turns.end_on_sigterm()
sleeper = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
sides = {str(i): turns.Side(str(i), [sleeper] * 20, [], 1) for i in range(2)}
whole.in_turns(sides, pathlib.Path(sys.argv[1]), 0.5, random.Random(0))
"""


def test_sigterm_twice_leaves_no_side_behind(tmp_path: Path) -> None:
    measurer = subprocess.Popen([sys.executable, "-c", MEASURER, str(tmp_path)], cwd=CHECKOUT)
    until = time.monotonic() + 60
    logs = [tmp_path / f"{i}-output" / "log" for i in range(2)]
    while sum(len(log.read_text().split()) for log in logs if log.exists()) < 40:
        assert time.monotonic() < until and measurer.poll() is None
        time.sleep(0.05)
    while measurer.poll() is None:  # as timeout and a person at once would
        measurer.terminate()
        time.sleep(0.001)
    assert measurer.returncode == 143
    pids = [int(word) for log in logs for word in log.read_text().split()]
    assert len(pids) == 40 and not any(psutil.pid_exists(pid) for pid in pids)


# Keras pads a convolution of stride 2 below and to the right alone, PyTorch's layer all around: here alike.
TORCH_SIDE = """
import sys, numpy, torch
from benchmarks.peers.torch_resnet import ResNet
given = numpy.load(sys.argv[1])
net = ResNet(20).double()
for m in list(net.modules()):
    if isinstance(m, torch.nn.Conv2d) and m.stride == (2, 2):
        m.padding = (0, 0)
        m.register_forward_pre_hook(lambda _, inputs: torch.nn.functional.pad(inputs[0], (0, 1, 0, 1)))
parameters = list(net.parameters())
with torch.no_grad():
    for i, p in enumerate(parameters):
        value = torch.from_numpy(given[f"arr_{i}"])
        p.copy_({4: lambda: value.permute(3, 2, 0, 1), 2: lambda: value.T, 1: lambda: value}[value.ndim]())
images = torch.from_numpy(given["images"]).permute(0, 3, 1, 2)
logits = net(images)
logits.square().sum().backward()
found = {"logits": logits.detach().numpy(), "gradient": net.conv.weight.grad.permute(2, 3, 1, 0).numpy()}
numpy.savez(sys.argv[2], count=sum(p.numel() for p in parameters), mean=net.norm.running_mean.numpy(), **found)
"""


@pytest.mark.skipif(not (PEERS / "bin" / "python").exists(), reason=f"needs PyTorch; no environment in {PEERS}")
def test_pytorchs_resnet20_is_ours(tmp_path: Path) -> None:
    import tensorflow as tf

    model = build("resnet20", 32, "float64").model
    random = np.random.default_rng(0)
    for v in model.trainable_variables:
        v.assign(v.numpy() + 0.1 * random.standard_normal(v.shape))
    images = random.standard_normal((4, 32, 32, 3))
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_sum(tf.square(logits))
    weights = [v.numpy() for v in model.trainable_variables]
    given, answer = tmp_path / "given.npz", tmp_path / "answer.npz"
    np.savez(given, *weights, images=images)
    words = [str(PEERS / "bin" / "python"), "-c", TORCH_SIDE, str(given), str(answer)]
    subprocess.run(words, cwd=CHECKOUT, check=True, timeout=120)
    found = np.load(answer)
    assert int(found["count"]) == 269_722
    np.testing.assert_allclose(found["logits"], logits.numpy(), rtol=1e-9, atol=1e-12)
    gradient = tape.gradient(loss, model.trainable_variables[0].value)
    np.testing.assert_allclose(found["gradient"], gradient.numpy(), rtol=1e-7, atol=1e-10)
    mean = next(v for v in model.variables if v.path.endswith("moving_mean"))
    np.testing.assert_allclose(found["mean"], mean.numpy(), rtol=1e-9, atol=1e-12)
