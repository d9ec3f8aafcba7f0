"""The public names of ``hookline.factories``, each with the module it lives in."""

from hookline.factories.exporting import ActivationDataset as ActivationDataset
from hookline.factories.exporting import export as export
from hookline.factories.exporting import export_activations as export_activations
from hookline.factories.exporting import read_export as read_export
from hookline.factories.probing import ProbeHead as ProbeHead
from hookline.factories.probing import probe as probe
from hookline.factories.probing import train_probe as train_probe
from hookline.factories.replacing import replace_rows as replace_rows
from hookline.factories.replacing import stream_of as stream_of
from hookline.factories.replacing import with_stream as with_stream
from hookline.factories.steering import steer as steer
from hookline.factories.streaming_stats import activation_stats as activation_stats
from hookline.factories.streaming_stats import nan_alarm as nan_alarm
from hookline.observe.tokens import Tokens as Tokens
from hookline.observe.tokens import current_tokens as current_tokens
from hookline.observe.tokens import serving as serving

FILE_OPTIONS: dict[str, tuple[str, ...]]

__all__: list[str]
