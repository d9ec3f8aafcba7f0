"""The public names of ``hookline.sinks``, each with the module it lives in."""

from hookline.sinks.console_sink import ConsoleSink as ConsoleSink
from hookline.sinks.csv_sink import CSVSink as CSVSink
from hookline.sinks.fan_out import FanOut as FanOut
from hookline.sinks.jsonl_sink import JSONLSink as JSONLSink
from hookline.sinks.memory_sink import MemorySink as MemorySink
from hookline.sinks.mlflow_sink import MLflowSink as MLflowSink
from hookline.sinks.parquet_sink import ParquetSink as ParquetSink
from hookline.sinks.prometheus_sink import PrometheusSink as PrometheusSink
from hookline.sinks.record_log import RecordLog as RecordLog
from hookline.sinks.record_log import read_log as read_log
from hookline.sinks.replay_log import replay as replay
from hookline.sinks.sink import MetricSink as MetricSink
from hookline.sinks.sink import Record as Record
from hookline.sinks.sink import StepSeries as StepSeries
from hookline.sinks.tensorboard_sink import TensorBoardSink as TensorBoardSink
from hookline.sinks.wandb_sink import WandbSink as WandbSink

__all__: list[str]
