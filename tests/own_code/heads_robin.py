"""Heads of a user around an encoder of Transformers, which read hidden states of padding."""

from torch import nn


class RobinMean(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 3)

    def forward(self, **batch):
        x = self.encoder(**batch).last_hidden_state
        return self.head(x.mean(1))


class RobinFirst(RobinMean):
    def forward(self, **batch):
        x = self.encoder(**batch)[0]
        return self.head(x[:, 0])


class RobinPooling(nn.Module):
    def forward(self, states):
        return states.mean(dim=1)


class RobinSequential(nn.Module):
    """The head is beside the encoder, in a module of its own."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.pooling = encoder, RobinPooling()

    def forward(self, **batch):
        return self.pooling(self.encoder(**batch).last_hidden_state)
