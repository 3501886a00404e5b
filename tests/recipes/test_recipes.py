"""Every recipe in configs/ passes `megarl check` for the GPUs that it names. Its header and docs/recipes.md
say what the check says.

pytest tests/recipes"""

import re

import pytest

from megarl import cli
from megarl.config.hf_config import ModelShape
from tests.recipes.recipes import FIRST, PAGE, RECIPES, ROOT, arguments, checked, gpu_gb, make_reader_folder

OUTSIDE = 0.9
"""Share of a GPU that the estimate may take: it does not count what operations, CUDA and NCCL take."""
LARGE = ("qwen3_235b",)
"""Recipes whose check takes seconds."""
MODELS = ROOT / "tests" / "recipes" / "models"
PARAMETERS = {
    "Qwen2.5-0.5B-Instruct": 0.494e9,
    "Qwen2.5-7B-Instruct": 7.616e9,
    "Qwen3-4B": 4.022e9,
    "Qwen3-8B": 8.191e9,
    "Qwen3-30B-A3B": 30.53e9,
    "Qwen3-235B-A22B": 235.1e9,
    "Llama-3.1-8B-Instruct": 8.030e9,
    "Llama-3.1-70B-Instruct": 70.55e9,
    "DeepSeek-V3-bf16": 671.0e9,
}
"""Numbers of parameters as published."""


@pytest.fixture
def reader(tmp_path, monkeypatch):
    make_reader_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_the_shapes_have_the_published_number_of_parameters(name):
    from megarl.checks.sizes import canonical_elements

    assert canonical_elements(ModelShape.load(MODELS / name)) == pytest.approx(PARAMETERS[name], rel=1e-3)
    assert {folder.parent.name for folder in MODELS.glob("*/config.json")} == PARAMETERS.keys()


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=pytest.mark.nightly if recipe.stem.startswith(LARGE) else ())
        for recipe in RECIPES
    ],
    ids=lambda recipe: recipe.stem,
)
def test_a_recipe_fits_and_says_what_it_needs(reader, recipe):
    report, needs, row = checked(recipe)
    assert report.errors + report.estimates == () and report.lines[0].startswith("ok: ")
    assert needs.peak_gb <= OUTSIDE * needs.gpu_gb
    assert row in PAGE.read_text().splitlines()
    header = recipe.read_text().splitlines()
    if recipe == FIRST:
        return
    assert header[0].endswith(" Unproven: no GPU has run it.") and header[1] == needs.line
    assert header[2].startswith("# Settings: ") and f"@configs/recipes/{recipe.name}" in recipe.read_text()
    nodes = re.findall(r"--nnodes (\d+) --nproc-per-node 8", recipe.read_text())
    # torchrun's in the header, and the job's
    assert nodes == ([str(needs.devices // 8)] * 2 if needs.devices > 8 else [])


def test_the_page_has_no_other_recipe():
    rows = re.findall(r"^\| \[(.*?)\]", PAGE.read_text(), re.MULTILINE)
    assert rows == [recipe.stem for recipe in RECIPES] and len(rows) > 12


def test_the_command_of_the_page(reader, capsys):
    (recipe,) = [recipe for recipe in RECIPES if recipe.stem == "qwen3_8b_gsm8k_grpo"]
    assert cli.main(["check", *arguments(recipe), "--gpu-memory", str(gpu_gb(recipe))]) == 0
    assert capsys.readouterr().out.startswith("ok: world size 8, data-parallel size 4, 105 steps")
    assert cli.main(["check", *arguments(recipe), "--gpu-memory", "40"]) == 2
