"""The mixers by name. A new one is a folder beside this file and a line here."""

from unsoftmax.kernels.gsa.layer import GatedSlotAttention
from unsoftmax.kernels.mixer import Mixer
from unsoftmax.kernels.polysketch.layer import PolySketchAttention
from unsoftmax.kernels.window.layer import WindowAttention

MIXERS: dict[str, type[Mixer]] = {
    "gsa": GatedSlotAttention,
    "polysketch": PolySketchAttention,
    "window": WindowAttention,
}
