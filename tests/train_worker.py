"""Training runs of the tests, one after another in one launch. Usage: train_worker.py JOBS.json

Each job: recipe (a tree), run, model, resume, and stop_at: the step whose checkpoint is the last thing done.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from unsoftmax.recipes.schema import parse_recipe
from unsoftmax.train import checkpoint
from unsoftmax.train.loop import train


class BrokenOff(Exception):
    """Stands for a process that ends in the middle of a run."""


def perform(job: dict[str, Any]) -> None:
    save = checkpoint.save

    def save_and_break(engine, run, recipe, place, resumed):
        save(engine, run, recipe, place, resumed)
        if resumed.step == job.get("stop_at"):
            raise BrokenOff

    checkpoint.save = save_and_break
    try:
        train(parse_recipe(job["recipe"]), Path(job["run"]), model=job.get("model"), resume=job.get("resume"))
    except BrokenOff:
        pass
    finally:
        checkpoint.save = save


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        perform(job)
