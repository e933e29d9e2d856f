"""Which device gets which precision, why, and what to do where the answer is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoamp import devices
from autoamp.devices import Decision, cpu_has_bfloat16_arithmetic, decide
from autoamp.policy import Policy

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def policy(**words: str) -> Policy:
    return Policy(name="mine", devices=words)


def cpu_has_bfloat16(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(devices, "cpu_has_bfloat16_arithmetic", lambda: answer)


def capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))


@pytest.mark.parametrize(
    ("dtype", "word"),
    [(torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (None, "off")],
)
def test_a_decision_has_the_word_of_the_policy(dtype, word):
    assert Decision(dtype, "").word == word


@pytest.mark.parametrize("forced", [False, True])
def test_a_device_that_the_policy_switches_off_stays_off(forced):
    expected = Decision(None, 'policy "mine" says off')
    for device in (CPU, CUDA, torch.device("xpu"), torch.device("mps")):
        assert decide(device, policy(**{device.type: "off"}), forced) == expected


def test_a_device_that_a_forced_dtype_meets_switched_off_stays_off():
    forced = policy(cpu="off", cuda="bfloat16").forced("float16", None)
    assert forced.devices == {"cpu": "off", "cuda": "float16"}
    assert decide(CPU, forced, True).dtype is None


def test_a_kind_of_device_that_no_policy_knows_is_off():
    assert decide(torch.device("hpu"), Policy(name="mine"), True).dtype is None


def test_bfloat16_on_a_cpu_that_has_its_arithmetic(monkeypatch):
    cpu_has_bfloat16(monkeypatch, True)
    assert decide(CPU, policy(cpu="bfloat16"), False) == Decision(torch.bfloat16, 'policy "mine"')


def test_bfloat16_on_a_cpu_without_its_arithmetic_is_off_with_the_remedy(monkeypatch):
    cpu_has_bfloat16(monkeypatch, False)
    assert decide(CPU, policy(cpu="bfloat16"), False) == Decision(
        None,
        "this CPU has no bfloat16 arithmetic (AVX512-BF16, AMX or ARM BF16); "
        "force it with AUTO_MIXED_PRECISION_DTYPE=bfloat16",
    )


def test_float16_on_any_cpu_is_off_with_the_remedy(monkeypatch):
    cpu_has_bfloat16(monkeypatch, True)
    assert decide(CPU, policy(cpu="float16"), False) == Decision(
        None,
        "float16 is slower than float32 on CPUs; force it with AUTO_MIXED_PRECISION_DTYPE=float16",
    )


@pytest.mark.parametrize(
    ("dtype", "version", "obstacle"),
    [
        ("float16", (6, 1), "no Tensor Cores at compute capability 6.1 (7.0 or later has)"),
        ("float16", (7, 0), ""),
        ("float16", (8, 0), ""),
        ("float16", (12, 0), ""),
        (
            "bfloat16",
            (6, 1),
            "no bfloat16 Tensor Cores at compute capability 6.1 (8.0 or later has)",
        ),
        (
            "bfloat16",
            (7, 5),
            "no bfloat16 Tensor Cores at compute capability 7.5 (8.0 or later has)",
        ),
        ("bfloat16", (8, 0), ""),
    ],
)
def test_cuda_is_decided_by_its_compute_capability(monkeypatch, dtype, version, obstacle):
    capability(monkeypatch, *version)
    decision = decide(CUDA, policy(cuda=dtype), False)
    if obstacle:
        why = f"{obstacle}; force it with AUTO_MIXED_PRECISION_DTYPE={dtype}"
        assert decision == Decision(None, why)
    else:
        assert decision == Decision(getattr(torch, dtype), 'policy "mine"')


def test_the_capability_asked_for_is_that_of_the_model_s_device(monkeypatch):
    asked = []

    def get_device_capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return (9, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    decide(torch.device("cuda", 1), policy(cuda="float16"), False)
    assert asked == [torch.device("cuda", 1)]


@pytest.mark.parametrize("kind", ["xpu", "mps"])
@pytest.mark.parametrize("available", [True, False])
def test_other_devices_need_an_autocast_of_torch(monkeypatch, kind, available):
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device_type: available)
    decision = decide(torch.device(kind), policy(**{kind: "float16"}), False)
    if available:
        assert decision == Decision(torch.float16, 'policy "mine"')
    else:
        assert decision == Decision(
            None,
            f"this torch has no autocast for {kind}; "
            "force it with AUTO_MIXED_PRECISION_DTYPE=float16",
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_forced_dtype_is_taken_unasked(monkeypatch, dtype):
    capability(monkeypatch, 6, 1)
    cpu_has_bfloat16(monkeypatch, False)
    forced = Policy(name="mine").forced(dtype, None)
    for device in (CPU, CUDA):
        assert decide(device, forced, True) == Decision(
            getattr(torch, dtype), "AUTO_MIXED_PRECISION_DTYPE"
        )


@pytest.mark.parametrize(
    ("machine", "bf16", "amx", "answer"),
    [
        ("x86_64", False, False, False),
        ("x86_64", True, False, True),
        ("AMD64", False, True, True),
        ("x86_64", None, None, False),
    ],
)
def test_an_x86_cpu_is_asked_through_torch(monkeypatch, machine, bf16, amx, answer):
    """None: a torch that cannot tell."""
    monkeypatch.setattr(devices.platform, "machine", lambda: machine)
    probes = {"_is_avx512_bf16_supported": bf16, "_is_amx_tile_supported": amx}
    for name, found in probes.items():
        if found is None:
            monkeypatch.delattr(torch.cpu, name, raising=False)
        else:
            monkeypatch.setattr(torch.cpu, name, lambda found=found: found, raising=False)
    assert cpu_has_bfloat16_arithmetic() is answer


@pytest.mark.parametrize(
    ("features", "answer"),
    [("fp asimd bf16 i8mm", True), ("fp asimd sbf16x", False), (None, False)],
)
@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_an_arm_cpu_is_asked_through_the_kernel(monkeypatch, machine, features, answer):
    """None: no /proc/cpuinfo."""

    def read_text(path: Path) -> str:
        assert str(path) == "/proc/cpuinfo"
        if features is None:
            raise FileNotFoundError(path)
        return f"processor\t: 0\nFeatures\t: {features}\n"

    monkeypatch.setattr(devices.platform, "machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", read_text)
    assert cpu_has_bfloat16_arithmetic() is answer
