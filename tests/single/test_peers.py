"""The comparison with peers: PyTorch's side trains the same net."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import nets

CHECKOUT = Path(__file__).resolve().parent.parent.parent
PEERS = Path(os.environ.get("HVD_CIFAR_PEERS", "~/.cache/hvd_cifar/peers")).expanduser()
NEEDS_TORCH = pytest.mark.skipif(not (PEERS / "bin/python").exists(), reason=f"needs PyTorch; none is in {PEERS}")


def test_pytorchs_side_reads_the_data_with_numpy_alone() -> None:
    """Its environment has PyTorch, NumPy and what these need."""
    hidden = ["keras", "tensorflow", "pydantic", "click", "psutil", "PIL"]
    script = f"import sys; sys.modules.update(dict.fromkeys({hidden}))"
    script += "; import hvd_cifar.data.cifar, hvd_cifar.data.sampler, benchmarks.gpu.serve"
    subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, check=True, timeout=60)


# Keras pads a convolution of stride 2 below and to the right alone, PyTorch's layer all around: here alike.
TORCH_SIDE = """
import sys, numpy, torch
from benchmarks.peers import ddp
given = numpy.load(sys.argv[1])
net = ddp.work_of(sys.argv[3], 256).net.double()
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
found = {"logits": logits.detach().numpy(), "gradient": parameters[0].grad.permute(2, 3, 1, 0).numpy()}
if hasattr(net.norm, "running_mean"):
    found["mean"] = net.norm.running_mean.numpy()
numpy.savez(sys.argv[2], count=sum(p.numel() for p in parameters), **found)
"""


@NEEDS_TORCH
@pytest.mark.parametrize(
    "name, side, parameters",
    [("resnet20", 32, 269_722), ("tutorial", 24, 1_068_298)],
)
def test_pytorchs_net_is_ours(name: str, side: int, parameters: int, tmp_path: Path) -> None:
    import tensorflow as tf

    # With this seed none of the logits near 100 comes so near 0 that rounding shows.
    model = nets.build(name, side, "float64", seed=0).model
    random = np.random.default_rng(0)
    for v in model.trainable_variables:
        v.assign(v.numpy() + 0.1 * random.standard_normal(v.shape))
    images = random.standard_normal((4, side, side, 3))
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_sum(tf.square(logits))
    weights = [v.numpy() for v in model.trainable_variables]
    given, answer = tmp_path / "given.npz", tmp_path / "answer.npz"
    np.savez(given, *weights, images=images)
    words = [str(PEERS / "bin" / "python"), "-c", TORCH_SIDE, str(given), str(answer), name]
    subprocess.run(words, cwd=CHECKOUT, check=True, timeout=120)
    found = np.load(answer)
    assert int(found["count"]) == parameters
    np.testing.assert_allclose(found["logits"], logits.numpy(), rtol=1e-9, atol=1e-12)
    gradient = tape.gradient(loss, model.trainable_variables[0].value)
    np.testing.assert_allclose(found["gradient"], gradient.numpy(), rtol=1e-7, atol=1e-10)
    means = [v for v in model.variables if v.path.endswith("moving_mean")]
    assert bool(means) == ("mean" in found)
    if means:
        np.testing.assert_allclose(found["mean"], means[0].numpy(), rtol=1e-9, atol=1e-12)
