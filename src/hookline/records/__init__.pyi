"""The public names of ``hookline.records``, each with the module it lives in."""

from hookline.records.log import FanOut as FanOut
from hookline.records.log import RecordLog as RecordLog
from hookline.records.log import read_log as read_log
from hookline.records.log import replay as replay
from hookline.records.sink import MetricSink as MetricSink
from hookline.records.sink import Record as Record
from hookline.records.sink import StepSeries as StepSeries

__all__: list[str]
