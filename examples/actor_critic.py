"""Train an actor-critic that balances a pole; trackers report on its units and gradients after each epoch.

The first run gives a reward of 1 for every step that a pole stands. It learns, but the column "tanh full" shows that
the critic is saturated: it cannot represent returns of a hundred. The second run gives 0.02, and the critic can learn.

python examples/actor_critic.py
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributions import Categorical

import hookline as hl

EPOCHS, UPDATES, STEPS, POLES = 6, 12, 16, 64


class Poles:
    """Many poles on carts, balanced side by side: the equations of the classic cart-pole task, in tensors."""

    def __init__(self, number: int, reward: float) -> None:
        self.reward = reward
        self.state = self._fresh(number)  # (number, 4): position, speed, angle, turning speed
        self.age = torch.zeros(number)
        self.lived: list[float] = []

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Push each cart left (0) or right (1); the reward of each, and whether it fell. Fallen ones start anew."""
        _, speed, angle, turning = self.state.unbind(1)
        push = 20.0 * action - 10.0
        drive = (push + 0.05 * turning**2 * angle.sin()) / 1.1
        bend = (9.8 * angle.sin() - angle.cos() * drive) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        change = torch.stack([speed, drive - 0.05 * bend * angle.cos() / 1.1, turning, bend], 1)
        self.state = self.state + 0.02 * change
        self.age += 1
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > math.radians(12)) | (self.age >= 500)
        self.lived += self.age[fell].tolist()
        self.age[fell] = 0
        self.state = torch.where(fell[:, None], self._fresh(len(fell)), self.state)
        return torch.full((len(fell),), self.reward), fell

    def mean_life(self) -> float:
        """How many steps the poles that fell have stood, on average, since the last time this was asked."""
        ages = self.lived or self.age.tolist()
        self.lived = []
        return sum(ages) / len(ages)

    @staticmethod
    def _fresh(number: int) -> Tensor:
        return torch.rand(number, 4) * 0.1 - 0.05


def act_and_judge(components: OrderedDict[str, nn.Module], seen: Tensor) -> tuple[Tensor, Tensor]:
    """What to do, as logits, and how good it looks."""
    hidden = components["actor_mlp"](seen)
    return components["actor_head"](hidden), components["value"](components["critic_head"](hidden)).squeeze(-1)


def make_policy() -> hl.metta.PolicyAutoBuilder:
    """A body with ReLU that actor and critic share, and a critic with tanh."""
    return hl.metta.PolicyAutoBuilder(
        OrderedDict(
            actor_mlp=nn.Sequential(nn.Linear(4, 64), nn.ReLU()),
            actor_head=nn.Linear(64, 2),
            critic_head=nn.Sequential(nn.Linear(64, 32), nn.Tanh()),
            value=nn.Linear(32, 1),
        ),
        forward=act_and_judge,
    )


def make_tool() -> hl.metta.TrainTool:
    """What to track, by component; nothing is attached yet, there is not even a policy."""
    tool = hl.metta.TrainTool()
    tool.add_training_hook("actor_mlp", hl.metta.attach_relu_activation_hooks())
    tool.add_training_hook("critic_head", hl.metta.attach_saturated_activation_hooks(activation="tanh"))
    tool.add_training_backward_hook("actor_mlp", hl.metta.attach_fisher_information_hooks())
    tool.add_training_backward_hook("actor_mlp", hl.metta.attach_gradient_flow_hooks())
    tool.add_training_backward_hook("critic_head", hl.metta.attach_gradient_flow_hooks())
    return tool


@dataclass
class Trainer:
    """Advantage actor-critic; `context` is where the trackers are kept."""

    policy: hl.metta.PolicyAutoBuilder
    poles: Poles
    context: hl.metta.ComponentContext = field(default_factory=hl.metta.ComponentContext)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)

    def train_one_epoch(self) -> float:
        """Some updates; the loss of the last."""
        for _ in range(UPDATES):
            loss = self._loss()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def _loss(self) -> Tensor:
        chosen, values, rewards, fallen, entropy = [], [], [], [], []
        for _ in range(STEPS):
            logits, value = self.policy(self.poles.state)
            choice = Categorical(logits=logits)
            action = choice.sample()
            reward, fell = self.poles.step(action.float())
            chosen.append(choice.log_prob(action))
            values.append(value)
            rewards.append(reward)
            fallen.append(fell)
            entropy.append(choice.entropy())
        with torch.no_grad():
            ahead = self.policy(self.poles.state)[1]
        returns = []
        for reward, fell in zip(reversed(rewards), reversed(fallen), strict=True):
            ahead = reward + 0.99 * ahead * ~fell
            returns.insert(0, ahead)
        target, judged = torch.stack(returns), torch.stack(values)
        advantage = (target - judged).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = (torch.stack(chosen) * advantage).mean() + 0.01 * torch.stack(entropy).mean()
        return 0.5 * F.smooth_l1_loss(judged, target) - gain


def row(epoch: int, life: float, loss: float, metrics: dict[str, float]) -> list[str]:
    """A line of the table, from the metrics of one epoch."""
    active = [value for name, value in metrics.items() if name.startswith("activations/relu/actor_mlp/")]
    return [
        str(epoch),
        f"{life:.0f}",
        f"{loss:.2f}",
        f"{sum(active) / len(active):.0%}",
        str(sum(value < 0.01 for value in active)),
        f"{metrics['activations/tanh/saturation/critic_head/fraction']:.1%}",
        f"{metrics['fisher_info/actor_mlp/actor_mlp.0.weight/mean']:.1e}",
        f"{metrics['gradient_flow/actor_mlp/blocked_fraction']:.0%}",
        f"{metrics['gradient_flow/critic_head/mean']:.1e}",
    ]


def run(reward: float) -> tuple[Table, hl.sinks.MemorySink]:
    """Train with that reward; a line per epoch, and all the metrics. The policy is left without a hook."""
    torch.manual_seed(0)
    tool, policy, sink = make_tool(), make_policy(), hl.sinks.MemorySink()
    trainer = Trainer(policy, Poles(POLES, reward))
    reporter = hl.metta.StatsReporter(trainer.context, policy=policy, sinks=[sink])
    titles = ("epoch", "steps alive", "loss", "ReLU on", "dead", "tanh full", "Fisher", "blocked", "critic grad")
    table = Table(*titles, title=f"A reward of {reward:g} per step")
    with tool.attached(policy=policy, trainer=trainer):
        for epoch in range(EPOCHS):
            loss = trainer.train_one_epoch()
            table.add_row(*row(epoch, trainer.poles.mean_life(), loss, reporter.on_epoch_end(epoch)))
    hl.assert_no_hooks(policy, foreign=True)
    return table, sink


def main() -> None:
    """Two runs that differ in the reward alone."""
    torch.set_num_threads(1)  # tensors this small are not worth a second
    console = Console(width=100, highlight=False)
    for reward in (1.0, 0.02):
        table, sink = run(reward)
        console.print(table)
        fractions = sink.series("activations/tanh/saturation/critic_head/fraction")
        console.print(
            f"{len(sink.latest)} metrics per epoch; critic at its limits in the end: {fractions[-1][1]:.0%}\n"
        )


if __name__ == "__main__":
    main()
