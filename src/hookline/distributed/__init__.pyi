"""The public names of ``hookline.distributed``, each with the module it lives in."""

from hookline.distributed.ranks import gather_objects as gather_objects
from hookline.distributed.ranks import is_distributed as is_distributed
from hookline.distributed.ranks import rank_count as rank_count
from hookline.distributed.ranks import this_rank as this_rank
from hookline.distributed.reduce import Exchange as Exchange
from hookline.errors import RankError as RankError

__all__: list[str]
