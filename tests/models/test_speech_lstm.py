"""The speech LSTM: what it sees, what it answers for, and any size of sample."""

from __future__ import annotations

import pytest
import torch

from ddpcore.models import MODELS
from ddpcore.models.small import SpeechLSTM


def test_the_published_layers() -> None:
    with torch.device("meta"):
        model = SpeechLSTM((21, 260), 32000)
    assert (model.lstm.num_layers, model.lstm.hidden_size, model.lstm.bidirectional) == (6, 512, True)
    assert [(layer.in_features, layer.out_features) for layer in model.head] == [(1024, 256), (256, 32000)]


def test_every_frame_decides_the_class_of_the_middle_one() -> None:
    model = SpeechLSTM((5, 3), 4, depth=1, width=6, bottleneck=2)
    inputs = torch.randn(1, 5, 3)
    logits = model(inputs)
    for frame in range(5):
        changed = inputs.clone()
        changed[0, frame, 1] += 1
        assert not torch.allclose(model(changed), logits), frame
    both, _ = model.lstm(inputs)
    forwards, _ = model.lstm(inputs[:, :3])  # forwards, the middle frame knows nothing of those after it
    torch.testing.assert_close(both[:, 2, :6], forwards[:, 2, :6])
    backwards, _ = model.lstm(inputs[:, 2:])
    torch.testing.assert_close(both[:, 2, 6:], backwards[:, 0, 6:])
    torch.testing.assert_close(logits, model.head(torch.cat([forwards[:, 2, :6], backwards[:, 0, 6:]], dim=1)))


def test_samples_of_any_size_fit() -> None:
    for shape in ((1, 1), (4, 7), (21, 40)):
        model = MODELS.build("speech_lstm", input_shape=shape, num_classes=5, depth=1, width=3, bottleneck=2)
        assert model(torch.randn(2, *shape)).shape == (2, 5)
    with pytest.raises(ValueError, match="takes samples of 21x260, or other sizes and does not fit 10: models that do"):
        MODELS.check_input("speech_lstm", (10,))
    with pytest.raises(ValueError, match="does not fit 0x3"):
        MODELS.check_input("speech_lstm", (0, 3))


def test_impossible_sizes() -> None:
    for option in ("depth", "width", "bottleneck"):
        with pytest.raises(ValueError, match=f"{option} 0.*each must be at least 1"):
            SpeechLSTM((21, 260), 32000, **{option: 0})
