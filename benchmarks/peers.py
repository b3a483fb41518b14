"""Other tools that show gradients, each used as its own documentation says, with every step observed.

Where a tool has several ways, the cheapest one that still shows gradients is taken.  Versions: ``requirements.txt``.
"""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from benchmarks.hooks import HOOKS
from benchmarks.runners import Configuration, Runner, Seen, SkippedError

PACKAGES = ("torchlens", "torchexplorer", "nansense", "torchspace", "wandb")


def versions() -> dict[str, str]:
    """Versions of the peers that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _load(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        message = f"{name} is not installed: {error}"
        raise SkippedError(message) from error


class TorchLens(Runner):
    """A trace with ``save_grads=True`` and ``log_backward``: it captures anew at each step, as its API wants it."""

    def attach(self) -> None:
        """Nothing: the step captures."""
        self.tool = _load("torchlens")

    def forward(self) -> Tensor:
        """Trace the call; the loss is made of the output that the trace kept."""
        if len(self.built.args) != 1:
            message = "the output of a call with keyword arguments and a loss of its own is not in the trace"
            raise SkippedError(message)
        options = self.tool.options.CaptureOptions(save_grads=True)
        self.trace = self.tool.trace(self.built.model, self.built.args[0], capture=options)
        return self.built.loss(self.trace[self.trace.output_layers[0]].out)

    def backward(self, loss: Tensor) -> None:
        """Backward under capture; then let go of what the trace holds."""
        self.trace.log_backward(loss)
        self.count = int(self.trace.num_saved_grad_ops)
        self.trace.cleanup()

    def seen(self) -> Seen:
        """Whole gradients, one an operation."""
        return Seen(activations=self.count, told="the gradient itself")


class TorchExplorer(Runner):
    """``torchexplorer.watch`` at every step, with nothing behind it that would have to be served."""

    def attach(self) -> None:
        """Watch; in-place activations off and blocks with residuals left out, as its documentation says."""
        tool = _load("torchexplorer")
        left_out: list[type] = []
        try:
            from torchvision.models.resnet import BasicBlock, Bottleneck

            left_out = [BasicBlock, Bottleneck]
        except ImportError:
            pass
        tool.watch(
            self.built.model, log_freq=1, log=["io_grad"], disable_inplace=True, ignore_io_grad_classes=left_out,
            backend="none",
        )  # fmt: skip

    def seen(self) -> Seen:
        """Histograms of per-sample norms for each module that has them."""
        data = [getattr(module, "torchexplorer_metadata", None) for module in self.built.model.modules()]
        calls = [call for found in data if found is not None for call in found.invocation_grad_hists.values()]
        found = sum(len(call.output_hists) for call in calls)
        return Seen(activations=found, told="histogram of norms by sample, inputs and outputs of modules")


class Nansense(Runner):
    """A session that runs freely and folds every batch of every layer into its running statistics."""

    def attach(self) -> None:
        """Start a session without its page, and let it run on."""
        tool = _load("nansense")
        self.session = tool.start(self.built.model, optimizer=self.optimizer)
        self.session.detach()
        self.session.set_stats_scope("all")

    def step(self) -> None:
        """A step inside of a batch."""
        with self.session.batch(phase="train", epoch=0):
            super().step()

    def seen(self) -> Seen:
        """Running statistics by layer."""
        found = self.session.watch_snapshot(include_patches=False).stats
        return Seen(activations=len(found), told="histogram, extrema, by channel")

    def close(self) -> None:
        """End the session."""
        self.session.close()


class NansenseCapture(Runner):
    """The capture of nansense alone, and one norm a node: less than the tool does, the cheapest peer seen."""

    def attach(self) -> None:
        """Trace the model once."""
        _load("nansense")
        from nansense import capture

        graph = capture.try_trace(self.built.model)
        if graph is None:
            message = "nansense cannot trace this model and falls back to module hooks"
            raise SkippedError(message)
        self.capture, self.graph = capture._CaptureInterpreter, graph  # noqa: SLF001  # what its session does
        self.norms: list[float] = []

    def forward(self) -> Tensor:
        """Run under its interpreter, which keeps every value and asks for its gradient."""
        self.kept: dict[str, Tensor] = {}
        return self.built.loss(self.capture(self.graph, self.kept).run(*self.built.args))

    def backward(self, loss: Tensor) -> None:
        """Backward, then all norms in one read."""
        loss.backward()
        grads = [t.grad for t in self.kept.values() if t.requires_grad and t.grad is not None and not t.is_leaf]
        self.norms = torch.stack([grad.norm() for grad in grads]).tolist()
        self.kept = {}

    def seen(self) -> Seen:
        """One norm by node; wrong where the value is changed in place later."""
        return Seen(activations=len(self.norms), told="norm; wrong before an in-place change")


class TorchSpace(Runner):
    """``torchspace.trace`` once, then ordinary steps with ``capture_backward``."""

    def attach(self) -> None:
        """Trace and arm."""
        tool = _load("torchspace")
        if len(self.built.args) != 1:
            message = "torchspace.trace takes one input"
            raise SkippedError(message)
        self.run = tool.trace(self.built.model, input_data=self.built.args[0], mode="train")
        self.built.model.train()

    def backward(self, loss: Tensor) -> None:
        """Backward and the parameters' statistics."""
        self.run.capture_backward(loss)

    def seen(self) -> Seen:
        """Statistics of what every module returned and of the parameters."""
        frames = self.run.runtime.frames if hasattr(self.run, "runtime") else self.run.ir["frames"]
        last = max((frame["step"] for frame in frames), default=0)
        kinds = [frame["kind"] for frame in frames if frame["step"] == last]
        return Seen(
            activations=kinds.count("gradient"), parameters=kinds.count("param_grad"),
            told="10 scalars; also of the values",
        )  # fmt: skip

    def close(self) -> None:
        """Take the hooks off."""
        self.run.detach()


class WandbWatch(Runner):
    """``run.watch`` with ``log_freq=1`` in an offline run, and one ``log`` a step, which sends what was collected."""

    def attach(self) -> None:
        """Begin an offline run in a temporary folder."""
        tool = _load("wandb")
        os.environ["WANDB_SILENT"] = "true"
        self.folder = tempfile.TemporaryDirectory()
        settings = tool.Settings(console="off", x_disable_stats=True)
        self.session = tool.init(mode="offline", dir=self.folder.name, project="benchmark", settings=settings)
        self.session.watch(self.built.model, log="gradients", log_freq=1)
        self.number = 0

    def step(self) -> None:
        """A step, and its line in the log."""
        super().step()
        self.number += 1
        self.session.log({"step": self.number})

    def seen(self) -> Seen:
        """Parameters only."""
        count = sum(p.requires_grad for p in self.built.model.parameters())
        return Seen(parameters=count, told="histogram, parameters only")

    def close(self) -> None:
        """End the run."""
        self.session.unwatch(self.built.model)
        self.session.finish()
        self.folder.cleanup()


PEERS = (
    *HOOKS,
    Configuration("nansense_capture", "nansense, capture alone + norm", NansenseCapture, "peer", apart=True),
    Configuration("nansense", "nansense, statistics of all layers", Nansense, "peer", apart=True),
    Configuration("torchexplorer", "torchexplorer", TorchExplorer, "peer", apart=True),
    Configuration("torchspace", "torchspace", TorchSpace, "peer", apart=True),
    Configuration("torchlens", "torchlens", TorchLens, "peer", apart=True),
    Configuration("wandb_watch", "wandb.watch", WandbWatch, "peer", apart=True),
)
