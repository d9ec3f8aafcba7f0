"""The public names of ``hookline.integrations``, each with the module it lives in."""

from hookline.integrations.follow import Follow as Follow
from hookline.integrations.host_run import HostRun as HostRun

__all__: list[str]
