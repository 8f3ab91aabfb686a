"""DeepSpeed, and nothing else of ours: the one file that imports it.

bf16 runs keep float32 parameters under torch autocast, so that masters, moments and the mixers' new scalars
really are float32 (a bf16 engine would round every parameter); gradients are summed in float32 too, which
costs bandwidth and keeps ZeRO 0 to 3 equal to plain AdamW. A step whose gradient is not finite is skipped.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import math
import os
import random
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
from deepspeed.utils import logger as deepspeed_logger
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedModel

from unsoftmax.kernels.mixer import Mixer
from unsoftmax.recipes.schema import Recipe, StagePlan, accumulation, stage_plans
from unsoftmax.train.objective import objective
from unsoftmax.train.packing import Batch

BUCKET = 50_000_000  # elements; DeepSpeed's own 500 million would be a buffer of 2 GB in float32
PREFIX = "model."  # what an objective puts before the model's own parameter names


class Place(NamedTuple):
    """Where this process stands among all of them."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


class StepResult(NamedTuple):
    """One optimizer step, the same on every rank.

    loss: mean over the labels of the global batch. grad_norm: before clipping. applied: False if the step was
    skipped. bad: names of parameters whose gradient was not finite.
    """

    loss: float
    grad_norm: float
    applied: bool
    bad: list[str]


def start(seed: int) -> Place:
    """Join the other processes, or be the only one if no launcher said otherwise; seed every generator."""
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    deepspeed_logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    elif hasattr(deepspeed.ops, "__compatible_ops__"):
        # gloo does without this op, whose compilation takes a minute and a C++ compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return Place(dist.get_rank(), dist.get_world_size(), device)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def leave_at_exit() -> None:
    """Part from the other processes when this one ends; not earlier, since DeepSpeed joins them only once."""
    atexit.unregister(dist.destroy_process_group)
    atexit.register(dist.destroy_process_group)


def barrier() -> None:
    dist.barrier()


def gather(value: Any) -> list[Any]:
    """`value` of every rank, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def deepspeed_config(recipe: Recipe, stage: StagePlan, world: int) -> dict[str, Any]:
    """DeepSpeed's own configuration of a stage on `world` processes; ValueError if it does not divide."""
    t = recipe.train
    return {
        "train_micro_batch_size_per_gpu": t.micro_batch_sequences,
        "gradient_accumulation_steps": accumulation(recipe, world),
        "gradient_clipping": t.grad_clip if t.zero_stage else 0.0,  # without ZeRO we clip: see _finish
        "zero_optimization": {
            "stage": t.zero_stage,
            "overlap_comm": False,  # has raced with multi-rank buckets (DeepSpeed #4298, #5347)
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
        },
        "torch_autocast": {
            "enabled": t.dtype == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # reduce every gradient in float32
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": stage.peak_lr,
                "betas": [t.beta1, t.beta2],
                "weight_decay": t.weight_decay,
                "torch_adam": True,  # the others are compiled on first use
            },
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**12,
    }


def _shape(p: nn.Parameter) -> torch.Size:
    return getattr(p, "ds_shape", p.shape)  # ZeRO-3 leaves an empty parameter and its shape


def trained(model: nn.Module, stage: StagePlan) -> list[nn.Parameter]:
    """The parameters that a stage trains.

    Raises ValueError where there are none: no layer is converted, or the mixers add nothing that learns.
    """
    if stage.train == "all":
        return list(model.parameters())
    mixers = [m for m in model.modules() if isinstance(m, Mixer)]
    if stage.train == "attention":
        found = [p for m in mixers for p in m.parameters()]
    else:
        found = [p for m in mixers for p in m.new_parameters().values()]
    if not found:
        reason = "its mixers add nothing that learns; attention would" if mixers else "no layer is converted"
        raise ValueError(
            f"stages.{stage.number - 1}: {stage.loss} trains {stage.train}, but in this checkpoint {reason}"
        )
    return found


def count(parameters: Iterable[nn.Parameter]) -> int:
    """Numbers in all parameters together, sharded ones in full."""
    return sum(_shape(p).numel() for p in parameters)


def parameter_groups(model: nn.Module, recipe: Recipe, stage: StagePlan) -> list[dict[str, Any]]:
    """AdamW's groups: the source's and the new parameters, each as matrices and, without decay, the rest.

    Each group's `lr_scale` multiplies the scheduled rate.
    """
    new = {id(p) for m in model.modules() if isinstance(m, Mixer) for p in m.new_parameters().values()}
    groups = []
    for is_new in (False, True):
        for is_matrix in (True, False):
            params = [
                p
                for p in model.parameters()
                if p.requires_grad and (id(p) in new) == is_new and (len(_shape(p)) >= 2) == is_matrix
            ]
            scale, decay = (stage.new_lr_scale if is_new else 1.0), recipe.train.weight_decay
            if params:
                groups.append(
                    {"params": params, "weight_decay": decay if is_matrix else 0.0, "lr_scale": scale}
                )
    return groups


def _own_share(p: nn.Parameter) -> torch.Tensor:
    """What this rank holds of a parameter: its shard under ZeRO-3, else all of it."""
    return getattr(p, "ds_tensor", p).data


def _tell_of_readers(module: nn.Module) -> None:
    """Mixers read parameters of their children, which ZeRO-3 gathers for the child alone unless told so."""
    for mixer in (m for m in module.modules() if isinstance(m, Mixer)):
        for p in mixer.new_parameters().values():
            deepspeed.zero.register_external_parameter(mixer, p)


def _load_sharded(load_model: Callable[[], PreTrainedModel], config: dict[str, Any]) -> PreTrainedModel:
    """Load with every parameter sharded as it arrives: what transformers does while this object lives."""
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(config)
    model = load_model()
    del alive
    return model


def _recompute_layers(model: nn.Module) -> None:
    new_name = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.24
    enable = new_name or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})  # type: ignore[operator]


class Engine:
    """A model in training, for one stage of a run: pass, step, save, load.

    Args:
        load_model: called once the engine is ready for it (under ZeRO-3 parameters are sharded while they
            load); returns a transformers causal LM with float32 parameters.
        stage: None is the recipe's first.
        teacher: a causal LM on the device, for a stage that learns from one; stays outside the engine.
        weights: what another engine's `weights` gave on this rank, in place of those that were loaded.
    """

    def __init__(
        self,
        recipe: Recipe,
        place: Place,
        load_model: Callable[[], PreTrainedModel],
        *,
        stage: StagePlan | None = None,
        teacher: PreTrainedModel | None = None,
        weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.recipe, self.place = recipe, place
        stage = stage_plans(recipe)[0] if stage is None else stage
        config = deepspeed_config(recipe, stage, place.world)
        model = _load_sharded(load_model, config) if recipe.train.zero_stage == 3 else load_model()
        if recipe.train.activation_checkpointing:
            _recompute_layers(model)
        module = objective(model, stage, teacher, recompute=recipe.train.activation_checkpointing)
        module = module.to(place.device).train()
        chosen = {id(p) for p in trained(module, stage)}
        for name, p in module.named_parameters():
            p.requires_grad_(id(p) in chosen)
            if weights is not None:
                _own_share(p).copy_(weights[name])
        if recipe.train.zero_stage == 3:
            _tell_of_readers(module)
        self._names = [n.removeprefix(PREFIX) for n, _ in module.named_parameters()]
        self._seen = torch.zeros(len(self._names), device=place.device)
        for i, p in enumerate(module.parameters()):
            if p.requires_grad:
                p.register_hook(self._watch(i))
        groups = parameter_groups(module, recipe, stage)
        self._scales = [g["lr_scale"] for g in groups]
        arguments: Any = {"model_parameters": groups, "config": config, "dist_init_required": False}
        self._engine: Any = deepspeed.initialize(model=module, **arguments)[0]

    @property
    def model(self) -> PreTrainedModel:
        """The language model itself, for scoring."""
        return self._engine.module.model

    def _watch(self, i: int) -> Callable[[torch.Tensor], None]:
        """A hook that keeps whether gradient i was ever not finite, without waiting for the device."""

        def hook(grad: torch.Tensor) -> None:
            self._seen[i] += torch.linalg.vector_norm(grad.detach().float(), float("inf"))

        return hook

    def step(self, batch: Batch, lr: float) -> StepResult:
        """Forward and backward over this rank's passes, then one step of AdamW at rate `lr` on all ranks."""
        for group, scale in zip(self._engine.optimizer.param_groups, self._scales, strict=True):
            group["lr"] = lr * scale
        self._seen.zero_()
        # the engine takes the mean over ranks of what each sums; ours is a sum over ranks per label
        per_label = self.place.world / max(1, batch.targets)
        total = torch.zeros((), device=self.place.device)
        for number, (input_ids, labels, cu_seqlens) in enumerate(batch.passes):
            inputs = [t if t is None else t.to(self.place.device) for t in (input_ids, labels, cu_seqlens)]
            loss = self._engine(*inputs)
            total += loss.detach().float()
            self._engine.backward(loss * per_label, scale_wrt_gas=False)
            if number + 1 < len(batch.passes):
                self._engine.step()
        return self._finish(total / max(1, batch.targets))

    def _finish(self, loss: torch.Tensor) -> StepResult:
        report = torch.cat([loss.view(1), (~self._seen.isfinite()).float()])
        dist.all_reduce(report)
        values = report.tolist()
        bad = [name for name, count in zip(self._names, values[1:], strict=True) if count]
        norm = self._plain_clip() if self.recipe.train.zero_stage == 0 else None
        applied = not bad and (norm is None or math.isfinite(norm))
        if not applied and self.recipe.train.zero_stage == 0:
            self._engine.zero_grad()  # AdamW passes over parameters that have no gradient
        self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
            applied = applied and math.isfinite(norm)
            if not applied and self._engine.was_step_applied():
                raise RuntimeError(
                    f"DeepSpeed {deepspeed.__version__} applied a gradient that is not finite: {bad}"
                )
        return StepResult(values[0], norm, applied, bad)

    def _plain_clip(self) -> float:
        """Clip the gradient as ZeRO would, and return its norm before."""
        most = self.recipe.train.grad_clip or float("inf")
        return float(torch.nn.utils.clip_grad_norm_(self._engine.module.parameters(), most))

    def bad_weights(self) -> list[str]:
        """Names of parameters with an entry that is not finite (of this rank's shard under ZeRO-3)."""
        parameters = zip(self._names, self._engine.module.parameters(), strict=True)
        return [n for n, p in parameters if not _own_share(p).isfinite().all()]

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies, on the CPU, of what this rank holds of each parameter."""
        return {n: _own_share(p).to("cpu", copy=True) for n, p in self._engine.module.named_parameters()}

    def _empty(self) -> None:
        """Take the numbers out of what ZeRO-3 never lets go: its caches hold each module for good."""
        for p in self._engine.module.parameters():
            p.grad = None
            p.ds_tensor.data = p.data = torch.empty(0, device=p.device)
        for optimizer in (self._engine.optimizer, self._engine.basic_optimizer):
            vars(optimizer).clear()
        self._engine.optimizer = None  # or the engine would end it again when Python does

    def close(self) -> None:
        """Give the memory back; the engine is of no use afterwards."""
        self._engine.destroy()
        if self.recipe.train.zero_stage == 3:
            self._empty()
        del self._engine
        gc.collect()  # hooks and parameters refer to each other
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def scoring(self) -> Iterator[PreTrainedModel]:
        """The model for passes without gradient. Under ZeRO-3 every rank must make the same ones."""
        module = self._engine.module
        module.eval()
        try:
            with torch.no_grad():
                yield module.model
        finally:
            module.train()

    def save(self, folder: Path) -> None:
        """Write parameters and optimizer state; every rank calls it. No data position, no generators."""
        self._engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote on as many ranks; every rank calls it."""
        loaded, _ = self._engine.load_checkpoint(str(folder.parent), tag=folder.name)
        if loaded is None:
            raise ValueError(f"{folder} holds no checkpoint that DeepSpeed can load")


def saved_weights(folder: Path, zero_stage: int) -> dict[str, torch.Tensor]:
    """Full float32 weights of a folder that `Engine.save` wrote, by the model's own names."""
    if zero_stage < 3:  # the float32 parameters themselves, whole on every rank
        file = folder / "mp_rank_00_model_states.pt"
        state = torch.load(file, map_location="cpu", weights_only=False)["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as merged

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            state = merged(str(folder.parent), tag=folder.name) or {}
    return {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
