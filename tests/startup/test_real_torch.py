"""The doors with the real torch behind them: what is on, what is said, what is left."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from environments import CURRENT, Environment

torch = pytest.importorskip("torch")

PACKAGES = Path(torch.__file__).parents[1]
BANNER = "autoamp 0.1.0 on: cpu bfloat16"
RUN = """
import torch
model = torch.nn.Linear(4, 4)
output = model(torch.randn(2, 4))
print("ran")
"""
TRAIN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""
STATUS = """
import autoamp, json
found = autoamp.status()
print(json.dumps({name: found[name] for name in ("active", "reason", "door", "policy")}))
"""


@pytest.fixture(scope="session")
def real(make_environment) -> Environment:
    """Autoamp as pip installs it, beside the torch, wrapt and PyYAML that run the tests."""
    made = make_environment(CURRENT, packages=PACKAGES)
    # The dtype whatever this CPU would choose. One thread: oneDNN hangs in a fork of a process
    # in which it has run a half precision product with several, with and without autoamp.
    forced = {"AUTO_MIXED_PRECISION_DTYPE": "bfloat16", "OMP_NUM_THREADS": "1"}
    return Environment(made.python, made.site, forced)


@pytest.fixture(scope="session")
def quiet(real) -> Environment:
    return real.on(AUTO_MIXED_PRECISION_LOG="quiet")


def status(environment: Environment, code: str, **variables: str) -> SimpleNamespace:
    result = environment.run("-c", code + STATUS, **variables)
    assert result.code == 0, result.stderr
    *printed, found = result.stdout.splitlines()
    return SimpleNamespace(**json.loads(found), printed=printed, stderr=result.stderr)


def test_one_line_at_the_first_region_and_one_at_exit(real):
    result = real.on().run("-c", TRAIN)
    assert (result.code, result.stdout) == (0, "")
    first, last = result.stderr.splitlines()
    assert first.startswith(BANNER)
    assert last.startswith("autoamp: ")


def test_nothing_is_said_by_a_process_that_runs_no_model_or_is_told_to_be_quiet(real, quiet):
    assert real.on().run("-c", "import torch").stderr == ""
    assert quiet.run("-c", RUN).stderr == ""


def test_a_variable_set_by_the_script_before_torch_counts_and_no_process_is_started(real):
    script = (
        "import os, sys\n"
        "events, started = ('subprocess.Popen', 'os.posix_spawn', 'os.fork', 'os.exec'), []\n"
        "sys.addaudithook(lambda event, _: started.append(event) if event in events else None)\n"
        "os.environ['AUTO_MIXED_PRECISION'] = '1'\n"
    )
    found = status(real, script + TRAIN + "print(started)")
    plain = real.run("-c", script.replace("'1'", "'0'") + TRAIN + "print(started)")
    assert (found.active, found.door) == (True, "torch.backends")
    assert found.printed == plain.stdout.splitlines()  # torch's CUDA builds start one


def test_a_variable_set_after_torch_counts_from_the_first_optimizer(real):
    script = "import os, torch; os.environ['AUTO_MIXED_PRECISION'] = '1'\n"
    look = "print(torch.optim.Optimizer.__init__.__code__.co_filename.endswith('optimizer.py'))"
    found = status(real, script + TRAIN + look)
    assert (found.active, found.door) == (True, "Optimizer.__init__")
    assert found.printed == ["True"]
    assert found.stderr.startswith(BANNER)


def test_a_variable_set_after_the_first_optimizer_is_explained_by_status(real):
    script = TRAIN + "import os; os.environ['AUTO_MIXED_PRECISION'] = '1'\n"
    found = status(real, script)
    assert (found.active, found.door, found.stderr) == (False, None, "")
    assert "after torch was imported" in found.reason
    assert "autoamp.enable()" in found.reason


def test_an_explicit_zero_leaves_torch_untouched_and_is_explained_by_status(real):
    untouched = "import torch; print(hasattr(torch.optim.Optimizer.__init__, '__wrapped__'))"
    found = status(real, untouched, AUTO_MIXED_PRECISION="0")
    assert (found.active, found.printed) == (False, ["False"])
    assert "off" in found.reason


def test_a_directory_of_packages_on_pythonpath_is_served_by_the_entry_point(
    real, quiet, make_environment
):
    """`pip install --target`."""
    elsewhere = make_environment(CURRENT, autoamp=False, packages=PACKAGES)
    environment = Environment(elsewhere.python, elsewhere.site, quiet.variables)
    found = status(environment, RUN, PYTHONPATH=str(real.site))
    assert (found.active, found.door) == (True, "torch.backends")


def test_the_watcher_activates_where_torch_autoload_is_off_and_leaves_the_loader_clean(quiet):
    look = "print(type(torch.__loader__).__name__, *sorted(vars(torch.__loader__)))"
    found = status(quiet, RUN + look, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (found.active, found.door) == (True, ".pth")
    assert found.printed == ["ran", "SourceFileLoader name path"]


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_policy_that_cannot_be_read_costs_one_line_or_the_program(real, tmp_path, strict):
    policy = tmp_path / "mine.yaml"
    policy.write_text("extends: default\ndevices: {cpu: fp8}\n")
    variables = {"AUTO_MIXED_PRECISION": str(policy), "AUTO_MIXED_PRECISION_STRICT": strict}
    result = real.run("-c", RUN, **variables)
    end = "stopped (AUTO_MIXED_PRECISION_STRICT=1)" if strict == "1" else "continues in float32"
    assert (result.code, result.stdout) == ((2, "") if strict == "1" else (0, "ran\n"))
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"autoamp: off in this process: {policy}:2:")
    assert result.stderr.endswith(f"{end}\n")


@pytest.mark.parametrize(("module", "package"), [("wrapt", "wrapt"), ("yaml", "pyyaml")])
def test_a_missing_dependency_costs_one_line_that_says_what_to_install(real, module, package):
    script = f"import sys; sys.modules['{module}'] = None\n"
    result = real.on().run("-c", script + RUN)
    assert (result.code, result.stdout) == (0, "ran\n")
    assert result.stderr == (
        f"autoamp: off in this process: {module} is not installed (pip install {package}); "
        "the program continues in float32\n"
    )


SNAPSHOT = """
import sys, torch, autoamp
from autoamp import bootstrap
class Refusing(type):
    frozen = False
    def __setattr__(cls, name, value):
        if Refusing.frozen: raise RuntimeError("half way")
        super().__setattr__(name, value)
class Own(torch.optim.SGD, metaclass=Refusing):
    def step(self, closure=None): return super().step(closure)
def snapshot():
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "torch" and m]
    classes = [torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.optim.SGD, Own,
               torch.autograd.Function, torch.autograd.function.BackwardCFunction,
               torch.amp.GradScaler, torch.nn.Linear]
    owners = [dict(vars(owner)) for owner in modules + classes]
    return [(name, id(value)) for owner in owners for name, value in owner.items()]
def train(kind):
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    output = model(torch.randn(2, 4)); output.sum().backward(); optimizer.step()
train(torch.optim.SGD); train(Own)  # torch wraps step when the first instance of a class appears
import autoamp.activation
before = snapshot()
"""


def test_a_failure_half_way_and_disable_both_leave_torch_as_it_was(real):
    script = SNAPSHOT + (
        "Refusing.frozen = True; autoamp.enable()\n"
        "print(bootstrap.reason, snapshot() == before)\n"
        "Refusing.frozen = False; autoamp.enable(); train(Own)\n"
        "print(bootstrap.phase, snapshot() == before)\n"
        "autoamp.disable(); print(bootstrap.phase, snapshot() == before)\n"
    )
    result = real.run("-c", script, AUTO_MIXED_PRECISION_LOG="quiet")
    assert result.code == 0, result.stderr
    expected = ["RuntimeError: half way True", "active False", "off True"]
    assert result.stdout.splitlines() == expected
    assert result.stderr == (
        "autoamp: off in this process: RuntimeError: half way; the program continues in float32\n"
    )


WORKERS = """
import sys, torch
class Phases(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, index):
        torch.nn.Linear(2, 2)(torch.randn(1, 2))
        return sys.modules["autoamp.bootstrap"].phase
if __name__ == "__main__":
    torch.nn.Linear(2, 2)(torch.randn(1, 2))
    for context in ("fork", "spawn", "forkserver"):
        loader = torch.utils.data.DataLoader(
            Phases(), num_workers=1, multiprocessing_context=context
        )
        print(context, *next(iter(loader)))
"""
SPAWN = """
import sys, torch
def work(rank):
    torch.nn.Linear(2, 2)(torch.randn(1, 2))
    print(sys.modules["autoamp.bootstrap"].phase, flush=True)
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""
RANK = """
import os, sys, torch
torch.nn.Linear(2, 2)(torch.randn(1, 2))
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(sys.modules["autoamp.bootstrap"].phase)
"""


def banners(stderr: str) -> int:
    return sum(line.startswith("autoamp 0.1.0 on: ") for line in stderr.splitlines())


def test_data_loader_workers_are_active_and_say_nothing(real, tmp_path):
    (tmp_path / "script.py").write_text(WORKERS)
    result = real.on().run(tmp_path / "script.py")
    assert result.stdout == "fork active\nspawn active\nforkserver active\n", result.stderr
    assert banners(result.stderr) == 1
    assert len(result.stderr.splitlines()) == 2


def test_spawned_trainers_are_active_and_one_of_them_speaks(real, tmp_path):
    (tmp_path / "script.py").write_text(SPAWN)
    result = real.on().run(tmp_path / "script.py")
    assert result.stdout == "active\nactive\n", result.stderr
    assert banners(result.stderr) == 1


def test_the_ranks_of_torchrun_are_active_and_rank_0_speaks(real, tmp_path):
    (tmp_path / "script.py").write_text(RANK)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    result = real.on().run(*launch, tmp_path / "script.py", tmp_path)
    assert result.code == 0, result.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["active", "active"]
    assert banners(result.stderr) == 1
    assert sum(line.startswith("autoamp: ") for line in result.stderr.splitlines()) == 1


def test_a_fork_counts_from_zero_and_does_not_say_again_what_was_said(real):
    fork = (
        "import autoamp, os, sys\n"
        "if os.fork() == 0:\n"
        "    before = autoamp.status()['regions']\n"
        "    model(torch.randn(2, 4))\n"
        "    print(before, autoamp.status()['regions'], flush=True)\n"
        "    os._exit(0)\n"
        "os.wait(); print(autoamp.status()['regions'])\n"
    )
    result = real.on().run("-c", TRAIN + fork)
    assert result.stdout == "0 1\n2\n", result.stderr
    assert banners(result.stderr) == 1


COMPILED = """
import autoamp
autoamp.enable()
torch.manual_seed(0)
model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
def step(x): return model(x) * 2
def check(function, backend):
    with autoamp.off(): full = function(x)
    eager, compiled = function(x), torch.compile(function, backend=backend, fullgraph=True)(x)
    print(compiled.dtype, torch.equal(compiled, eager), torch.equal(compiled, full))
    torch._dynamo.reset()
for backend in "eager", "aot_eager":
    check(model, backend)
    check(step, backend)
"""


@pytest.mark.parametrize("first", ["torch", "torch, torch._dynamo"])
def test_compiled_code_runs_in_the_precision_of_eager_code(real, first):
    """Dynamo remembers the `Module.__call__` that it finds when it is first imported."""
    script = f"import {first}\n{COMPILED}"
    if first == "torch":
        script += "check(step, 'inductor')\n"
    result = real.run("-c", script)
    assert result.code == 0, result.stderr
    assert set(result.stdout.splitlines()) == {"torch.float32 True False"}


@pytest.mark.parametrize("collects", [True, False])
def test_a_script_without_an_optimizer_does_not_wait_for_dynamo_and_keeps_its_collector(
    real, collects
):
    """To load Dynamo takes a second; torch does it for modes, and for optimizers."""
    script = (
        "import gc, sys\n"
        f"{'gc.enable' if collects else 'gc.disable'}()\n"
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "with torch.no_grad():\n"
        "    for _ in range(3): model(torch.randn(2, 4))\n"
        "import autoamp\n"
        "print(autoamp.status()['regions'] > 0, 'torch._dynamo' in sys.modules, gc.isenabled())\n"
    )
    result = real.on().run("-c", script)
    assert result.stdout == f"True False {collects}\n", result.stderr


COMPILED_PIECE = """
import torch, torch._dynamo
import torch._dynamo.convert_frame as frames
import autoamp
autoamp.enable()
compiled, compile = set(), frames._compile
def noted(code, *rest, **words):
    compiled.add(code.co_filename.rpartition("/")[2])
    return compile(code, *rest, **words)
frames._compile = noted

def shown(x):
    str(x.detach())  # torch switches gradients off for that, in frames that are not compiled
    return x.exp()

class Net(torch.nn.Module):
    def __init__(self, compiler):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.piece = torch.nn.Linear(4, 4), compiler(self.part)
    def part(self, x):
        torch._dynamo.graph_break()
        return shown(torch.relu(x)) + 1e-9
    def forward(self, x): return self.piece(self.layer(x))

def gradient(compiler):
    net = Net(compiler)
    for _ in range(3): net(torch.ones(2, 4)).sum().backward()
    return net.layer.weight.grad

same = torch.equal(gradient(lambda f: torch.compile(f, backend="eager")), gradient(lambda f: f))
looking = {"inspection.py", "standing.py", "audit.py", "edits.py"}
print(same, "<string>" in compiled, sorted(compiled & looking))
"""


def test_a_compiled_piece_of_a_model_may_print_and_what_looks_at_it_is_not_compiled(real):
    result = real.run("-c", COMPILED_PIECE)
    assert result.stdout == "True True []\n", result.stderr
