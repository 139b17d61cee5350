"""doctor: each line says ok, slower or broken, and the fix."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.lab.doctor import compatibility, containers, links, processor, storage


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own: this user's may have any number of files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def plain() -> list[dict[str, str]]:
    """What doctor finds here, with nothing asked for."""
    found: list[dict[str, str]] = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    return found


def test_every_line_has_a_verdict() -> None:
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    verdicts = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert len(verdicts) >= 20
    assert set(verdicts) <= {"ok", "slower", "broken"}


def test_json_is_one_array_and_broken_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ISA", "no-such-path")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert checks["kernels"]["status"] == "broken"
    assert "HEADRACE_ISA" in checks["kernels"]["fix"]
    assert result.exit_code == 1


def test_a_slow_kernel_path_says_how_to_get_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    best = processor.kernels().finding.split(",")[0]
    monkeypatch.setenv("HEADRACE_ISA", "portable")
    check = processor.kernels()
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
    check = processor.cpu(info)
    assert check.status == status
    assert says in check.finding
    assert check.finding.startswith("Test 9000")


def test_an_arm_cpu(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n")
    check = processor.cpu(info)
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
    check = processor.cores(tmp_path)
    if quota is None:
        assert "quota" not in check.finding
    else:
        assert f"quota {quota}" in check.finding
        assert (check.status, "--threads 1" in check.fix) == ("slower", True)


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{600 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{100 * 2**20}\n")
    check = containers.memory(tmp_path)
    assert check.status == "slower"
    assert check.finding == "0.5 GiB free of 0.6 GiB"
    assert "--kv-cache-memory" in check.fix


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))
    check = storage.cache()
    assert check.status == "broken"
    assert "HEADRACE_CACHE" in check.fix


def test_a_gpu_is_seen_through_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Test GPU, 81559 MiB, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "Test GPU" in compatibility.gpu().finding


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
    check = compatibility.suits_torch(installed, "Test GPU")
    assert check.status == status
    assert says in check.fix


def tree(root: Path, files: dict[str, str]) -> Path:
    """Files as they lie in /proc or /sys."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "status", "says"),
    [
        (
            {"cpu.stat": "usage_usec 9\nnr_periods 200\nnr_throttled 50\nthrottled_usec 2500000\n"},
            "slower",
            "25%",
        ),
        ({"cpu/cpu.stat": "nr_periods 100\nnr_throttled 9\nthrottled_time 1500000000\n"}, "slower", "1.5 s"),
        ({"cpu.stat": "nr_periods 1000\nnr_throttled 1\nthrottled_usec 10\n"}, "ok", "1 of 1000"),
        ({"cpu.stat": "usage_usec 9\n"}, "ok", "no CPU quota"),
        ({"cpu.stat": "nr_periods many\nnr_throttled\n"}, "ok", "no CPU quota"),
        ({}, "ok", "no CPU quota"),
    ],
)
def test_throttled_periods_are_counted(tmp_path: Path, files: dict[str, str], status: str, says: str) -> None:
    check = containers.throttling(tree(tmp_path, files))
    assert (check.status, says in check.finding) == (status, True)
    assert bool(check.cost) == bool(check.fix) == (status != "ok")


@pytest.mark.parametrize(
    ("membership", "group"),
    [
        ("0::/system.slice/headrace.service\n", "system.slice/headrace.service"),
        ("0::/\n", ""),
        ("0::/../elsewhere\n", ""),
        ("0::/not/there\n", ""),
        ("4:memory:/docker/1\n", ""),
        ("", ""),
    ],
)
def test_a_service_has_a_group_of_its_own(tmp_path: Path, membership: str, group: str) -> None:
    tree(tmp_path, {"root/system.slice/headrace.service/cpu.max": "50000 100000", "elsewhere/cpu.max": "1 1"})
    (tmp_path / "membership").write_text(membership)
    found = containers.own_group(tmp_path / "root", tmp_path / "membership")
    assert found == tmp_path / "root" / group


def test_processes_killed_for_memory_are_told(tmp_path: Path) -> None:
    tree(tmp_path, {"memory.max": str(2**40), "memory.events": "low 0\noom 3\noom_kill 2\n"})
    check = containers.memory(tmp_path)
    assert check.status == "slower"
    assert "killed 2 processes" in check.cost


@pytest.mark.parametrize(
    ("before", "after", "status", "says"),
    [
        (
            "cpu  100 0 100 500 0 0 0 0 0 0",
            "cpu  150 0 140 600 0 0 0 10 0 0",
            "slower",
            "10.0% now, 0.0% since",
        ),
        ("cpu  100 0 100 500 0 0 0 0 0 0", "cpu  150 0 150 600 0 0 0 0 0 0", "ok", "0.0% now"),
        ("cpu  100 0 80 500 0 0 0 20 0 0", "cpu  100 0 80 500 0 0 0 20 0 0", "slower", "10.0% since"),
        ("cpu  1 2 3", "cpu  1 2 3", "ok", "not known"),
        ("nonsense", "nonsense", "ok", "not known"),
    ],
)
def test_stolen_time_is_sampled(tmp_path: Path, before: str, after: str, status: str, says: str) -> None:
    stat = tmp_path / "stat"
    stat.write_text(f"{before}\ncpu0 1 2 3 4 5 6 7 8\n")
    check = containers.steal(stat, wait=lambda: stat.write_text(f"{after}\n") and None)
    assert (check.status, says in check.finding) == (status, True)


def cpufreq(governor: str, driver: str, allowed: int = 3_700_000) -> dict[str, str]:
    return {
        "cpu/cpu0/cpufreq/scaling_governor": governor,
        "cpu/cpu0/cpufreq/scaling_driver": driver,
        "cpu/cpu0/cpufreq/cpuinfo_max_freq": "3700000",
        "cpu/cpu0/cpufreq/scaling_max_freq": str(allowed),
    }


@pytest.mark.parametrize(
    ("files", "status", "says"),
    [
        (cpufreq("powersave", "acpi-cpufreq"), "slower", "powersave"),
        (cpufreq("powersave", "intel_pstate"), "ok", "3.70 GHz"),
        (cpufreq("performance", "acpi-cpufreq", 1_850_000), "slower", "limited to 1.85 GHz"),
        ({}, "ok", "virtual machine"),
    ],
)
def test_cores_held_back_are_seen(tmp_path: Path, files: dict[str, str], status: str, says: str) -> None:
    check = processor.frequency(tree(tmp_path, files))
    assert (check.status, says in check.finding) == (status, True)


@pytest.mark.parametrize(
    ("affinity", "status", "says"), [({0, 5}, "slower", "cores of 2"), ({4, 5}, "ok", "cores of 1")]
)
def test_cores_of_two_nodes(tmp_path: Path, affinity: set[int], status: str, says: str) -> None:
    tree(tmp_path, {"node/node0/cpulist": "0-3\n", "node/node1/cpulist": "4,5-7\n"})
    check = processor.numa(tmp_path, affinity)
    assert (check.status, says in check.finding) == (status, True)
    assert (status == "ok") or "--cpunodebind=0" in check.fix


def test_damaged_node_lists_are_no_nodes(tmp_path: Path) -> None:
    tree(tmp_path, {"node/node0/cpulist": "0-\n", "node/node1/cpulist": "x"})
    assert processor.numa(tmp_path, {0}).status == "ok"


@pytest.mark.parametrize(
    ("text", "status"),
    [("always [madvise] never\n", "ok"), ("always madvise [never]\n", "slower"), ("", "ok"), ("?", "ok")],
)
def test_huge_pages(tmp_path: Path, text: str, status: str) -> None:
    (tmp_path / "enabled").write_text(text)
    assert storage.huge_pages(tmp_path / "enabled").status == status


def test_the_disk_is_read_and_what_was_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(100))
    assert "a file written into" in storage.disk(tmp_path).finding
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "model.weights").write_bytes(os.urandom(17 * 2**20))
    assert "reading 17 MiB of model.weights" in storage.disk(tmp_path).finding


def test_a_cache_that_is_not_there_yet(tmp_path: Path) -> None:
    check = storage.disk(tmp_path / "not" / "yet")
    assert f"written into {tmp_path}" in check.finding
    assert not (tmp_path / "not").exists()


def port(device: str, layer: str, state: str, rate: str) -> dict[str, str]:
    folder = f"{device}/ports/1"
    return {f"{folder}/link_layer": layer, f"{folder}/state": state, f"{folder}/rate": rate}


def test_ports_between_nodes(tmp_path: Path) -> None:
    assert links.between_nodes(tmp_path).status == "ok"
    tree(tmp_path, port("mlx5_0", "InfiniBand\n", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n"))
    check = links.between_nodes(tmp_path)
    assert (check.status, check.finding) == ("ok", "mlx5_0/1 InfiniBand 400 Gb/sec (4X NDR) ACTIVE")
    tree(tmp_path, port("mlx5_1", "Ethernet\n", "1: DOWN\n", "100 Gb/sec\n"))
    check = links.between_nodes(tmp_path)
    assert check.status == "slower"
    assert "mlx5_1/1 RoCE" in check.finding
    assert "mlx5_1/1" in check.fix


def driver_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """An nvidia-smi that prints ``text`` whatever it is asked."""
    (folder / "answer").write_text(text)
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat '{folder / 'answer'}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(("cell", "status"), [("NV18", "ok"), ("SYS", "slower")])
def test_gpus_are_joined_by_nvlink_or_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cell: str, status: str
) -> None:
    text = f"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{cell}\t0-31\nGPU1\t{cell}\t X \t0-31\n\nLegend:\n"
    driver_tool(tmp_path, monkeypatch, text)
    check = links.between_gpus()
    assert (check.status, cell in check.finding) == (status, True)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("NVIDIA L4, 23034 MiB, 570.1, 8.9", "NVIDIA L4 (sm_89): int8, bf16, fp8"),
        ("NVIDIA A100, 81920 MiB, 570.1, 8.0", "(sm_80): int8, bf16, no fp8"),
        ("Old, 8192 MiB, 390.1", "CPU: int8"),
        ("", "CPU: int8"),
    ],
)
def test_precisions_in_hardware(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, says: str
) -> None:
    driver_tool(tmp_path, monkeypatch, line + "\n")
    (tmp_path / "cpuinfo").write_text("model name : Test\nflags : sse2 avx2 avx512_vnni\n")
    assert says in compatibility.precisions(tmp_path / "cpuinfo").finding


@pytest.mark.parametrize(("triton", "status"), [("3.6.0", "ok"), ("3.5.0", "slower"), (None, "ok")])
def test_triton_must_be_the_one_of_torch(triton: str | None, status: str) -> None:
    check = compatibility.triton_suits(
        "2.13.0", ["sympy>=1.13", 'triton==3.6.0; platform_system == "Linux"'], triton
    )
    assert check.status == status
    assert status == "ok" or "triton==3.6.0" in check.fix


def test_the_network_is_measured_only_if_asked(plain: list[dict[str, str]], tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(2 * 2**20))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/large"
        shown = CliRunner().invoke(app, ["doctor", "--json", "--network", url]).stdout
        missing = storage.network(f"http://127.0.0.1:{server.server_port}/none")
        server.shutdown()
    found = {check["name"]: check for check in json.loads(shown)}["network"]
    assert "2.0 MiB of" in found["finding"]
    assert (missing.status, "404" in missing.finding) == ("broken", True)
    assert "network" not in {check["name"] for check in plain}


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/file", "nonsense", "http://127.0.0.1:9/x"])
def test_addresses_that_cannot_be_read(url: str) -> None:
    check = storage.network(url)
    assert check.status == "broken"
    assert check.fix


def test_everything_amiss_says_what_it_costs_and_how_to_fix_it(plain: list[dict[str, str]]) -> None:
    for check in plain:
        assert check["status"] == "ok" or (check["cost"] and check["fix"]), check
