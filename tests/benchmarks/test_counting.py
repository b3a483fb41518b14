from __future__ import annotations

import torch

from benchmarks.counting import Counts, count, host_reads


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def test_views_are_no_kernels_and_bytes_are_those_of_the_arguments() -> None:
    x, y = torch.ones(3, 4), torch.ones(4)
    found = count(lambda: (x.reshape(4, 3), x.t(), x[0], x + y))
    assert (found.kernels, found.bytes_read) == (1, 4 * (12 + 4))
    assert found.operators == {"add": 1}


def test_what_is_written_into_is_not_read() -> None:
    x, slot = torch.ones(5), torch.empty(())
    found = count(lambda: torch.linalg.vector_norm(x, out=slot))
    assert (found.kernels, found.bytes_read, found.allocations) == (1, 20, 0)


def test_hooks_of_the_backward_pass_are_seen() -> None:
    def step(kernels: int) -> Counts:
        value = leaf(3) * 2

        def hook(grad: torch.Tensor) -> None:
            for _ in range(kernels):
                grad + 1

        value.register_hook(hook)
        return count(lambda: value.sum().backward())

    assert (step(3) - step(0)).kernels == 3
    assert (step(3) - step(0)).operators == {"add": 3}


def test_an_allocation_that_a_hook_keeps_outlives_it() -> None:
    kept = []

    def step(*, keep: bool) -> Counts:
        value = leaf(3) * 2

        def hook(grad: torch.Tensor) -> None:
            made = grad + 1
            if keep:
                kept.append(made)

        value.register_hook(hook)
        return count(lambda: value.sum().backward())

    dropped, stays = step(keep=False), step(keep=True)
    assert (dropped.outliving, stays.outliving) == (0, 1)
    assert stays.allocations == dropped.allocations
    assert (stays - dropped).left == 1
    assert (stays - dropped).left_bytes == kept[0].untyped_storage().nbytes()


def test_a_scalar_read_is_a_sync() -> None:
    x = torch.ones(3)
    assert count(lambda: (x.sum().item(), float(x[0]))).syncs == 2
    assert count(x.sum).syncs == 0


def test_a_difference_keeps_what_is_more_and_what_is_less() -> None:
    x = torch.ones(3)
    found = count(lambda: x.add(x).sin_()) - count(lambda: x.add(x).cos_())
    assert found.kernels == 0
    assert found.operators == {"sin_": 1, "cos_": -1}


def test_host_reads_count_copies_and_not_what_is_on_the_host() -> None:
    x = torch.ones(3)
    with host_reads() as reads:
        here = (x * 2).to("cpu")
        here[:2].reshape(2).tolist()
        here.sum().item()
    assert reads.number == 1
    with host_reads() as reads:
        x.sum().item()
        x.tolist()
        x.to(torch.float64)
        bool(x[0] > 0)
        x.to(device=torch.device("cpu"))  # from here on x is on the host: there is no copy of it on the CPU
        x.tolist()
    assert reads.number == 4
