"""The public names of ``hookline.sinks``, each with the module it lives in."""

from hookline.sinks.console_sink import ConsoleSink as ConsoleSink
from hookline.sinks.csv_sink import CSVSink as CSVSink
from hookline.sinks.jsonl_sink import JSONLSink as JSONLSink
from hookline.sinks.memory_sink import MemorySink as MemorySink
from hookline.sinks.mlflow_sink import MLflowSink as MLflowSink
from hookline.sinks.parquet_sink import ParquetSink as ParquetSink
from hookline.sinks.prometheus_sink import PrometheusSink as PrometheusSink
from hookline.sinks.tensorboard_sink import TensorBoardSink as TensorBoardSink
from hookline.sinks.wandb_sink import WandbSink as WandbSink

__all__: list[str]
