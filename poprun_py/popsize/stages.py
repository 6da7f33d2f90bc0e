"""The division of a model's layers into the stages of a pipeline."""

from dataclasses import dataclass
from functools import lru_cache

from popsize.model import Layer, Model


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A pipeline stage: its different layers, each with the number of times that the stage has it."""

    index: int  # place in the pipeline, from 0
    layers: tuple[tuple[Layer, int], ...]  # different layers, and the number of each
    tied_parameters: float = 0.0  # parameters that two layers of the stage share

    def parameters_on_device(self, tensor: int) -> float:
        """Return how many of the stage's parameters are on each of the ``tensor`` devices that share the stage."""
        return (
            sum(n * layer.parameters.on_device(tensor) for layer, n in self.layers) - self.tied_parameters / tensor
        )


@lru_cache(maxsize=512)
def stages_of(model: Model, pipeline: int) -> tuple[Stage, ...]:
    """Cut ``model`` into ``pipeline`` stages with almost equally many layers, and return the stages.

    Layers before the repeated layers (embedding) belong to the first stage, and later layers (logits) to the last.
    """
    block = model.block
    place = model.layers.index(block)
    each, left = divmod(block.count, pipeline)
    middle = range((pipeline - left) // 2, (pipeline - left) // 2 + left)
    stages = []
    for index in range(pipeline):
        layers = [(block, each + (index in middle))]
        if index == 0:
            layers = [*((layer, layer.count) for layer in model.layers[:place]), *layers]
        if index == pipeline - 1:
            layers = [*layers, *((layer, layer.count) for layer in model.layers[place + 1 :])]
        stages.append(Stage(index, tuple(layers), model.tied_parameters if pipeline == 1 else 0.0))
    return tuple(stages)


@lru_cache(maxsize=512)
def shown_stages(model: Model, pipeline: int) -> tuple[Stage, ...]:
    """Return at most three stages of the pipeline: the first, the largest stage between, and the last."""
    stages = stages_of(model, pipeline)
    between = stages[1:-1]
    fullest = max(between, key=lambda stage: sum(count for _, count in stage.layers), default=None)
    return tuple(dict.fromkeys(stage for stage in (stages[0], fullest, stages[-1]) if stage is not None))


@lru_cache(maxsize=512)
def most_parameters(model: Model, pipeline: int, tensor: int) -> float:
    """Return the number of parameters on each device of the stage with the most parameters."""
    return max(stage.parameters_on_device(tensor) for stage in shown_stages(model, pipeline))


def most_phases(model: Model, pipeline: int, *, are_layers: bool) -> int:
    """Return the largest possible number of phases (groups of layers that are loaded one by one): the number of
    layers of the largest pipeline stage or, if not ``are_layers``, of its parts of layers.
    """
    return max(
        sum(n * (1 if are_layers else len(layer.parts)) for layer, n in stage.layers)
        for stage in shown_stages(model, pipeline)
    )
