"""The checks of `scripts/gpu_check`: each finds something wrong by raising, and prints figures."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1]))
for name in [name for name in os.environ if name.startswith("AUTO_MIXED_PRECISION")]:
    del os.environ[name]
os.environ.update(AUTO_MIXED_PRECISION_LOG="quiet", AUTO_MIXED_PRECISION_DTYPE="float16")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import checkpoint as torchs  # noqa: E402 - its functions are patched

import autoamp  # noqa: E402
from autoamp import activation, plan, policyfile  # noqa: E402
from autoamp.categories import FLOAT32, LOWER, overload  # noqa: E402

LEFT_OUT = 3
"""The exit code of a check that this device cannot have."""
SCALE = 65536.0


class Net(nn.Module):
    """A bit of everything that training has: convolution, norm, products, softmax."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.inner, self.last = nn.Linear(width, 2 * width), nn.Linear(2 * width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.last(torch.nn.functional.gelu(self.inner(x)).softmax(-1) * 4)


def data(device: str, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(16, 3, size, size, generator=made),
        torch.randint(0, 4, (16,), generator=made),
    )
    return x.to(device), y.to(device)


def net(device: str) -> Net:
    torch.manual_seed(0)
    return Net().to(device)


def loss_of(model: nn.Module, device: str) -> torch.Tensor:
    x, y = data(device)
    return nn.functional.cross_entropy(model(x), y)


@contextlib.contextmanager
def mixed(policy: str = "torch", **variables: str) -> Iterator[Any]:
    """autoamp is on."""
    names = {f"AUTO_MIXED_PRECISION_{name}": value for name, value in variables.items()}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    autoamp.enable(policy)
    try:
        yield activation.session()
    finally:
        autoamp.disable()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def by_hand(
    device: str, steps: int, scale: float = SCALE, **options: Any
) -> tuple[Any, list[float]]:
    """A training with `torch.amp` as its documentation has it: weights, and the scales."""
    model = net(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler(device, init_scale=scale)
    scales = []
    for _ in range(steps):
        with torch.autocast(device, torch.float16):
            output = model(data(device)[0])
        loss = nn.functional.cross_entropy(output.float(), data(device)[1])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return list(model.state_dict().values()), scales


def plainly(device: str, steps: int, **options: Any) -> tuple[Any, list[float]]:
    """The same without a word of mixed precision."""
    model = net(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, **options)
    scales = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, device).backward()
        optimizer.step()
        session = activation.session()
        if session is not None:
            scales.append(session.loss_scale.state()["scale"])
    return list(model.state_dict().values()), scales


def furthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference, in parts of the largest number there."""
    pairs = [(a.double(), b.double()) for a, b in zip(some, others, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(what)


def lists(device: str) -> None:
    """Ops of one operand give what the plan says, for every shipped policy."""
    count = 0
    for policy in policyfile.shipped():
        with mixed(policy):
            model = nn.Linear(2, 2).to(device)
            model(torch.ones(1, 2, device=device))  # the kernels are put in
            for row in plan.rows(activation.session().policy, device, "float16"):
                if row.category in (LOWER, FLOAT32) and not row.conditions and takes_one(row.op):
                    given = torch.float32 if row.category == LOWER else torch.float16
                    wanted = torch.float16 if row.category == LOWER else torch.float32
                    found = result_of(row.op, device, given)
                    if found is not None and row.fix is None:
                        require(found is wanted, f"{policy}: {row.op} gives {found}")
                        count += 1
    print(f"{count} ops of {len(list(policyfile.shipped()))} policies")


def takes_one(op: str) -> bool:
    needed = [a for a in overload(op)._schema.arguments if not a.has_default_value()]
    is_pure = not any(a.alias_info for a in overload(op)._schema.arguments)
    return is_pure and [str(a.type) for a in needed] == ["Tensor"]


def result_of(op: str, device: str, given: torch.dtype) -> torch.dtype | None:
    """The dtype of its result inside a region, None where it does not take such an operand."""

    class Calls(nn.Linear):
        def forward(self, x: torch.Tensor) -> list[torch.dtype]:
            result = overload(op)(x)
            first = result if isinstance(result, torch.Tensor) else result[0]
            return [first.dtype] if first.is_floating_point() else []

    with torch.no_grad(), autoamp.off():
        x = torch.rand(4, 4, device=device).clamp(0.1, 0.9).to(given)
        module = Calls(2, 2, device=device)
    try:
        with torch.no_grad():
            found = module(x)
    except RuntimeError:
        return None
    return found[0] if found else None


def twins(device: str) -> None:
    """Training as by hand: to the bit, or as far as by hand from itself."""
    expected, again = by_hand(device, 20)[0], by_hand(device, 20)[0]
    with mixed():
        found = plainly(device, 20)[0]
    noise, apart = furthest(again, expected), furthest(found, expected)
    print(f"after 20 steps {apart:.1e} from hand-written, which is {noise:.1e} from itself")
    require(apart <= max(2 * noise, 0.0), "it is further away")


def overflow(device: str) -> None:
    """A scale that is too high: the same steps skipped, the same scales."""
    expected = by_hand(device, 40, 2.0**30)[1]
    with mixed(LOSS_SCALE="1073741824"):
        fixed = plainly(device, 2)[1]
    require(fixed == [2.0**30] * 2, f"a static scale moved: {fixed}")
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "high.yaml")
        policy.write_text("extends: torch\nloss_scale: {init: 1073741824, max: 4294967296}\n")
        with mixed(str(policy)):
            found = plainly(device, 40)[1]
    print(f"scales from {expected[0]:.10g} to {expected[-1]:.10g}, as GradScaler's")
    require(found == expected, f"{found} is not {expected}")


def checkpoints(device: str) -> None:
    """Both kinds of checkpoint give the gradients of a model without."""
    results = []
    for reentrant in (None, True, False):
        model = net(device)
        x, y = data(device)
        x.requires_grad_()
        with mixed("default"):
            run: Callable[..., Any] = model
            if reentrant is not None:
                run = functools.partial(torchs.checkpoint, model, use_reentrant=reentrant)
            nn.functional.cross_entropy(run(x), y).backward()
        results.append([p.grad for p in model.parameters()])
    worst = max(furthest(found, results[0]) for found in results[1:])
    print(f"gradients {worst:.1e} from those without checkpoints")
    require(worst < 1e-2, "that is too far")


class Cube(torch.autograd.Function):
    """x cubed; its backward notes what it is given in `seen`."""

    seen: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Cube.seen.append(grad.clone())
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def hooks(device: str) -> None:
    """Hooks and custom Functions see true gradients, on the engine's threads too."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        first, last = nn.Linear(8, 8).to(device), nn.Linear(8, 1).to(device)
        seen: list[torch.Tensor] = []
        Cube.seen = seen
        first.weight.register_hook(lambda grad: seen.append(grad.clone()))
        first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        h = first(torch.ones(4, 8, device=device))
        h.register_hook(lambda grad: seen.append(grad.clone()))
        last(Cube.apply(h)).mean().backward()
        return [*seen, first.weight.grad, last.weight.grad]

    expected = run()
    with mixed("default"):
        found = run()
    require(len(found) == len(expected), "some were not called")
    apart = furthest(found, expected)
    print(f"{len(found)} gradients, at most {apart:.1e} from float32's")
    require(apart < 2e-2, "they are not true")


def fused(device: str) -> None:
    """Fused optimizers: as by hand, and nobody waits for the device."""
    expected = by_hand(device, 15, fused=True)[0]
    with mixed():
        found = plainly(device, 15, fused=True)[0]
    apart = furthest(found, expected)
    require(
        apart <= 2 * furthest(by_hand(device, 15, fused=True)[0], expected), f"{apart:.1e} away"
    )
    waits = "not asked of a CPU"
    if device == "cuda":
        with mixed("default"):
            model = net(device)
            optimizer = torch.optim.Adam(model.parameters(), fused=True)
            x, y = data(device)
            for step in range(30):
                if step == 20:  # later than what the first steps and models cost
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        waits = "no synchronisation in 10 steps"
    print(f"{apart:.1e} from hand-written; {waits}")


def graphs(device: str) -> None:
    """A training step can be captured as a CUDA graph, and replays right."""
    if device != "cuda":
        print("only CUDA has graphs")
        raise SystemExit(LEFT_OUT)
    with mixed("default", DTYPE="bfloat16"):
        model = net(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = data(device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(11):
                optimizer.zero_grad(set_to_none=True)
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        losses = []
        for _ in range(20):
            graph.replay()
            losses.append(float(loss))
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in 20 replays")
    require(losses[-1] < losses[0], "it does not train")


def compiled(device: str) -> None:
    """torch.compile with inductor: near eager autoamp."""
    with mixed("default"):
        eager = net(device)
        loss_of(eager, device).backward()
        model = net(device)
        run = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")
        x, y = data(device)
        nn.functional.cross_entropy(run(x), y).backward()
    apart = furthest([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    print(f"gradients {apart:.1e} from eager ones")
    require(apart < 3e-2, "that is too far")


def channels_last(device: str) -> None:
    """A model in channels_last gives what it gives in the usual format."""
    with mixed("default"):
        usual = net(device)
        loss_of(usual, device).backward()
        model = net(device).to(memory_format=torch.channels_last)
        x, y = data(device)
        x = x.contiguous(memory_format=torch.channels_last)
        nn.functional.cross_entropy(model(x), y).backward()
    apart = furthest([p.grad for p in model.parameters()], [p.grad for p in usual.parameters()])
    print(f"gradients {apart:.1e} from the usual format's")
    require(apart < 3e-2, "that is too far")


def weights(device: str) -> None:
    """Casts of weights that are kept for evaluation: those of now, on every stream."""
    model = net(device).eval()
    x = data(device)[0]

    def expected() -> torch.Tensor:
        with torch.autocast(device, torch.float16):
            return model(x).float()

    with torch.no_grad(), mixed("default") as session:
        for edit in (lambda w: None, lambda w: w.mul_(2), lambda w: w.data.mul_(0.5)):
            edit(model.inner.weight)
            found = [model(x) for _ in range(3)]
            apart = max(furthest([one], [expected()]) for one in found)
            require(apart < 1e-3, f"{apart:.1e} from fresh casts")
        kept = len(session.weights._kept)
        if device == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                elsewhere = model(x)
            torch.cuda.current_stream().wait_stream(side)
            require(torch.equal(elsewhere, model(x)), "another stream, another result")
    require(kept > 0, "none were kept")
    print(f"{kept} kept; those of now after edits")


def performance(device: str) -> None:
    """The policy `fast`: an optimizer that is fused for its step alone, switches put back."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    with mixed("fast"):
        model = net(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(15):
            optimizer.zero_grad()
            loss = loss_of(model, device)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        saved = optimizer.state_dict()
    counts = [state["step"] for state in (*saved["state"].values(), *optimizer.state.values())]
    require(losses[-1] < losses[0], "it does not train")
    require(all(count.is_cpu and count == 15 for count in counts), f"steps counted: {counts}")
    require(optimizer.param_groups[0]["fused"] is None, "the group says fused")
    after = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    require(after == before, f"switches are {after}, and were {before}")
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; steps are counted on the host again")


def memory(device: str) -> None:
    """What a step of a large model needs at most, beside float32."""
    if device != "cuda":
        print("torch counts the bytes of CUDA only")
        raise SystemExit(LEFT_OUT)

    def peak() -> int:
        torch.manual_seed(0)
        layers = [part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.GELU())]
        model = nn.Sequential(*layers).to(device)
        x = torch.randn(16384, 1024, device=device)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(x).pow(2).mean().backward()
        return torch.cuda.max_memory_allocated()

    full = peak()
    with mixed("default"):
        found = peak()
    print(f"{found / 2**20:.0f} MiB, float32 {full / 2**20:.0f} MiB: {found / full:.2f}")
    require(found < 0.9 * full, "too little is saved")


def speed(device: str) -> None:
    """Milliseconds a step, medians: float32, TF32, hand-written, autoamp; and a decode loop."""
    width, batch, steps = (2048, 4096, 20) if device == "cuda" else (32, 16, 3)
    if device == "cuda":
        torch.set_float32_matmul_precision("highest")
    model = nn.Sequential(*[p for _ in range(4) for p in (nn.Linear(width, width), nn.ReLU())])
    model, x = model.to(device), torch.randn(batch, width, device=device)
    small = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)]).to(device)
    token = torch.randn(1, 64, device=device)

    def training() -> None:
        model(x).pow(2).mean().backward()

    def decoding() -> None:
        with torch.no_grad():
            for _ in range(10):
                small(token)

    for what, call in (("training", training), ("decoding", decoding)):
        found = {"float32": time_of(call, device, steps)}
        with torch.autocast(device, torch.float16):
            found["by hand, one context"] = time_of(call, device, steps)
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
            found["TF32"] = time_of(call, device, steps)
            torch.set_float32_matmul_precision("highest")
        with mixed("default"):
            for _ in range(12):
                call()
            found["autoamp"] = time_of(call, device, steps)
        print(what, ", ".join(f"{name} {ms:.3g} ms" for name, ms in found.items()))


def time_of(call: Callable[[], None], device: str, steps: int) -> float:
    """Milliseconds, the median."""
    seconds = []
    for _ in range(steps + 3):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[3:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


CHECKS: dict[str, Callable[[str], None]] = {
    "lists": lists,
    "twins": twins,
    "overflow": overflow,
    "checkpoints": checkpoints,
    "hooks": hooks,
    "fused": fused,
    "graphs": graphs,
    "compile": compiled,
    "channels_last": channels_last,
    "weights": weights,
    "performance": performance,
    "memory": memory,
    "speed": speed,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # tiny half precision models get slower by more
    CHECKS[sys.argv[1]](sys.argv[2])
