"""Channels-last convolutions by policy: the same training, and nobody sees the layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp import formats


@pytest.fixture
def laid_out(mixed: Any, tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "last.yaml").write_text(
        "extends: default\nperformance: {memory_format: channels_last}\n"
    )
    return lambda dtype="bfloat16": mixed(str(tmp_path / "last.yaml"), dtype, LOG="quiet")


class Net(nn.Module):
    """Convolutions, a norm, an upsampling one, and a view of the result, as scripts write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.head = nn.Linear(4 * 12 * 12, 5)
        self.layouts: list[bool] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.norm(self.first(x)))
        self.layouts.append(x.is_contiguous())
        x = self.up(torch.relu(self.second(x)))
        return self.head(x.view(x.size(0), -1)), x.float() * 2


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def train(net: Net, steps: int = 4) -> list[float]:
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
    for _ in range(steps):
        scores, image = net(X)
        loss = scores.square().mean() + image.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_cast_in_two_steps_is_that_in_one_and_so_is_its_gradient():
    weight, gradient = torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(4, 3, 3, 3)
    gradient = gradient.bfloat16().contiguous(memory_format=torch.channels_last)
    found = formats.cast(weight, torch.bfloat16, torch.channels_last)
    expected = weight.to(torch.bfloat16, memory_format=torch.channels_last)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    arriving = []
    found.grad_fn.next_functions[0][0].register_prehook(lambda grads: arriving.append(grads[0]))
    (back,) = torch.autograd.grad(found, weight, gradient)
    assert torch.equal(back, torch.autograd.grad(expected, weight, gradient)[0])
    assert back.is_contiguous()
    assert [(one.dtype, one.is_contiguous()) for one in arriving] == [(torch.bfloat16, True)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_layout_changes_the_losses_by_rounding_alone(mixed, laid_out, dtype):
    exact = train(Net())
    mixed("default", dtype, LOG="quiet")
    as_it_is, net = train(Net()), Net()
    session = laid_out(dtype)
    last = train(net)
    assert net.layouts == [False] * len(net.layouts)
    assert last == pytest.approx(as_it_is, rel=2e-3)
    assert last == pytest.approx(exact, rel=1e-2)
    assert session.demotions == []


def test_nobody_sees_the_layout_in_results_parameters_gradients_and_checkpoints(laid_out):
    laid_out()
    net = Net()
    train(net, 2)
    scores, image = net(X)
    assert image.is_contiguous()
    image.view(-1)
    assert all(p.is_contiguous() and p.grad.is_contiguous() for p in net.parameters())
    assert all(value.is_contiguous() for value in net.state_dict().values())
    assert scores.dtype is image.dtype is torch.float32


def test_a_script_that_works_with_channels_last_gets_it_back(laid_out):
    laid_out()
    net = nn.Conv2d(3, 4, 3)
    assert net(X).is_contiguous()
    result = net(X.to(memory_format=torch.channels_last))
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_what_is_written_to_a_view_is_written_to_the_tensor(laid_out):
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            y.view(-1)[0] = 7.0
            return y

    laid_out()
    net = Writes()
    result = net(X)
    assert result.flatten()[0] == 7
    result.sum().backward()
    assert torch.isfinite(net.conv.weight.grad).all()


def test_hooks_and_custom_functions_may_view_what_they_are_given(laid_out):
    seen: list[tuple[int, ...]] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert x.is_contiguous()
            return x.view(-1).mul(2).view(x.shape)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.view(-1).mul(2).view(gradient.shape)

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x.register_hook(lambda gradient: seen.append(gradient.view(-1).shape))
            return self.second(Double.apply(x))

    session = laid_out()
    net = Hooked()
    net(X).sum().backward()
    assert session.demotions == []
    assert seen == [(2 * 4 * 4 * 4,)]
    assert net.first.weight.grad is not None


def test_a_convolution_without_a_weight_is_refused_in_torch_s_words(laid_out):
    class Wrong(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv2d(x)

    with pytest.raises(TypeError) as plain:
        Wrong(1, 1)(X)
    laid_out()
    with pytest.raises(TypeError) as caught:
        Wrong(1, 1)(X)
    assert str(caught.value) == str(plain.value)


def test_views_that_float32_refuses_are_refused(laid_out):
    laid_out()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        torch.randn(2, 3, 4, 5).transpose(1, 2).view(-1)
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).view(7)


def test_other_convolutions_and_a_policy_without_a_word_stay_as_they_are(mixed, laid_out):
    net = Net()
    mixed("default", "bfloat16", LOG="quiet")
    net(X)
    assert net.layouts == [True] * len(net.layouts)
    laid_out()
    assert nn.Conv1d(3, 4, 3)(torch.randn(2, 3, 9)).is_contiguous()
    autoamp.disable()
    assert "view" not in vars(torch.Tensor)
