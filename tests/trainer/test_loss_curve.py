import numpy as np
import pytest
from PIL import Image

from opslot.trainer.loss_curve import draw_loss_curve, smooth


def test_smoothing_does_not_lag_and_ignores_non_finite_values():
    assert smooth(np.array([3.0, 1.0])).tolist() == [3.0, 1.0]
    falling = np.linspace(9, 1, 200)
    assert smooth(falling)[:195] == pytest.approx(falling[:195], abs=1e-9)
    noisy = smooth(np.where(np.arange(200) % 2, 1.0, 3.0))
    assert noisy[0] == 3.0
    assert noisy[20:] == pytest.approx(2.0, abs=0.2)
    assert noisy[-1] == pytest.approx(2.0, abs=0.2)
    assert np.isfinite(smooth(np.array([1.0, np.nan] * 50))).all()


def test_plots_of_short_and_long_runs(tmp_path, monkeypatch):
    # Searching for the best place of the legend is slow with many points, and warns so.
    monkeypatch.delattr("matplotlib.legend.Legend._find_best_position")
    for count in (1, 200):
        records = [{"step": i + 1, "loss": 8 / (i + 1) ** 0.2} for i in range(count)]
        records[-1]["eval_loss"] = 4.0
        draw_loss_curve(records, tmp_path / "loss.png", title="a run", reference=6.5)
        with Image.open(tmp_path / "loss.png") as picture:
            assert picture.size == (1280, 736)
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
