"""PyTorch's step of the same nets: eager, compiled and as a CUDA graph; `python -m benchmarks.gpu` starts it.

Runs where PyTorch is. Channels last, the fused optimizer, autocast to bfloat16, TF32. `fast` stands beside airbench94.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.serve import serve
from benchmarks.peers import airbench, ddp
from benchmarks.peers.torch_views import decaying


class Work:
    """A net, its optimizer, what follows an update, and a batch on the device."""

    def __init__(self, model: str, precision: str, examples: int, device: str) -> None:
        torch.manual_seed(0)
        self.follow: Callable[[], None] = lambda: None
        if model == "fast":
            net: Any = airbench.Net()
            self.net = net.to(device, memory_format=torch.channels_last)
            self.optimizer = airbench.make_optimizer(self.net)
            self.loss_of: Any = nn.CrossEntropyLoss(label_smoothing=airbench.SMOOTHING, reduction="sum")
        else:
            work = ddp.work_of(model, 128)
            self.net = work.net.to(device, memory_format=torch.channels_last)
            groups = decaying(self.net, work.decayed, work.weight_decay)
            self.optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=work.momentum, fused=True)
            self.loss_of = nn.CrossEntropyLoss()
            if work.ema_decay:
                self.follow = ddp.MovingAverage(self.net, work.ema_decay).update
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-6 if model == "fast" else 1e-3  # weights stay finite on one batch
        side = 24 if model == "tutorial" else 32
        images = torch.randn(examples, 3, side, side, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 10, (examples,), device=device)
        self.autocast = {"device_type": device, "dtype": torch.bfloat16, "enabled": precision == "mixed_bfloat16"}

    def step(self, net: Any) -> Any:
        """Forward, backward, update; the loss."""
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast(**self.autocast):
            logits = net(self.images)
        loss = self.loss_of(logits.float(), self.labels)
        loss.backward()
        self.optimizer.step()
        self.follow()
        return loss


def repeated(work: Work, form: str, device: str) -> Callable[[int], None]:
    """What repeats a form of the step.

    Raises:
        ValueError: where the form needs a GPU.
    """
    if "graph" in form and device != "cuda":
        raise ValueError("CUDA graphs need a GPU")
    net = torch.compile(work.net) if "compile" in form else work.net

    def once() -> Any:
        return work.step(net)

    def repeat(steps: int) -> None:
        for _ in range(steps):
            loss = once()
        loss.item()  # waits for the device

    if net is not work.net:
        once()  # compiles
    if "graph" not in form:
        return repeat
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        repeat(3)  # allocations, before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = once()

    def replay(steps: int) -> None:
        for _ in range(steps):
            graph.replay()
        loss.item()

    return replay


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True

    def make(name: str) -> Callable[[int], None]:
        work = Work(given.model, given.precision, given.batch_size, device)
        return repeated(work, name.removeprefix("PyTorch, "), device)

    def reset() -> int:
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())

    serve(make, *((reset, torch.cuda.max_memory_allocated) if device == "cuda" else ()))


if __name__ == "__main__":
    main()
