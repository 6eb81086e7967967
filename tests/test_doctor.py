import json
import platform
import subprocess
import sys

import torch

from mor_kernels import doctor
from mor_kernels.ops import _dispatch


def test_report_is_plain_values_and_true():
    report = doctor.report()
    assert json.loads(json.dumps(report)) == report
    assert report["python"] == platform.python_version()
    assert report["torch"] == torch.__version__
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert report["packages"]["numpy"]
    assert list(report["backends"]) == [*_dispatch.BACKENDS, *_dispatch.SPECIALISTS]
    assert report["backends"]["eager"] is None


def test_a_missing_package_and_a_backend_that_cannot_work_are_named(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PACKAGES", ("numpy", "no-such-package"))
    monkeypatch.setattr(_dispatch, "unavailable", lambda name, device=None: "broken" if name == "cuda" else None)
    monkeypatch.setenv("MOR_BACKEND", "eager")
    doctor.main()
    facts = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    facts = {name.strip(): fact.strip() for name, fact in facts.items()}
    assert facts["no-such-package"] == "not installed"
    assert facts["cuda backend"] == "broken"
    assert facts["eager backend"] == "works"
    assert facts["MOR_BACKEND"] == "eager"
    assert facts["torch"] == torch.__version__


def test_it_runs_as_a_module():
    printed = subprocess.check_output([sys.executable, "-m", "mor_kernels.doctor"], text=True)
    assert "eager backend" in printed
