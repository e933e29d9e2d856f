"""Children are reached by the environment alone; each activates for itself."""

import pytest

START_METHODS = ("spawn", "forkserver", "fork")
CHILD = "import torch, sys; print(sys.modules['autoamp.activation'].calls[0]['door'])"


def test_a_subprocess_is_active_too(installed):
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    result = installed.on().run("-c", script)
    assert (result.stdout, result.stderr) == (".pth\n", "")


@pytest.mark.parametrize("method", START_METHODS)
def test_multiprocessing_children_are_active_too(installed, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def work():\n"
        "    import torch\n"
        "    print(sys.modules['autoamp.bootstrap'].phase, flush=True)\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context('{method}')\n"
        "    child = context.Process(target=work); child.start(); child.join()\n"
    )
    result = installed.on().run(script)
    assert (result.stdout, result.stderr) == ("active\n", "")


@pytest.mark.parametrize("method", START_METHODS)
def test_children_of_a_script_that_set_the_variable_are_active_too(installed, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "os.environ['AUTO_MIXED_PRECISION'] = '1'\n"
        "import multiprocessing, sys, torch\n"
        "def work():\n"
        "    print(sys.modules['autoamp.bootstrap'].phase, flush=True)\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context('{method}')\n"
        "    child = context.Process(target=work); child.start(); child.join()\n"
    )
    result = installed.run(script)
    assert (result.stdout, result.stderr) == ("active\n", "")


@pytest.mark.parametrize(
    "change", ["env={}", "env=(os.environ.pop('AUTO_MIXED_PRECISION'), os.environ)[1]"]
)
def test_a_child_without_the_variable_is_off(installed, change):
    child = "import torch, sys; print('autoamp.activation' in sys.modules)"
    script = (
        f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], {change})"
    )
    assert installed.on().run("-c", script).stdout == "False\n"


def test_a_chain_of_twenty_children_has_twenty_links(current):
    script = (
        "import subprocess, sys, torch\n"
        "code, depth = sys.argv[1], int(sys.argv[2])\n"
        "print(depth, sys.modules['autoamp.bootstrap'].phase, flush=True)\n"
        "if depth: subprocess.run([sys.executable, '-c', code, code, str(depth - 1)])\n"
    )
    result = current.on().run("-c", script, script, "19")
    assert result.stdout.splitlines() == [f"{depth} active" for depth in range(19, -1, -1)]
    assert result.stderr == ""


def test_opening_a_door_starts_no_process(no_start_files):
    script = (
        "import os, sys\n"
        "started = []\n"
        "sys.addaudithook(lambda event, _: started.append(event) if event in EVENTS else None)\n"
        "EVENTS = ('subprocess.Popen', 'os.posix_spawn', 'os.fork', 'os.system', 'os.exec')\n"
        "from autoamp.bootstrap import start, start_in_torch, enable\n"
        "start(); import torch; start_in_torch(); enable(); print(started)\n"
    )
    assert no_start_files.on().report(script).printed == ["[]"]
