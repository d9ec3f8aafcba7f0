"""Stand in for vLLM's worker, runner and engine: a small model, and steps that tests describe."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from hookline.engines.vllm.extension import HookExtension
from hookline.factories import current_tokens

STATS = {"target_modules": ["layers.#"], "hook_factory": "hookline.factories:activation_stats"}
PROMPTS = {"a-00000001": 3, "b-00000002": 2}

KEPT = []
"""The tables of tokens that `keep_tokens` has seen."""


def keep_tokens(config):
    """Make a hook as a user would, which asks whose rows it sees."""
    return lambda module, inputs, output: KEPT.append(current_tokens())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, input_ids, positions):
        x = input_ids[:, None] * torch.ones(4)
        for layer in self.layers:
            x = layer(x)
        return x


class Runner:
    """A stand-in for the V1 runner: it runs the prompts of all requests in the first step, then a token of each."""

    def __init__(self, model, context):
        self.model, self.context = model, context
        self.input_batch = None

    def execute_model(self, scheduled):
        names = list(scheduled.counts)
        counts = list(scheduled.counts.values())
        self.query_start_loc = SimpleNamespace(np=np.cumsum([0, *counts]))
        self.input_batch = SimpleNamespace(
            req_ids=names,
            num_reqs=len(names),
            num_computed_tokens_cpu=np.array([scheduled.computed[name] for name in names]),
            num_prompt_tokens=np.array([PROMPTS[name] for name in names]),
        )
        self.context.attn_metadata, self.context.skip_compiled = {}, False
        ids = torch.arange(1.0, 1 + sum(counts))
        with torch.inference_mode():
            return self.model(input_ids=ids, positions=torch.arange(sum(counts)))


class _WorkerBase:
    pass


class Worker(_WorkerBase):
    """A stand-in for vLLM's worker."""

    def __init__(self, context, *, compiled=True, rank=0, tp=1, **options):
        context.workers.append(self)
        self.rank = rank
        self.model_runner = Runner(Model().eval(), context)
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(mode=3 if compiled else 0, cudagraph_mode=None),
            parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=1),
            additional_config={"hookline": options},
        )

    def get_model(self):
        return self.model_runner.model

    def load_model(self):
        return "loaded"

    def shutdown(self):
        return "down"

    def compile_or_warm_up_model(self):
        self.model_runner.context.attn_metadata = None
        with torch.inference_mode():
            self.get_model()(input_ids=torch.full((8,), 1e6), positions=torch.arange(8))
        return "warm"


Worker.__bases__ += (HookExtension,)  # as vLLM does, when the class is long made


class Engine:
    """A stand-in for ``LLM``, with one or two workers."""

    def __init__(self, *workers):
        self.workers = workers
        self.collective_rpc("hookline_describe")  # as the start of a real engine does

    def collective_rpc(self, method, args=()):
        return [getattr(worker, method)(*args) for worker in self.workers]

    def step(self, counts, new=None, computed=None, finished=()):
        """Run a step; ``new`` has the options of requests that begin with it."""
        begun = [
            SimpleNamespace(
                req_id=name,
                prompt_token_ids=[0] * PROMPTS[name],
                num_computed_tokens=0,
                sampling_params=SimpleNamespace(extra_args=None if options is None else {"hookline": options}),
            )
            for name, options in (new or {}).items()
        ]
        scheduled = SimpleNamespace(
            counts=counts,
            computed=computed or dict.fromkeys(counts, 0),
            scheduled_new_reqs=begun,
            finished_req_ids=finished,
        )
        results = [worker.model_runner.execute_model(scheduled) for worker in self.workers]
        return results[0]
