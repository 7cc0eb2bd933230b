"""Events: told in order, their values in the rows, their state in the checkpoint."""

import json

import torch

from k3_train.events.base import Events, TrainerEvent


class Counter(TrainerEvent):
    """Counts steps and remembers what it was told."""

    def __init__(self, config=None):
        super().__init__(config)
        self.told, self.count, self.norm = [], torch.tensor(0), None

    def started(self, trainer):
        self.told.append(f"started at {trainer.state.step}")

    def gradients(self, trainer):
        grads = [p.grad for p in trainer.stepper.params if p.grad is not None]
        self.norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
        self.told.append("gradients")

    def stepped(self, trainer, metrics):
        assert torch.isclose(metrics["grad_norm"], self.norm, rtol=1e-4)
        self.count += 1
        self.told.append(f"stepped to {trainer.state.step}")

    def row_values(self, trainer):
        return {"count": int(self.count)}

    def row(self, trainer, row):
        self.told.append(f"row {row.step}")

    def saved(self, trainer, folder):
        self.told.append(f"saved {folder.name}")

    def finished(self, trainer, stopped):
        self.told.append(f"finished {stopped}")

    def state_tensors(self):
        return {"count": self.count}

    def load_state_tensors(self, tensors):
        self.count.copy_(tensors["count"])


def with_counter(trainer):
    counter = Counter()
    trainer.events = trainer.state.events = Events({"counter": counter})
    return counter


def test_events_are_told_in_order_and_their_state_is_resumed(tmp_path, make_trainer, run):
    trainer = make_trainer(tmp_path)
    counter = with_counter(trainer)
    run(trainer, 2)
    steps = [["gradients", f"stepped to {n}", f"row {n}"] for n in (1, 2)]
    expected = ["started at 0", *steps[0], *steps[1], "saved step-00000002", "finished "]
    assert counter.told == expected
    resumed = make_trainer(tmp_path)
    second = with_counter(resumed)
    resumed.resume()
    run(resumed, 3)
    assert int(second.count) == 3
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["count"] for row in rows] == [1, 2, 3]
