"""``headrace compress sweep``, and mixed precision: what is measured decides."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.lab.compress.quantize import Asked
from headrace.lab.compress.sweep import front, sweep
from tests.lab.compressing import compressor, make_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


def test_a_sweep_leaves_models_a_table_and_a_picture_and_goes_on(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"

    def run(recipes: str) -> list[str]:
        arguments = ["headrace", "compress", "sweep", str(files / "model"), "-o", str(out)]
        arguments += ["--calibration", str(files / "calibration.jsonl"), "--text", str(files / "text.txt")]
        arguments += ["--sequence-length", "96", "--threads", "1", "--backend", "torch", "--recipe", recipes]
        monkeypatch.setattr("sys.argv", arguments)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code or 0, printed.err) == (0, ""), printed.out
        return printed.out.splitlines()

    first = run("rtn-int4,rtn-int8")
    assert first[0].startswith("rtn-int4: 0.")
    made = (out / "rtn-int4" / "compress.json").stat()
    second = run("rtn-int4,rtn-int8,gptq-int4")
    assert second[:2] == first[:2]
    assert (out / "rtn-int4" / "compress.json").stat().st_ino == made.st_ino
    assert (out / "sweep.md").read_text().splitlines()[0].startswith("| recipe | MiB | of 16 bits | KL |")
    assert "| gptq-int4" in (out / "sweep.md").read_text()
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert second[-1] == f"picture: {out / 'pareto.png'}"


def test_the_front_is_what_nothing_beats(files: Path, tmp_path: Path) -> None:
    asked = Asked(
        model=str(files / "model"),
        recipe="rtn-int4",
        output=tmp_path / "sweep",
        texts=(str(files / "text.txt"),),
        backend="torch",
        threads=1,
    )
    (tmp_path / "rows.yaml").write_text("steps:\n- {step: round, bits: 4, group_size: -1}\n")
    entries = list(sweep(asked, ["rtn-int8", str(tmp_path / "rows.yaml"), "rtn-int4"]))
    names = [entry.name for entry in front(entries)]
    assert names == ["rows", "rtn-int4", "rtn-int8"]
    sizes = [entry.size_mib for entry in front(entries)]
    losses = [entry.kl for entry in front(entries)]
    assert sizes == sorted(sizes)
    assert losses == sorted(losses, reverse=True)


def test_mixed_precision_gives_bits_to_the_layers_that_suffer(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compress = compressor(files, capsys, monkeypatch)
    path, out = tmp_path / "mixed.yaml", tmp_path / "out"
    path.write_text("steps:\n- {step: round, method: gptq, group_size: 32, average_bits: 5.5}\n")
    done = compress("--recipe", str(path), "-o", str(out), "--no-eval")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((out / "compress.json").read_text())
    bits = {one["name"]: int(one["scheme"][3]) for one in report["tensors"]}
    by_layer = {layer: {b for name, b in bits.items() if f"layers.{layer}." in name} for layer in range(3)}
    assert Counter(map(str, by_layer.values())) == {"{4}": 2, "{8}": 1}
    worst = max(range(3), key=lambda layer: report["sensitivity"][layer])
    assert by_layer[worst] == {8}
    weights = {one["name"]: one["shape"][0] * one["shape"][1] for one in report["tensors"]}
    assert sum(bits[name] * count for name, count in weights.items()) / sum(weights.values()) <= 5.5


def test_names_in_the_picture_do_not_cover_each_other() -> None:
    from matplotlib.figure import Figure

    from headrace.lab.compress.labels import place_labels

    axis = Figure(figsize=(8, 5), dpi=110, layout="constrained").subplots()
    points = {f"a-recipe-{index}": (108.0 + index % 3, 0.2 + 0.005 * index) for index in range(12)}
    axis.plot([x for x, _ in points.values()], [y for _, y in points.values()], "o")
    axis.set_ylim(0.001, 1)
    axis.set_xlim(100, 160)
    boxes = [label.get_window_extent() for label in place_labels(axis, points)]
    whole = axis.get_window_extent()
    assert all(whole.contains(x, y) for box in boxes for x, y in box.corners())
    assert not [(a, b) for a, b in combinations(boxes, 2) if a.overlaps(b)]
