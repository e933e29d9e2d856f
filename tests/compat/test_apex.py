"""Scripts written for Apex run as they are, in the precision that their opt level meant."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoamp

FP16 = {"AUTO_MIXED_PRECISION": "torch", "AUTO_MIXED_PRECISION_DTYPE": "float16"}
NETS = """
import torch
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 16, 5)
    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x)))
        return self.fc(x.flatten(1))

def loader(steps=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (torch.randn(4, 3, 4, 4, generator=generator),
               torch.randint(0, 5, (4,), generator=generator))

def seed():
    torch.manual_seed(0)
"""

# --- in the style of examples/imagenet/main_amp.py ------------------------------------------------

IMAGENET = """
import argparse
import os
import torch
import torch.nn as nn
import nets
try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex.fp16_utils import *
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError as error:
    if "multi_tensor" not in str(error):
        raise ImportError("Please install apex from https://www.github.com/nvidia/apex")

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str)
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--steps", default=6, type=int)
args = parser.parse_args()

class AverageMeter(object):
    def __init__(self):
        self.sum = self.count = 0
    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

nets.seed()
model = nets.Classifier()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
model, optimizer = amp.initialize(model, optimizer,
                                  opt_level=args.opt_level,
                                  keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                                  loss_scale=args.loss_scale)
criterion = nn.CrossEntropyLoss(reduction="sum")
start = 0
if args.resume and os.path.isfile(args.resume):
    checkpoint = torch.load(args.resume)
    start = checkpoint["step"]
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
losses = AverageMeter()
for step, (input, target) in enumerate(nets.loader()):
    if not start <= step < args.steps:
        continue
    output = model(input)
    loss = criterion(output, target) * 64
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 20.0)
    optimizer.step()
    losses.update(to_python_float(loss.data), input.size(0))
    print("loss", float(loss).hex())
print("weights", sum(p.double().abs().sum() for p in model.parameters()).item().hex())
print("amp", {key: dict(value) for key, value in amp.state_dict().items()})
if args.resume:
    torch.save({"step": args.steps, "model": model.state_dict(),
                "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, args.resume)
"""

BY_HAND = """
import torch
import nets
nets.seed()
model = nets.Classifier()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
criterion = torch.nn.CrossEntropyLoss(reduction="sum")
scaler = torch.amp.GradScaler(
    "cpu", enabled={scales}, init_scale={init}, growth_interval={interval})
for input, target in nets.loader():
    with torch.autocast("cpu", torch.float16, enabled={lowers}):
        output = model(input)
    loss = criterion(output.float(), target) * 64
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 20.0)
    scaler.step(optimizer)
    scaler.update()
    print("loss", float(loss).hex())
print("weights", sum(p.double().abs().sum() for p in model.parameters()).item().hex())
state = scaler.state_dict()
print("amp", {{"loss_scaler0": {{"loss_scale": state.get("scale"),
                                 "unskipped": state.get("_growth_tracker")}}}})
"""


@pytest.fixture
def nets(tmp_path, run_script) -> Callable[..., Any]:
    """`run_script` where the module `nets` can be imported; the script has to succeed."""
    (tmp_path / "nets.py").write_text(NETS)

    def run(script: str, *arguments: str, **variables: str) -> Any:
        done = run_script(script, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def lines_of(python_in, tmp_path_factory) -> Callable[..., list[str]]:
    """What a reference prints. Each is run once."""
    folder, known = tmp_path_factory.mktemp("references"), {}
    (folder / "nets.py").write_text(NETS)

    def run(script: str, **variables: str) -> list[str]:
        key = script, *variables.items()
        if key not in known:
            done = python_in(folder)(script, **variables)
            assert done.returncode == 0, done.stderr
            known[key] = done.stdout.splitlines()
        return known[key]

    return run


def by_hand(lowers: bool = True, scales: bool = True, init: float = 65536.0, interval: int = 2000):
    return BY_HAND.format(lowers=lowers, scales=scales, init=init, interval=interval)


@pytest.mark.parametrize(
    ("arguments", "reference"),
    [
        (["--opt-level", "O1"], by_hand()),
        (["--opt-level", "O2", "--keep-batchnorm-fp32", "True"], by_hand()),
        (["--opt-level", "O1", "--loss-scale", "128.0"], by_hand(init=128.0, interval=10**6)),
    ],
    ids=["O1", "O2", "O1-128"],
)
def test_an_imagenet_script_equals_hand_written_mixed_precision(
    nets, lines_of, arguments, reference
):
    ours = nets(IMAGENET, *arguments, **FP16)
    expected = lines_of(reference)
    if "128.0" in arguments:  # a static scale counts no steps
        expected = [*expected[:-1], expected[-1].replace("6}", "0}")]
    assert ours.stdout.splitlines() == expected
    assert f"apex.amp {arguments[1]}: mixed precision by autoamp" in ours.stderr
    assert "6 regions" in ours.stderr
    if arguments == ["--opt-level", "O1"]:
        assert ", 0 skipped" not in ours.stderr  # the scale had to fall


def test_o3_scales_by_one(nets, lines_of):
    ours = nets(IMAGENET, "--opt-level", "O3", **FP16)
    assert ours.stdout.splitlines()[:-1] == lines_of(by_hand(scales=False))[:-1]
    assert "{'loss_scale': 1.0, 'unskipped'" in ours.stdout
    assert "static loss scale 1," in ours.stderr


@pytest.mark.parametrize("what", ["opt_level='O0'", "enabled=False"])
def test_what_asks_for_float32_gets_it_to_the_bit(nets, lines_of, what):
    script = IMAGENET.replace("opt_level=args.opt_level", what)
    ours = nets(script, "--opt-level", "O1", **FP16)
    reference = lines_of(by_hand(lowers=False, scales=False))
    assert ours.stdout.splitlines()[:-1] == reference[:-1]
    assert "stands aside: the script" in ours.stderr
    assert "0 regions, 6 steps taken" in ours.stderr


def test_a_resumed_script_goes_on_as_if_it_had_never_stopped(nets, lines_of):
    whole = lines_of(by_hand())
    # More than Apex had: a scale that only `amp.load_state_dict` brings back.
    script = IMAGENET.replace(
        'optimizer.load_state_dict(checkpoint["optimizer"])',
        'checkpoint["optimizer"].pop("autoamp"); '
        'optimizer.load_state_dict(checkpoint["optimizer"])',
    )
    resumed = ("--opt-level", "O1", "--resume", "checkpoint.pt")
    first = nets(script, *resumed, "--steps", "3", **FP16).stdout.splitlines()
    second = nets(script, *resumed, **FP16).stdout.splitlines()
    assert [*first[:3], *second] == whole


def test_without_the_variable_the_script_fails_as_before(nets, run_script):
    for variables in ({}, {"AUTO_MIXED_PRECISION": "0"}):
        done = run_script("import apex", **variables)
        assert "ModuleNotFoundError: No module named 'apex'" in done.stderr


# --- in the style of examples/dcgan/main_amp.py ---------------------------------------------------

DCGAN = """
import torch
import torch.nn as nn
from apex import amp

torch.manual_seed(3)
netG = nn.Sequential(nn.ConvTranspose2d(6, 4, 4), nn.BatchNorm2d(4), nn.ReLU(True),
                     nn.ConvTranspose2d(4, 1, 2, 2), nn.Tanh())
netD = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 4))
criterion = nn.BCEWithLogitsLoss(reduction="sum")
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.002, betas=(0.5, 0.999))
[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level="O1", num_losses=3)
data = torch.randn(5, 4, 1, 8, 8)
for real in data:
    netD.zero_grad()
    output = netD(real).view(-1)
    errD_real = criterion(output, torch.full_like(output, 1)) * 16
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    fake = netG(torch.randn(4, 6, 1, 1))
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, torch.zeros_like(output)) * 16
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    optimizerD.step()
    netG.zero_grad()
    output = netD(fake).view(-1)
    errG = criterion(output, torch.full_like(output, 1)) * 16
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    print("loss", *[float(e).hex() for e in (errD_real, errD_fake, errG)])
print("skipped", 16 - amp._amp_state.loss_scalers[2].loss_scale().hex().count("p+16"))
print(sorted(amp.state_dict()))
"""
DCGAN_BY_HAND = (
    DCGAN.replace("from apex import amp", "scaler = torch.amp.GradScaler('cpu')")
    .split('print("skipped"')[0]
    .replace("netD(", "lower(netD)(")
    .replace("netG(", "lower(netG)(")
    .replace("optimizerD.step()", "scaler.step(optimizerD); scaler.update()")
    .replace("optimizerG.step()", "scaler.step(optimizerG); scaler.update()")
)


def dcgan_by_hand() -> str:
    lines = []
    for line in DCGAN_BY_HAND.splitlines():
        if "amp.initialize" in line or line.startswith(("[netD", "    [netD")):
            continue
        if "amp.scale_loss" in line:
            loss = line.split("amp.scale_loss(")[1].split(",")[0]
            line = f"    scaler.scale({loss}).backward()"
        elif "_scaled.backward()" in line:
            continue
        lines.append(line)
    lower = """
def lower(net):
    def call(x):
        with torch.autocast("cpu", torch.float16):
            return net(x).float()
    return call
"""
    return "\n".join(lines).replace("torch.manual_seed(3)", lower + "torch.manual_seed(3)")


def test_a_dcgan_script_with_three_losses_equals_one_grad_scaler(nets, lines_of):
    ours = nets(DCGAN, **FP16)
    assert ours.stdout.splitlines()[:5] == lines_of(dcgan_by_hand())
    assert "['loss_scaler0', 'loss_scaler1', 'loss_scaler2']" in ours.stdout
    assert ", 0 skipped" not in ours.stderr


# --- in the style of examples/simple/distributed --------------------------------------------------

DISTRIBUTED = """
import argparse, os, sys
import torch
import nets
{imports}
torch.distributed.init_process_group(
    backend="gloo", init_method="file://" + os.path.abspath(sys.argv[1]), rank=0, world_size=1)
nets.seed()
model = nets.Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
{initialize}
loss_fn = torch.nn.CrossEntropyLoss(reduction="sum")
for x, y in nets.loader(4):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    {backward}
    optimizer.step()
    print("loss", float(loss).hex())
print(sorted(model.state_dict())[0])
torch.distributed.destroy_process_group()
"""


def test_a_distributed_script_equals_torchs_ddp(nets, lines_of):
    apex = DISTRIBUTED.format(
        imports="from apex.parallel import DistributedDataParallel\nfrom apex import amp",
        initialize="model, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n"
        "model = DistributedDataParallel(model, message_size=1, {})",
        backward="\n    with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()",
    )
    plain = DISTRIBUTED.format(
        imports="",
        initialize="model = torch.nn.parallel.DistributedDataParallel(model)",
        backward="loss.backward()",
    )
    reference = lines_of(plain.replace("sys.argv[1]", "'store'"), **FP16)
    assert reference[-1] == "module.bn.bias"
    ours = nets(apex.replace("{}", "delay_allreduce=True"), "store", **FP16)
    assert ours.stdout.splitlines() == reference


TWO_RANKS = """
import os
import torch
from apex.parallel import DistributedDataParallel as DDP, create_syncbn_process_group
rank = int(os.fork() == 0)
torch.distributed.init_process_group(
    backend="gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
for arguments in {}, {"gradient_average": False}, {"delay_allreduce": True}:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(1, 1), "unused": torch.nn.Linear(1, 1)})
    model.forward = lambda x, model=model: model["used"](x)
    if not arguments.get("delay_allreduce"):
        del model["unused"]
    ddp = DDP(model, **arguments)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
    if rank == 0:
        print("gradient", model["used"].weight.grad.item())
groups = [create_syncbn_process_group(size) for size in (0, 1, 2)]
if rank == 0:
    print("groups", [group and group.size() for group in groups])
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_two_ranks_average_their_gradients_or_add_them_up(nets):
    lines = nets(TWO_RANKS, **FP16, AUTO_MIXED_PRECISION_LOSS_SCALE="1").stdout.splitlines()
    assert [line for line in lines if line.startswith("gradient")] == [
        "gradient 1.5",
        "gradient 3.0",
        "gradient 1.5",
    ]
    assert lines[-1] == "groups [None, 1, None]"


# --- accumulation ---------------------------------------------------------------------------------

ACCUMULATION = """
import torch
import nets
{imports}
nets.seed()
model = nets.Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
{initialize}
for step, (x, y) in enumerate(nets.loader()):
    loss = torch.nn.functional.cross_entropy({model}.float(), y, reduction="sum") * 64
    {backward}
    if step % 2 == 1:
        {step}
        optimizer.zero_grad()
    print("loss", float(loss).hex())
"""


def test_accumulation_with_delay_unscale_equals_a_grad_scaler(nets, lines_of):
    ours = ACCUMULATION.format(
        imports="from apex import amp",
        initialize="model, optimizer = amp.initialize(model, optimizer, opt_level='O2')",
        model="model(x)",
        backward="""
    if step % 2 == 1:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()""",
        step="optimizer.step()",
    )
    reference = ACCUMULATION.format(
        imports="scaler = torch.amp.GradScaler('cpu')",
        initialize="lower = torch.autocast('cpu', torch.float16)(model)",
        model="lower(x)",
        backward="scaler.scale(loss).backward()",
        step="scaler.step(optimizer); scaler.update()",
    )
    done = nets(ours, **FP16)
    assert done.stdout.splitlines() == lines_of(reference)
    assert ", 0 skipped" not in done.stderr


# --- fp16_utils -----------------------------------------------------------------------------------

FP16_UTILS = """
import torch
import nets
{imports}
nets.seed()
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
{wrap}
for x, y in nets.loader():
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model({x}).float(), y, reduction="sum") * 64
    {backward}
    optimizer.step()
    print("loss", float(loss).hex())
"""
PLAIN = FP16_UTILS.format(
    imports="", model="nets.Classifier()", wrap="", x="x", backward="loss.backward()"
)


def test_a_script_with_fp16_optimizer_is_mixed_precision(nets, lines_of):
    script = FP16_UTILS.format(
        imports="from apex.fp16_utils import FP16_Optimizer, network_to_half",
        model="network_to_half(nets.Classifier())",
        wrap="optimizer = FP16_Optimizer(optimizer, {})",
        x="x.half()",
        backward="optimizer.backward(loss)\n    optimizer.clip_master_grads(1e9)",
    )
    ours = nets(script.replace("{}", "dynamic_loss_scale=True"), **FP16)
    # The input of the first layer was rounded to half before, too.
    assert ours.stdout.splitlines() == lines_of(PLAIN, **FP16)
    static = nets(script.replace("{}", "static_loss_scale=128.0"), **FP16)
    assert "static loss scale 128," in static.stderr
    reference = lines_of(PLAIN, **FP16, AUTO_MIXED_PRECISION_LOSS_SCALE="128")
    assert static.stdout.splitlines() == reference


def test_a_half_model_with_fp16_optimizer_trains_on_float32_masters(mixed):
    mixed("torch", "float16")
    from apex.fp16_utils import FP16_Optimizer

    torch.manual_seed(0)
    half = nn.Linear(8, 3).half()
    full = copy.deepcopy(half).float()
    optimizer = FP16_Optimizer(
        torch.optim.SGD(half.parameters(), lr=0.01),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**24},
    )
    reference = torch.optim.SGD(full.parameters(), lr=0.01)
    x, steps = torch.randn(16, 8), 0
    while steps < 20:
        optimizer.zero_grad()
        optimizer.backward(half(x.half()).float().pow(2).mean())
        optimizer.step()
        if optimizer.overflow:
            continue
        steps += 1
        reference.zero_grad()
        full(x).pow(2).mean().backward()
        reference.step()
    assert optimizer.loss_scale < 2.0**24
    (masters,) = optimizer.fp32_from_fp16_groups
    for master, param, wanted in zip(masters, half.parameters(), full.parameters(), strict=True):
        assert master.dtype is torch.float32
        assert torch.equal(master.half(), param)
        assert torch.allclose(master, wanted, atol=2e-4)
    state = optimizer.state_dict()
    again = FP16_Optimizer(torch.optim.SGD(half.parameters(), lr=0.01), dynamic_loss_scale=True)
    again.load_state_dict(state)
    assert again.loss_scale == optimizer.loss_scale


def test_master_copies_by_hand_are_as_in_apex(mixed):
    mixed("torch", "float16")
    from apex import fp16_utils

    for flat in (False, True):
        model = nn.Linear(3, 2).half()
        params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
        assert [m.dtype for m in masters] == [torch.float32] * (1 if flat else 2)
        for p in params:
            p.grad = torch.full_like(p, 2.0)
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        wanted = [(p - 0.5 * p.grad).half() for p in params]
        torch.optim.SGD(masters, lr=0.5).step()
        fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
        assert all(map(torch.equal, params, wanted))
    scaler = fp16_utils.DynamicLossScaler(init_scale=8.0, scale_window=2)
    scales = []
    for overflow in (True, False, False, True, True, True, True, False):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [4.0, 4.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]


# --- amp, name by name ----------------------------------------------------------------------------


@pytest.fixture
def amp(mixed) -> Any:
    mixed("torch", "float16")
    from apex import amp

    return amp


def test_models_and_optimizers_come_back_as_they_went_in(amp):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    assert amp.initialize(model, verbosity=0) is model
    assert amp.initialize(model, optimizer) == (model, optimizer)
    assert amp.initialize([model, other], optimizer) == ([model, other], optimizer)
    assert amp.initialize(model, [optimizer]) == (model, [optimizer])
    assert list(amp.master_params(optimizer)) == list(model.parameters())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"opt_level": "02"}, RuntimeError),
        ({"loss_scale": "dynamo"}, ValueError),
        ({"loss_scale": 0}, ValueError),
        ({"keep_batchnorm_fp32": "yes"}, ValueError),
    ],
)
def test_what_apex_refuses_is_refused(amp, arguments, error):
    with pytest.raises(error):
        amp.initialize(nn.Linear(2, 2), **arguments)


@pytest.mark.parametrize(
    ("arguments", "scale", "mode"),
    [
        ({}, 65536.0, "dynamic"),
        ({"opt_level": "O3"}, 1.0, "static"),
        ({"opt_level": "O2", "loss_scale": "dynamic"}, 65536.0, "dynamic"),
        ({"loss_scale": "512"}, 512.0, "static"),
        ({"max_loss_scale": 1024.0}, 1024.0, "dynamic"),
        ({"min_loss_scale": 2.0**17}, 2.0**17, "dynamic"),
        ({"loss_scale": 8.0, "min_loss_scale": 16.0}, 8.0, "static"),
    ],
)
def test_the_loss_scale_is_what_was_asked_for(amp, arguments, scale, mode):
    amp.initialize(nn.Linear(2, 2), **arguments)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}
    from autoamp import activation

    assert activation.session().loss_scale.rule.mode == mode


@pytest.mark.parametrize("least", [None, 2.0**15])
def test_min_loss_scale_is_the_floor(amp, least):
    model = nn.Linear(4, 4)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), min_loss_scale=least
    )
    for _ in range(3):
        with amp.scale_loss(model(torch.ones(2, 4)).sum() * 1e30, optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == (least or 2.0**13)


def test_the_environment_outranks_the_loss_scale_of_a_script(mixed):
    session = mixed("torch", "float16", LOSS_SCALE="32")
    from apex import amp

    amp.initialize(nn.Linear(2, 2), loss_scale=512)
    assert session.loss_scale.state()["scale"] == 32.0


def test_of_several_saved_loss_scales_the_smallest_counts(amp):
    amp.initialize(nn.Linear(2, 2), num_losses=2)
    amp.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 4096.0, "unskipped": 7},
            "loss_scaler1": {"loss_scale": 256.0, "unskipped": 11},
        }
    )
    state = amp.state_dict()
    assert state == {key: {"loss_scale": 256.0, "unskipped": 11} for key in state}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        amp.load_state_dict({"model": {}})


def test_scale_loss_before_initialize_or_for_a_loss_too_many_is_refused(amp):
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="has not been initialized"), amp.scale_loss(loss, None):
        pass
    amp.initialize(nn.Linear(2, 2), num_losses=2)
    with pytest.raises(IndexError), amp.scale_loss(loss, None, loss_id=2):
        pass


def test_the_handle_of_2018_still_works(amp):
    handle = amp.init(loss_scale=128)
    assert handle.is_active()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.bias.detach().clone()
    with handle.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    with wrapped.scale_loss(model(torch.ones(2, 4)).sum()) as loss:
        loss.backward()
    wrapped.step()  # gradients add up: 2, then 4, each times 0.1
    assert torch.allclose(before - model.bias, torch.full((4,), 0.6))
    assert amp._amp_state.loss_scalers[0].loss_scale() == 128.0


class Calls(nn.Module):
    """Calls `function` with the half result of a layer and a float32 tensor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x), other=torch.ones(4, 4))


def test_functions_of_the_script_run_in_the_precision_that_they_are_marked_with(amp):
    seen: list[tuple[torch.dtype, ...]] = []

    def product(x, other):
        seen.append((x.dtype, other.dtype, (x.float() @ other.float()).dtype))
        return x

    model = nn.Sequential(Calls(product))
    for around in (
        amp.half_function,
        amp.float_function,
        amp.promote_function,
        lambda function: function,
    ):
        model[0].function = around(product)
        assert model(torch.ones(2, 4)).dtype is torch.float32
    half, full = torch.float16, torch.float32
    assert seen == [(half, half, half), (full, full, full), (full, full, half), (half, full, half)]
    seen.clear()
    # Outside of any module.
    assert amp.half_function(product)(torch.ones(2, 4), other=torch.ones(4, 4)).dtype is full
    assert amp.float_function(product)(torch.ones(2, 4), other=torch.ones(4, 4)).dtype is full
    assert seen == [(half, half, half), (full, full, full)]
    assert amp.half_function(product).__name__ == "product"


def test_registered_functions_are_found_under_their_name_until_autoamp_is_off(amp):
    dtypes: list[torch.dtype] = []

    def note(x):
        dtypes.append(x.dtype)
        return x

    module = types.ModuleType("extension")
    module.one = module.two = module.three = note
    amp.register_half_function(module, "one")
    amp.register_float_function(module, "two")
    amp.register_promote_function(module, "three")
    module.one(torch.ones(2))
    module.two(torch.ones(2).half())
    module.three(torch.ones(2).half())
    assert dtypes == [torch.float16, torch.float32, torch.float16]
    with pytest.raises(ValueError, match="No function named four"):
        amp.register_half_function(module, "four")
    autoamp.disable()
    assert module.one is module.two is module.three is note


def test_disable_casts_is_float32(amp):
    model = nn.Linear(64, 4)
    x = torch.randn(2, 64)
    with amp.disable_casts():
        exact = model(x)
        half = amp.half_function(torch.matmul)(x, x.T)
    assert torch.equal(half, x @ x.T)
    assert (exact - (x @ model.weight.T + model.bias)).abs().max() < 1e-6
    assert (exact - model(x)).abs().max() > 1e-6


# --- optimizers -----------------------------------------------------------------------------------


def trained(make: Callable[..., Any], steps: int = 5, dtype: torch.dtype = torch.float32) -> Any:
    """The parameters after some steps down a fixed bowl."""
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for shape in ((3, 4), (5,))
    ]
    optimizer = make(params)
    for _ in range(steps):
        optimizer.zero_grad()
        sum((p.sin() + p.pow(2)).sum() for p in params).backward()
        optimizer.step()
    return [p.detach() for p in params]


def test_torchs_optimizers_go_by_apexs_names(mixed):
    mixed("torch", "float16")
    from apex import optimizers as apex

    optim = torch.optim
    for ours, theirs in (
        (
            lambda p: apex.FusedAdam(p, lr=0.1, weight_decay=0.1),
            lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1),
        ),
        (
            lambda p: apex.FusedAdam(p, weight_decay=0.1, adam_w_mode=False),
            lambda p: optim.Adam(p, lr=1e-3, weight_decay=0.1),
        ),
        (
            lambda p: apex.FusedSGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
            lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        ),
        (
            lambda p: apex.FusedAdagrad(p, weight_decay=0.1),
            lambda p: optim.Adagrad(p, lr=1e-2, eps=1e-10, weight_decay=0.1),
        ),
    ):
        assert all(map(torch.equal, trained(ours), trained(theirs)))
    with pytest.raises(RuntimeError, match="amsgrad"):
        apex.FusedAdam([nn.Parameter(torch.ones(1))], amsgrad=True)


class ByFormula:
    """An optimizer that is a formula: (parameter, gradient, state, step) -> parameter."""

    def __init__(self, params, formula, clips=None):
        self.params, self.formula, self.count, self.clips = params, formula, 0, clips
        self.states = [{} for _ in params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        self.count += 1
        total = sum(p.grad.pow(2).sum() for p in self.params).sqrt()
        clip = max(1.0, total / self.clips) if self.clips else 1.0
        for p, state in zip(self.params, self.states, strict=True):
            p.data = self.formula(p.data, p.grad / clip, state, self.count)


def adam_without_correction(p, g, s, t):
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    return p - 0.01 * (s["m"] / (s["v"].sqrt() + 1e-8) + 0.1 * p) if t else p


def adagrad_w(p, g, s, t):
    s["h"] = s.get("h", 0) + g * g
    return p - 0.01 * (g / (s["h"].sqrt() + 1e-10) + 0.1 * p)


def lamb(p, g, s, t, decay=0.01, ratio=True):
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    update = s["m"] / (1 - 0.9**t) / ((s["v"] / (1 - 0.999**t)).sqrt() + 1e-6) + decay * p
    return p - 0.1 * update * (p.norm() / update.norm() if ratio else 1.0)


def novograd(p, g, s, t):
    new = g.norm()
    s["n"] = (0.98 * s.get("n", new) ** 2 + 0.02 * new**2).sqrt()
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    denominator = s["n"] / (1 - 0.98**t) ** 0.5 + 1e-8
    return p - 0.1 * (s["m"] / (1 - 0.9**t) / denominator + 0.1 * p)


def novograd_inside(p, g, s, t):
    new = g.abs().max()
    s["n"] = 0.98 * s.get("n", 0) + 0.02 * new
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * (g / (s["n"] / (1 - 0.98**t) ** 0.5 + 1e-8) + 0.1 * p)
    return p - 0.1 * s["m"] / (1 - 0.9**t)


@pytest.mark.parametrize(
    ("name", "arguments", "formula", "clips"),
    [
        (
            "FusedAdam",
            {"lr": 0.01, "bias_correction": False, "weight_decay": 0.1},
            adam_without_correction,
            None,
        ),
        ("FusedAdagrad", {"weight_decay": 0.1, "adagrad_w_mode": True}, adagrad_w, None),
        ("FusedLAMB", {"lr": 0.1}, lamb, 1.0),
        (
            "FusedLAMB",
            {"lr": 0.1, "weight_decay": 0.0, "max_grad_norm": 5.0},
            lambda *a: lamb(*a, decay=0.0, ratio=False),
            5.0,
        ),
        (
            "FusedLAMB",
            {"lr": 0.1, "weight_decay": 0.0, "use_nvlamb": True},
            lambda *a: lamb(*a, decay=0.0),
            1.0,
        ),
        (
            "FusedNovoGrad",
            {"lr": 0.1, "betas": (0.9, 0.98), "weight_decay": 0.1},
            novograd,
            None,
        ),
        (
            "FusedNovoGrad",
            {
                "lr": 0.1,
                "betas": (0.9, 0.98),
                "weight_decay": 0.1,
                "reg_inside_moment": True,
                "norm_type": 0,
                "init_zero": True,
            },
            novograd_inside,
            None,
        ),
    ],
)
def test_the_other_optimizers_follow_their_formula(mixed, name, arguments, formula, clips):
    mixed("torch", "float16")
    from apex import optimizers as apex

    ours = trained(lambda params: getattr(apex, name)(params, **arguments))
    exact = trained(lambda params: ByFormula(params, formula, clips), dtype=torch.float64)
    for p, wanted in zip(ours, exact, strict=True):
        assert torch.allclose(p.double(), wanted, rtol=1e-5, atol=1e-6)


# --- normalization, parallel ----------------------------------------------------------------------


def test_norms_have_torchs_numbers_and_names(mixed):
    mixed("torch", None)
    from apex import normalization as apex

    x = torch.randn(2, 6)
    for ours, theirs in (
        (apex.FusedLayerNorm(6), nn.LayerNorm(6)),
        (apex.FusedLayerNorm(6, elementwise_affine=False), nn.LayerNorm(6, 1e-5, False)),
        (apex.MixedFusedLayerNorm(6), nn.LayerNorm(6)),
        (apex.FusedRMSNorm(6), nn.RMSNorm(6, 1e-5)),
        (apex.MixedFusedRMSNorm([6], eps=0.1), nn.RMSNorm(6, 0.1)),
    ):
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert torch.equal(ours(x), theirs(x))
        assert type(ours).__module__ == "apex.normalization"
    assert apex.MixedFusedLayerNorm(6)(x.half()).dtype is torch.float32
    with pytest.raises(RuntimeError, match="elementwise_affine"):
        apex.MixedFusedLayerNorm(6, elementwise_affine=False)
    from apex.normalization.fused_layer_norm import FusedLayerNorm

    assert FusedLayerNorm is apex.FusedLayerNorm


def test_batch_norms_become_synchronized_ones_with_the_same_state(mixed):
    mixed("torch", None)
    from apex.parallel import SyncBatchNorm, convert_syncbn_model

    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2, momentum=0.3)))
    model(torch.randn(2, 1, 3, 3))
    model.eval()
    x = torch.randn(2, 1, 3, 3)
    before, expected = copy.deepcopy(model.state_dict()), model(x)
    model = convert_syncbn_model(model)
    assert isinstance(model[1][0], SyncBatchNorm)
    assert model[1][0].momentum == 0.3
    state = model.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[key], before[key]) for key in state)
    assert torch.equal(model(x), expected)


def test_larc_keeps_updates_in_proportion(mixed):
    mixed("torch", None)
    from apex.parallel.LARC import LARC

    p = nn.Parameter(torch.full((4,), 2.0))
    optimizer = LARC(torch.optim.SGD([p], lr=0.1, weight_decay=0.01), trust_coefficient=0.02)
    p.grad = torch.full((4,), 3.0)
    optimizer.step()
    # |p| = 4, |g| = 6: 0.02 * 4 / (6 + 0.04) is below lr, and divided by it scales the gradient.
    rate = 0.02 * 4 / (6 + 0.01 * 4) / 0.1
    assert torch.allclose(p, torch.full((4,), 2.0 - 0.1 * rate * (3.0 + 0.02)))
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


# --- an Apex that is installed --------------------------------------------------------------------


def package(folder: Any, files: dict[str, str]) -> Any:
    for name, text in files.items():
        path = folder / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "site"


def test_a_real_apex_is_what_a_script_gets_and_autoamp_stands_aside(tmp_path, run_script):
    site = package(
        tmp_path,
        {
            "apex/__init__.py": "from . import amp",
            "apex/amp/__init__.py": "def initialize(model, optimizer=None, **kwargs):\n"
            "    return 'real'\n"
            "def scale_loss(loss, optimizer): return 'real'\n",
        },
    )
    done = run_script(
        "import torch, apex\nfrom apex import amp\n"
        "model = torch.nn.Linear(2, 2)\n"
        "assert amp.initialize(model) == amp.scale_loss(0, 0) == 'real'\n"
        "assert model(torch.ones(1, 2)).dtype is torch.float32\n"
        "print(amp.__file__)\n",
        pythonpath=(site,),
        **FP16,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert "stands aside: the script uses the Apex that is installed" in done.stderr
    assert "0 regions" in done.stderr


def test_a_young_apex_gets_what_was_deleted_from_it_and_keeps_its_own(tmp_path, run_script):
    site = package(
        tmp_path,
        {
            "apex/__init__.py": "from . import optimizers",
            "apex/optimizers/__init__.py": "class FusedAdam: 'real'",
            "apex/other.py": "",
        },
    )
    done = run_script(
        "import torch, apex, apex.other, autoamp, sys\n"
        "amp = apex.amp\n"
        "assert apex.__file__.startswith(sys.argv[1])\n"
        "assert not amp.__file__.startswith(sys.argv[1])\n"
        "model = amp.initialize(torch.nn.Linear(2, 2))\n"
        "from apex.optimizers import FusedAdam, FusedLAMB\n"
        "assert FusedAdam.__doc__ == 'real' and issubclass(FusedLAMB, torch.optim.Optimizer)\n"
        "from apex.parallel import DistributedDataParallel\n"
        "autoamp.disable()\n"
        "assert not hasattr(apex, 'amp') and not hasattr(apex.optimizers, 'FusedLAMB')\n"
        "assert apex.optimizers.FusedAdam is FusedAdam and 'apex.amp' not in sys.modules\n"
        "assert sorted(m for m in sys.modules if m.startswith('apex')) == "
        "['apex', 'apex.optimizers', 'apex.other']\n",
        str(site),
        pythonpath=(site,),
        **FP16,
    )
    assert done.returncode == 0, done.stderr


def test_an_old_apex_that_cannot_be_imported_any_more_is_stood_in_for(tmp_path, run_script):
    site = package(
        tmp_path,
        {
            "apex/__init__.py": "from . import amp",
            "apex/amp/__init__.py": "from torch._six import string_classes",
        },
    )
    done = run_script(
        "import torch\nfrom apex import amp\n"
        "model = amp.initialize(torch.nn.Linear(2, 2))\nmodel(torch.ones(1, 2))\n",
        pythonpath=(site,),
        **FP16,
    )
    assert done.returncode == 0, done.stderr
    assert "apex.amp is installed but cannot be imported (No module named 'torch._six')" in (
        done.stderr
    )
    assert "1 region" in done.stderr


def test_folders_called_apex_stay_what_they_are(tmp_path, run_script):
    site = package(tmp_path, {"apex/legends.py": "name = 'wraith'"})
    done = run_script(
        "import torch\nfrom apex.legends import name\nfrom apex import amp\nprint(name)\n",
        pythonpath=(site,),
        **FP16,
    )
    assert done.stdout == "wraith\n", done.stderr


def test_nothing_is_loaded_before_a_script_asks_and_nothing_is_left_after(mixed):
    mixed("torch", "float16")
    assert not [name for name in sys.modules if name.partition(".")[0] == "apex"]
    finders = len(sys.meta_path)
    import apex

    assert apex.amp.__name__ == "apex.amp"
    with pytest.raises(ImportError):
        import apex.contrib
    autoamp.disable()
    assert not [name for name in sys.modules if name.partition(".")[0] == "apex"]
    assert len(sys.meta_path) < finders
    with pytest.raises(ModuleNotFoundError, match="No module named 'apex'"):
        import apex.amp
    # What the script still holds does no harm.
    model = apex.amp.initialize(nn.Linear(2, 2))
    with apex.amp.scale_loss(model(torch.ones(1, 2)).sum(), None) as loss:
        loss.backward()
    assert apex.amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
