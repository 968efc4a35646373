"""The acoustic model of Zhang et al. 2019, "Distributed Deep Learning Strategies for Automatic Speech Recognition"."""

from __future__ import annotations

from torch import Tensor, nn

from ddpcore.models.blocks import Shape


class SpeechLSTM(nn.Module):
    """Stacked bidirectional LSTM layers, a linear bottleneck, and the classes of the middle frame.

    Inputs [B, frames, features] of any size to logits [B, C]. The defaults are the published acoustic model: 21 frames
    of 260 features, 6 layers of 512 cells in each direction, a bottleneck of 256 and 32000 states of hidden Markov
    models. It has 43154944 parameters, which are the 164.62 MB of the large-batch study:

        4 x 512 x (260 + 512 + 2) x 2 + 5 x 4 x 512 x (1024 + 512 + 2) x 2 + 1024 x 256 + 256 + 256 x 32000 + 32000.

    The acoustic model classifies all frames of a sequence; here a sample has one label, the label of frame frames // 2.

    Args:
        depth: number of layers, at least 1.
        width: cells of each direction, at least 1.
        bottleneck: units of the linear layer before the last, at least 1.
    """

    input_shapes = ((21, 260),)
    num_classes = 32000
    any_size = True

    def __init__(
        self,
        input_shape: Shape = input_shapes[0],
        num_classes: int = num_classes,
        *,
        depth: int = 6,
        width: int = 512,
        bottleneck: int = 256,
    ) -> None:
        super().__init__()
        if min(depth, width, bottleneck) < 1:
            raise ValueError(f"depth {depth}, width {width} and bottleneck {bottleneck}: each must be at least 1")
        self.lstm = nn.LSTM(input_shape[1], width, num_layers=depth, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * width, bottleneck), nn.Linear(bottleneck, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        frames, _ = self.lstm(inputs)
        logits: Tensor = self.head(frames[:, inputs.shape[1] // 2])
        return logits
