"""The table of `scripts/demo`: each script as it is, once in float32 and once under autoamp."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "tests" / "scripts"
DTYPE = "bfloat16"  # the scripts train on the CPU, where float16 is slow
RUNS = (
    ("digits_cnn", "--steps", "100"),
    ("char_lstm", "--steps", "60"),
    ("char_transformer", "--steps", "40"),
    ("digits_vae", "--steps", "200"),
    ("digits_dcgan", "--steps", "80"),
    # The one that gains. At this rate its accuracy does not jump from step to step.
    ("image_resnet", "--steps", "60", "--lr", "0.005", "--width", "64", "--size", "64"),
)
SMALL = {"image_resnet": ("--steps", "40")}
"""What is played where the CPU has no such arithmetic: there nothing gains, and the larger
model would take half an hour."""
ROW = "{:<17} {:<16} {:>8} {:>9}   {:>9} {:>10}   {:>8}"


def main() -> int:
    findings = ask_the_doctor()
    if findings["state"] == "broken":
        print(f"autoamp doctor: {findings['verdict']}", file=sys.stderr)
        return 1
    cpu = findings["child"]["devices"]["cpu"]
    small = SMALL if cpu["dtype"] == "off" else {}
    if small:
        print(f"{cpu['why']}.\nIt is forced here, to compare the results: it will not be faster.")
    columns = ("float32", DTYPE, "float32 s", f"{DTYPE} s", "speed-up")
    print(ROW.format("script", "metric", *columns))
    for name, *options in RUNS:
        options = small.get(name, options)
        metric, full, full_time = train(name, options, {"AUTO_MIXED_PRECISION": "0"})
        mixed = {"AUTO_MIXED_PRECISION": "1", "AUTO_MIXED_PRECISION_DTYPE": DTYPE}
        _, lower, lower_time = train(name, options, mixed)
        times = (f"{full_time:.1f}", f"{lower_time:.1f}", f"{full_time / lower_time:.2f}x")
        print(ROW.format(name, metric, f"{full:.4g}", f"{lower:.4g}", *times), flush=True)
    print(
        "Compared: tests/scripts, unmodified, from the same seed, without and with autoamp.\n"
        "Seconds are of the whole process, and very small models gain nothing.\n"
        "For a script of your own: AUTO_MIXED_PRECISION=1 python train.py"
    )
    return 0


def ask_the_doctor() -> dict:
    command = [sys.executable, "-m", "autoamp", "doctor", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS).stdout)


def train(name: str, options: list[str], variables: dict[str, str]) -> tuple[str, float, float]:
    """Run the script: its metric's name and value, and the seconds that it took."""
    command = [sys.executable, f"{name}.py", "--seed", "0", *options]
    started = time.perf_counter()
    run = subprocess.run(
        command, cwd=SCRIPTS, env={**os.environ, **variables}, capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    _, metric, value = run.stdout.splitlines()[-1].split()
    return metric, float(value), seconds


if __name__ == "__main__":
    sys.exit(main())
