"""Make .venv, or bring it up to date; do nothing, at once, if nothing has changed.

    python3 tools/bootstrap.py --find    # build on the best interpreter there is
    /path/to/python tools/bootstrap.py   # build on this one

If the interpreter has torch, .venv is laid over its packages and adds only what is missing; its torch, triton and numpy
stay as they are. Otherwise .venv gets a torch of its own: MOR_TORCH (any arguments of `pip install`) chooses which.
A working .venv that was made by other means is only added to. Where there is nvcc the CUDA kernels are built, and built
again when they change; MOR_CUDA, MOR_CUDA_ARCHS and the like are setup.py's.
"""

import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys

import toolchain

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".bootstrap"  # two lines: what .venv is built on, and the state it was brought to or UNFINISHED
THIS = f"Python {platform.python_version()} in {sys.prefix}"
UNFINISHED = "unfinished"

# Questions to another interpreter: has it a CUDA build of torch, and a recent one? Is it recent enough itself?
HAS_CUDA_TORCH = (
    "import sys, torch; sys.exit(not (sys.version_info >= (3, 10) and torch.version.cuda"
    " and tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 6)))"
)
IS_RECENT = "import sys; sys.exit(sys.version_info < (3, 10))"
INSTALLED = (
    "from importlib.metadata import distributions as d; "
    "print(*sorted({f'{x.name}=={x.version}' for x in d() if x.name in ('torch', 'triton', 'numpy')}), sep='\\n')"
)


def run(*command):
    print("+", *command, flush=True)
    return subprocess.run([str(part) for part in command], cwd=str(ROOT)).returncode == 0


def must_run(*command):
    if not run(*command):
        sys.exit("this command failed; run make again once its cause is mended")


def runs(python, code):
    # quietly, and really run: a shim on PATH may lead nowhere
    command = [str(python), "-c", code]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def has(python, package):
    return runs(python, f"from importlib.metadata import version; version({package!r})")


def find():
    names = [shutil.which(name) for name in ("python3", "python")]
    for python in filter(None, names):
        if runs(python, HAS_CUDA_TORCH):
            return python
    names = [shutil.which(f"python3.{minor}") for minor in (11, 12, 13, 14, 10)] + names
    for python in filter(None, names):
        if runs(python, IS_RECENT):
            return python
    sys.exit("no Python 3.10 or newer on PATH; name one: make PY=/path/to/python")


def wanted_state():
    kernels = [toolchain.choice(), os.environ.get("MOR_CUDA_ARCHS"), os.path.realpath(toolchain.find_nvcc() or "")]
    digest = hashlib.sha256(repr([str(ROOT), kernels]).encode())
    names = ("pyproject.toml", "setup.py", "CMakeLists.txt", "tools/bootstrap.py", "tools/toolchain.py")
    for path in [ROOT / name for name in names] + sorted(ROOT.glob("csrc/*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def has_gpu():
    return shutil.which("nvidia-smi") is not None and run("nvidia-smi", "-L")


def create():
    VENV.mkdir()
    STAMP.write_text(f"{THIS}\n{UNFINISHED}\n")
    # without pip, since on some distributions ensurepip is a package of its own and venv then fails half-way
    must_run(sys.executable, "-m", "venv", "--without-pip", VENV)
    if has(sys.executable, "torch"):
        # not --system-site-packages: from within a virtual environment it shows the packages of the interpreter below
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        [site] = VENV.glob("lib/python*/site-packages")
        (site / "host.pth").write_text("\n".join(packages) + "\n")


def install():
    pip = [PYTHON, "-m", "pip"]
    # Compiling all modules takes as long as the rest of it, and few are ever imported. Python compiles those the first
    # time, but each time where it may not keep the result.
    install = [*pip, "install", "-q", *([] if sys.dont_write_bytecode else ["--no-compile"])]
    if not has(PYTHON, "pip") and not runs(PYTHON, "import ensurepip; ensurepip.bootstrap()"):
        if not run(sys.executable, "-m", "pip", "--python", PYTHON, "install", "-q", "pip"):
            sys.exit(f"{sys.executable} has neither pip nor ensurepip (on Debian: apt-get install python3-venv)")
    if not has(PYTHON, "torch"):
        # On PyPI torch for Linux is a CUDA build of gigabytes whatever the machine; MOR_TORCH can name another index.
        default = "torch" if has_gpu() else "torch==2.13.0 'triton==3.7.1; sys_platform == \"linux\"'"
        must_run(*install, *shlex.split(os.environ.get("MOR_TORCH", default)))
    keep = VENV / "constraints.txt"
    keep.write_text(subprocess.check_output([str(PYTHON), "-c", INSTALLED], universal_newlines=True))
    editable = [*install, "-c", keep, "--no-build-isolation", "-e"]
    lacking = subprocess.check_output([str(PYTHON), "tools/toolchain.py"], cwd=str(ROOT), universal_newlines=True)
    if lacking.split():
        run(*install, "-c", keep, *lacking.split())  # without them there will be no kernels
    ready = run(*install, "setuptools>=77")
    if ready and run(*editable, ".[dev]"):
        return
    if not any(VENV.glob("lib/python*/site-packages/host.pth")):
        sys.exit("the packages could not be installed; run make again once the cause is mended")
    print("Going on with the packages that the interpreter has; to try again: make clean", flush=True)
    if ready and not run(*editable, ".", "--no-deps"):
        sys.exit("mor-kernels could not be installed; MOR_CUDA=0 does it without the CUDA kernels")
    run(*editable, ".[test]") or run(*editable, ".")


def main():
    toolchain.choice()  # before all else: it may be misspelt
    built_on, state = STAMP.read_text().splitlines() if STAMP.exists() else ("", "")
    find_it = sys.argv[1:] == ["--find"]
    if state == UNFINISHED or not PYTHON.exists():
        python = find() if find_it else sys.executable
        if python != sys.executable:
            os.execv(python, [python, __file__])
        shutil.rmtree(str(VENV), ignore_errors=True)
        create()
        built_on = THIS
    elif not find_it and built_on != THIS:
        sys.exit(f".venv is not built on {THIS}; remove it first: make clean")
    elif state == wanted_state():
        return
    wanted = wanted_state()  # what is edited while this installs is installed by the next call
    install()
    must_run(PYTHON, "-m", "mor_kernels.doctor")
    STAMP.write_text(f"{built_on}\n{wanted}\n")


main()
