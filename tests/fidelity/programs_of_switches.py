"""Programs that throw torch's switches: gradient mode, precision, backends, modes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fidelity.harness import Program, program


@program
class FrozenAroundACall(Program):
    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.a.parameters():
            parameter.requires_grad = False
        h = self.a(x)
        for parameter in self.a.parameters():
            parameter.requires_grad = True
        return self.b(h.tanh())


@program
class FrozenInTheLoop(Program):
    def change(self, i: int) -> None:
        self.a.requires_grad_(i not in {2, 3})
        self.b.bias.requires_grad_(i < 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@program
class BackboneWithoutGradientsWhileFrozen(Program):
    def change(self, i: int) -> None:
        self.a.requires_grad_(i >= 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(any(p.requires_grad for p in self.a.parameters())):
            h = self.a(x).tanh()
        return self.b(h)


@program
class PartsWithoutGradients(Program):
    @torch.no_grad()
    def targets(self, x: Tensor) -> Tensor:
        return self.a(x).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.b(x).abs().mean()
            with torch.enable_grad():
                h = self.a(x * 2)
        return self.b(h) / scale - self.targets(x)


@program
class ValidationBetweenSteps(Program):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.norm(self.a(x)), 0.2, self.training))

    def step(self, i: int) -> Any:
        out = super().step(i)
        self.eval()
        with torch.inference_mode() if i % 2 else torch.no_grad():
            valid = self(self.inputs(i))
        self.train()
        return out, valid.clone(), valid.is_inference()


@program
class AttentionBackend(Program):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def inputs(self, i: int) -> Tensor:
        return torch.randn(2, 37, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        with sdpa_kernel(SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, k, v)
        return y + F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


@program
class AutocastInside(Program):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                h = h.float() + self.b(x)
            return self.b(h).float()


@program
class AutocastAround(Program):
    def forward(self, x: Tensor) -> Tensor:
        gain = 2 if torch.is_autocast_enabled("cpu") else 1
        return self.b(self.a(x).tanh()) * gain

    def step(self, i: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=i >= 3):
            out = self(self.inputs(i))
            loss = out.float().square().mean()
        loss.backward()
        return out


@program
class SwitchesThatPythonReads(Program):
    def change(self, i: int) -> None:
        torch.use_deterministic_algorithms(i >= 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * 2 if torch.are_deterministic_algorithms_enabled() else h)


@program
class BackendFlags(Program):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            h = self.convolution(x[:, None]).mean(1)
        return self.b(h) * (2 if torch.backends.mkldnn.enabled else 3)


@program
class DefaultDtype(Program):
    def change(self, i: int) -> None:
        if i == 3:
            torch.set_default_dtype(torch.float64)
            self.double()

    def inputs(self, i: int) -> Tensor:
        return torch.randn(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + torch.rand(8)


@program
class DefaultDevice(Program):
    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            noise = torch.randn(8)
        return self.b(self.a(x)) + noise


@program
class AnomalyDetection(Program):
    def step(self, i: int) -> Any:
        with torch.autograd.set_detect_anomaly(i == 3):
            return super().step(i)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sigmoid()


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        result = func(*args, **kwargs or {})
        return result * 2 if self.names[-1] == "tanh" else result


@program
class FunctionModeAround(Program):
    """Every call of torch as the user's mode sees it, each once."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(self.a(x).sin()) + x)

    def step(self, i: int) -> Any:
        with Counting() as mode:
            out = self(self.inputs(i))
        names = list(mode.names)
        out.square().mean().backward()
        return out, names


@program
class FunctionModeAroundTheWholeStep(Program):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(self.a(x).sin()) + x)

    def step(self, i: int) -> Any:
        with Counting() as mode:
            out = super().step(i)
        return out, list(mode.names)


@program
class FunctionModeInside(Program):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with Counting() as mode:
            h = torch.tanh(h) + self.b(h)
        self.names = list(mode.names)
        return h

    def state(self) -> Any:
        return self.names


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


@program
class DispatchModeInside(Program):
    """The operators of a part of the forward, as a mode below autograd sees them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with Operators() as mode:
            h = torch.tanh(h) + self.b(h)
        self.names = list(mode.names)
        return h

    def state(self) -> Any:
        return self.names


@program
class DispatchModeAroundTheWholeStep(Program):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())

    def step(self, i: int) -> Any:
        with Operators() as mode:
            out = super().step(i)
        return out, list(mode.names)


@program
class SavedTensorsPacked(Program):
    def __init__(self) -> None:
        super().__init__()
        self.packed: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            self.packed.append(f"pack {tuple(tensor.shape)}")
            return tensor.detach().clone()

        def unpack(tensor: Tensor) -> Tensor:
            self.packed.append(f"unpack {tuple(tensor.shape)}")
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            h = self.a(x).tanh()
        return self.b(h)

    def state(self) -> Any:
        return list(self.packed)
