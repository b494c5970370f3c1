"""Settings every test runs under: one thread, no network, no screen. They are set before torch is imported."""

from __future__ import annotations

import os
import sys

import pytest

SETTINGS = {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
os.environ.update(SETTINGS)  # spawned workers inherit them

pytest.register_assert_rewrite("tests.trl_fixtures", "tests.trl_rounds")  # shared by files: they assert too


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Hold torch to one thread even if a plugin imported it before the settings; never import it for this alone."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
