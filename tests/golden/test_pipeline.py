"""The compiled pipeline as a golden file: a change is reviewed before it is kept."""

from flotilla.pipelines.compile import compile_pipeline


def test_the_compiled_pipeline_is_the_golden_file(golden, tmp_path):
    compile_pipeline(tmp_path / "pipeline.yaml")
    golden("pipeline.yaml", (tmp_path / "pipeline.yaml").read_text(encoding="utf-8"))
