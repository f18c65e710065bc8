"""The compiled pipelines as golden files, so that every change is reviewed."""

from flotilla.pipelines.compile import compile_pipeline
from flotilla.pipelines.sweeps import SweepOptions
from flotilla.pipelines.sweeps.pipeline import compile_sweep


def test_the_compiled_pipeline_is_the_golden_file(golden, tmp_path):
    compile_pipeline(tmp_path / "pipeline.yaml")
    golden("pipeline.yaml", (tmp_path / "pipeline.yaml").read_text(encoding="utf-8"))


SETTINGS = ("training.optimizer.learning_rate=0.01,0.003,0.001", "training.batch_size=16,64,256")


def test_the_compiled_sweep_is_the_golden_file(golden, tmp_path):
    options = SweepOptions(config="configs/digits.yaml", settings=SETTINGS, parallel=3)
    compile_sweep(options, tmp_path / "sweep.yaml")
    golden("sweep.yaml", (tmp_path / "sweep.yaml").read_text(encoding="utf-8"))
