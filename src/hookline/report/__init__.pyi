"""The public names of ``hookline.report``, each with the module it lives in."""

from hookline.report.loaded_run import LoadedRun as LoadedRun
from hookline.report.loaded_run import load_run as load_run
from hookline.report.loaded_run import load_runs as load_runs
from hookline.report.report_page import write_report as write_report

__all__: list[str]
