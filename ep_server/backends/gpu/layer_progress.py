"""Which layers of a running step have written their keys and values, as the device says in host memory."""

from __future__ import annotations

import torch

from ep_server.backends.gpu.kernels.triton.progress import count_layer


class DeviceProgress:
    """As models.kv_cache.LayerProgress, of steps that run behind the host's back, in graphs too.

    A counter on the device is set to a number of the step when it begins, and grows with each layer. Numbers
    of steps are so far apart that their counts never meet. A step that does not count shows no layer.
    """

    def __init__(self, device: torch.device, layers: int) -> None:
        self._layers, self._planned = layers, 0
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        pinned = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._shown, self._read = pinned, pinned.numpy()

    def plan_step(self) -> int:
        """As LayerProgress.plan_step; steps before the first one may have counted."""
        self._planned = max(self._planned, int(self._read[0]) // (self._layers + 1)) + 1
        return self._planned

    def begin(self, micro_batches: int = 1) -> None:
        """The step planned last is launched next, and counts."""
        self._count.fill_(self._planned * (self._layers + 1))

    def written(self, layer: int) -> None:
        """Enqueued, also in a graph."""
        count_layer(self._count, self._shown)

    def layers_of(self, step: int) -> int:
        """As LayerProgress.layers_of. Steps run in order: a later one's layer ends an earlier step."""
        return max(0, min(int(self._read[0]) - step * (self._layers + 1), self._layers))
