"""The public names of ``hookline.training``, each with the module it lives in."""

from hookline.training.checkpoints import Checkpoints as Checkpoints
from hookline.training.experiment import Experiment as Experiment
from hookline.training.experiment import StepResult as StepResult
from hookline.training.loops import LoopResult as LoopResult
from hookline.training.loops import epoch_loop as epoch_loop
from hookline.training.loops import step_loop as step_loop

__all__: list[str]
