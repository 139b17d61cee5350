"""doctor: each line says ok, slower or broken, and the fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import machine
from headrace.cli.main import app


def test_every_line_has_a_verdict() -> None:
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    verdicts = [line.split()[0] for line in lines if not line.strip().startswith("→")]
    assert len(verdicts) >= 10
    assert set(verdicts) <= {"ok", "slower", "broken"}


def test_json_is_one_array_and_broken_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ISA", "no-such-path")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert checks["kernels"]["status"] == "broken"
    assert "HEADRACE_ISA" in checks["kernels"]["fix"]
    assert result.exit_code == 1


def test_a_slow_kernel_path_says_how_to_get_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    best = machine.kernels().finding.split(",")[0]
    monkeypatch.setenv("HEADRACE_ISA", "portable")
    check = machine.kernels()
    assert check.finding.startswith("portable")
    if best != "portable":
        assert check.status == "slower"
        assert best in check.fix


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        ("fpu sse2 avx2 fma avx512f avx512_vnni", "ok", "AVX-512 VNNI"),
        ("fpu sse2 ssse3", "slower", "no vector instructions"),
    ],
)
def test_the_cpu_is_read_from_proc(tmp_path: Path, flags: str, status: str, says: str) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: Test 9000\nflags\t\t: {flags}\n\n")
    check = machine.cpu(info)
    assert check.status == status
    assert says in check.finding
    assert check.finding.startswith("Test 9000")


def test_an_arm_cpu(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n")
    check = machine.cpu(info)
    assert check.status == "ok"
    assert "NEON dot product" in check.finding


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "50000 100000\n"}, "0.5"),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "0.5"),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_a_containers_quota_counts(tmp_path: Path, files: dict[str, str], quota: str | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    check = machine.cores(tmp_path)
    if quota is None:
        assert "quota" not in check.finding
    else:
        assert f"quota {quota}" in check.finding
        assert (check.status, "--threads 1" in check.fix) == ("slower", True)


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{600 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{100 * 2**20}\n")
    check = machine.memory(tmp_path)
    assert check.status == "slower"
    assert check.finding == "0.5 GiB free of 0.6 GiB"
    assert "--kv-cache-memory" in check.fix


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))
    check = machine.cache()
    assert check.status == "broken"
    assert "HEADRACE_CACHE" in check.fix


def test_a_gpu_is_seen_through_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Test GPU, 81559 MiB, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "Test GPU" in machine.gpu().finding


@pytest.mark.parametrize(
    ("torch", "status", "says"),
    [
        ({"cuda_version": None}, "slower", "CUDA build"),
        ({"available": False}, "broken", "driver"),
        ({"archs": ["sm_80"]}, "broken", "sm_90"),
        ({}, "ok", ""),
    ],
)
def test_torch_must_suit_the_gpu(torch: dict[str, Any], status: str, says: str) -> None:
    installed = SimpleNamespace(
        __version__="2.9",
        version=SimpleNamespace(cuda=torch.get("cuda_version", "12.8")),
        cuda=SimpleNamespace(
            is_available=lambda: torch.get("available", True),
            get_device_capability=lambda: (9, 0),
            get_arch_list=lambda: torch.get("archs", ["sm_80", "sm_90"]),
        ),
    )
    check = machine.suits_torch(installed, "Test GPU")
    assert check.status == status
    assert says in check.fix
